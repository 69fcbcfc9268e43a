"""A small network on MNIST-shaped pictures: PyTorch Lightning, data parallel (DDP).

The MLP of the published example: 784-100-10, ReLU, Adam 1e-3, cross entropy, batches of 64, ten
epochs; pictures normalised by (0.1307, 0.3081) and flattened.

    mnist_lightning.py --data-dir D --job-dir M [--epochs 10 | --train-steps N] [--trainer.… …]

Runs alone, under torchrun on any number of nodes, or as one process a node with MASTER_ADDR,
MASTER_PORT, NODE_RANK and WORLD_SIZE set. D holds the four IDX files of MNIST or Fashion-MNIST,
gzipped or not, or what `data.preprocess` has made of them (`to: tensors`): then each process reads
only the files that it needs. `M/checkpoints` is where a restarted run goes on from, `M/export` gets
the model. Both may be anything that fsspec opens, such as hdfs://. When M is a directory of each
node's own, rank 0 writes, and gives its checkpoint to the others when they start again.

A global step is one batch of `--batch-size` samples, divided among the processes: the gradients,
and the samples seen, are those of one process, whatever their number (of tensors, each process
draws from its own part, and only the number of samples is the same). With `--batch-per-process`
each process takes as many, and a step is larger.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import fsspec
import lightning
import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from shared import sigterm
from torch import nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

MEAN, STD = 0.1307, 0.3081
EVAL_BATCH = 1000
LOG_STEPS = 100
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_CHECKPOINT = re.compile(r"step=(\d+)\.ckpt$")


# --- the network ---------------------------------------------------------------------------------


class Classifier(lightning.LightningModule):
    """The network, its loss and its optimizer."""

    def __init__(self, hidden: int = 100, classes: int = 10, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.learning_rate = learning_rate
        self.network = nn.Sequential(
            nn.Linear(28 * 28, hidden), nn.ReLU(), nn.Linear(hidden, classes)
        )
        self.correct = self.seen = torch.zeros(())

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Logits [n, classes] of pictures [n, 784], normalised and flattened."""
        return self.network(pictures)

    def training_step(self, batch: list[torch.Tensor], _index: int) -> torch.Tensor:
        pictures, labels = batch
        return nn.functional.cross_entropy(self(pictures), labels)

    def on_test_epoch_start(self) -> None:
        self.correct = self.seen = torch.zeros((), device=self.device)

    def test_step(self, batch: list[torch.Tensor], _index: int) -> None:
        pictures, labels = batch
        self.correct = self.correct + (self(pictures).argmax(1) == labels).sum()
        self.seen = self.seen + len(labels)

    def on_test_epoch_end(self) -> None:
        # Every process had other pictures, none had one twice: sums over all are exact.
        correct, seen = (self.trainer.strategy.reduce(x, reduce_op="sum")
                         for x in (self.correct, self.seen))  # fmt: skip
        self.log("accuracy", correct / seen, sync_dist=True)
        self.log("pictures", seen.float(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), self.learning_rate)


# --- the data ------------------------------------------------------------------------------------


