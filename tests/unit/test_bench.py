"""The benches' own arithmetic; what they measure is not tested here."""

from __future__ import annotations

import ast
import json
import sys
import xml.etree.ElementTree as ET
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "tests/golden/radl/local.radl"
PROGRAMS = ROOT / "training/programs"
OWN = {path.stem for path in (ROOT / "tests/bench").glob("*.py")}


@pytest.fixture(autouse=True)
def benches(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "tests/bench"))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:  # `deploy`, `memory` are names that others may have
        if name in OWN:
            del sys.modules[name]


def test_bars_are_well_formed_and_to_scale():
    import bars

    svg = bars.stacked_bars("a < b", {"ours": {"x": 10, "y": 30}, "old": {"x": 80}})
    boxes = ET.fromstring(svg).findall("{http://www.w3.org/2000/svg}rect")
    widths = [float(box.get("width")) for box in boxes[1:4]]
    assert widths == [pytest.approx(w, abs=0.1) for w in (92.5, 277.5, 740.0)]


def test_the_old_way_has_one_step_for_each_kind_of_node():
    import deploy
    from radl.radl_parse import parse_radl

    old = deploy.old_radl(GOLDEN.read_text(), "mayfly-bench:old")
    steps = [line.split()[-1] for line in old.splitlines() if line.startswith("  system ")]
    assert steps == [str(number) for number in range(1, 9)]
    assert old.count("docker://mayfly-bench:old") == 2
    assert old.count("hadoop_datanodes: \"{{ groups['ps'] }}\"") == 1
    parse_radl(old).check()


def test_phases_end_where_the_next_that_was_seen_begins():
    import deploy

    seconds = deploy.durations({"infrastructure": 0, "hdfs": 20, "train": 50, "first step": 70}, 75)
    assert sum(seconds.values()) == 75
    assert (seconds["infrastructure"], seconds["hdfs"], seconds["first step"]) == (20, 30, 5)


def test_changed_tasks_are_counted_once_for_each_node():
    import deploy

    text = (
        "TASK [a : One]\nok: [h]\nTASK [a : Two]\nchanged: [h] => (item=1)\n"
        "changed: [h] => (item=2)\nPLAY RECAP\nh : ok=2 changed=1\nTASK [b]\nchanged: [i]\n"
    )
    assert deploy.changed_tasks(text) == ["a : Two", "b"]


def test_memory_above_a_limit_is_named():
    import memory

    peaks = {("NameNode", 1): 200.4, ("DataNode", 2): 180, ("DataNode", 3): 300, ("im", 4): 120}
    document = memory.summary(peaks)
    assert document["peak_mib"]["DataNode"] == [300, 180]
    assert document["above"] == [
        "DataNode: 300 MiB, above its limit of 256 MiB",
        "mayfly: none was seen",
    ]


def test_what_grows_without_end_is_named():
    import soak

    def samples(**last):
        flat = {"containers": 0, "im_fds": 20, "im_mib": 100, "docker_disk": 900, "s3_disk": 1}
        return [{**flat, **{key: value(n) for key, value in last.items()}} for n in range(21)]

    assert soak.growth(samples()) == []
    assert soak.growth(samples(im_mib=lambda n: 100 + 40 * (n > 2))) == []
    assert soak.growth(samples(s3_disk=lambda n: n * 1000)) == []
    assert soak.growth(samples(im_fds=lambda n: 20 + 2 * n)) == ["im_fds: 36, later 56"]
    assert soak.growth(samples(containers=lambda n: int(n == 7))) == [
        "containers: 0 before, 1 afterwards"
    ]


@pytest.mark.parametrize("program", sorted(path.stem for path in PROGRAMS.glob("*.py")))
def test_a_program_is_told_only_what_it_takes(program):
    from faults import lab

    taken = lab.options_of(PROGRAMS / f"{program}.py")
    assert {"data_dir", "job_dir", "train_steps", "batch_size"} <= taken
    assert set(lab.told(program)) == set(lab.TOLD) & taken


def test_the_launchers_programs_take_their_options():
    import launchers
    from faults import lab

    for engine, program in launchers.PROGRAMS.items():
        taken = lab.options_of(PROGRAMS / f"{program}.py")
        assert set(launchers.options(engine)) | set(lab.told(program)) <= taken
    assert lab.told("mnist_lightning") == {"batch_size": 32}


@pytest.mark.parametrize(("ours", "reached"), [(910, True), (900, True), (890, False)])
def test_a_launcher_may_be_slower_by_a_tenth(ours, reached):
    import launchers

    middle = {"ours": {"examples_per_s": ours}, "own": {"examples_per_s": 1000}}
    assert launchers.compared(middle) == {"ratio": ours / 1000, "reached": reached}


