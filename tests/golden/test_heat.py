"""Heat jobs to templates: the text as recorded, and accepted by Heat's own classes.

Record again with `make goldens` (MAYFLY_UPDATE_GOLDENS=1), and read the difference.
"""

from __future__ import annotations

import json
import os
import subprocess
import textwrap
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from heat_cloud.hot import Hot

from mayfly.heat.job import HeatJob, make_job
from mayfly.heat.template import build, dump, node_names
from mayfly.heat.user_data import NODE_SCRIPT
from mayfly.local import venvs
from mayfly.local.paths import find_paths

HERE = Path(__file__).resolve().parent
# Its requirements hold back ours (IM's, ansible's), so it has an environment of its own.
HEAT = "openstack-heat>=27,<28"
EVIL = """it's "quoted" $HOME `id` $(id) \\ %node% MAYFLY_JOB_JSON é 漢"""
SECRETS = {"s3_access_key_id": "AKIA-test", "s3_secret_access_key": "never/in+a=file"}


@dataclass(frozen=True)
class Case:
    """A job, and the file that holds its template."""

    name: str
    job: dict[str, Any] = field(default_factory=dict)
    form: dict[str, Any] = field(default_factory=dict)  # what the user types in the stack's form

    @property
    def golden(self) -> Path:
        return HERE / "heat" / f"{self.name}.yml"

    def make(self) -> HeatJob:
        base = {"repository": "https://example.org/team/repo.git", "entrypoint": "train.py"}
        return make_job({**base, **self.job})

    def text(self) -> str:
        return dump(build(self.make()))

    @property
    def parameters(self) -> dict[str, Any]:
        results = SECRETS if self.job.get("results") else {}
        return {"key": "my-key", **results, **self.form}

    def signals(self) -> dict[str, Any]:
        """The attributes that Heat gives the nodes' signals."""
        names = node_names(self.make())
        return {f"{n}_signal": {"curl_cli": f"curl -i -H 'X: y' https://h/{n}"} for n in names}

    def question(self, form: dict[str, Any] | None = None) -> dict[str, Any]:
        parameters = {**self.parameters, **(form or {})}
        return {"template": self.text(), "parameters": parameters, "attributes": self.signals()}


CASES = [
    Case("two_workers"),
    Case("main_alone", {"workers": 0, "launcher": "plain", "keep": True, "key": "own"}),
    Case(
        "long_run_with_results",
        {
            "workers": 3,
            "ref": "v1.2",
            "directory": "code",
            "arguments": "--epochs 100",
            "processes": 4,
            "accelerator": "gpu",
            "max_duration": "12h",
            "results": "s3://my-results/team/",
            "s3_endpoint": "https://objects.example.org:7480",
            "reservation": "0f0e0d0c-0000-4000-8000-000000000001",
            "cidr": "10.20.0.0/16",
            "main_address": "10.20.0.10",
            "security_groups": ["monitoring", "nfs"],
            "ssh_from": "192.0.2.0/24",
        },
    ),
    Case(
        "every_character",
        {
            "workers": 1,
            "directory": EVIL,
            "entrypoint": f"{EVIL}.py",
            "arguments": "--title " + "'" + EVIL.replace("'", "'\\''") + "'",
        },
        {"arguments": "-x \"two words\" '$PATH' MAYFLY_NODE_SCRIPT"},
    ),
]
every_case = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@every_case
def test_the_text_is_the_recorded_one(case: Case):
    """Without the launcher, which has a file of its own."""
    script = textwrap.indent(NODE_SCRIPT.read_text(), " " * 12, lambda line: line.strip() != "")
    text = case.text()
    assert text.count(script) == 1
    text = text.replace(script, " " * 12 + "(the text of scripts/mayfly/heat/node.sh)\n")
    if os.environ.get("MAYFLY_UPDATE_GOLDENS"):
        case.golden.write_text(text, encoding="utf-8")
    assert text == case.golden.read_text(encoding="utf-8"), "run make goldens, read the difference"


def test_every_recorded_file_has_its_case():
    assert {path.stem for path in (HERE / "heat").iterdir()} == {case.name for case in CASES}


@every_case
def test_the_text_is_the_template(case: Case):
    assert yaml.safe_load(case.text()) == build(case.make())
    assert case.text().isascii()


