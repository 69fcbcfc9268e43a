"""A small network on MNIST-shaped pictures: Keras 3 with parameter servers, asynchronous.

The MLP of the published example, 784-100-10 (or one with convolutions), ReLU, Adam 1e-3, cross
entropy; pictures normalised by (0.1307, 0.3081). The learning rate falls in a line to 0: what
workers do to each other's steps would stay in the weights otherwise.

    mnist_keras_ps.py --data-dir D --job-dir M --train-steps N [--batch-size 64] [--network cnn]

All tasks run this file, and TF_CONFIG says which task one is. Workers and parameter servers start
TensorFlow's server and wait for work; chief-0 is the coordinator, which has the workers train
(ClusterCoordinator), saves, evaluates and exports. Without TF_CONFIG one process is all of them.

D holds the four IDX files of MNIST or Fashion-MNIST, gzipped or not; each worker copies them to its
own disk once and reads them there. `M/checkpoints` is where a restarted run goes on from,
`M/export` gets the model; only the coordinator writes there. D and M may be anything that fsspec
opens, such as hdfs://.

A global step is one batch of `--batch-size` pictures on one worker; the steps of all workers are
counted together. Each worker draws from all pictures, in an order of its own.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import gzip
import io
import json
import math
import os
import re
import secrets
import socket
import struct
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import fsspec
import keras
import numpy as np
import tensorflow as tf
from shared import sigterm

MEAN, STD = 0.1307, 0.3081
SIDE, CLASSES = 28, 10
EVAL_BATCH = 1000
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
IMAGES_HEADER, LABELS_HEADER = 16, 8  # bytes before the data in IDX files of 3 and 1 dimensions
KEEP = 2  # checkpoints
# Debian 12's Python is older than the filter; we wrote what is unpacked.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
# No worker waits for work while the coordinator takes in results.
CALLS_PER_WORKER = 3
PATIENCE_S = 600.0  # nodes are not configured at the same time
_CAUSE = re.compile(r"(UNAVAILABLE|ABORTED|INVALID_ARGUMENT|INTERNAL)\b|grpc_message")
_CHECKPOINT = re.compile(r"step=(\d+)\.tar$")


def options() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True, help="directory of the IDX files")
    parser.add_argument("--job-dir", required=True, help="for checkpoints and the model")
    parser.add_argument("--train-steps", type=int, default=2813, help="global steps")
    parser.add_argument("--batch-size", type=int, default=64, help="pictures in one global step")
    parser.add_argument("--network", choices=("mlp", "cnn", "deep"), default="mlp")
    parser.add_argument(
        "--learning-rate", type=float, default=1e-3, help="at first; it falls in a line to 0"
    )
    parser.add_argument(
        "--steps-per-call", type=int, default=20, help="steps that a worker makes on one order"
    )
    parser.add_argument("--checkpoint-seconds", type=float, default=30)
    parser.add_argument("--log-steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=0, help="of each server; 0: one a core")
    parser.add_argument(
        "--local-dir",
        default=f"{tempfile.gettempdir()}/mayfly-{os.environ.get('MAYFLY_RUN', 'alone')}",
        help="where each node keeps the pictures, the same path on all",
    )
    return parser.parse_args()


def main() -> int:
    """Do this task's part. Returns the exit code."""
    args = options()
    config = json.loads(os.environ.get("TF_CONFIG") or "{}")
    task = config.get("task", {"type": "alone", "index": 0})
    fetch_pictures(args.data_dir, pictures_place(args))
    if task["type"] in ("worker", "ps"):
        serve(tf.train.ClusterSpec(config["cluster"]), task["type"], task["index"], args.threads)
    if task["type"] == "alone":
        config["cluster"] = serve_here(args.threads)
    wait_for_servers(config["cluster"])
    try:
        return coordinate(args, tf.train.ClusterSpec(config["cluster"]))
    except tf.errors.OpError as error:
        # Workers come and go, and the coordinator of TensorFlow sees to it; this is another fault.
        tell_why(error)
        return 1


# --- servers -------------------------------------------------------------------------------------


def serve(cluster: tf.train.ClusterSpec, job: str, index: int, threads: int) -> None:
    """Be a worker or a parameter server until SIGTERM: neither ends by itself."""
    server = start_server(cluster, job, index, threads)
    print(f"{job}-{index} waits for work at {cluster.task_address(job, index)}", flush=True)
    server.join()