class Pictures(lightning.LightningDataModule):
    """Pictures of one directory of IDX files, in memory, shared out among the processes."""

    def __init__(
        self, data_dir: str, batch_size: int = 64, batch_per_process: bool = False, seed: int = 1
    ) -> None:
        super().__init__()
        self.data_dir = data_dir
        self.batch_size = batch_size
        self.batch_per_process = batch_per_process
        self.seed = seed

    def train_dataloader(self) -> DataLoader[Any]:
        """Shuffled batches, this process's part of each."""
        world, rank = self._place()
        size = self.batch_size * world if self.batch_per_process else self.batch_size
        stored = preprocessed(self.data_dir)
        if stored is None:
            data = load(self.data_dir, "train")
            batches = SharedBatches(len(data), size, world, rank, self.seed)
        else:
            batches = OwnBatches(stored["counts"]["train"], size, world, rank, self.seed)
            data = read_tensors(self.data_dir, stored, "train", batches.own)
        return DataLoader(data, sampler=batches, batch_size=None)

    def test_dataloader(self) -> DataLoader[Any]:
        """This process's part of the whole set, every picture once over all processes."""
        world, rank = self._place()
        stored = preprocessed(self.data_dir)
        if stored is None:
            data = load(self.data_dir, "test")
            own = TensorDataset(*(tensor[rank::world] for tensor in data.tensors))
        else:
            count = stored["counts"]["eval"]
            wanted = range(count * rank // world, count * (rank + 1) // world)
            own = read_tensors(self.data_dir, stored, "eval", wanted)
        return DataLoader(own, batch_size=EVAL_BATCH)

    def _place(self) -> tuple[int, int]:
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer else (1, 0)


class SharedBatches(Sampler[list[int]]):
    """The batches of an epoch, of which each process takes its part.

    All processes draw the same order from seed and epoch, so a batch holds the same pictures
    whatever the number of processes; what is left over at the end of an epoch is dropped.
    """

    def __init__(self, length: int, size: int, world: int, rank: int, seed: int) -> None:
        if size < world:
            raise SystemExit(f"--batch-size is {size}, and {world} processes share it: raise it")
        self.length, self.size, self.world, self.rank = length, size, world, rank
        self.seed, self.epoch = seed, 0

    def set_epoch(self, epoch: int) -> None:
        """Lightning calls this at the start of each epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.length // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng((self.seed, self.epoch)).permutation(self.length)
        for start in range(0, len(self) * self.size, self.size):
            yield order[start + self.rank : start + self.size : self.world].tolist()


class OwnBatches(SharedBatches):
    """The same where a process has only a part of the pictures, from which it draws its part.

    The processes' parts are disjoint, all together are all pictures, and each is as large as its
    part of a batch: so all make the same number of steps. Which pictures are in one step depends
    on the number of processes.
    """

    @property
    def own(self) -> range:
        """This process's pictures, by their numbers in the whole."""
        shares = [len(range(rank, self.size, self.world)) for rank in range(self.rank + 1)]
        before, after = sum(shares[:-1]), sum(shares)
        return range(self.length * before // self.size, self.length * after // self.size)

    def __iter__(self) -> Iterator[list[int]]:
        chance = np.random.default_rng((self.seed, self.epoch, self.rank))
        order = chance.permutation(len(self.own))
        take = len(range(self.rank, self.size, self.world))
        for start in range(0, len(self) * take, take):
            yield order[start : start + take].tolist()


def load(data_dir: str, split: str) -> TensorDataset:
    """The pictures of a split, float32 [n, 784], normalised, and their labels, int64 [n]."""
    pixels, labels = (read_idx(data_dir, name) for name in FILES[split])
    scaled = (pixels.reshape(len(pixels), -1).astype(np.float32) / 255 - MEAN) / STD
    return TensorDataset(torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64)))


def read_file(path: str) -> bytes | None:
    """The content of a file, None when there is none."""
    try:
        with fsspec.open(path, "rb") as file:
            return bytes(file.read())
    except FileNotFoundError:
        return None


def read_idx(data_dir: str, name: str) -> np.ndarray:
    """The array of unsigned bytes in an IDX file, gzipped or not. Ends the program without it."""
    for path in (f"{data_dir.rstrip('/')}/{name}{suffix}" for suffix in ("", ".gz")):
        data = read_file(path)
        if data is None:
            continue
        data = gzip.decompress(data) if path.endswith(".gz") else data
        dimensions = data[3]
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    raise SystemExit(f"no {name} (or .gz) in {data_dir}: give the directory of the IDX files")


def preprocessed(data_dir: str) -> dict[str, Any] | None:
    """What metadata.json says where `data.preprocess` made tensors of the data; None otherwise."""
    content = read_file(f"{data_dir.rstrip('/')}/metadata.json")
    stored = json.loads(content) if content else {}
    if stored.get("format") != "tensors":
        return None
    if np.prod(stored["shape"]) != 28 * 28:
        raise SystemExit(f"images of {stored['shape']} in {data_dir}: this network takes 28x28")
    return dict(stored)


def read_tensors(
    data_dir: str, stored: Mapping[str, Any], split: str, wanted: range
) -> TensorDataset:
    """Those pictures of a split, float32 [n, 784], and labels, from the files that have some."""
    images, labels = [np.empty((0, 28 * 28), np.float32)], [np.empty(0, np.int64)]
    first = 0
    for name, count in stored["files"][split]:
        start, stop = max(wanted.start - first, 0), min(wanted.stop - first, count)
        first += count
        if start < stop:
            content = read_file(f"{data_dir.rstrip('/')}/{name}")
            if content is None:
                raise SystemExit(f"no {name} in {data_dir}: preprocess the data again")
            part = np.load(io.BytesIO(content), allow_pickle=False)[start:stop]
            images.append(part["image"].reshape(len(part), -1))
            labels.append(part["label"])
    return TensorDataset(*(torch.from_numpy(np.concatenate(x)) for x in (images, labels)))


