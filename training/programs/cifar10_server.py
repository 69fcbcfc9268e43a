"""A small convolutional network by TensorFlow's own servers: for scripts older than Estimator.

    cifar10_server.py --data_dir D --job_dir M --train_steps N --ps_hosts H --worker_hosts H \\
        --job_name ps|worker --task_index I [--sync]

The flags are those of TensorFlow's first distributed examples: a ClusterSpec of hosts, a Server
for each task, parameter servers that join, workers in a MonitoredTrainingSession whose chief is
worker 0. Without --worker_hosts it trains alone. Reads `D/train*.tfrecords` and
`D/eval*.tfrecords` (`image`: uint8 bytes, channel-major 3x32x32; `label`: int64); writes
checkpoints to M and a SavedModel to `M/export`.

A global step is one batch of `--batch_size` samples in both modes: a synchronous step divides its
batch among the workers.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import tensorflow as tf  # noqa: E402 (the log level must be set before)
from shared import sigterm  # noqa: E402

tf1 = tf.compat.v1
Hook = tf1.train.SessionRunHook

SIDE, CHANNELS, CLASSES = 32, 3, 10
READ_BUFFER_BYTES = 8 << 20  # small reads from HDFS are several times slower
SHUFFLE_RECORDS = 10_000
EVAL_BATCH = 500
POLL_SECONDS = 1.0


def main(argv: list[str]) -> None:
    """Serve variables or train, as --job_name says."""
    args = parse_args(argv)
    if "://" in args.data_dir + args.job_dir:
        import tensorflow_io  # noqa: F401 (registers hdfs:// and s3://)
    spec = cluster_spec(args)
    if args.job_name == "ps":
        server(spec, args).join()  # for ever: whoever started it ends it
    stopped = train(spec, args)
    if args.task_index == 0 and not stopped:
        finish(args)
    sys.stdout.flush()
    # tensorflow-io's file systems can abort in static destructors after the work is done.
    os._exit(sigterm.EXIT_CODE if stopped else 0)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse exits 2 with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data_dir", required=True, help="where train*.tfrecords are")
    parser.add_argument("--job_dir", required=True, help="for checkpoints and the model, shared")
    parser.add_argument("--train_steps", type=int, required=True, help="global steps")
    parser.add_argument("--ps_hosts", default="", help="host:port,… of the parameter servers")
    parser.add_argument("--worker_hosts", default="", help="host:port,… of the workers")
    parser.add_argument("--job_name", choices=["ps", "worker"], default="worker")
    parser.add_argument("--task_index", type=int, default=0, help="worker 0 is the chief")
    parser.add_argument("--sync", action="store_true", help="aggregate the workers' gradients")
    parser.add_argument("--batch_size", type=int, default=128, help="samples in one global step")
    parser.add_argument("--filters", type=int, default=32, help="of the first convolution")
    parser.add_argument("--learning_rate", type=float, default=0.05, help="peak; falls in a line")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--clip_norm", type=float, default=1.0, help="of all gradients; 0: none")
    parser.add_argument("--checkpoint_seconds", type=float, default=30)
    parser.add_argument("--log_steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=0, help="0: the cores it may use")
    return parser.parse_args(argv)


# --- the cluster -------------------------------------------------------------------------------


def cluster_spec(args: argparse.Namespace) -> tf1.train.ClusterSpec | None:
    """The hosts by job, None when this process is alone."""
    if not args.worker_hosts:
        return None
    jobs = {"ps": args.ps_hosts, "worker": args.worker_hosts}
    return tf1.train.ClusterSpec({job: hosts.split(",") for job, hosts in jobs.items() if hosts})


def server(spec: tf1.train.ClusterSpec, args: argparse.Namespace) -> tf1.train.Server:
    """This task's server, started."""
    return tf1.train.Server(spec, args.job_name, args.task_index, config=session_config(args))


def session_config(args: argparse.Namespace) -> tf1.ConfigProto:
    """Threads, and device filters: without these a worker waits for every other one."""
    threads = args.threads or len(os.sched_getaffinity(0))
    config = tf1.ConfigProto(
        intra_op_parallelism_threads=threads,
        inter_op_parallelism_threads=max(2, threads),
        allow_soft_placement=True,
    )
    if args.job_name == "worker" and args.worker_hosts:
        config.device_filters.extend(["/job:ps", f"/job:worker/task:{args.task_index}"])
    return config


def workers(args: argparse.Namespace) -> int:
    return max(1, len(list(filter(None, args.worker_hosts.split(",")))))


# --- training ----------------------------------------------------------------------------------


