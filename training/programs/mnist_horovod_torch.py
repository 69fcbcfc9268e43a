"""A small network on MNIST-shaped pictures: PyTorch with Horovod, data parallel.

The MLP of the published example: 784-100-10, ReLU, Adam 1e-3, cross entropy, batches of 64, ten
epochs; pictures normalised by (0.1307, 0.3081) and flattened.

    mnist_horovod_torch.py --data-dir D --job-dir M [--epochs 10 | --train-steps N]

Runs under Mayfly's engine horovod, under `horovodrun`, and alone. D holds the four IDX files of
MNIST or Fashion-MNIST, gzipped or not, or what `data.preprocess` has made of them (`to: tensors`):
then each rank reads only the files that it needs. Rank 0 saves to `M/checkpoints`, from where all
go on after a restart, with as many ranks as there are then, and leaves the model in `M/export`.
Both may be anything that fsspec opens, such as hdfs://.

A global step is one batch of `--batch-size` samples, divided among the ranks: the gradients, and
the samples seen, are those of one process, whatever the number of ranks (of tensors, each rank
draws from its own part, and only the number of samples is the same). With `--batch-per-rank`
each rank takes as many, a step is larger, and the learning rate is scaled by the number of ranks
(Goyal et al., https://arxiv.org/abs/1706.02677). In both cases it is warmed up.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
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
import horovod.torch as hvd
import numpy as np
import torch
from shared import sigterm
from torch import nn

MEAN, STD = 0.1307, 0.3081
EVAL_BATCH = 1000
KEEP = 2  # checkpoints
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_CHECKPOINT = re.compile(r"step=(\d+)\.ckpt$")


def main(argv: list[str]) -> int:
    """Train from rank 0's last checkpoint on, test once over the whole set, leave the model.

    Returns the exit code.
    """
    args = parse_args(argv)
    hvd.init()
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    device = f"cuda:{hvd.local_rank()}" if torch.cuda.is_available() else "cpu"
    job_dir = args.job_dir.rstrip("/")
    model = nn.Sequential(nn.Linear(28 * 28, args.hidden), nn.ReLU(), nn.Linear(args.hidden, 10))
    model = model.to(device)
    optimizer = torch.optim.Adam(model.parameters(), args.learning_rate)
    done = restore(job_dir, model, optimizer)

    stored = preprocessed(args.data_dir)
    data, batches = training_data(args, stored)
    data = [tensor.to(device) for tensor in data]
    steps = args.train_steps or args.epochs * batches.per_epoch
    tell(restored_step=done)
    reached = train(args, model, optimizer, data, batches, range(done, steps))
    if reached < steps:  # it was asked to end, and has saved
        hvd.shutdown()
        return sigterm.EXIT_CODE
    if hvd.rank() == 0:
        save(job_dir, model, optimizer, reached)

    own_test = test_data(args.data_dir, stored)
    correct, seen = test(model, [tensor.to(device) for tensor in own_test])
    digest = equal_weights(tensor.cpu().numpy() for tensor in model.state_dict().values())
    tell(evaluated_step=max(done, steps), accuracy=f"{correct / seen:.4f}")
    if hvd.rank() == 0:
        facts = {"accuracy": correct / seen, "pictures": seen, "weights_sha256": digest}
        facts["input"] = scaling(stored)
        export(job_dir, model, {"global_step": max(done, steps), "ranks": hvd.size(), **facts})
    hvd.shutdown()
    return 0


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse exits 2 with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data-dir", required=True, help="directory of the IDX files")
    parser.add_argument("--job-dir", required=True, help="for checkpoints and the model")
    parser.add_argument("--train-steps", type=int, default=0, help="global steps; 0: epochs")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=64, help="samples in one global step")
    parser.add_argument(
        "--batch-per-rank", action="store_true", help="--batch-size is for each rank"
    )
    parser.add_argument("--learning-rate", type=float, default=1e-3, help="for one --batch-size")
    parser.add_argument("--warmup", type=float, default=0.05, help="part of the steps")
    parser.add_argument("--hidden", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-seconds", type=float, default=10.0)
    parser.add_argument("--log-steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of each rank; the network is small")
    return parser.parse_args(argv)


def batch_size(args: argparse.Namespace) -> int:
    """Samples in one global step."""
    return int(args.batch_size * (hvd.size() if args.batch_per_rank else 1))


def rate(args: argparse.Namespace, step: int, steps: int, ranks: int) -> float:
    """The learning rate of a step: scaled as the samples in it are, risen in a line at first."""
    peak = args.learning_rate * (ranks if args.batch_per_rank else 1)
    return float(peak * min(1.0, (step + 1) / max(1.0, args.warmup * steps)))


# --- the data ------------------------------------------------------------------------------------


class SharedBatches:
    """The batches of all epochs, of which each rank takes its part.

    All ranks draw the same order from seed and epoch, so a global step has the same pictures
    whatever the number of ranks; what is left over at the end of an epoch is dropped.
    """

    def __init__(self, length: int, size: int, world: int, rank: int, seed: int) -> None:
        if size < world:
            raise SystemExit(f"--batch-size is {size}, and {world} ranks share it: raise it")
        self.length, self.size, self.world, self.rank = length, size, world, rank
        self.seed, self.per_epoch = seed, length // size
        if not self.per_epoch:
            raise SystemExit(f"a step of {size} samples is more than all {length}: lower it")

    def parts(self, steps: range) -> Iterator[np.ndarray]:
        """This rank's part of each of the steps: indices of pictures, int64."""
        epoch, order = -1, np.empty(0, np.int64)
        for step in steps:
            if step // self.per_epoch != epoch:
                epoch = step // self.per_epoch
                order = np.random.default_rng((self.seed, epoch)).permutation(self.length)
            start = step % self.per_epoch * self.size
            yield order[start + self.rank : start + self.size : self.world]