def scaling(stored: Mapping[str, Any] | None) -> str:
    """What was done to pixels, in words."""
    done = stored["normalised"] if stored else {"mean": MEAN, "std": STD}
    return f"float32 [n, 784]: pixels / 255, less {done['mean']}, by {done['std']}"


# --- training ------------------------------------------------------------------------------------


class Told(lightning.Callback):
    """Tells how training goes, in the lines that Mayfly reads (docs/programs.md)."""

    def __init__(self) -> None:
        self.since, self.step = time.monotonic(), 0

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        self.since, self.step = time.monotonic(), trainer.global_step
        tell(restored_step=trainer.global_step)  # 0, too: a restart may find no checkpoint

    def on_train_batch_end(
        self, trainer: lightning.Trainer, _module: Any, outputs: Any, *_: Any
    ) -> None:
        step, now = trainer.global_step, time.monotonic()
        if step % LOG_STEPS and step != trainer.max_steps:
            return
        rate = (step - self.step) / max(now - self.since, 1e-6)
        tell(step=step, loss=f"{float(outputs['loss']):.4f}", steps_per_second=f"{rate:.2f}")
        self.since, self.step = now, step

    def on_test_end(self, trainer: lightning.Trainer, *_: Any) -> None:
        accuracy = float(trainer.callback_metrics["accuracy"])
        tell(evaluated_step=trainer.global_step, accuracy=f"{accuracy:.4f}")


class SaveWhenAsked(lightning.Callback):
    """Saves and ends all processes after the same step, once SIGTERM has come to any of them.

    Lightning's own handler takes part in a broadcast at once, in whatever step the others are, and
    would have training end without a checkpoint. Ours takes its place.
    """

    def __init__(self, job_dir: str) -> None:
        self.job_dir = job_dir
        self.stop: sigterm.StopTogether | None = None

    def on_train_start(self, trainer: lightning.Trainer, *_: Any) -> None:
        strategy = trainer.strategy

        def total(values: list[int]) -> list[int]:
            summed = torch.tensor(values, device=strategy.root_device)
            return [int(value) for value in strategy.reduce(summed, reduce_op="sum")]

        self.stop = sigterm.StopTogether(sigterm.Asked(), total)

    def on_train_batch_end(
        self, trainer: lightning.Trainer, _module: Any, outputs: Any, *_: Any
    ) -> None:
        step = trainer.global_step
        if self.stop is None or not self.stop.after_step() or step == trainer.max_steps:
            return
        tell(step=step, loss=f"{float(outputs['loss']):.4f}")
        trainer.save_checkpoint(f"{self.job_dir}/checkpoints/step={step}.ckpt")  # all wait for it
        raise SystemExit(sigterm.EXIT_CODE)


def tell(**facts: Any) -> None:
    """Write one line, by one process of each node."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print("progress:", *(f"{key}={value}" for key, value in facts.items()), flush=True)


class Cli(LightningCLI):
    """Mayfly's options for a program beside Lightning's own."""

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Options that name what several parts need; `--help` lists all."""
        parser.add_argument("--data-dir", required=True, help="directory of the IDX files")
        parser.add_argument("--job-dir", required=True, help="for checkpoints and the model")
        parser.add_argument("--train-steps", type=int, default=0, help="global steps; 0: epochs")
        parser.add_argument("--epochs", type=int, default=10)
        parser.add_argument("--batch-size", type=int, default=64, help="samples in one global step")
        parser.add_argument(
            "--batch-per-process", action="store_true", help="--batch-size is for each process"
        )
        parser.add_argument(
            "--threads", type=int, default=1, help="of each process: the network is small"
        )
        for name in ("data_dir", "batch_size", "batch_per_process"):
            parser.link_arguments(name, f"data.{name}")


