"""A small network on MNIST-shaped pictures: TensorFlow 2.15's Keras with Horovod, data parallel.

The MLP of the published example, 784-100-10 (or a small convolutional network), ReLU, Adam 1e-3,
cross entropy, batches of 64, ten epochs; pictures normalised by (0.1307, 0.3081) and flattened.

    mnist_horovod_keras.py --data-dir D --job-dir M [--epochs 10 | --train-steps N] [--network cnn]

Runs under Mayfly's engine horovod, under `horovodrun`, and alone. D holds the four IDX files of
MNIST or Fashion-MNIST, gzipped or not, or what `data.preprocess` has made of them (`to: tensors`):
then each rank reads only the files that it needs. Rank 0 saves to `M/checkpoints`, from where all
go on after a restart, with as many ranks as there are then, and leaves a SavedModel in `M/export`.
Both may be anything that tf.io.gfile opens, such as hdfs://.

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
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import horovod.tensorflow as hvd  # noqa: E402 (the log level must be set before)
import numpy as np  # noqa: E402
import tensorflow as tf  # noqa: E402
from shared import sigterm  # noqa: E402

MEAN, STD = 0.1307, 0.3081
SIDE, CLASSES = 28, 10
EVAL_BATCH = 1000
KEEP = 2  # checkpoints
FILES = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}


def main(argv: list[str]) -> int:
    """Train from rank 0's last checkpoint on, test once over the whole set, leave the model.

    Returns the exit code.
    """
    args = parse_args(argv)
    hvd.init()
    if "://" in args.data_dir + args.job_dir:
        import tensorflow_io  # noqa: F401, PLC0415 (registers hdfs:// and s3://)
    use_own_devices(args.threads)
    tf.keras.utils.set_random_seed(args.seed)
    job_dir = args.job_dir.rstrip("/")
    model = network(args.network, args.hidden)
    optimizer = tf.keras.optimizers.Adam(args.learning_rate)
    optimizer.build(model.trainable_variables)
    checkpoint = tf.train.Checkpoint(
        model=model, optimizer=optimizer, step=tf.Variable(0, dtype=tf.int64)
    )
    saver = tf.train.CheckpointManager(checkpoint, f"{job_dir}/checkpoints", max_to_keep=KEEP)
    done = restore(saver)

    stored = preprocessed(args.data_dir)
    data, batches = training_data(args, stored)
    steps = args.train_steps or args.epochs * batches.per_epoch
    tell(restored_step=done)
    if train(args, saver, data, batches, range(done, steps)) < steps:
        hvd.shutdown()  # it was asked to end, and has saved
        return sigterm.EXIT_CODE

    correct, seen = test(model, test_data(args.data_dir, stored))
    digest = equal_weights(iter(model.get_weights()))
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
    parser.add_argument("--network", choices=("mlp", "cnn", "deep"), default="mlp")
    parser.add_argument("--hidden", type=int, default=100, help="units of the MLP")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--checkpoint-seconds", type=float, default=10.0)
    parser.add_argument("--log-steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=1, help="of each rank; the network is small")
    return parser.parse_args(argv)


def use_own_devices(threads: int) -> None:
    """One GPU for each rank where there are some, and as many threads as said."""
    tf.config.threading.set_intra_op_parallelism_threads(threads)
    tf.config.threading.set_inter_op_parallelism_threads(threads)
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, enable=True)
    if gpus:
        tf.config.set_visible_devices(gpus[hvd.local_rank()], "GPU")


def network(kind: str, hidden: int) -> tf.keras.Model:
    """Logits [n, 10] of pictures [n, 784]; with convolutions, those of mnist_mwms."""
    if kind == "mlp":
        own = [tf.keras.layers.Dense(hidden, "relu")]
    elif kind == "cnn":
        own = [
            tf.keras.layers.Reshape([SIDE, SIDE, 1]),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(128, "relu"),
        ]
    else:  # many computations for each of few weights
        own = [
            tf.keras.layers.Reshape([SIDE, SIDE, 1]),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.Conv2D(32, 3, activation="relu"),
            tf.keras.layers.MaxPooling2D(),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.Conv2D(64, 3, activation="relu"),
            tf.keras.layers.GlobalAveragePooling2D(),
        ]
    pictures = tf.keras.Input((SIDE * SIDE,), name="pictures")
    return tf.keras.Sequential([pictures, *own, tf.keras.layers.Dense(CLASSES, name="logits")])


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
) -> tuple[tuple[tf.Tensor, tf.Tensor], SharedBatches]:
    """Pictures and labels to train on, and their batches: all of them, or this rank's own."""
    place = (batch_size(args), hvd.size(), hvd.rank(), args.seed)
    if stored is None:
        data = load(args.data_dir, "train")
        return data, SharedBatches(len(data[0]), *place)
    batches = OwnBatches(stored["counts"]["train"], *place)
    images, labels = read_tensors(args.data_dir, stored, "train", batches.own)
    return (tf.constant(images), tf.constant(labels)), batches


