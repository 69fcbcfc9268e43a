"""What the built-in programs do at SIGTERM: they save what there is, all processes together.

Neither TensorFlow nor PyTorch is among the tools for tests: what a program takes from them is fake
here. Real ones are in tests/e2e/faults/test_budget.py.
"""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from shared import sigterm
from tests.unit import test_horovod_programs
from tests.unit.test_torch_programs import ABSENT, PROGRAMS, Library

from mayfly_train import launch, supervise

STEPS = 1000
ENDED = 143  # as a shell has it


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    """Leaves the process's own way with SIGTERM as it was."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def ask() -> None:
    """Send SIGTERM to this process, as its launcher does."""
    signal.raise_signal(signal.SIGTERM)


def load(name: str, monkeypatch: pytest.MonkeyPatch, libraries: dict[str, Any]) -> Any:
    """A program, with fakes of the libraries that it imports."""
    for library, fake in libraries.items():
        monkeypatch.setitem(sys.modules, library, fake)
    spec = importlib.util.spec_from_file_location(name, PROGRAMS / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


# --- the wish, and how all processes come to know it ----------------------------------------------


def test_a_program_is_asked_once_sigterm_has_come():
    asked = sigterm.Asked()
    assert not asked
    ask()
    assert asked
    ask()
    assert asked


class FakeProcesses:
    """Threads that make steps together; numbers are summed as an all-reduce does it."""

    def __init__(self, count: int) -> None:
        self.barrier = threading.Barrier(count)
        self.told: list[list[int]] = []
        self.stopped: dict[int, int] = {}

    def total(self, values: list[int]) -> list[int]:
        self.told.append(values)
        self.barrier.wait(30)
        sums = [sum(column) for column in zip(*self.told, strict=True)]
        if self.barrier.wait(30) == 0:
            self.told.clear()
        self.barrier.wait(30)
        return sums

    def train(self, rank: int, asked_at: int | None) -> None:
        asked = MagicMock()
        asked.__bool__.return_value = False
        stop = sigterm.StopTogether(asked, self.total)
        for step in range(1, STEPS):
            asked.__bool__.return_value = asked_at is not None and step >= asked_at
            if stop.after_step():
                self.stopped[rank] = step
                return


@pytest.mark.parametrize("asked_rank", [0, 2])
def test_all_stop_after_the_same_step_whoever_is_asked(asked_rank):
    processes = FakeProcesses(3)
    threads = [
        threading.Thread(target=processes.train, args=(rank, 250 if rank == asked_rank else None))
        for rank in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(processes.stopped) == 3
    (step,) = set(processes.stopped.values())
    assert 250 <= step < 250 + sigterm.MOST_STEPS


@pytest.mark.parametrize(
    ("seconds", "looks"),
    [
        (0.25, [1, 5, 9, 13, 17]),
        (2.5, [1, 2, 3, 4, 5]),
        (0.001, [1, 101, 201, 301, 401]),
    ],
)
def test_all_are_asked_about_once_a_second_and_at_least_every_hundred_steps(
    monkeypatch, seconds, looks
):
    made, asked_at = [0], []
    monkeypatch.setattr(sigterm.time, "monotonic", lambda: made[0] * seconds)

    def total(values: list[int]) -> list[int]:
        asked_at.append(made[0])
        return [2 * value for value in values]

    stop = sigterm.StopTogether(sigterm.Asked(), total)
    while made[0] < looks[-1]:
        made[0] += 1
        assert not stop.after_step()
    assert asked_at == looks


def test_launchers_wait_longer_than_a_second_and_less_than_the_supervisor():
    assert 30 < launch.RANKS_SAVE_S < supervise.SAVE_S


# --- ranks that average gradients -----------------------------------------------------------------


def fake_horovod(rank: int, others_asked: Callable[[], int]) -> MagicMock:
    """Horovod with a rank beside this one, which is as quick and may have been asked to end."""

    def allreduce(values: Any, name: str, op: Any = None) -> Any:
        if name == "stop":
            return np.array(values) + np.array([others_asked(), values[1], 1])
        return values if name == "loss" else values * 2  # both ranks have had as many samples

    hvd = MagicMock()
    hvd.size.return_value, hvd.rank.return_value = 2, rank
    hvd.local_rank.return_value, hvd.allreduce = 0, allreduce
    return hvd


def parts_of(program: Any, at: int, happens: Callable[[], None]) -> Any:
    """Batches for two ranks; something happens before the step after `at`."""

    class Batches(program.SharedBatches):
        def parts(self, steps: range) -> Iterator[np.ndarray]:
            for step, part in zip(steps, super().parts(steps), strict=True):
                if step == at:
                    happens()
                yield part

    return Batches(200, 20, 2, 0, seed=1)


ARGS = ["--data-dir", "d", "--job-dir", "j", "--checkpoint-seconds", "1e9"]


def train_keras(program: Any, monkeypatch: Any, batches: Any, steps: range) -> tuple[int, Any]:
    """The step that Keras' ranks have reached, and which were saved."""
    tf, saved = MagicMock(), []
    tf.function = lambda decorated: decorated
    tf.constant = lambda value, *_: np.array(value)
    tf.reduce_sum.return_value = 0.5
    monkeypatch.setattr(program, "tf", tf)
    saver = Namespace(checkpoint=MagicMock(), save=saved.append)
    args = program.parse_args(ARGS)
    return program.train(args, saver, (None, None), batches, steps), saved


