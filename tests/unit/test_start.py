"""How fast a command answers: what takes long to import is left until it is needed."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

SLOW = ("openstack", "keystoneauth1", "boto3", "dask", "distributed", "tensorflow", "torch", "IM")
SCRIPT = """
import json, sys
from mayfly import cli
sys.argv = ["mayfly", *sys.argv[1:]]
try:
    cli.main()
except SystemExit as ended:
    assert not ended.code, ended.code
print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


@pytest.mark.parametrize("words", [["--help"], ["heat", "--help"], ["clouds"], ["schema"]])
def test_a_command_imports_no_library_that_it_does_not_need(words):
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True
    )
    imported = json.loads(done.stderr.splitlines()[-1])
    assert "mayfly.heat.stack" in imported
    assert {name.split(".")[0] for name in imported} & {*SLOW} == set()