class OwnBatches(SharedBatches):
    """The same where a rank has only a part of the pictures, from which it draws its part.

    The ranks' parts are disjoint, all together are all pictures, and each is as large as its part
    of a batch: so all ranks make the same number of steps. Which pictures are in one step depends
    on the number of ranks.
    """

    @property
    def own(self) -> range:
        """This rank's pictures, by their numbers in the whole."""
        shares = [len(range(rank, self.size, self.world)) for rank in range(self.rank + 1)]
        before, after = sum(shares[:-1]), sum(shares)
        return range(self.length * before // self.size, self.length * after // self.size)

    def parts(self, steps: range) -> Iterator[np.ndarray]:
        """This rank's part of each of the steps: indices among its own pictures, int64."""
        take = len(range(self.rank, self.size, self.world))
        epoch, order = -1, np.empty(0, np.int64)
        for step in steps:
            if step // self.per_epoch != epoch:
                epoch = step // self.per_epoch
                chance = np.random.default_rng((self.seed, epoch, self.rank))
                order = chance.permutation(len(self.own))
            start = step % self.per_epoch * take
            yield order[start : start + take]


def training_data(
    args: argparse.Namespace, stored: Mapping[str, Any] | None
) -> tuple[tuple[torch.Tensor, torch.Tensor], SharedBatches]:
    """Pictures and labels to train on, and their batches: all of them, or this rank's own."""
    place = (batch_size(args), hvd.size(), hvd.rank(), args.seed)
    if stored is None:
        data = load(args.data_dir, "train")
        return data, SharedBatches(len(data[0]), *place)
    batches = OwnBatches(stored["counts"]["train"], *place)
    images, labels = read_tensors(args.data_dir, stored, "train", batches.own)
    return (torch.from_numpy(images), torch.from_numpy(labels)), batches


def test_data(data_dir: str, stored: Mapping[str, Any] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the test set: all ranks have all of it, none has a picture twice."""
    world, rank = hvd.size(), hvd.rank()
    if stored is None:
        pictures, labels = load(data_dir, "test")
        return pictures[rank::world], labels[rank::world]
    count = stored["counts"]["eval"]
    wanted = range(count * rank // world, count * (rank + 1) // world)
    images, labels = read_tensors(data_dir, stored, "eval", wanted)
    return torch.from_numpy(images), torch.from_numpy(labels)


def load(data_dir: str, split: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The pictures of a split, float32 [n, 784], normalised, and their labels, int64 [n]."""
    pixels, labels = (read_idx(data_dir, name) for name in FILES[split])
    scaled = (pixels.reshape(len(pixels), -1).astype(np.float32) / 255 - MEAN) / STD
    return torch.from_numpy(scaled), torch.from_numpy(labels.astype(np.int64))


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
) -> tuple[np.ndarray, np.ndarray]:
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
    return np.concatenate(images), np.concatenate(labels)


def scaling(stored: Mapping[str, Any] | None) -> str:
    """What was done to pixels, in words."""
    done = stored["normalised"] if stored else {"mean": MEAN, "std": STD}
    return f"float32 [n, 784]: pixels / 255, less {done['mean']}, by {done['std']}"


# --- training ------------------------------------------------------------------------------------


def train(  # noqa: PLR0913, PLR0917 (what a step needs)
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: list[torch.Tensor],
    batches: SharedBatches,
    steps: range,
) -> int:
    """Make the steps; rank 0 saves every now and then, all tell the mean of their losses.

    Returns the step that was reached: after SIGTERM it may not be the last one, and is saved.
    """
    stop = sigterm.StopTogether(sigterm.Asked(), total)
    distributed = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Average)
    told = saved = time.monotonic()
    last = done = steps.start
    seen = 0
    for step, part in zip(steps, batches.parts(steps)):
        pictures, labels = (tensor[part] for tensor in data)
        for group in optimizer.param_groups:
            group["lr"] = rate(args, step, steps.stop, hvd.size())
        distributed.zero_grad()
        # The mean over ranks is the mean over the batch, even where their parts are not equal.
        loss = nn.functional.cross_entropy(model(pictures), labels, reduction="sum")
        loss = loss * hvd.size() / batches.size
        loss.backward()
        distributed.step()
        seen += len(part)
        done, now = step + 1, time.monotonic()
        stopped = stop.after_step()
        if done % args.log_steps == 0 or done == steps.stop or stopped:
            mean = float(hvd.allreduce(loss.detach(), op=hvd.Average, name="loss"))
            per_second = (done - last) / max(now - told, 1e-6)
            tell(step=done, loss=f"{mean:.4f}", steps_per_second=f"{per_second:.2f}")
            told, last = now, done
        if hvd.rank() == 0 and (now - saved > args.checkpoint_seconds or stopped):
            save(args.job_dir.rstrip("/"), model, optimizer, done)
            saved = time.monotonic()
        if stopped:
            break
    count(seen, batches.size * (done - steps.start))  # no rank leaves before rank 0 has saved
    return done