def processes() -> tuple[int, int]:
    """Nodes, and processes on this one, as torchrun or the environment says."""
    here = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return max(1, int(os.environ.get("WORLD_SIZE", "1")) // here), here


def trainer_defaults() -> dict[str, Any]:
    """What Lightning's Trainer gets unless an option says otherwise."""
    nodes, here = processes()
    return {
        "accelerator": "gpu" if torch.cuda.is_available() else "cpu",
        "devices": here,
        "num_nodes": nodes,
        "strategy": "ddp" if nodes * here > 1 else "auto",  # over gloo, with GPUs over NCCL
        "logger": False,
        "enable_checkpointing": False,  # keep_checkpoints knows where
        "use_distributed_sampler": False,  # ours shares batches, not pictures
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
    }


def main() -> None:
    """Train from the last checkpoint on, test once over the whole set, and leave the model."""
    cli = Cli(
        Classifier,
        Pictures,
        run=False,
        save_config_callback=None,
        seed_everything_default=1,
        trainer_defaults=trainer_defaults(),
    )
    torch.set_num_threads(cli.config.threads)
    job_dir = cli.config.job_dir.rstrip("/")
    cli.trainer.callbacks += [Told(), SaveWhenAsked(job_dir), keep_checkpoints(job_dir)]
    steps = cli.config.train_steps
    cli.trainer.fit_loop.epoch_loop.max_steps = steps or -1
    cli.trainer.fit_loop.max_epochs = -1 if steps else cli.config.epochs
    cli.trainer.fit(cli.model, cli.datamodule, ckpt_path=common_checkpoint(job_dir))
    # An epoch that the last step has cut short leaves no checkpoint by itself.
    final = f"step={cli.trainer.global_step}.ckpt"
    saved = cli.trainer.strategy.broadcast(last_checkpoint(job_dir))
    if not (saved or "").endswith(f"/{final}"):
        cli.trainer.save_checkpoint(f"{job_dir}/checkpoints/{final}")
    (facts,) = cli.trainer.test(cli.model, cli.datamodule, verbose=False)
    if cli.trainer.is_global_zero:
        facts["input"] = scaling(preprocessed(cli.config.data_dir))
        export(job_dir, cli.model, {"global_step": cli.trainer.global_step, **facts})


def keep_checkpoints(job_dir: str) -> ModelCheckpoint:
    """Saves at the end of each epoch and keeps the two newest."""
    return ModelCheckpoint(
        f"{job_dir}/checkpoints",
        "{step}",
        monitor="step",
        mode="max",
        save_top_k=2,
        every_n_epochs=1,
        save_on_train_epoch_end=True,
    )


def last_checkpoint(job_dir: str) -> str | None:
    """The newest checkpoint that is whole, None when there is none.

    A process that was killed while it wrote leaves a part of one.
    """
    fs, directory = fsspec.url_to_fs(f"{job_dir}/checkpoints")
    if not fs.exists(directory):
        return None
    found = [(int(match[1]), path) for path in fs.ls(directory, detail=False)
             if (match := _CHECKPOINT.search(path))]  # fmt: skip
    for _, path in sorted(found, reverse=True):
        try:
            with fs.open(path, "rb") as file:
                torch.load(file, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError):
            continue
        return str(fs.unstrip_protocol(path))
    return None


def common_checkpoint(job_dir: str) -> str | None:
    """Rank 0's newest checkpoint, at the same path for all processes, None when it has none."""
    found = last_checkpoint(job_dir)
    nodes, here = processes()
    if nodes == 1:
        return found
    if not dist.is_initialized():  # Lightning takes the group that is there
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        rank = int(os.environ.get("RANK", os.environ.get("NODE_RANK", "0")))
        dist.init_process_group(backend, rank=rank, world_size=nodes * here)
        print(f"rank {dist.get_rank()} of {dist.get_world_size()}, {backend}", flush=True)
    (path,) = from_rank_0(found)
    if path is None:
        return None
    fs, place = fsspec.url_to_fs(path)
    there: list[bool] = [False] * dist.get_world_size()
    dist.all_gather_object(there, fs.exists(place))
    if not all(there):
        (content,) = from_rank_0(fs.cat_file(place) if dist.get_rank() == 0 else None)
        if dist.get_rank() != 0:
            part = f"{place}.{dist.get_rank()}.part"
            fs.makedirs(place.rpartition("/")[0], exist_ok=True)
            fs.pipe_file(part, content)
            fs.mv(part, place)
        dist.barrier()
    return str(path)


def from_rank_0(value: Any) -> list[Any]:
    """What rank 0 has, in a list of one."""
    box = [value]
    dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
    return box


def export(job_dir: str, model: Classifier, facts: dict[str, Any]) -> None:
    """Leave the weights and what is needed to use them under `<job-dir>/export`."""
    about = {
        "network": repr(model.network),
        "output": f"logits [n, {model.network[-1].out_features}]",
        **facts,
    }
    fs, directory = fsspec.url_to_fs(f"{job_dir}/export")
    fs.makedirs(directory, exist_ok=True)
    with fs.open(f"{directory}/model.pt", "wb") as file:
        torch.save(model.network.cpu().state_dict(), file)
    with fs.open(f"{directory}/model.json", "wb") as file:
        file.write(json.dumps(about, indent=1).encode())


if __name__ == "__main__":
    main()
    sys.stdout.flush()
