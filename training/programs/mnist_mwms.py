"""A small network on MNIST-shaped pictures: MultiWorkerMirroredStrategy with tf-keras, synchronous.

The MLP of the published example, 784-100-10 (or one with convolutions), ReLU, Adam 1e-3, cross
entropy; pictures normalised by (0.1307, 0.3081).

    mnist_mwms.py --data-dir D --job-dir M --train-steps N [--batch-size 64] [--network cnn]

All tasks (chief-0 and workers) run this file as TF_CONFIG has it, each of them a replica on a CPU,
or one for each GPU; without TF_CONFIG it trains alone. D holds the four IDX files of MNIST or
Fashion-MNIST, gzipped or not. `M/checkpoints` is where a restarted run goes on from, `M/export`
gets the model; only the chief reads and writes there, and tells the others. D and M may be
anything that fsspec opens, such as hdfs://.

A global step is one batch of `--batch-size` pictures, divided among the replicas: gradients and
pictures are those of one process, whatever their number.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import re
import secrets
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import tensorflow as tf
import tf_keras as keras
from shared import sigterm

MEAN, STD = 0.1307, 0.3081
SIDE, CLASSES = 28, 10
EVAL_BATCH = 1000
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
KEEP = 2  # checkpoints
# Debian 12's Python is older than the filter; we wrote what is unpacked.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
# A replica that is silent for so long has failed; saving on the chief's disk takes a part of it.
SILENT_S = 30.0
_CHECKPOINT = re.compile(r"step=(\d+)\.tar$")


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True, help="directory of the IDX files")
    parser.add_argument("--job-dir", required=True, help="for checkpoints and the model")
    parser.add_argument("--train-steps", type=int, default=2813, help="global steps")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures in one global step")
    parser.add_argument("--network", choices=("mlp", "cnn", "deep"), default="mlp")
    parser.add_argument("--learning-rate", type=float, default=1e-3)
    parser.add_argument(
        "--steps-per-call", type=int, default=20, help="steps between two looks at the clock"
    )
    parser.add_argument("--checkpoint-seconds", type=float, default=30)
    parser.add_argument("--log-steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=0, help="0: one a core")
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


def main() -> int:
    """Train, evaluate and export with the others. Returns the exit code."""
    args = options()
    tf.config.threading.set_intra_op_parallelism_threads(args.threads)
    tf.config.threading.set_inter_op_parallelism_threads(args.threads)
    keras.utils.set_random_seed(args.seed)
    try:
        return train_with_the_others(args)
    except tf.errors.OpError as error:
        # No step is possible without all: whoever is left ends, and all start again.
        lines = str(error).strip().splitlines()
        cause = next((line for line in lines if "aborted" in line.lower()), lines[0])
        why = f"{type(error).__name__}: {cause.strip()[:200]}"
        print(f"a step with the others has failed: {why}", file=sys.stderr, flush=True)
        return 1


# --- training ------------------------------------------------------------------------------------


def train_with_the_others(args: argparse.Namespace) -> int:
    """Train to the last step, from the chief's newest checkpoint on; then evaluate and export.

    After SIGTERM save what there is, and leave the rest. Returns the exit code.
    """
    if is_chief() and newest_step(args.job_dir) >= args.train_steps:
        # What is left takes nobody else, and the others may have left.
        os.environ.pop("TF_CONFIG", None)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(
        communication_options=tf.distribute.experimental.CommunicationOptions(
            timeout_seconds=SILENT_S
        )
    )
    replicas, chief = strategy.num_replicas_in_sync, is_chief()
    if args.batch_size < replicas:
        raise SystemExit(f"--batch-size is {args.batch_size}, and {replicas} share it: raise it")
    with strategy.scope():
        model = network(args.network)
        optimizer = keras.optimizers.Adam(args.learning_rate, jit_compile=False)
        optimizer.build(model.trainable_variables)
    keeper = Keeper(args.job_dir, tf.train.Checkpoint(model=model, optimizer=optimizer))
    if chief:
        keeper.restore()
    take_the_chiefs(strategy, [*model.variables, *optimizer.variables])
    begun = int(optimizer.iterations.numpy())
    tell(restored_step=begun)
    pixels, labels = (tf.constant(read_idx(args.data_dir, name)) for name in FILES["train"])
    train = training(strategy, model, optimizer, (pixels, labels), args.batch_size)
    told, asked = Told(begun, args.log_steps), sigterm.Asked()
    for orders in calls(len(pixels), args, begun):
        # Any replica's wish comes with the gradients to all: they stop after the same call.
        loss, stop = train(tf.constant(orders), tf.constant(float(bool(asked)))).numpy().tolist()
        step = int(optimizer.iterations.numpy())
        told.step(step, loss, last=bool(stop) or step == args.train_steps)
        if stop:
            break
        if chief and keeper.is_time(args.checkpoint_seconds):
            keeper.save(step)
    step = int(optimizer.iterations.numpy())
    if chief:
        keeper.save(step)
        keeper.finish()
    if step < args.train_steps:
        return sigterm.EXIT_CODE
    tell(evaluated_step=step, accuracy=f"{accuracy(strategy, model, args.data_dir):.4f}")
    take_leave(strategy, chief)
    if chief:
        export(model, args)
    return 0


def is_chief() -> bool:
    """Whether this task is the one that reads and writes for all."""
    task = json.loads(os.environ.get("TF_CONFIG") or "{}").get("task", {"type": "chief"})
    return bool(task["type"] == "chief")


def network(kind: str) -> keras.Model:
    """Logits [n, 10] of normalised pictures [n, 28, 28, 1]."""
    if kind == "mlp":
        hidden = [keras.layers.Flatten(), keras.layers.Dense(100, "relu")]
    elif kind == "cnn":
        hidden = [
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Flatten(),
            keras.layers.Dense(128, "relu"),
        ]
    else:  # many computations for each of few weights
        hidden = [
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.Conv2D(32, 3, activation="relu"),
            keras.layers.MaxPooling2D(),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.Conv2D(64, 3, activation="relu"),
            keras.layers.GlobalAveragePooling2D(),
        ]
    layers = [keras.layers.InputLayer([SIDE, SIDE, 1]), *hidden, keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers)


def training(
    strategy: tf.distribute.Strategy,
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    pictures: tuple[tf.Tensor, tf.Tensor],
    batch_size: int,
) -> Callable[[tf.Tensor, tf.Tensor], tf.Tensor]:
    """The function that makes steps, all replicas together.

    It takes the pictures of each step, int32 [steps, batch], of which a replica takes its part, and
    whether this task was asked to stop, 1.0 or 0.0. It returns the steps' mean loss, and how many
    replicas were asked.
    """

    pixels, labels = pictures

    def one(order: tf.Tensor, asked: tf.Tensor) -> tf.Tensor:
        context = tf.distribute.get_replica_context()
        own = order[context.replica_id_in_sync_group :: strategy.num_replicas_in_sync]
        with tf.GradientTape() as tape:
            logits = model(normalised(tf.gather(pixels, own)), training=True)
            wanted = tf.cast(tf.gather(labels, own), tf.int32)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(wanted, logits)
            loss = tf.reduce_sum(each) / batch_size
        variables = model.trainable_variables
        *gradients, loss, asked = summed([*tape.gradient(loss, variables), loss, asked])
        optimizer.apply_gradients(zip(gradients, variables), skip_gradients_aggregation=True)
        return tf.stack([loss, asked])

    @tf.function(
        input_signature=[
            tf.TensorSpec([None, batch_size], tf.int32),
            tf.TensorSpec([], tf.float32),
        ]
    )
    def train(orders: tf.Tensor, asked: tf.Tensor) -> tf.Tensor:
        total = tf.zeros([2])
        for order in orders:
            results = strategy.run(one, args=(order, asked))
            total += strategy.experimental_local_results(results)[0]
        return total / tf.cast(tf.shape(orders)[0], tf.float32)

    return train


def summed(values: list[tf.Tensor]) -> list[tf.Tensor]:
    """Each value summed over all replicas, in one message: for small ones its way is what costs."""
    flat = tf.concat([tf.reshape(value, [-1]) for value in values], 0)
    flat = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, flat)
    parts = tf.split(flat, [value.shape.num_elements() for value in values])
    return [tf.reshape(part, value.shape) for part, value in zip(parts, values)]


def take_the_chiefs(strategy: tf.distribute.Strategy, variables: list[tf.Variable]) -> None:
    """Give every replica the chief's values, which may be a checkpoint's that only it has."""

    @tf.function
    def sent() -> list[tf.Tensor]:
        first = tf.distribute.get_replica_context().replica_id_in_sync_group == 0
        own = [tf.cast(value, tf.float64) for value in variables]
        return summed([tf.where(first, value, tf.zeros_like(value)) for value in own])

    for variable, values in zip(variables, strategy.run(sent)):
        value = strategy.experimental_local_results(values)[0]
        variable.assign(tf.cast(value, variable.dtype))


def take_leave(strategy: tf.distribute.Strategy, chief: bool) -> None:
    """Return once all have come here: who ends earlier may break what another still receives.

    This last message may break so, too; but the chief, which has all it needs, goes on then, and
    the others are not needed for more.
    """
    try:
        strategy.run(tf.function(lambda: summed([tf.ones([])])))
    except tf.errors.OpError:
        if not chief:
            raise


def calls(pictures: int, args: argparse.Namespace, step: int) -> Iterator[np.ndarray]:
    """What is trained next: int32 [steps, batch], until the last step; the same on all replicas.

    What is left over at the end of an epoch is dropped.
    """
    each = pictures // args.batch_size
    while step < args.train_steps:
        epoch, begin = divmod(step, each)
        order = np.random.default_rng((args.seed, epoch)).permutation(pictures).astype(np.int32)
        batches = order[: each * args.batch_size].reshape(each, args.batch_size)
        last = min(each, begin + args.train_steps - step)
        for start in range(begin, last, args.steps_per_call):
            part = batches[start : min(start + args.steps_per_call, last)]
            step += len(part)
            yield part


def accuracy(strategy: tf.distribute.Strategy, model: keras.Model, data_dir: str) -> float:
    """The part of the whole test set that is classified rightly, each replica's share once."""
    pixels, labels = (tf.constant(read_idx(data_dir, name)) for name in FILES["test"])

    @tf.function
    def right() -> tf.Tensor:
        context, found = tf.distribute.get_replica_context(), 0.0
        own = tf.range(len(pixels))[
            context.replica_id_in_sync_group :: strategy.num_replicas_in_sync
        ]
        for begin in tf.range(0, tf.size(own), EVAL_BATCH):
            part = own[begin : begin + EVAL_BATCH]
            classes = tf.argmax(model(normalised(tf.gather(pixels, part)), training=False), 1)
            wanted = tf.cast(tf.gather(labels, part), tf.int64)
            found += tf.reduce_sum(tf.cast(classes == wanted, tf.float32))
        return context.all_reduce(tf.distribute.ReduceOp.SUM, found)

    (count, *_) = strategy.experimental_local_results(strategy.run(right))
    return float(count) / len(pixels)