def total(values: list[int]) -> list[int]:
    """The values summed over all ranks."""
    summed = hvd.allreduce(torch.tensor(values), op=hvd.Sum, name="stop")
    return [int(value) for value in summed]


def count(seen: int, expected: int) -> None:
    """Check that all ranks together have had each sample of each step once."""
    total = int(hvd.allreduce(torch.tensor(seen), op=hvd.Sum, name="samples"))
    if total != expected:
        raise SystemExit(f"ranks have had {total} samples instead of {expected}: a bug")
    if hvd.rank() == 0:
        print(f"samples: {total} in this start, by {hvd.size()} ranks", flush=True)


@torch.no_grad()
def test(model: nn.Module, data: list[torch.Tensor]) -> tuple[int, int]:
    """Right answers, and pictures, over all ranks: each tests its own."""
    pictures, labels = data
    parts = zip(pictures.split(EVAL_BATCH), labels.split(EVAL_BATCH))
    correct = sum(int((model(x).argmax(1) == y).sum()) for x, y in parts)
    sums = hvd.allreduce(torch.tensor([correct, len(labels)]), op=hvd.Sum, name="accuracy")
    return int(sums[0]), int(sums[1])


def equal_weights(weights: Iterator[np.ndarray]) -> str:
    """The SHA-256 of the weights. Raises when a rank has others."""
    digest = hashlib.sha256(b"".join(array.tobytes() for array in weights)).hexdigest()
    digests = hvd.allgather_object(digest)
    others = [rank for rank, other in enumerate(digests) if other != digests[0]]
    if others:
        raise SystemExit(f"ranks {others} have other weights than rank 0: training has gone wrong")
    if hvd.rank() == 0:
        print(f"weights: equal on {len(digests)} ranks, sha256 {digest[:16]}", flush=True)
    return digest