def test_data(data_dir: str, stored: Mapping[str, Any] | None) -> tuple[tf.Tensor, tf.Tensor]:
    """This rank's part of the test set: all ranks have all of it, none has a picture twice."""
    world, rank = hvd.size(), hvd.rank()
    if stored is None:
        pictures, labels = load(data_dir, "test")
        return pictures[rank::world], labels[rank::world]
    count = stored["counts"]["eval"]
    wanted = range(count * rank // world, count * (rank + 1) // world)
    images, labels = read_tensors(data_dir, stored, "eval", wanted)
    return tf.constant(images), tf.constant(labels)


def load(data_dir: str, split: str) -> tuple[tf.Tensor, tf.Tensor]:
    """The pictures of a split, float32 [n, 784], normalised, and their labels, int64 [n]."""
    pixels, labels = (read_idx(data_dir, name) for name in FILES[split])
    scaled = (pixels.reshape(len(pixels), -1).astype(np.float32) / 255 - MEAN) / STD
    return tf.constant(scaled.astype(np.float32)), tf.constant(labels.astype(np.int64))


def read_file(path: str) -> bytes | None:
    """The content of a file, None when there is none."""
    if not tf.io.gfile.exists(path):
        return None
    with tf.io.gfile.GFile(path, "rb") as file:
        return bytes(file.read())


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


def train(
    args: argparse.Namespace,
    saver: tf.train.CheckpointManager,
    data: tuple[tf.Tensor, tf.Tensor],
    batches: SharedBatches,
    steps: range,
) -> int:
    """Make the steps; rank 0 saves every now and then, all tell the mean of their losses.

    Returns the step that was reached: after SIGTERM it may not be the last one, and is saved.
    """
    stop = sigterm.StopTogether(sigterm.Asked(), total)
    checkpoint = saver.checkpoint
    model, optimizer = checkpoint.model, checkpoint.optimizer
    pictures, labels = data

    @tf.function
    def make_step(part: tf.Tensor, learning_rate: tf.Tensor) -> tf.Tensor:
        """One step on this rank's part of a batch; the mean over ranks is the mean over it."""
        optimizer.learning_rate.assign(learning_rate)
        with tf.GradientTape() as tape:
            logits = model(tf.gather(pictures, part), training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, part), logits)
            # Parts need not be equal: their sums are.
            loss = tf.reduce_sum(losses) * (hvd.size() / batches.size)
        tape = hvd.DistributedGradientTape(tape, op=hvd.Average)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss

    told = saved = time.monotonic()
    last = done = steps.start
    seen = 0
    for step, part in zip(steps, batches.parts(steps)):
        learning_rate = rate(args, step, steps.stop, hvd.size())
        loss = make_step(tf.constant(part), tf.constant(learning_rate, tf.float32))
        seen += len(part)
        done, now = step + 1, time.monotonic()
        stopped = stop.after_step()
        if done % args.log_steps == 0 or done == steps.stop or stopped:
            mean = float(hvd.allreduce(loss, op=hvd.Average, name="loss"))
            per_second = (done - last) / max(now - told, 1e-6)
            tell(step=done, loss=f"{mean:.4f}", steps_per_second=f"{per_second:.2f}")
            told, last = now, done
        late = now - saved > args.checkpoint_seconds
        if hvd.rank() == 0 and (late or done == steps.stop or stopped):
            checkpoint.step.assign(done)
            saver.save(done)
            saved = time.monotonic()
        if stopped:
            break
    count(seen, batches.size * (done - steps.start))  # no rank leaves before rank 0 has saved
    return done


def total(values: list[int]) -> list[int]:
    """The values summed over all ranks."""
    summed = hvd.allreduce(tf.constant(values, tf.int64), op=hvd.Sum, name="stop")
    return [int(value) for value in summed]


def count(seen: int, expected: int) -> None:
    """Check that all ranks together have had each sample of each step once."""
    total = int(hvd.allreduce(tf.constant(seen, tf.int64), op=hvd.Sum, name="samples"))
    if total != expected:
        raise SystemExit(f"ranks have had {total} samples instead of {expected}: a bug")
    if hvd.rank() == 0:
        print(f"samples: {total} in this start, by {hvd.size()} ranks", flush=True)


def test(model: tf.keras.Model, data: tuple[tf.Tensor, tf.Tensor]) -> tuple[int, int]:
    """Right answers, and pictures, over all ranks: each tests its own."""
    pictures, labels = data
    correct = 0
    for start in range(0, len(labels), EVAL_BATCH):
        answers = tf.argmax(model(pictures[start : start + EVAL_BATCH]), 1)
        correct += int(
            tf.reduce_sum(tf.cast(answers == labels[start : start + EVAL_BATCH], "int64"))
        )
    own = tf.constant([correct, len(labels)], tf.int64)
    sums = hvd.allreduce(own, op=hvd.Sum, name="accuracy").numpy()
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


def restore(saver: tf.train.CheckpointManager) -> int:
    """Give all ranks what rank 0 has: its last checkpoint, else its initial weights; the step."""
    checkpoint = saver.checkpoint
    if hvd.rank() == 0:
        for path in reversed(saver.checkpoints):
            try:
                checkpoint.restore(path)
                break
            except (tf.errors.OpError, ValueError) as error:
                print(f"{path} is not whole, the one before it is taken: {error}", file=sys.stderr)
    hvd.broadcast_variables(checkpoint.model.variables, root_rank=0)
    hvd.broadcast_variables(checkpoint.optimizer.variables, root_rank=0)
    hvd.broadcast_variables([checkpoint.step], root_rank=0)
    return int(checkpoint.step)


def export(job_dir: str, model: tf.keras.Model, facts: Mapping[str, Any]) -> None:
    """Leave a SavedModel and what is needed to use it under `<job-dir>/export`."""
    about = {
        "output": "logits [n, 10]",
        **facts,
    }
    tf.saved_model.save(model, f"{job_dir}/export/saved_model")
    with tf.io.gfile.GFile(f"{job_dir}/export/model.json", "w") as file:
        file.write(json.dumps(about, indent=1))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    # tensorflow-io's file systems can abort in static destructors after the work is done.
    os._exit(code)
