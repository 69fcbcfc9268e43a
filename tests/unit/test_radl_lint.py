"""The linter: each trap is found on its line, and a sound file has none."""

from __future__ import annotations

from pathlib import Path

import pytest

from mayfly.errors import UserError
from mayfly.radl_lint import lint, lint_file

SOUND = """\
# A comment: 'ansible.modules.x', outports = '1 2', system nowhere configure nothing
network public (outbound = 'yes' and outports = '22/tcp,80/tcp-8080/tcp,9000:9100/tcp')
network private ()
system ps (
  cpu.count >= 1 and   # don't say 'two
  net_interface.0.connection = 'private' and
  net_interface.1.connection = 'public' and
  disk.0.os.name = 'linux' and
  disk.0.applications contains (name = 'ansible.collections.a.b,1.0.0' and version = '1.0')
)
configure one (
@begin
---
- tasks:
    - name: Not the end @end, nor a comma contains (a, b), nor outports = '1 2'
      ansible.builtin.debug: {msg: "become: x"}
@end
)
contextualize (
  system ps configure one step 1
)
deploy ps 1
"""


def broken(old: str, new: str) -> list[tuple[int, str]]:
    """Findings after a replacement in the sound text."""
    assert old in SOUND
    return [(finding.line, finding.message) for finding in lint(SOUND.replace(old, new))]


def test_a_sound_file_has_no_findings():
    assert lint(SOUND) == []


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("'22/tcp,80", "'22/tcp, 80", 2, "blank in outports"),
        ("'22/tcp,80", "'70000/tcp,80", 2, "port 70000 does not exist"),
        ("'22/tcp,80", "'0/tcp,80", 2, "port 0 does not exist"),
        ("9000:9100/tcp", "9000:99100/tcp", 2, "port 99100"),
        ("' and version", "', version", 9, "comma in contains"),
        ("ansible.collections.a.b", "ansible.modules.a.b", 9, "installs nothing"),
        ("deploy ps 1", "deploy sp 1", 22, "unknown system 'sp'"),
        ("system ps configure one", "system master configure one", 20, "unknown system 'master'"),
        ("configure one step", "configure two step", 20, "unknown configure 'two'"),
        ("= 'public' and", "= 'internet' and", 7, "unknown network 'internet'"),
        ("      ansible.builtin.debug", "@end\n      ansible.builtin.debug", 16, "indent it"),
        ("- tasks:", "- hosts: ps\n  tasks:", 14, "hosts in a configure block"),
        ("- tasks:", "- become: true\n  tasks:", 14, "become in a configure block"),
        ("- tasks:", "- gather_facts: true\n  tasks:", 14, "gather_facts in a configure"),
        ("- tasks:", "- import_playbook: a.yml\n- tasks:", 14, "import_playbook"),
        ("- tasks:", "- ansible.builtin.import_playbook: a.yml\n- tasks:", 14, "import_playbook"),
        ("- tasks:", "- [tasks:", 15, "not YAML"),
        ("cpu.count >= 1", "cpu.count >= -1", 5, "'-' outside of quotes"),
        ("name = 'linux'", 'name = "linux"', 8, "outside of quotes"),
        ("disk.0.os.name = 'linux'", "disk.0.os.name = 'dos'", 8, "expected one of"),
    ],
)
def test_a_trap_is_found_on_its_line(old, new, line, words):
    findings = broken(old, new)
    assert findings
    assert (line, True) == (findings[0][0], words in findings[0][1]), findings


def test_a_recipe_without_an_end():
    found = broken("@end\n)\ncontextualize", "contextualize")
    assert any("no @end" in message for _, message in found)


def test_a_recipe_may_begin_and_end_beside_its_brackets():
    assert broken("one (\n@begin\n", "one (@begin\n") == []
    assert broken("@end\n)", "@end)") == []


def test_a_network_address_is_not_a_port():
    assert broken("'22/tcp,80", "'10.70.0.0/16-22/tcp,80") == []


def test_several_findings_come_in_order_of_lines():
    text = SOUND.replace("deploy ps", "deploy sp").replace("'22/tcp,", "'22/tcp, ")
    assert [finding.line for finding in lint(text)] == [2, 22]


def test_the_parsers_own_errors_come_with_their_line():
    (finding,) = lint("network public ()\nsystem ps (\n  cpu.count is 3\n)\ndeploy ps 1\n")
    assert finding.line == 3
    assert "Parse error" in finding.message


@pytest.mark.parametrize("text", ["hello", "{}", "deploy"])
def test_what_is_no_radl(text):
    assert lint(text)


def test_a_file(tmp_path: Path):
    file = tmp_path / "x.radl"
    file.write_text(SOUND.replace("deploy ps", "deploy sp"))
    assert str(lint_file(file)[0]).startswith("22: unknown system 'sp'")


def test_a_file_that_is_not_there(tmp_path: Path):
    with pytest.raises(UserError, match="No such file"):
        lint_file(tmp_path / "x.radl")


def test_what_a_dry_run_left_open_is_accepted_only_in_a_dry_run():
    text = "system a (\n  disk.0.image.url = 'aws://us-east-1/@at-deploy.image@'\n)\ndeploy a 1\n"
    assert lint(text, dry_run=True) == []
    (finding,) = lint(text)
    assert finding.line == 2
    assert "image is left open: a dry run wrote this" in finding.message
