"""What the pages say exists: links, make targets and mayfly verbs."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from typer.main import get_command

from mayfly.cli import app

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\((?!https?://|mailto:|#)([^)#]+)(?:#[^)]*)?\)")
MAKE = re.compile(r"\bmake ([a-z][a-z0-9-]+)")
VERB = re.compile(r"(?<![./-])\bmayfly ((?:data |local |heat (?=delete))?[a-z][a-z-]*)")
CODE = re.compile(r"```.*?```|`[^`\n]+`", re.DOTALL)


def code(page: Path) -> str:
    return "\n".join(CODE.findall(page.read_text()))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path):
    targets = LINK.findall(page.read_text())
    assert [target for target in targets if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_make_targets_exist(page: Path):
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(MAKE.findall(code(page))) - targets == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_verbs_exist(page: Path):
    command = get_command(app)
    for words in set(VERB.findall(code(page))):
        found = command
        for word in words.split():
            assert word in found.commands, f"{page.name}: mayfly {words}"
            found = found.commands[word]


def test_every_public_make_target_has_a_help_line():
    text = (ROOT / "Makefile").read_text()
    phony = text.split(".PHONY:")[1].split("\n\n")[0].replace("\\\n", " ").split()
    listed = subprocess.run(
        ["make", "-s", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    shown = {line.split()[0] for line in listed.splitlines() if line.startswith("  ")}
    assert set(phony) <= shown