class Told:
    """Tells how training goes, in the lines that Mayfly reads (docs/engines.md)."""

    def __init__(self, begun: int, each: int) -> None:
        self.reached, self.each, self.since = begun, each, time.monotonic()

    def step(self, reached: int, loss: float, last: bool = False) -> None:
        """Note that a step is reached."""
        if reached - self.reached < (1 if last else self.each):
            return
        now = time.monotonic()
        rate = (reached - self.reached) / max(now - self.since, 1e-6)
        tell(step=reached, loss=f"{loss:.4f}", steps_per_second=f"{rate:.2f}")
        self.reached, self.since = reached, now


def tell(**facts: Any) -> None:
    """Write one line."""
    print("progress:", *(f"{key}={value}" for key, value in facts.items()), flush=True)


# --- pictures ------------------------------------------------------------------------------------


def read_idx(data_dir: str, name: str) -> np.ndarray:
    """The array of unsigned bytes in an IDX file, gzipped or not. Ends the program without it."""
    for path in (f"{data_dir.rstrip('/')}/{name}{suffix}" for suffix in ("", ".gz")):
        try:
            with fsspec.open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue
        data = gzip.decompress(data) if path.endswith(".gz") else data
        dimensions = data[3]
        shape = struct.unpack_from(f">{dimensions}I", data, 4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)
    raise SystemExit(f"no {name} (or .gz) in {data_dir}: give the directory of the IDX files")