def train_torch(program: Any, monkeypatch: Any, batches: Any, steps: range) -> tuple[int, Any]:
    """The same of PyTorch's."""
    saved: list[int] = []
    loss = MagicMock()
    for method in (loss.__mul__, loss.__truediv__):
        method.return_value = loss
    loss.detach.return_value = 0.5
    nn = MagicMock()
    nn.functional.cross_entropy.return_value = loss
    monkeypatch.setattr(program, "nn", nn)
    monkeypatch.setattr(program, "torch", Namespace(tensor=np.array))
    monkeypatch.setattr(program, "save", lambda *values: saved.append(values[-1]))
    optimizer = Namespace(param_groups=[{}])
    args, data = program.parse_args(ARGS), [np.zeros(200), np.zeros(200)]
    return program.train(args, MagicMock(), optimizer, data, batches, steps), saved


HOROVOD = {"mnist_horovod_keras": train_keras, "mnist_horovod_torch": train_torch}


@pytest.mark.parametrize("name", HOROVOD)
@pytest.mark.parametrize("asked_here", [True, False])
def test_horovods_ranks_save_the_step_that_all_have_made(monkeypatch, capsys, name, asked_here):
    program = test_horovod_programs.load(name, monkeypatch)
    other = []
    monkeypatch.setattr(program, "hvd", fake_horovod(0, lambda: len(other)))
    batches = parts_of(program, 50, ask if asked_here else lambda: other.append(1))
    reached, saved = HOROVOD[name](program, monkeypatch, batches, range(10, STEPS))
    assert 50 < reached <= 50 + sigterm.MOST_STEPS
    assert saved == [reached]
    told = capsys.readouterr().out
    assert f"progress: step={reached} " in told  # the run's status names the step that is exported
    assert f"samples: {(reached - 10) * 20} in this start" in told  # none without the other


@pytest.mark.parametrize("name", HOROVOD)
def test_only_horovods_rank_0_saves(monkeypatch, name):
    program = test_horovod_programs.load(name, monkeypatch)
    monkeypatch.setattr(program, "hvd", fake_horovod(1, lambda: 0))
    batches = parts_of(program, 50, ask)
    reached, saved = HOROVOD[name](program, monkeypatch, batches, range(STEPS))
    assert 50 < reached < STEPS and saved == []