def tell(**facts: Any) -> None:
    """Write one line that Mayfly reads (docs/engines.md), by one rank of each node."""
    if hvd.local_rank() == 0:
        print("progress:", *(f"{key}={value}" for key, value in facts.items()), flush=True)


# --- checkpoints and the model -------------------------------------------------------------------


def restore(job_dir: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Give all ranks what rank 0 has: its last checkpoint, else its initial weights; the step."""
    state = last_checkpoint(job_dir) if hvd.rank() == 0 else None
    if state is not None:
        model.load_state_dict(state["model"])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    step, slots = hvd.broadcast_object((state["step"], state["optimizer"]) if state else (0, None))
    if slots is not None:
        optimizer.load_state_dict(slots)
    return int(step)


def save(job_dir: str, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Keep a checkpoint, whole or not at all, and the one before it."""
    fs, directory = fsspec.url_to_fs(f"{job_dir}/checkpoints")
    fs.makedirs(directory, exist_ok=True)
    content = io.BytesIO()
    state = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, content)
    path = f"{directory}/step={step}.ckpt"
    fs.pipe_file(f"{path}.part", content.getvalue())
    if fs.exists(path):
        fs.rm_file(path)
    fs.mv(f"{path}.part", path)
    for _, old in checkpoints(fs, directory)[KEEP:]:
        fs.rm_file(old)


def last_checkpoint(job_dir: str) -> Mapping[str, Any] | None:
    """The newest checkpoint that is whole, None when there is none."""
    fs, directory = fsspec.url_to_fs(f"{job_dir}/checkpoints")
    if not fs.exists(directory):
        return None
    for _, path in checkpoints(fs, directory):
        try:
            with fs.open(path, "rb") as file:
                return dict(torch.load(io.BytesIO(file.read()), "cpu", weights_only=True))
        except (OSError, RuntimeError, EOFError) as error:
            print(f"{path} is not whole, the one before it is taken: {error}", file=sys.stderr)
    return None


def checkpoints(fs: Any, directory: str) -> list[tuple[int, str]]:
    """Steps and paths of the checkpoints in a directory, newest first."""
    fs.invalidate_cache()
    names = fs.ls(directory, detail=False)
    return sorted(
        ((int(match[1]), path) for path in names if (match := _CHECKPOINT.search(path))),
        reverse=True,
    )


def export(job_dir: str, model: nn.Sequential, facts: Mapping[str, Any]) -> None:
    """Leave the weights and what is needed to use them under `<job-dir>/export`."""
    about = {
        "network": repr(model),
        "output": f"logits [n, {model[-1].out_features}]",
        **facts,
    }
    fs, directory = fsspec.url_to_fs(f"{job_dir}/export")
    fs.makedirs(directory, exist_ok=True)
    with fs.open(f"{directory}/model.pt", "wb") as file:
        torch.save(model.cpu().state_dict(), file)
    with fs.open(f"{directory}/model.json", "wb") as file:
        file.write(json.dumps(about, indent=1).encode())


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # Horovod's and the file systems' threads have nothing more to do