def normalised(pixels: tf.Tensor) -> tf.Tensor:
    """float32 [n, 28, 28, 1] of unsigned bytes of any shape that has as many."""
    scaled = (tf.cast(pixels, tf.float32) / 255 - MEAN) / STD
    return tf.reshape(scaled, [-1, SIDE, SIDE, 1])


# --- checkpoints, export -------------------------------------------------------------------------


class Keeper:
    """Checkpoints of a job directory: one archive each, with TensorFlow's files in it.

    They are written on the chief's own disk, and copied beside the training.
    """

    def __init__(self, job_dir: str, checkpoint: tf.train.Checkpoint) -> None:
        self.url = f"{job_dir.rstrip('/')}/checkpoints"
        self.checkpoint = checkpoint
        self.saved_at = time.monotonic()
        self.pool = ThreadPoolExecutor(1)
        self.copying: Future[None] | None = None

    def restore(self) -> None:
        """Read the newest checkpoint that is whole, if there is any."""
        fs, directory = fsspec.url_to_fs(self.url)
        for _, path in reversed(checkpoints(fs, directory)):
            with tempfile.TemporaryDirectory() as scratch:
                try:
                    with tarfile.open(fileobj=io.BytesIO(fs.cat_file(path))) as archive:
                        archive.extractall(scratch, **SAFELY)
                except (OSError, tarfile.TarError):
                    continue
                self._read(f"{scratch}/checkpoint", path)
                return

    def _read(self, prefix: str, path: str) -> None:
        try:
            self.checkpoint.read(prefix).assert_consumed()
        except (AssertionError, ValueError):
            raise SystemExit(f"{path} is of another network: give another --job-dir") from None

    def is_time(self, seconds: float) -> bool:
        """Whether the last time is so long ago, and its copy is made."""
        ready = self.copying is None or self.copying.done()
        return ready and time.monotonic() - self.saved_at >= seconds

    def save(self, step: int) -> None:
        """Save now; the copy to the job directory is made meanwhile."""
        self.finish()
        with tempfile.TemporaryDirectory() as scratch:
            self.checkpoint.write(f"{scratch}/checkpoint")
            content = io.BytesIO()
            with tarfile.open(fileobj=content, mode="w") as archive:
                for path in sorted(Path(scratch).iterdir()):
                    archive.add(path, path.name)
        self.saved_at = time.monotonic()
        self.copying = self.pool.submit(self._copy, step, content.getvalue())

    def finish(self) -> None:
        """Return when the last copy is made. Raises what has kept it from being."""
        if self.copying is not None:
            self.copying.result()
            self.copying = None

    def _copy(self, step: int, content: bytes) -> None:
        fs, directory = fsspec.url_to_fs(self.url)
        put(fs, f"{directory}/step={step}.tar", content)
        for _, path in checkpoints(fs, directory)[:-KEEP]:
            fs.rm_file(path)


