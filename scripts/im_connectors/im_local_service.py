# Copyright (C) 2026 Mayfly developers
# SPDX-License-Identifier: GPL-3.0-or-later
#
# This program is free software: you can redistribute it and/or modify it under the terms of the GNU
# General Public License as published by the Free Software Foundation, either version 3 of the
# License, or (at your option) any later version. It is distributed WITHOUT ANY WARRANTY; see the
# GNU General Public License, https://www.gnu.org/licenses/, for details.
"""Start the Infrastructure Manager with this directory's connectors and a given configuration.

IM looks for its configuration beside its own code only. Here MAYFLY_IM_CONFIG names the file, so
that several services can share one installation.

What signs the URL of a collection is masked in the log: IM names tasks after it.
"""

from __future__ import annotations

import logging
import os
import re
from configparser import ConfigParser
from pathlib import Path

import IM.connectors
from IM import config

SIGNATURE = re.compile(r"(?<=X-Amz-Signature=)[0-9a-f]+|(?<=X-Amz-Security-Token=)[^\s&#'\"]+")


def mask_signatures() -> None:
    """Mask what signs an URL of S3's in every record that is logged from now on."""
    make = logging.getLogRecordFactory()

    def masked(*args: object, **options: object) -> logging.LogRecord:
        record = make(*args, **options)
        record.msg, record.args = SIGNATURE.sub("********", record.getMessage()), ()
        return record

    logging.setLogRecordFactory(masked)


def main() -> None:
    """Become IM's service; ends with it."""
    mask_signatures()
    settings = ConfigParser(interpolation=None)
    with Path(os.environ["MAYFLY_IM_CONFIG"]).open() as file:
        settings.read_file(file)
    config.parse_options(settings, "im", config.Config)
    IM.connectors.__path__.append(str(Path(__file__).resolve().parent))
    # The service makes its REST server from the configuration as soon as it is imported.
    from IM.im_service import main as serve  # noqa: PLC0415

    serve()


if __name__ == "__main__":
    main()
