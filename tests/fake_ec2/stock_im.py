"""Start IM with its own EC2 connector, whose list of types is given: IM fetches it from afar.

That list is a file of IM's own repository, and there is no way to it in the tests' network. Nothing
else of the connector is touched; boto3 finds the fake EC2 by AWS_ENDPOINT_URL.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts/im_connectors"))

import im_local_service  # noqa: E402 (the path comes first)
from IM.connectors.EC2 import EC2CloudConnector, InstanceTypeInfo  # noqa: E402

TYPES = {"m6i.large": (2, 8192), "c6i.xlarge": (4, 8192)}

if __name__ == "__main__":
    EC2CloudConnector.instance_type_list = [
        InstanceTypeInfo(name=name, cpu_arch=["x86_64"], num_cpu=cpu, mem=memory)
        for name, (cpu, memory) in TYPES.items()
    ]
    im_local_service.main()
