"""ResNet on CIFAR-10-shaped pictures in plain PyTorch, data parallel (DDP); at home on GPUs.

    cifar10_torch.py --data-dir D --job-dir M [--epochs 10 | --train-steps N] [--batch-size 128] …

Runs alone, under torchrun on any number of nodes, or as one process a node with MASTER_ADDR,
MASTER_PORT, NODE_RANK and WORLD_SIZE set. D holds CIFAR-10's binary files (data_batch_1.bin …,
test_batch.bin) or the four IDX files of MNIST or Fashion-MNIST, gzipped or not, which are padded to
3x32x32. M is the same for all processes: `M/checkpoints` is where a restarted run goes on from,
`M/export` gets the model. Both may be anything that fsspec opens, such as hdfs://.

A global step is one batch of `--batch-size` samples, divided among the processes: samples seen and
learning rate do not depend on their number. On GPUs it computes in bfloat16 with channels last, and
pictures stay in the GPU's memory.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import io
import json
import os
import re
import struct
import time
from dataclasses import dataclass
from typing import Any

import fsspec
import numpy as np
import torch
import torch.distributed as dist
from shared import sigterm
from torch import nn
from torch.nn.parallel import DistributedDataParallel

MEAN, STD = 127.5, 63.75
SIDE, CHANNELS, CLASSES = 32, 3, 10
EVAL_BATCH = 500
KEEP_CHECKPOINTS = 2
IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
BINARY = {"train": re.compile(r"data_batch_\d+\.bin$"), "test": re.compile(r"test_batch\.bin$")}
_CHECKPOINT = re.compile(r"step=(\d+)\.ckpt$")


@dataclass(frozen=True)
class Place:
    """This process among all, and what it computes on."""

    rank: int
    world: int
    device: torch.device
    local_rank: int

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """The values summed over all processes."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    def total(self, values: list[int]) -> list[int]:
        """The same of whole numbers."""
        return [int(value) for value in self.sum(torch.tensor(values, device=self.device))]


@dataclass(frozen=True)
class Learner:
    """What a checkpoint holds."""

    model: nn.Module
    optimizer: torch.optim.Optimizer


@dataclass(frozen=True)
class Pictures:
    """uint8 [n, 3, 32, 32] and int64 [n], on the device that computes."""

    pixels: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)


def main() -> None:
    """Train from the last checkpoint on, test once over the whole set, and leave the model."""
    args = parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    place = join()
    try:
        run(args, place)
    finally:
        if place.world > 1:
            dist.destroy_process_group()


def parse_args() -> argparse.Namespace:
    """The command line; argparse exits 2 with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--job-dir", required=True, help="for checkpoints and the model")
    parser.add_argument("--train-steps", type=int, default=0, help="global steps; 0: --epochs")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=128, help="samples in one global step")
    parser.add_argument("--blocks", type=int, default=1, help="n of 6n+2 layers: 1 is ResNet-8")
    parser.add_argument("--filters", type=int, default=16, help="filters of the first stage")
    parser.add_argument("--learning-rate", type=float, default=0.1, help="peak")
    parser.add_argument("--warmup", type=float, default=0.05, help="part with a rising rate")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--augment", choices=["none", "full"], default="none")
    parser.add_argument("--precision", choices=["auto", "bf16", "fp32"], default="auto")
    parser.add_argument("--checkpoint-seconds", type=float, default=30)
    parser.add_argument("--log-steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0, help="0: OMP_NUM_THREADS or all cores")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def join() -> Place:
    """Meet the other processes that torchrun or the environment names; alone without them."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", os.environ.get("NODE_RANK", "0")))
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if world > 1:
        dist.init_process_group("nccl" if gpu else "gloo", rank=rank, world_size=world)
    return Place(rank, world, device, local)