def test_each_engine_trains_the_same_network_by_options_that_its_program_takes():
    import engines
    from faults import lab

    assert set(engines.PROGRAMS) == set(engines.REACH)
    for program in engines.PROGRAMS.values():
        taken = lab.options_of(PROGRAMS / f"{program}.py")
        told = {*engines.TOLD, "network", "batch_size", "learning_rate"}
        assert told | set(lab.told(program)) <= taken


@pytest.mark.parametrize("network", ["cnn", "deep"])
def test_the_networks_of_all_engines_have_the_same_layers(network):
    import engines

    found = [layers_of(PROGRAMS / f"{name}.py", network) for name in engines.PROGRAMS.values()]
    assert found[0] == found[1] == found[2]
    assert [words for kind, words in found[0] if kind == "Conv2D"] == {
        "cnn": [[32, 3, "relu"], [64, 3, "relu"]],
        "deep": [[32, 3, "relu"], [32, 3, "relu"], [64, 3, "relu"], [64, 3, "relu"]],
    }[network]


def layers_of(program: Path, network: str) -> list[tuple[str, list[object]]]:
    """The hidden layers that a program lists for a network; a vector made a picture is none."""
    functions = {
        node.name: node
        for node in ast.walk(ast.parse(program.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    mlp = next(node for node in ast.walk(functions["network"]) if isinstance(node, ast.If))
    cnn = mlp.orelse[0]
    assert isinstance(cnn, ast.If) and "'cnn'" in ast.unparse(cnn.test)
    branch = {"cnn": cnn.body, "deep": cnn.orelse}[network]
    layers = []
    for call in (node for part in branch for node in ast.walk(part)):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute):
            words = [*call.args, *(word.value for word in call.keywords)]
            layers.append((call.func.attr, [getattr(word, "value", None) for word in words]))
    return [layer for layer in layers if layer[0] != "Reshape"]


@pytest.mark.parametrize(
    ("engine", "batch", "workers", "step"),
    [
        ("horovod", 128, 4, (512, 0.004)),
        ("mwms", 64, 2, (128, 0.002)),
        ("keras-ps", 128, 2, (128, 0.001)),
    ],
)
def test_each_worker_takes_a_batch_and_the_rate_is_scaled(engine, batch, workers, step):
    import engines

    assert engines.step_of(engine, batch, workers) == step


def test_a_rate_leaves_out_the_start():
    import engines

    lines = [
        "progress: restored_step=0",
        "progress: step=20 loss=2.0 steps_per_second=0.5",
        "INFO something else",
        "progress: step=40 loss=1.0 steps_per_second=10",
        "progress: step=60 loss=0.5 steps_per_second=20",
        "progress: evaluated_step=60 accuracy=0.8",
    ]
    assert engines.rate(lines) == pytest.approx(40 / 3)  # 20 steps in 2 s, 20 in 1 s


@pytest.mark.parametrize(
    ("engine", "rate", "accuracy", "reached"),
    [
        ("horovod", 1760, 0.895, True),
        ("horovod", 1758, 0.9, False),
        ("horovod", 1759.2, 0.9, False),  # 0.8796, which is not 0.88
        ("mwms", 1700, 0.91, True),
        ("keras-ps", 1900, 0.8949, False),
    ],
)
def test_two_workers_are_efficient_and_as_good_as_one(engine, rate, accuracy, reached):
    import engines

    one = {"examples_per_s": 1000, "accuracy": 0.9}
    found = engines.compared(engine, {1: one, 2: {"examples_per_s": rate, "accuracy": accuracy}})
    assert found["efficiency"] == round(rate / 2000, 3)
    assert found["accuracy_difference"] == pytest.approx(accuracy - 0.9, abs=1e-9)
    assert found["reached"] is reached


def test_two_workers_are_compared_with_two_that_never_speak():
    import engines

    one, two = ({"examples_per_s": rate, "accuracy": 0.9} for rate in (1000, 1700))
    found = engines.compared("horovod", {1: one, 2: two, engines.APART: {"examples_per_s": 1800}})
    assert (found["efficiency"], found["efficiency_apart"]) == (0.85, 0.9)
    assert found["of_apart"] == round(1700 / 1800, 3)
    assert found["reached"] is False  # by what was promised, not by what the machine allows


def test_two_workers_are_compared_with_two_that_have_further_variables():
    import engines

    rates = {1: 1000, 2: 1600, engines.BESIDE: 1800}
    middle = {way: {"examples_per_s": rate, "accuracy": 0.9} for way, rate in rates.items()}
    found = engines.compared("horovod", middle)
    assert (found["efficiency"], found["reached"]) == (0.8, False)
    with_variables = found["with_beside"]
    assert (with_variables["efficiency"], with_variables["reached"]) == (0.9, True)
    assert with_variables["times_without"] == 1.125


def test_the_table_has_the_published_rows():
    import engines

    def found(rate, total):
        return {"examples_per_s": rate, "start_s": 9, "total_s": total, "accuracy": 0.9,
                "samples": 1_437_696}  # fmt: skip

    one, two, four = engines.rows(
        {1: found(1000, 1450), 2: found(1900, 770), 4: found(1950, 750)}, 2
    )
    assert [row["epoch_s"] for row in (one, two, four)] == [60.0, 31.6, 30.8]
    assert [row["times_one_worker"] for row in (one, two, four)] == [1.0, 1.9, 1.95]
    assert [row["workers_per_core"] for row in (one, two, four)] == [1.0, 1.0, 2.0]
    assert [row["published_accuracy"] for row in (one, two, four)] == [0.9965, 0.9956, 0.9953]
    assert (two["workers"], two["total_s"], two["samples"]) == (2, 770, 1_437_696)


# --- kill points ----------------------------------------------------------------------------------


def ended(seconds: float, *left: str, happened: bool = True, lost: int = 0, code: int = 0):
    """What a point came to: so many of ours that are left, and of others that are lost."""
    from fake_ec2.cases import Outcome

    return Outcome(
        left={"instances": set(left), "volumes": set()},
        foreign_lost={"groups": {f"sg-{number}" for number in range(lost)}},
        foreign_changed=False,
        destroyed=True,
        im_runs=True,
        seconds=seconds,
        told={"call": "RunInstances", "happened": happened, "destroy": code},
    )


@pytest.fixture
def bench_killpoints(monkeypatch, tmp_path, capsys):
    """Run the bench with labs in which points end like this, into a file of the test's own; returns
    its exit code and the last line that it prints."""
    import killpoints

    monkeypatch.setattr(killpoints, "KEPT", tmp_path / "build/killpoints.jsonl")
    monkeypatch.setattr(killpoints.signal, "signal", lambda *_: None)

    def play(*outcomes, seed: int = 1, canary: tuple[str, ...] = ()):
        class FakeLabs:
            def __init__(self, directory, count):
                self.every = [SimpleNamespace(canary_in=lambda: list(canary))]
                self.futures = {}

            def submit(self, name, case):
                self.futures[name] = Future()
                self.futures[name].set_result(outcomes[int(name)])

            def close(self):
                pass

        monkeypatch.setattr(killpoints, "Labs", FakeLabs)
        monkeypatch.setattr(sys, "argv", ["killpoints", f"N={len(outcomes)}", f"SEED={seed}"])
        code = killpoints.main()
        return code, json.loads(capsys.readouterr().out)

    return play


def test_kill_points_without_a_leak_are_summed_up(bench_killpoints):
    code, told = bench_killpoints(
        ended(10), ended(20.04), ended(40), ended(99, happened=False), ended(50, code=1)
    )
    assert code == 0
    assert told == {
        "points": 4,
        "leaks": 0,
        "foreign_harmed": 0,
        "not_destroyed": 1,
        "missed": 1,
        "by_victim": {"im": 2, "client": 1, "destroy": 1},
        "median_s": 30.0,
        "canary": [],
    }


def test_a_leak_a_key_in_a_file_and_only_misses_are_told(bench_killpoints):
    code, told = bench_killpoints(ended(1, happened=False))
    assert (code, told["points"], told["missed"], told["median_s"]) == (0, 0, 1, None)
    code, told = bench_killpoints(ended(1), canary=("im.log",))
    assert (code, told["canary"]) == (1, ["im.log"])
    code, told = bench_killpoints(ended(1, "i-1", "i-2", lost=3))
    assert (code, told["leaks"], told["foreign_harmed"]) == (1, 2, 3)


def test_kill_points_of_earlier_runs_count_and_a_leak_is_not_forgotten(bench_killpoints, tmp_path):
    assert bench_killpoints(ended(10), ended(20, "i-1"))[0] == 1
    code, told = bench_killpoints(ended(30), seed=2)
    assert (code, told["points"], told["leaks"], told["median_s"]) == (1, 3, 1, 20.0)
    kept = [json.loads(line) for line in (tmp_path / "build/killpoints.jsonl").open()]
    assert [(each["seed"], each["whom"], each["leaks"]) for each in kept] == [
        (1, "im", 0),
        (1, "client", 1),
        (2, "im", 0),
    ]
    assert kept[1]["left"] == {"instances": ["i-1"], "volumes": []}
    assert all(each["point"].startswith(f"{each['whom']}, ") for each in kept)
