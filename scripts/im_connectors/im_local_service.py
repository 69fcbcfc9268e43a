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
"""

from __future__ import annotations

import os
from configparser import ConfigParser
from pathlib import Path

import IM.connectors
from IM import config


def main() -> None:
    """Become IM's service; ends with it."""
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