def train(spec: tf1.train.ClusterSpec | None, args: argparse.Namespace) -> bool:
    """Train to the last global step, from the newest checkpoint on when there is one.

    Returns whether the chief was asked to stop before.
    """
    chief = args.task_index == 0
    target = server(spec, args).target if spec else ""
    if not chief:
        wait_for_chief(args.job_dir)
    with tf.Graph().as_default(), tf1.device(placement(spec, args)):
        images, labels = tf1.data.make_one_shot_iterator(train_records(args)).get_next()
        global_step = tf1.train.get_or_create_global_step()
        loss = cross_entropy(network(images, args.filters), labels)
        optimizer, hooks = make_optimizer(global_step, chief, args)
        pairs = clipped(optimizer.compute_gradients(loss), args.clip_norm)
        train_op = optimizer.apply_gradients(pairs, global_step)
        hooks += [tf1.train.StopAtStepHook(last_step=args.train_steps)]
        hooks += [Told(loss, global_step, args.log_steps)]
        stop = StopWhenAsked()
        hooks += [stop] if chief else []
        with tf1.train.MonitoredTrainingSession(
            master=target,
            is_chief=chief,
            checkpoint_dir=args.job_dir,
            save_checkpoint_secs=args.checkpoint_seconds,
            save_summaries_steps=None,
            save_summaries_secs=None,
            log_step_count_steps=None,
            hooks=hooks,
            config=session_config(args),
        ) as session:
            while not session.should_stop():
                session.run(train_op)
    return stop.stopped


def placement(spec: tf1.train.ClusterSpec | None, args: argparse.Namespace) -> Any:
    """Variables on the parameter servers in turn, all else on this worker."""
    if spec is None or "ps" not in spec.jobs:
        return None
    worker = f"/job:worker/task:{args.task_index}"
    return tf1.train.replica_device_setter(worker_device=worker, cluster=spec)


def wait_for_chief(job_dir: str) -> None:
    """Wait for the chief's checkpoint at step 0, which says that the variables are initialised.

    A worker that finds them uninitialised sleeps 30 s before it looks again
    (SessionManager.recovery_wait_secs).
    """
    while tf.train.latest_checkpoint(job_dir) is None:
        time.sleep(POLL_SECONDS)


class StopWhenAsked(Hook):
    """Ends the chief's training after the step at which SIGTERM comes, with a checkpoint of it.

    The session's own saver writes at the end.
    """

    def __init__(self) -> None:
        self.asked: sigterm.Asked | None = None
        self.stopped = False

    def begin(self) -> None:
        self.asked = sigterm.Asked()

    def after_run(self, run_context: Any, run_values: Any) -> None:  # noqa: ARG002
        if self.asked:
            self.stopped = True
            run_context.request_stop()


class Told(Hook):
    """Tells how training goes, in the lines that Mayfly reads (docs/engines.md)."""

    def __init__(self, loss: tf.Tensor, global_step: tf.Tensor, every: int) -> None:
        self.wanted, self.every = {"loss": loss, "step": global_step}, every
        self.step, self.since = 0, 0.0

    def after_create_session(self, session: tf1.Session, coord: Any) -> None:  # noqa: ARG002
        self.step, self.since = int(session.run(self.wanted["step"])), time.monotonic()
        tell(restored_step=self.step)  # 0, too: a restart may find no checkpoint

    def before_run(self, run_context: Any) -> tf1.train.SessionRunArgs:  # noqa: ARG002
        return tf1.train.SessionRunArgs(self.wanted)

    def after_run(self, run_context: Any, run_values: Any) -> None:  # noqa: ARG002
        step, now = int(run_values.results["step"]), time.monotonic()
        if step < self.step + self.every:
            return
        rate = (step - self.step) / max(now - self.since, 1e-6)
        tell(step=step, loss=f"{run_values.results['loss']:.4f}", steps_per_second=f"{rate:.2f}")
        self.step, self.since = step, now

    def end(self, session: tf1.Session) -> None:
        tell(step=int(session.run(self.wanted["step"])))


def tell(**facts: Any) -> None:
    print("progress:", *(f"{key}={value}" for key, value in facts.items()), flush=True)


def make_optimizer(
    global_step: tf.Tensor, chief: bool, args: argparse.Namespace
) -> tuple[tf1.train.Optimizer, list[Hook]]:
    """Momentum SGD with a rate that falls in a line; with --sync its workers' mean."""
    done = tf.cast(global_step, tf.float32) / args.train_steps
    rate = args.learning_rate * tf.maximum(1.0 - done, 0.01) * tf.minimum(done * 20 + 0.1, 1.0)
    optimizer = tf1.train.MomentumOptimizer(rate, args.momentum, use_nesterov=True)
    replicas = workers(args)
    if not args.sync or replicas == 1:
        return optimizer, []
    optimizer = tf1.train.SyncReplicasOptimizer(optimizer, replicas, total_num_replicas=replicas)
    return optimizer, [SyncReplicasHook(optimizer.make_session_run_hook(chief))]


def clipped(pairs: list[tuple[tf.Tensor, tf.Variable]], norm: float) -> list[Any]:
    """Gradients and variables, with the gradients' global norm at most `norm`.

    Workers that do not wait for each other bring gradients of older variables, and with momentum
    these can drive the loss to infinity (Pascanu et al. 2013, arXiv:1211.5063, for the clipping).
    """
    if not norm:
        return pairs
    gradients, variables = zip(*pairs)
    return list(zip(tf.clip_by_global_norm(gradients, norm)[0], variables))