def start_server(
    cluster: tf.train.ClusterSpec, job: str, index: int, threads: int
) -> tf.distribute.Server:
    """TensorFlow's server of a task, which answers from now on.

    A call keeps a thread while it waits for another one: a server with a single one, as on a node
    of one core, hangs at the first step. So there is one for each worker, and another.
    """
    between = max(threads or len(os.sched_getaffinity(0)), cluster.num_tasks("worker") + 1)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=threads, inter_op_parallelism_threads=between
    )
    return tf.distribute.Server(
        cluster, job_name=job, task_index=index, protocol="grpc", config=config
    )


def serve_here(threads: int) -> dict[str, list[str]]:
    """The cluster of a worker and a parameter server that are threads of this process."""
    cluster = {job: [f"localhost:{free_port()}"] for job in ("worker", "ps")}
    spec = tf.train.ClusterSpec(cluster)
    for job in cluster:
        start_server(spec, job, 0, threads)
    return cluster


def free_port() -> int:
    """A port of loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


def wait_for_servers(cluster: dict[str, list[str]]) -> None:
    """Return when all servers take connections. Ends the program when one does not in the end."""
    end = time.monotonic() + PATIENCE_S
    servers = [(job, index, address) for job in ("ps", "worker")
               for index, address in enumerate(cluster.get(job, []))]  # fmt: skip
    for job, index, address in servers:
        host, _, port = address.rpartition(":")
        said = False
        while not takes_connections(host, int(port)):
            if time.monotonic() > end:
                raise SystemExit(f"{job}-{index} at {address} does not answer: see its log")
            if not said:
                print(f"waiting for {job}-{index} at {address}", flush=True)
                said = True
            time.sleep(0.5)


def takes_connections(host: str, port: int) -> bool:
    """Whether somebody listens there."""
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5):
        return True
    return False


def tell_why(error: tf.errors.OpError) -> None:
    """One line on what has ended the training."""
    text = str(error)
    first = next((line for line in text.splitlines() if _CAUSE.search(line)), text.strip())
    ps = re.search(r"/job:ps/replica:0/task:(\d+)", text)
    lost = f"ps-{ps[1]} is lost" if ps else "training has failed"
    line = f"coordinator: {lost}: {type(error).__name__}: {first.strip()[:200]}"
    print(line, file=sys.stderr, flush=True)


# --- pictures ------------------------------------------------------------------------------------


def pictures_place(args: argparse.Namespace) -> Path:
    """Where on this node the pictures are; workers are told the path, so it is the same on all."""
    return Path(args.local_dir) / re.sub(r"\W+", "-", args.data_dir).strip("-")


def fetch_pictures(data_dir: str, place: Path) -> None:
    """Copy the four files to this node's disk, inflated, unless they are there."""
    place.mkdir(parents=True, exist_ok=True)
    for name in (name for pair in FILES.values() for name in pair):
        if (place / name).exists():
            continue
        part = place / f"{name}.{secrets.token_hex(4)}.part"
        part.write_bytes(read_file(data_dir, name))
        part.rename(place / name)  # other tasks of this node may do the same


def read_file(data_dir: str, name: str) -> bytes:
    """The content of a file that may be gzipped. Ends the program when there is none."""
    for path in (f"{data_dir.rstrip('/')}/{name}{suffix}" for suffix in ("", ".gz")):
        try:
            with fsspec.open(path, "rb") as file:
                data = file.read()
        except FileNotFoundError:
            continue
        return gzip.decompress(data) if path.endswith(".gz") else data
    raise SystemExit(f"no {name} (or .gz) in {data_dir}: give the directory of the IDX files")


def read_idx(path: Path) -> np.ndarray:
    """The array of unsigned bytes in an IDX file."""
    data = path.read_bytes()
    dimensions = data[3]
    shape = struct.unpack_from(f">{dimensions}I", data, 4)
    return np.frombuffer(data, np.uint8, offset=4 + 4 * dimensions).reshape(shape)


