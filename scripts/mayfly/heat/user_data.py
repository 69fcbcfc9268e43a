"""What cloud-init runs on a node, as functions of Heat that put the text together.

Values that somebody typed travel as JSON in a quoted here-document: Heat writes the JSON, so no
value can end the document or be read as shell code. `node.sh` reads them from files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

NODE_SCRIPT = Path(__file__).with_name("node.sh")

# The timer comes first: a node that fails in any later line still goes away. It fires after the
# node's own limit, which also tells Heat why. (systemd adds up the two times.)
_DEADMAN = """\
#!/bin/bash
# Made by `mayfly heat`. First the timer that powers this node off whatever happens.
set -eu
systemd-run --quiet --unit=mayfly-deadman --on-active='%seconds%s 2m' systemctl poweroff ||
  { (sleep '%seconds%'; poweroff -f) & }
"""
_NO_DEADMAN = """\
#!/bin/bash
# Made by `mayfly heat --keep`: this node stays on until its stack is deleted.
set -eu
"""
_FILES = """\
umask 077
mkdir -p /var/lib/mayfly
cat >/var/lib/mayfly/job.json <<'MAYFLY_JOB_JSON'
%job%
MAYFLY_JOB_JSON
cat >/usr/local/sbin/mayfly-node <<'MAYFLY_NODE_SCRIPT'
"""
_NODE_FILE = """\
MAYFLY_NODE_SCRIPT
chmod 755 /usr/local/sbin/mayfly-node
cat >/var/lib/mayfly/node.json <<'MAYFLY_NODE_JSON'
"""
_START = """
MAYFLY_NODE_JSON
exec /usr/local/sbin/mayfly-node install
"""


def common_user_data(job: dict[str, Any], *, keep: bool) -> dict[str, Any]:
    """The beginning, which all nodes share: timer, job and launcher."""
    head = (
        _NO_DEADMAN if keep else _replaced(_DEADMAN, {"%seconds%": {"get_param": "max_duration"}})
    )
    script = NODE_SCRIPT.read_text(encoding="utf-8")
    return joined(head, _replaced(_FILES, {"%job%": job}), script, _NODE_FILE)


def node_user_data(common: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    """A server's whole user data: the `common` part, then what is this node's own, as JSON."""
    return joined(common, node, _START)


def joined(*parts: Any) -> dict[str, Any]:
    """The parts one after another; Heat writes mappings as JSON."""
    return {"list_join": ["", list(parts)]}


def _replaced(template: str, params: dict[str, Any]) -> dict[str, Any]:
    return {"str_replace": {"template": template, "params": params}}