def run(args: argparse.Namespace, place: Place) -> None:
    """Everything between joining and leaving the other processes."""
    data = load(args.data_dir, "train", place.device)
    if args.batch_size < place.world or args.batch_size > len(data):
        raise SystemExit(
            f"--batch-size is {args.batch_size}: {place.world} processes share it, and there are "
            f"{len(data)} pictures — choose one between the two"
        )
    steps = args.train_steps or args.epochs * (len(data) // args.batch_size)
    model = ResNet(args.blocks, args.filters).to(place.device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(
        model.parameters(), 0.0, args.momentum, weight_decay=args.weight_decay, nesterov=True
    )
    start = resume(args, model, optimizer, place)
    if train(args, place, data, Learner(model, optimizer), range(start, steps)) < steps:
        raise SystemExit(sigterm.EXIT_CODE)  # it was asked to end, and has saved
    accuracy = test(args, place, model)
    tell(place, evaluated_step=steps, accuracy=f"{accuracy:.4f}")
    if place.rank == 0:
        export(args.job_dir, model, {"global_step": steps, "accuracy": accuracy})


def train(
    args: argparse.Namespace,
    place: Place,
    data: Pictures,
    learner: Learner,
    steps: range,
) -> int:
    """Make the steps of the range; rank 0 saves a checkpoint now and then, and at the end.

    Returns the step that was reached: after SIGTERM it may not be the last one, and is saved.
    """
    stop = sigterm.StopTogether(sigterm.Asked(), place.total)
    model, optimizer = learner.model, learner.optimizer
    trained = DistributedDataParallel(model) if place.world > 1 else model
    model.train()
    since = time.monotonic()
    told = done = steps.start
    saved = since
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(args, (step + 0.5) / steps.stop)
        pixels, labels = batch(args, place, data, step)
        with precision(args, place):
            loss = nn.functional.cross_entropy(trained(pixels).float(), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        done, now = step + 1, time.monotonic()
        stopped = stop.after_step()
        last = stopped or done == steps.stop
        if done % args.log_steps == 0 or last:
            rate = (done - told) / (time.monotonic() - since)
            tell(place, step=done, loss=f"{loss.item():.4f}", steps_per_second=f"{rate:.2f}")
            since, told = time.monotonic(), done
        if place.rank == 0 and (now - saved >= args.checkpoint_seconds or last):
            save(args.job_dir, done, model, optimizer)
            saved = time.monotonic()
        if stopped:
            place.total([1])  # none leaves before rank 0 has saved: Mayfly exports what is there
            break
    return done


def learning_rate(args: argparse.Namespace, part: float) -> float:
    """The rate after this part of all samples: it rises, then falls in a line."""
    rising = min(part / max(args.warmup, 1e-6), 1.0)
    return args.learning_rate * (0.05 + 0.95 * rising) * (1 - 0.99 * part)


def batch(
    args: argparse.Namespace, place: Place, data: Pictures, step: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """This process's part of a step's batch: float32 [b, 3, 32, 32] and int64 [b].

    All processes draw the same order from seed and epoch, so a batch holds the same pictures
    whatever the number of processes, and a run that was resumed sees what it would have seen.
    """
    epoch, turn = divmod(step, len(data) // args.batch_size)
    whole = order_of(args.seed, epoch, len(data))[
        turn * args.batch_size : (turn + 1) * args.batch_size
    ]
    own = torch.from_numpy(whole[place.rank :: place.world].copy()).to(place.device)
    pixels = data.pixels[own]
    if args.augment == "full":
        pixels = augment(pixels, np.random.default_rng((args.seed, step, place.rank)))
    return normalize(pixels), data.labels[own]


@functools.lru_cache(maxsize=1)
def order_of(seed: int, epoch: int, length: int) -> np.ndarray:
    """The order of an epoch's pictures."""
    return np.random.default_rng((seed, epoch)).permutation(length)


def augment(pixels: torch.Tensor, random: np.random.Generator) -> torch.Tensor:
    """One random crop of the padded pictures, and flips of a random half of them.

    A crop for each picture would be a gather for each: over many steps this does as well.
    """
    pad = SIDE // 8
    top, left = random.integers(0, 2 * pad + 1, 2)
    padded = nn.functional.pad(pixels, (pad, pad, pad, pad))
    cropped = padded[:, :, top : top + SIDE, left : left + SIDE]
    flipped = torch.from_numpy(random.random(len(pixels)) < 0.5).to(pixels.device)  # noqa: PLR2004
    return torch.where(flipped[:, None, None, None], cropped.flip(3), cropped)


def normalize(pixels: torch.Tensor) -> torch.Tensor:
    return ((pixels.float() - MEAN) / STD).contiguous(memory_format=torch.channels_last)


def precision(args: argparse.Namespace, place: Place) -> contextlib.AbstractContextManager[Any]:
    """bfloat16 for what gains by it: on GPUs, or where asked."""
    if args.precision == "bf16" or (args.precision == "auto" and place.device.type == "cuda"):
        return torch.autocast(place.device.type, torch.bfloat16)
    return contextlib.nullcontext()


@torch.no_grad()
def test(args: argparse.Namespace, place: Place, model: nn.Module) -> float:
    """Accuracy over the whole test set, of which each process sees its own part."""
    data = load(args.data_dir, "test", place.device)
    pixels, labels = data.pixels[place.rank :: place.world], data.labels[place.rank :: place.world]
    model.eval()
    counts = torch.zeros(2, dtype=torch.float64, device=place.device)
    for some, truth in zip(pixels.split(EVAL_BATCH), labels.split(EVAL_BATCH), strict=True):
        with precision(args, place):
            counts[0] += (model(normalize(some)).argmax(1) == truth).sum()
        counts[1] += len(truth)
    correct, seen = place.sum(counts).tolist()
    return correct / seen


# --- the network ---------------------------------------------------------------------------------


class ResNet(nn.Module):
    """A residual network with 6n+2 layers (He et al. 2015, section 4.2)."""

    def __init__(self, blocks: int, filters: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [conv(CHANNELS, filters, 3, 1), nn.BatchNorm2d(filters)]
        layers.append(nn.ReLU())
        width = filters
        for stage in range(3):
            for block in range(blocks):
                stride = 2 if stage > 0 and block == 0 else 1
                layers.append(Block(width, filters << stage, stride))
                width = filters << stage
        self.layers = nn.Sequential(*layers)
        self.classify = nn.Linear(width, CLASSES)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Logits [n, 10] of normalised pictures [n, 3, 32, 32]."""
        return self.classify(self.layers(pixels).mean((2, 3)))


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            conv(before, after, 3, stride),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            conv(after, after, 3, 1),
            nn.BatchNorm2d(after),
        )
        same = stride == 1 and before == after
        self.shortcut = (
            nn.Identity()
            if same
            else nn.Sequential(conv(before, after, 1, stride), nn.BatchNorm2d(after))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.relu(self.body(x) + self.shortcut(x))


def conv(before: int, after: int, size: int, stride: int) -> nn.Conv2d:
    made = nn.Conv2d(before, after, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_in", nonlinearity="relu")
    return made


# --- the data ------------------------------------------------------------------------------------


def load(data_dir: str, split: str, device: torch.device) -> Pictures:
    """A split's pictures, of whichever of the two layouts lies there. Ends the program without."""
    fs, directory = fsspec.url_to_fs(data_dir)
    names = sorted(fs.ls(directory, detail=False)) if fs.exists(directory) else []
    binary = [name for name in names if BINARY[split].search(name)]
    pixels, labels = (
        read_binary([fs.cat_file(name) for name in binary])
        if binary
        else read_idx_pair(fs, names, data_dir, split)
    )
    return Pictures(torch.from_numpy(pixels).to(device), torch.from_numpy(labels).to(device))


def read_binary(files: list[bytes]) -> tuple[np.ndarray, np.ndarray]:
    """Pixels and labels of CIFAR-10's binary version: a byte of label, then 3x32x32 of picture."""
    size = 1 + CHANNELS * SIDE * SIDE
    records = np.frombuffer(b"".join(files), np.uint8).reshape(-1, size)
    return records[:, 1:].reshape(-1, CHANNELS, SIDE, SIDE).copy(), records[:, 0].astype(np.int64)


def read_idx_pair(
    fs: Any, names: list[str], data_dir: str, split: str
) -> tuple[np.ndarray, np.ndarray]:
    """Pixels, padded to 3x32x32, and labels of a pair of IDX files."""
    arrays = []
    for wanted in IDX[split]:
        found = [name for name in names if name.endswith((f"/{wanted}", f"/{wanted}.gz"))]
        if not found:
            raise SystemExit(
                f"no {wanted} (or .gz) and no CIFAR-10 binary files in {data_dir}: give the "
                "directory of the data"
            )
        data = fs.cat_file(found[0])
        arrays.append(read_idx(gzip.decompress(data) if found[0].endswith(".gz") else data))
    pixels, labels = arrays
    edge = [(SIDE - side) // 2 for side in pixels.shape[1:]]
    padded = np.pad(pixels, [(0, 0), *((width, width) for width in edge)])
    return np.repeat(padded[:, None], CHANNELS, axis=1), labels.astype(np.int64)


def read_idx(data: bytes) -> np.ndarray:
    """The array of unsigned bytes in the content of an IDX file."""
    dimensions = data[3]
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


# --- checkpoints, the model, and what is told ----------------------------------------------------


def save(job_dir: str, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write a checkpoint, and remove those before the last two."""
    fs, directory = fsspec.url_to_fs(f"{job_dir.rstrip('/')}/checkpoints")
    fs.makedirs(directory, exist_ok=True)
    content = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    write(fs, f"{directory}/step={step}.ckpt", content)
    for _, path in checkpoints(fs, directory)[KEEP_CHECKPOINTS:]:
        fs.rm_file(path)


def resume(
    args: argparse.Namespace, model: nn.Module, optimizer: torch.optim.Optimizer, place: Place
) -> int:
    """Take up the newest checkpoint that is whole; returns its step, 0 when there is none.

    A process that was killed while it wrote leaves a part of one.
    """
    fs, directory = fsspec.url_to_fs(f"{args.job_dir.rstrip('/')}/checkpoints")
    for _, path in checkpoints(fs, directory):
        try:
            with fs.open(path, "rb") as file:
                found = torch.load(file, map_location=place.device, weights_only=True)
        except (OSError, RuntimeError, EOFError):
            continue
        model.load_state_dict(found["model"])
        optimizer.load_state_dict(found["optimizer"])
        tell(place, restored_step=found["step"])
        return int(found["step"])
    tell(place, restored_step=0)  # a restart may find no checkpoint
    return 0


def checkpoints(fs: Any, directory: str) -> list[tuple[int, str]]:
    """Step and path of each checkpoint, the newest first."""
    names = fs.ls(directory, detail=False) if fs.exists(directory) else []
    found = ((_CHECKPOINT.search(name), name) for name in names)
    return sorted(((int(match[1]), name) for match, name in found if match), reverse=True)


def export(job_dir: str, model: nn.Module, facts: dict[str, Any]) -> None:
    """Leave the weights and what is needed to use them under `<job-dir>/export`."""
    about = {
        "network": repr(model),
        "input": f"float32 [n, {CHANNELS}, {SIDE}, {SIDE}]: pixels less {MEAN}, by {STD}",
        "output": f"logits [n, {CLASSES}]",
        **facts,
    }
    fs, directory = fsspec.url_to_fs(f"{job_dir.rstrip('/')}/export")
    fs.makedirs(directory, exist_ok=True)
    write(fs, f"{directory}/model.pt", model.cpu().state_dict())
    fs.pipe_file(f"{directory}/model.json", json.dumps(about, indent=1).encode())


def write(fs: Any, path: str, content: Any) -> None:
    """Write a file by torch.save; in memory first, since not every file system can seek."""
    buffer = io.BytesIO()
    torch.save(content, buffer)
    fs.pipe_file(path, buffer.getvalue())


def tell(place: Place, **facts: Any) -> None:
    """Write one line, by one process of each node, that Mayfly reads (docs/programs.md)."""
    if place.local_rank == 0:
        print("progress:", *(f"{key}={value}" for key, value in facts.items()), flush=True)


if __name__ == "__main__":
    main()