@every_case
def test_heat_accepts_it_and_makes_every_node(case: Case, heat):
    """Nothing that is nested wrongly, and so silently not created, gets past this."""
    found = heat[case.name]
    job = case.make()
    kinds = list(found["types"].values())
    nodes = job.workers + 1
    for kind in ("OS::Nova::Server", "OS::Heat::WaitConditionHandle", "OS::Heat::WaitCondition"):
        assert kinds.count(kind) == nodes
    for kind in ("Net", "Subnet", "Router", "RouterInterface", "SecurityGroup", "FloatingIP"):
        assert kinds.count(f"OS::Neutron::{kind}") == 1
    assert kinds.count("OS::Neutron::Port") == kinds.count("OS::Heat::Value") == 1
    assert len(kinds) == 8 + 3 * nodes == len(build(job)["resources"])
    assert set(found["outputs"]) == {"main_address", "follow_log", "nodes", "delete"}


@every_case
def test_heat_puts_the_user_data_together_as_our_test_tool_does(case: Case, heat):
    names = node_names(case.make())
    found = heat[case.name]["properties"]
    template = yaml.safe_load(case.text())

    def attribute(resource: str, name: str) -> Any:
        if resource == "launcher":
            return hot.resolve(template["resources"]["launcher"]["properties"]["value"])
        return case.signals()[resource][name]

    hot = Hot.parse(
        case.text(), case.parameters, "golden", reference=lambda n: n, attribute=attribute
    )
    for name in names:
        text = hot.resolve(template["resources"][name]["properties"]["user_data"])
        assert found[name]["user_data"] == text
        assert len(text) < 48 * 1024, "Nova takes 64 KiB, in base64"


@every_case
def test_what_was_asked_for_reaches_the_properties(case: Case, heat):
    found = heat[case.name]["properties"]
    job = case.make()
    assert found["subnet"]["cidr"] == job.cidr
    (fixed,) = found["main_port"]["fixed_ips"]
    assert fixed["ip_address"] == job.main_address
    assert found["main_port"]["security_groups"] == ["id-of-security_group", *job.security_groups]
    assert found["main"]["networks"][0]["port"] == "id-of-main_port"
    assert found["main"]["key_name"] == "my-key"
    rules = found["security_group"]["rules"]
    opened = [(rule["port_range_min"], rule["remote_ip_prefix"]) for rule in rules]
    assert opened == [(22, job.ssh_from), (None, None)]
    assert rules[1]["remote_mode"] == "remote_group_id"
    if job.workers:
        worker = found["worker_1"]
        assert worker["security_groups"] == ["id-of-security_group", *job.security_groups]
    waits = [p["timeout"] for name, p in found.items() if name.endswith(f"_{job.waits_for}")]
    assert len(waits) == job.workers + 1
    assert all(limit <= 43_200 for limit in waits)


@every_case
def test_no_secret_is_in_the_text(case: Case):
    assert SECRETS["s3_secret_access_key"] not in case.text()
    parameters = build(case.make())["parameters"]
    for name in set(SECRETS) & set(parameters):
        assert parameters[name]["hidden"] is True
        assert "default" not in parameters[name]


REFUSED_FORMS = {
    "repository": ["http://example.org/x.git", "https://u:p@example.org/x.git"],
    "ref": ["--upload-pack=x"],
    "directory": ["../.."],
    "entrypoint": ["/etc/passwd"],
    "arguments": ["one\ntwo"],
    "accelerator": ["gpus"],
    "processes": [0],
    "max_duration": [100_000],
}


@pytest.mark.parametrize("name", REFUSED_FORMS)
def test_the_form_refuses_what_the_flags_refuse(name: str, heat):
    for value in REFUSED_FORMS[name]:
        assert name in heat[f"{name}={value}"]["error"]


def test_heat_refuses_what_a_nesting_error_would_make(heat):
    """So the acceptance above means something."""
    assert "main" in heat["nested wrongly"]["error"]


@pytest.fixture(scope="module")
def heat() -> dict[str, Any]:
    """What Heat makes of everything in this file, by name: one process, since it starts slowly."""
    environment = venvs.ensure(find_paths(os.environ), "openstack-heat", [HEAT], print)
    questions = {case.name: case.question() for case in CASES}
    for name, values in REFUSED_FORMS.items():
        for value in values:
            questions[f"{name}={value}"] = CASES[0].question({name: value})
    wrong = build(CASES[0].make())
    wrong["resources"]["network"]["main"] = wrong["resources"].pop("main")
    questions["nested wrongly"] = {**CASES[0].question(), "template": dump(wrong)}
    done = subprocess.run(
        [environment / "bin/python", HERE / "heat_engine.py"],
        input=json.dumps(list(questions.values())),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(questions, json.loads(done.stdout), strict=True))