class SyncReplicasHook(Hook):
    """SyncReplicasOptimizer's hook with a Coordinator of its own.

    Its token thread blocks inside the session; with the session's Coordinator the chief would wait
    120 s for it at the end, with its own one closing the session ends it.
    """

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def begin(self) -> None:
        self.hook.begin()

    def after_create_session(self, session: tf1.Session, coord: Any) -> None:  # noqa: ARG002
        self.hook.after_create_session(session, tf1.train.Coordinator())


# --- network and data --------------------------------------------------------------------------


def network(images: tf.Tensor, filters: int) -> tf.Tensor:
    """Logits [n, 10] of float32 [n, 32, 32, 3]: three convolutions and a dense layer."""
    x = images
    for stage in range(3):
        x = tf1.layers.conv2d(x, filters << stage, 3, padding="same", activation=tf.nn.relu)
        x = tf1.layers.max_pooling2d(x, 2, 2)
    return tf1.layers.dense(tf1.layers.flatten(x), CLASSES)


def cross_entropy(logits: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    return tf1.losses.sparse_softmax_cross_entropy(labels, logits)


def train_records(args: argparse.Namespace) -> tf.data.Dataset:
    """Endless shuffled batches of this worker's share of the records."""
    count = workers(args)
    batch = max(1, round(args.batch_size / count)) if args.sync else args.batch_size
    own = read_records(args.data_dir, "train").shard(count, args.task_index).cache()
    return own.shuffle(SHUFFLE_RECORDS).repeat().batch(batch).map(scaled).prefetch(4)


def read_records(data_dir: str, split: str) -> tf.data.Dataset:
    """(uint8 [32, 32, 3], int32) for each record of a split. Ends the program without any."""
    files = sorted(tf.io.gfile.glob(f"{data_dir.rstrip('/')}/{split}*.tfrecords"))
    if not files:
        sys.exit(f"no {split}*.tfrecords in {data_dir}: was the data set staged there?")
    return tf.data.TFRecordDataset(files, buffer_size=READ_BUFFER_BYTES).map(parse, 2)


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    kinds = {name: tf.io.FixedLenFeature([], kind)
             for name, kind in {"image": tf.string, "label": tf.int64}.items()}  # fmt: skip
    found = tf.io.parse_single_example(record, kinds)
    planes = tf.reshape(tf.io.decode_raw(found["image"], tf.uint8), [CHANNELS, SIDE, SIDE])
    return tf.transpose(planes, [1, 2, 0]), tf.cast(found["label"], tf.int32)


def scaled(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(images, tf.float32) / 127.5 - 1.0, labels


# --- the end -----------------------------------------------------------------------------------


def finish(args: argparse.Namespace) -> None:
    """Test the last checkpoint on the whole held-out set, here and alone, and export it."""
    with tf.Graph().as_default():
        pixels = tf1.placeholder(tf.uint8, [None, SIDE, SIDE, CHANNELS], "image")
        logits = network(scaled(pixels, None)[0], args.filters)
        classes = tf.argmax(logits, 1, output_type=tf.int32)
        batches = tf1.data.make_one_shot_iterator(
            read_records(args.data_dir, "eval").batch(EVAL_BATCH)
        ).get_next()
        checkpoint = tf.train.latest_checkpoint(args.job_dir)
        with tf1.Session(config=session_config(args)) as session:
            tf1.train.Saver().restore(session, checkpoint)
            accuracy = tested(session, batches, pixels, classes)
            step = int(checkpoint.rsplit("-", 1)[1])
            tell(evaluated_step=step, accuracy=f"{accuracy:.4f}")
            export(session, pixels, {"classes": classes, "probabilities": tf.nn.softmax(logits)},
                   f"{args.job_dir.rstrip('/')}/export")  # fmt: skip


def tested(session: tf1.Session, batches: Any, pixels: tf.Tensor, classes: tf.Tensor) -> float:
    """The part of the held-out pictures that are taken for what they are."""
    right = seen = 0
    while True:
        try:
            images, labels = session.run(batches)
        except tf.errors.OutOfRangeError:
            return right / seen
        right += int((session.run(classes, {pixels: images}) == labels).sum())
        seen += len(labels)


def export(
    session: tf1.Session, pixels: tf.Tensor, outputs: dict[str, tf.Tensor], directory: str
) -> None:
    """Write the SavedModel under a temporary name, and rename it when it is whole."""
    part, whole = f"{directory}/temp-model", f"{directory}/model"
    for path in (part, whole):  # of a start that was killed here
        if tf.io.gfile.exists(path):
            tf.io.gfile.rmtree(path)
    tf1.saved_model.simple_save(session, part, {"image": pixels}, outputs)
    tf.io.gfile.rename(part, whole)


if __name__ == "__main__":
    main(sys.argv[1:])