def checkpoints(fs: Any, directory: str) -> list[tuple[int, str]]:
    """Steps and paths of the checkpoints in a directory, the newest last."""
    if not fs.exists(directory):
        return []
    fs.invalidate_cache()
    return sorted((int(match[1]), path) for path in fs.ls(directory, detail=False)
                  if (match := _CHECKPOINT.search(path)))  # fmt: skip


def newest_step(job_dir: str) -> int:
    """The step of a job directory's newest checkpoint, 0 when it has none."""
    fs, directory = fsspec.url_to_fs(f"{job_dir.rstrip('/')}/checkpoints")
    return max((step for step, _ in checkpoints(fs, directory)), default=0)


def put(fs: Any, path: str, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    part = f"{path}.{secrets.token_hex(4)}.part"
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(part, content)
    if fs.exists(path):
        fs.rm_file(path)
    fs.mv(part, path)


def export(model: keras.Model, args: argparse.Namespace) -> None:
    """Leave a SavedModel in `<job-dir>/export`: `image`, uint8 [n, 28, 28], to classes."""
    alone = network(args.network)  # without a strategy, so that any process can load it
    alone.set_weights(model.get_weights())
    served = tf.Module()
    served.model = alone

    @tf.function(input_signature=[tf.TensorSpec([None, SIDE, SIDE], tf.uint8, name="image")])
    def classify(image: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = served.model(normalised(image), training=False)
        return {"classes": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits)}

    served.classify = classify
    fs, directory = fsspec.url_to_fs(f"{args.job_dir.rstrip('/')}/export")
    with tempfile.TemporaryDirectory() as scratch:
        tf.saved_model.save(served, scratch, signatures=classify)
        files = [path for path in Path(scratch).rglob("*") if path.is_file()]
        # The file that makes it a model comes last.
        for path in sorted(files, key=lambda path: path.name == "saved_model.pb"):
            put(fs, f"{directory}/{path.relative_to(scratch)}", path.read_bytes())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # the others need not wait for threads of TensorFlow
