"""What a rented node is told to do at its first boot: to power itself off, unless a role comes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml

from mayfly.clouds import known_clouds, load_cloud
from mayfly.first_boot import ARM, BOOT_S, recipe
from mayfly.radl_lint import lint


def test_each_paid_cloud_has_a_timer_or_says_why_not():
    for name in known_clouds():
        profile = load_cloud(name)
        if profile.backend != "im" or profile.prices == "free":
            assert recipe(profile, None) is None, "nobody pays for these"
        elif recipe(profile, None) is None:
            assert any("first boot" in quirk for quirk in profile.quirks), name


@pytest.mark.parametrize(("end_s", "seconds"), [(None, BOOT_S), (10**6, BOOT_S), (1200, 1200)])
def test_it_never_outlives_the_budget(end_s: int | None, seconds: int):
    text = recipe(load_cloud("aws"), end_s)
    ((*_, command),) = yaml.safe_load(str(text))["bootcmd"]
    assert f" --on-active={seconds} --timer-property=" in command
    assert command.endswith(" systemctl poweroff")


def test_a_script_is_one_plain_text_to_yaml():
    """IM reads it as YAML first, and takes it for a script when it is no mapping."""
    text = str(recipe(load_cloud("gcp"), None))
    assert isinstance(yaml.safe_load(text), str)
    radl = f"configure boot (\n@begin\n{text}@end\n)\n"
    assert lint(radl) == []


def test_nothing_is_armed_where_the_role_has_been(tmp_path: Path):
    """The command itself, with a systemd-run of our own that only tells."""
    role = tmp_path / "role"
    told = tmp_path / "systemd-run"
    told.write_text('#!/bin/sh\necho "armed $*"\n')
    told.chmod(0o755)
    command = ARM.format(seconds=60).replace("/usr/local/sbin/mayfly-deadman", str(role))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}

    def boot() -> str:
        words = ["sh", "-c", command]
        return subprocess.run(words, env=environment, capture_output=True, text=True).stdout

    assert "--on-active=60 --timer-property=" in boot()
    role.write_text("")
    assert boot() == ""