def batches(place: Path, size: int) -> tf.data.Dataset:
    """Shuffled batches without end, uint8 [size, 784] with labels [size].

    All of it is operations of a graph, so that it is the worker who reads, from its own disk.
    """
    images, labels = (tf.io.read_file(str(place / name)) for name in FILES["train"])
    pixels = tf.io.decode_raw(tf.strings.substr(images, IMAGES_HEADER, -1), tf.uint8)
    pixels = tf.reshape(pixels, [-1, SIDE * SIDE])
    classes = tf.io.decode_raw(tf.strings.substr(labels, LABELS_HEADER, -1), tf.uint8)
    count = tf.shape(pixels)[0]

    def epoch(_number: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.shuffle(tf.range(count))[: count // size * size]
        return tf.data.Dataset.from_tensor_slices(tf.reshape(order, [-1, size]))

    def take(indices: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        return tf.gather(pixels, indices), tf.gather(classes, indices)

    return tf.data.Dataset.range(1 << 40).flat_map(epoch).map(take).prefetch(4)


def normalised(pixels: tf.Tensor) -> tf.Tensor:
    """float32 [n, 28, 28, 1] of unsigned bytes of any shape that has as many."""
    scaled = (tf.cast(pixels, tf.float32) / 255 - MEAN) / STD
    return tf.reshape(scaled, [-1, SIDE, SIDE, 1])


# --- training ------------------------------------------------------------------------------------


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
    layers = [keras.Input([SIDE, SIDE, 1]), *hidden, keras.layers.Dense(CLASSES)]
    return keras.Sequential(layers)


def coordinate(args: argparse.Namespace, cluster: tf.train.ClusterSpec) -> int:
    """Train to the last step, from the newest checkpoint on; then evaluate and export.

    After SIGTERM save what there is, and leave the rest. Returns the exit code.
    """
    strategy = tf.distribute.ParameterServerStrategy(
        tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, rpc_layer="grpc")
    )
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    here = State(args)
    with strategy.scope():
        there = State(args)
    keeper = Keeper(args.job_dir, here.checkpoint())
    keeper.restore()
    there.take(here)
    begun = int(here.step.numpy())
    tell(restored_step=begun)
    place = pictures_place(args)
    pictures = iter(coordinator.create_per_worker_dataset(lambda: batches(place, args.batch_size)))
    train = training(strategy, there)

    def order(step: int, steps: int) -> Any:
        """Have some worker make steps, of which this is the first."""
        rate = args.learning_rate * (1 - step / args.train_steps)
        words = (pictures, tf.constant(steps, tf.int64), tf.constant(rate, tf.float32))
        return coordinator.schedule(train, args=words)

    orders = Orders(order, CALLS_PER_WORKER * cluster.num_tasks("worker"), args.steps_per_call)
    told, loss, asked = Told(begun, args.log_steps), math.nan, sigterm.Asked()
    for loss, reached in orders.until(begun, args.train_steps):
        told.step(reached, loss)
        if asked:
            break
        if keeper.is_time(args.checkpoint_seconds):
            here.take(there)
            keeper.save(int(here.step.numpy()))
    here.take(there)
    step = int(here.step.numpy())
    told.step(step, loss, last=True)
    keeper.save(step)
    if asked and step < args.train_steps:
        keeper.finish()
        return sigterm.EXIT_CODE
    tell(evaluated_step=step, accuracy=f"{accuracy(here.model, place):.4f}")
    keeper.finish()
    export(here.model, args.job_dir)
    return 0


class State:
    """What is trained. There is one on the parameter servers, made in their strategy's scope.

    The other one is the coordinator's: from it checkpoints are written, and the model. Nobody else
    needs the job directory then, and reading takes a third of the time of TensorFlow's saving with
    `experimental_io_device`, which makes a new function for each checkpoint.
    """

    def __init__(self, args: argparse.Namespace) -> None:
        self.model = network(args.network)
        self.optimizer = keras.optimizers.Adam(args.learning_rate)
        self.optimizer.build(self.model.trainable_variables)
        # Several workers count at once; the optimizer's own count reads and writes, and loses some.
        self.step = tf.Variable(0, dtype=tf.int64, trainable=False)

    def checkpoint(self) -> tf.train.Checkpoint:
        """What a checkpoint holds."""
        return tf.train.Checkpoint(model=self.model, optimizer=self.optimizer, step=self.step)

    def take(self, other: State) -> None:
        """Take over all values of another one, while workers may go on changing them."""
        pairs = zip([*self.model.variables, *self.optimizer.variables, self.step],
                    [*other.model.variables, *other.optimizer.variables, other.step])  # fmt: skip
        for own, its in pairs:
            own.assign(its.numpy())


def training(strategy: tf.distribute.Strategy, state: State) -> Callable[..., Any]:
    """The function that a worker runs: some steps, then their mean loss and the global step."""
    model, optimizer = state.model, state.optimizer

    def one(pixels: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(normalised(pixels), training=True)
            each = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), logits)
            loss = tf.reduce_mean(each)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    @tf.function
    def train(pictures: Any, steps: tf.Tensor, rate: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        optimizer.learning_rate.assign(rate)
        total = 0.0
        for _ in tf.range(steps):
            total += strategy.run(one, args=next(pictures))
        # Counted once all are made: those of a worker that dies are made again by another one.
        return total / tf.cast(steps, tf.float32), state.step.assign_add(steps)

    return train


class Orders:
    """Keeps the workers in work: calls of the training function, a limited number at a time."""

    def __init__(
        self, order: Callable[[int, int], Any], in_flight: int, steps_per_call: int
    ) -> None:
        """`order` is given the first step, and how many."""
        self.order, self.in_flight, self.steps_per_call = order, in_flight, steps_per_call

    def until(self, step: int, end: int) -> Any:
        """Order steps until `end`; yields loss and global step of each call that is done."""
        waiting: collections.deque[Any] = collections.deque()
        while step < end or waiting:
            while step < end and len(waiting) < self.in_flight:
                steps = min(self.steps_per_call, end - step)
                waiting.append(self.order(step, steps))
                step += steps
            loss, reached = waiting.popleft().fetch()
            yield float(loss), int(reached)


class Told:
    """Tells how training goes, in the lines that Mayfly reads (docs/engines.md)."""

    def __init__(self, begun: int, each: int) -> None:
        self.reached, self.each, self.since = begun, each, time.monotonic()

    def step(self, reached: int, loss: float, last: bool = False) -> None:
        """Note that a step is reached; the results of several workers may come out of order."""
        if reached - self.reached < (1 if last else self.each):
            return
        now = time.monotonic()
        rate = (reached - self.reached) / max(now - self.since, 1e-6)
        tell(step=reached, loss=f"{loss:.4f}", steps_per_second=f"{rate:.2f}")
        self.reached, self.since = reached, now


def tell(**facts: Any) -> None:
    """Write one line."""
    print("progress:", *(f"{key}={value}" for key, value in facts.items()), flush=True)


# --- checkpoints, evaluation, export -------------------------------------------------------------


class Keeper:
    """Checkpoints of a job directory: one archive each, with TensorFlow's files in it.

    They are written on this node's own disk, and copied beside the training.
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


def put(fs: Any, path: str, content: bytes) -> None:
    """Write a file that appears whole or not at all."""
    part = f"{path}.{secrets.token_hex(4)}.part"
    fs.makedirs(path.rpartition("/")[0], exist_ok=True)
    fs.pipe_file(part, content)
    if fs.exists(path):
        fs.rm_file(path)
    fs.mv(part, path)


def accuracy(model: keras.Model, place: Path) -> float:
    """The part of the whole test set that is classified rightly."""
    pixels, labels = (read_idx(place / name) for name in FILES["test"])
    right = 0
    for begin in range(0, len(pixels), EVAL_BATCH):
        part = slice(begin, begin + EVAL_BATCH)
        logits = model(normalised(pixels[part]), training=False)
        right += int(np.sum(np.argmax(logits, 1) == labels[part]))
    return right / len(pixels)


def export(model: keras.Model, job_dir: str) -> None:
    """Leave a SavedModel in `<job-dir>/export`: `image`, uint8 [n, 28, 28], to classes."""
    served = tf.Module()
    served.model = model

    @tf.function(input_signature=[tf.TensorSpec([None, SIDE, SIDE], tf.uint8, name="image")])
    def classify(image: tf.Tensor) -> dict[str, tf.Tensor]:
        logits = served.model(normalised(image), training=False)
        return {"classes": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits)}

    served.classify = classify
    fs, directory = fsspec.url_to_fs(f"{job_dir.rstrip('/')}/export")
    with tempfile.TemporaryDirectory() as scratch:
        tf.saved_model.save(served, scratch, signatures=classify)
        files = [path for path in Path(scratch).rglob("*") if path.is_file()]
        # The file that makes it a model comes last.
        for path in sorted(files, key=lambda path: path.name == "saved_model.pb"):
            put(fs, f"{directory}/{path.relative_to(scratch)}", path.read_bytes())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # threads of TensorFlow's cluster may never end
