"""The dead-man timer of a node's first boot, before anybody has logged in: a command, as user data.

IM hands what a RADL says `with cloud_init` to the provider. A node on which nothing is ever
installed then powers itself off; role deadman takes over as soon as it can run.
"""

from __future__ import annotations

import yaml

from mayfly.clouds import CloudProfile

# Booting, IM's Ansible on the first node (at most 900 s), and SSH to all, generously.
BOOT_S = 3600
UNIT = "mayfly-boot-deadman"
# Once the role has been there its timer counts, also after a reboot. cloud-init runs this before
# sysinit.target, for which units wait by default (systemd.timer(5)), and systemd-run for them: that
# node would never come up.
ARM = (
    "test -e /usr/local/sbin/mayfly-deadman ||"
    f" systemd-run --unit={UNIT} --on-active={{seconds}} --timer-property=DefaultDependencies=no"
    " --property=DefaultDependencies=no systemctl poweroff"
)


def recipe(profile: CloudProfile, end_s: int | None) -> str | None:
    """Return the block's content; None where a node cannot be told anything at its first boot.

    A mapping is cloud-init's (IM adds the user's key to it), a text is a script. YAML has to read
    the script as one plain text, or IM refuses it.
    """
    seconds = BOOT_S if end_s is None else min(BOOT_S, end_s)
    command = ARM.format(seconds=seconds)
    if profile.first_boot == "cloud-config":
        content = {"bootcmd": [["sh", "-c", command]]}
        return "---\n" + yaml.safe_dump(content, sort_keys=False, width=1000)
    if profile.first_boot == "script":
        return f"#!/bin/sh\n{command}\n"
    return None