@pytest.mark.parametrize("name", HOROVOD)
def test_horovods_ranks_train_to_the_end_unless_they_are_asked(monkeypatch, name):
    program = test_horovod_programs.load(name, monkeypatch)
    monkeypatch.setattr(program, "hvd", fake_horovod(0, lambda: 0))
    batches = parts_of(program, 50, lambda: None)
    assert HOROVOD[name](program, monkeypatch, batches, range(120))[0] == 120


@pytest.fixture
def torch_program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A function that imports a program of PyTorch by its name."""
    libraries = {name: Library(name) for name in ABSENT}
    for library in libraries.values():
        library.__path__ = []
    return lambda name: load(name, monkeypatch, libraries)


@pytest.mark.parametrize("rank", [0, 1])
def test_processes_of_ddp_save_the_step_that_all_have_made(
    monkeypatch, capsys, torch_program, rank
):
    program = torch_program("cifar10_torch")
    saved, sums = [], []

    def all_reduce(values: np.ndarray) -> None:
        sums.append(len(values))
        values += values  # the other process is as quick, and is asked as this one is

    monkeypatch.setattr(program.dist, "all_reduce", all_reduce, raising=False)
    monkeypatch.setattr(program, "torch", Namespace(tensor=lambda values, device: np.array(values)))
    monkeypatch.setattr(program, "nn", MagicMock())
    monkeypatch.setattr(program, "DistributedDataParallel", MagicMock())
    monkeypatch.setattr(program, "precision", lambda *_: MagicMock())
    loss = program.nn.functional.cross_entropy.return_value
    loss.item.return_value = 0.5
    monkeypatch.setattr(program, "save", lambda _dir, step, *_: saved.append(step))

    def batch(_args: Any, _place: Any, _data: Any, step: int) -> tuple[Any, Any]:
        if step == 50:
            ask()
        return MagicMock(), MagicMock()

    monkeypatch.setattr(program, "batch", batch)
    args = Namespace(
        learning_rate=0.1, warmup=0.1, log_steps=20, checkpoint_seconds=1e9, job_dir="j"
    )
    place = program.Place(rank, 2, "cpu", 0)
    learner = program.Learner(MagicMock(), MagicMock(param_groups=[{}]))
    reached = program.train(args, place, None, learner, range(STEPS))
    assert 50 < reached <= 50 + sigterm.MOST_STEPS
    assert saved == ([reached] if rank == 0 else [])
    assert sums[-1] == 1  # rank 1 waits until rank 0 has saved
    assert f"progress: step={reached} " in capsys.readouterr().out


def test_processes_of_lightning_save_together_and_end(monkeypatch, capsys, torch_program):
    program = torch_program("mnist_lightning")
    monkeypatch.setattr(program, "torch", Namespace(tensor=lambda values, device: np.array(values)))
    saved: list[str] = []
    strategy = Namespace(root_device="cpu", reduce=lambda values, reduce_op: 2 * values)
    trainer = Namespace(
        strategy=strategy, global_step=0, max_steps=STEPS, save_checkpoint=saved.append
    )
    keeper = program.SaveWhenAsked("/job")
    # Lightning has a handler of its own, which would not save.
    signal.signal(signal.SIGTERM, lambda *_: pytest.fail("Lightning's handler is at work"))
    keeper.on_train_start(trainer)
    with pytest.raises(SystemExit) as ended:
        for step in range(1, STEPS):
            trainer.global_step = step
            if step == 50:
                ask()
            keeper.on_train_batch_end(trainer, None, {"loss": 0.5})
    step = trainer.global_step
    assert 50 <= step < 50 + sigterm.MOST_STEPS
    assert ended.value.code == ENDED
    assert saved == [f"/job/checkpoints/step={step}.ckpt"]
    assert f"progress: step={step} " in capsys.readouterr().out


# --- current TensorFlow ---------------------------------------------------------------------------


class FakeKeeper:
    """Notes what is saved, and whether it is all in the job directory."""

    def __init__(self, *_: Any) -> None:
        self.saved: list[int] = []
        self.finished = False

    def restore(self) -> None:
        """There is no checkpoint."""

    def is_time(self, _seconds: float) -> bool:
        return False

    def save(self, step: int) -> None:
        self.saved.append(step)

    def finish(self) -> None:
        self.finished = True


@pytest.fixture
def tensorflow_program(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Any, FakeKeeper]]:
    """A function that imports a program of TensorFlow 2.21, with its fake keeper."""

    def make(name: str) -> tuple[Any, FakeKeeper]:
        libraries = ("fsspec", "keras", "tensorflow", "tf_keras")
        program = load(name, monkeypatch, {library: MagicMock() for library in libraries})
        program.tf.constant = lambda value, *_: value
        keeper = FakeKeeper()
        monkeypatch.setattr(program, "Keeper", lambda *_: keeper)
        monkeypatch.setattr(program, "export", lambda *_: keeper.saved.append(-1))
        monkeypatch.setattr(program, "accuracy", lambda *_: 0.5)
        return program, keeper

    return make


WANTED = Namespace(
    job_dir="j", data_dir="d", batch_size=2, train_steps=STEPS, steps_per_call=20, seed=1,
    learning_rate=0.1, checkpoint_seconds=1e9, log_steps=100, network="mlp", local_dir="/tmp/x",
)  # fmt: skip


@pytest.mark.parametrize(("asked_at", "code"), [(100, ENDED), (None, 0)])
def test_the_coordinator_saves_what_the_workers_have_made(
    monkeypatch, capsys, tensorflow_program, asked_at, code
):
    program, keeper = tensorflow_program("mnist_keras_ps")
    made = [0]

    class FakeState:
        """The steps that are made."""

        def __init__(self, _args: Any) -> None:
            self.model = self.optimizer = MagicMock()
            self.step = Namespace(numpy=lambda: made[0])

        def take(self, _other: Any) -> None:
            """There is one count of steps for both."""

        def checkpoint(self) -> None:
            """The keeper is a fake."""

    def schedule(_train: Any, args: tuple[Any, int]) -> Any:
        def fetch() -> tuple[float, int]:
            made[0] += args[1]
            if made[0] == asked_at:
                ask()
            return 0.5, made[0]

        return Namespace(fetch=fetch)

    monkeypatch.setattr(program, "State", FakeState)
    program.tf.distribute.coordinator.ClusterCoordinator.return_value.schedule = schedule
    cluster = Namespace(num_tasks=lambda _job: 2)
    assert program.coordinate(WANTED, cluster) == code
    reached = asked_at or STEPS
    assert keeper.saved[0] == reached and keeper.finished
    assert (-1 in keeper.saved) == (code == 0)  # only a model that is whole is exported by itself
    assert f"progress: step={reached} " in capsys.readouterr().out


@pytest.mark.parametrize("task", ["chief", "worker"])
@pytest.mark.parametrize("asked_here", [True, False])
def test_mirrored_replicas_stop_after_the_same_call(
    monkeypatch, capsys, tensorflow_program, task, asked_here
):
    program, keeper = tensorflow_program("mnist_mwms")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": task, "index": 0}}))
    monkeypatch.setattr(program, "take_the_chiefs", lambda *_: None)
    monkeypatch.setattr(program, "newest_step", lambda _: STEPS - 1)
    monkeypatch.setattr(program, "network", MagicMock())
    monkeypatch.setattr(program, "read_idx", lambda *_: np.zeros(100))
    made, other = [0], [0.0]

    def train(orders: np.ndarray, asked: float) -> Any:
        made[0] += len(orders)
        if made[0] == 100:
            ask() if asked_here else other.append(1.0)
        return Namespace(numpy=lambda: np.array([0.5, asked + other[-1]]))

    monkeypatch.setattr(program, "training", lambda *_: train)
    optimizer = Namespace(iterations=Namespace(numpy=lambda: made[0]), build=lambda _: None)
    optimizer.variables = []
    program.keras.optimizers.Adam.return_value = optimizer
    program.tf.constant = lambda value, *_: value
    program.tf.distribute.MultiWorkerMirroredStrategy.return_value.num_replicas_in_sync = 2
    assert program.train_with_the_others(WANTED) == ENDED
    # The wish of a task goes out with its next call.
    reached = 120 if asked_here else 100
    assert keeper.saved == ([reached] if task == "chief" else [])
    assert keeper.finished == (task == "chief")
    assert f"progress: step={reached} " in capsys.readouterr().out
    assert "TF_CONFIG" in os.environ


@pytest.mark.parametrize("task", ["chief", "worker"])
def test_a_chief_needs_nobody_where_all_steps_are_made(monkeypatch, tensorflow_program, task):
    program, keeper = tensorflow_program("mnist_mwms")
    monkeypatch.setenv("TF_CONFIG", json.dumps({"task": {"type": task, "index": 0}}))
    monkeypatch.setattr(program, "take_the_chiefs", lambda *_: None)
    monkeypatch.setattr(program, "newest_step", lambda _: STEPS)
    monkeypatch.setattr(program, "network", MagicMock())
    monkeypatch.setattr(program, "read_idx", lambda *_: np.zeros(100))
    found: list[bool] = []

    def strategy(**_: Any) -> Any:
        found.append("TF_CONFIG" in os.environ)
        return MagicMock(num_replicas_in_sync=2)

    program.tf.distribute.MultiWorkerMirroredStrategy.side_effect = strategy
    optimizer = Namespace(iterations=Namespace(numpy=lambda: STEPS), build=lambda _: None)
    optimizer.variables = []
    program.keras.optimizers.Adam.return_value = optimizer
    program.tf.errors.OpError = OSError
    assert program.train_with_the_others(WANTED) == 0
    assert found == [task == "worker"]
    assert (-1 in keeper.saved) == (task == "chief")


# --- sessions of TensorFlow 1 ---------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cifar10", "cifar10_server"])
def test_the_chiefs_session_ends_after_the_step_and_saves_by_itself(monkeypatch, name):
    tensorflow = MagicMock()
    tensorflow.estimator.SessionRunHook = tensorflow.compat.v1.train.SessionRunHook = object
    program = load(name, monkeypatch, {"tensorflow": tensorflow})
    stop, context = program.StopWhenAsked(), MagicMock()
    stop.begin()
    stop.after_run(context, None)
    context.request_stop.assert_not_called()
    assert not stop.stopped
    ask()
    stop.after_run(context, None)
    context.request_stop.assert_called_once_with()
    assert stop.stopped


@pytest.mark.parametrize(("stopped", "code"), [(True, ENDED), (False, 0)])
def test_a_server_that_was_stopped_leaves_its_checkpoint_and_no_model(monkeypatch, stopped, code):
    tensorflow = MagicMock()
    tensorflow.compat.v1.train.SessionRunHook = object
    program = load("cifar10_server", monkeypatch, {"tensorflow": tensorflow})
    finished, codes = [], []
    monkeypatch.setattr(program, "train", lambda *_: stopped)
    monkeypatch.setattr(program, "finish", finished.append)
    monkeypatch.setattr(program.os, "_exit", codes.append)
    program.main(["--data_dir", "d", "--job_dir", "j", "--train_steps", "9"])
    assert codes == [code]
    assert len(finished) == (0 if stopped else 1)


def test_what_programs_share_is_copied_with_each_of_them():
    tasks = (PROGRAMS.parents[1] / "roles/trainer/tasks/program_builtin.yml").read_text()
    shared = sorted(path.name for path in (PROGRAMS / "shared").glob("*.py"))
    assert shared == ["__init__.py", "sigterm.py"]
    assert all(f"shared/{name}" in tasks for name in shared)
