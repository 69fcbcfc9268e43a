"""ResNet on CIFAR-10-shaped records: TensorFlow 2.15's Estimator with parameter servers.

The published examples' contract: `cifar10.py --data-dir D --job-dir M --train-steps N [--sync]`,
the cluster in TF_CONFIG. Reads `D/train*.tfrecords` and `D/eval*.tfrecords` whose records hold
`image` (uint8 bytes, channel-major as in the CIFAR-10 binary archive) and `label` (int64); writes
checkpoints, event files and, at the end, a SavedModel under `M/export/final`.

`--train-steps` counts global steps, and a global step is one batch of `--batch-size` samples in
both modes: a synchronous step divides its batch among the trainers. So the samples seen, the
learning rate and the effective batch do not depend on the number of workers.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import sys
import time
from pathlib import Path
from typing import Any, Callable

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")

import tensorflow as tf  # noqa: E402 (the log level must be set before)
from shared import sigterm  # noqa: E402

tf1 = tf.compat.v1
LOG = logging.getLogger("tensorflow")

READ_BUFFER_BYTES = 8 << 20  # small reads from HDFS are several times slower
SHUFFLE_RECORDS = 10_000
AUGMENT_EPOCHS = 20  # in fewer it costs accuracy: 0.886 instead of 0.90 after three
EVAL_BATCH = 200
LARGE_IMAGE = 64  # from here on the stem reduces by four, as in the paper's ImageNet networks
POLL_SECONDS = 1.0


def main(argv: list[str]) -> None:
    """Run this process's task and end it; an exception leaves a traceback and a non-zero exit."""
    args = parse_args(argv)
    tf1.logging.set_verbosity(tf1.logging.INFO)
    if "://" in args.data_dir + args.job_dir:
        import tensorflow_io  # noqa: F401 (registers hdfs:// and s3://)
    code = run(args)
    tf1.summary.FileWriterCache.clear()  # closes the event files; HDFS would keep them open
    sys.stdout.flush()
    sys.stderr.flush()
    logging.shutdown()
    # tensorflow-io's file systems can abort in static destructors after the work is done.
    os._exit(code)


def parse_args(argv: list[str]) -> argparse.Namespace:
    """The command line; argparse exits 2 with a usage message when it is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--data-dir", required=True, help="where train*.tfrecords, eval*.tfrecords are"
    )
    parser.add_argument("--job-dir", required=True, help="model directory, shared by all tasks")
    parser.add_argument("--train-steps", type=int, required=True, help="global steps")
    parser.add_argument("--sync", action="store_true", help="aggregate the trainers' gradients")
    parser.add_argument("--batch-size", type=int, default=128, help="samples in one global step")
    model = parser.add_argument_group("model")
    model.add_argument(
        "--blocks", type=int, default=1, help="n of 6n+2 layers: 1 is ResNet-8, 7 is ResNet-44"
    )
    model.add_argument("--filters", type=int, default=16, help="filters of the first stage")
    model.add_argument("--image-size", type=int, default=32)
    model.add_argument("--channels", type=int, default=3)
    model.add_argument("--classes", type=int, default=10)
    optimizer = parser.add_argument_group("optimizer")
    optimizer.add_argument(
        "--learning-rate", type=float, default=0.1, help="peak, for --batch-size samples"
    )
    optimizer.add_argument(
        "--schedule", choices=SCHEDULES, default="linear", help="how the rate falls"
    )
    optimizer.add_argument(
        "--warmup", type=float, default=0.05, help="part of the samples with a rising rate"
    )
    optimizer.add_argument("--momentum", type=float, default=0.9)
    optimizer.add_argument(
        "--weight-decay", type=float, default=1e-4, help="L2 on convolution and dense kernels"
    )
    inputs = parser.add_argument_group("input")
    inputs.add_argument(
        "--augment",
        choices=["auto", "none", "flip", "crop", "full"],
        default="auto",
        help=f"full is pad-and-crop with flips; auto: full from {AUGMENT_EPOCHS} epochs on",
    )
    inputs.add_argument(
        "--cache-mb",
        type=int,
        default=1024,
        help="keep a trainer's shard in memory up to this size",
    )
    ops = parser.add_argument_group("operation")
    ops.add_argument("--checkpoint-seconds", type=int, default=30)
    ops.add_argument(
        "--eval-seconds", type=int, default=90, help="least time between two evaluations"
    )
    ops.add_argument("--log-steps", type=int, default=20)
    ops.add_argument(
        "--threads", type=int, default=0, help="per session; 0: the cores this process may use"
    )
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Train, serve variables or evaluate, as TF_CONFIG says; without it do all of it here.

    Returns the exit code.
    """
    config = run_config(args)
    estimator = tf.estimator.Estimator(
        model_fn=model_fn, model_dir=args.job_dir, config=config, params=vars(args)
    )
    if config.task_type == "evaluator":
        evaluate_until_final(estimator, args)
        return 0
    train_input = train_input_fn(args, config)
    if not config.cluster_spec.jobs:
        estimator.train(train_input, max_steps=args.train_steps)
        evaluate_until_final(estimator, args)
        return 0
    stop = StopWhenAsked()
    hooks = [stop] if config.is_chief else [WaitForChief(args.job_dir)]
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(train_input, max_steps=args.train_steps, hooks=hooks),
        tf.estimator.EvalSpec(eval_input_fn(args)),
    )
    return sigterm.EXIT_CODE if stop.stopped else 0


# --- cluster -----------------------------------------------------------------------------------


def run_config(args: argparse.Namespace) -> tf.estimator.RunConfig:
    """Estimator's view of TF_CONFIG, with our threads, checkpoints and no start-up delay."""
    return tf.estimator.RunConfig(
        model_dir=args.job_dir,
        session_config=session_config(args, json.loads(os.environ.get("TF_CONFIG", "{}"))),
        save_checkpoints_secs=args.checkpoint_seconds,
        save_summary_steps=100,
        log_step_count_steps=args.log_steps,
        keep_checkpoint_max=5,
        # Worker i would sleep 5 (i + 1) s; WaitForChief waits for what that sleep hopes for.
        experimental_max_worker_delay_secs=0,
    )


def session_config(args: argparse.Namespace, tf_config: dict[str, Any]) -> tf1.ConfigProto:
    """Threads, and the device filters that Estimator only sets when it gets no session config.

    Without them each trainer waits for every other one, so one lost worker would stop all.
    """
    threads = args.threads or available_cores()
    config = tf1.ConfigProto(
        intra_op_parallelism_threads=threads,
        inter_op_parallelism_threads=max(2, threads),
        allow_soft_placement=True,
    )
    task = tf_config.get("task", {})
    if task.get("type") == "chief":
        config.device_filters.extend(["/job:ps", "/job:chief"])
    elif task.get("type") == "worker":
        config.device_filters.extend(["/job:ps", f"/job:worker/task:{task['index']}"])
    elif task.get("type") == "ps":
        config.device_filters.extend(["/job:ps", "/job:worker", "/job:chief"])
    return config


def available_cores() -> int:
    """Cores that this process may use: its CPU affinity, bounded by its control group's quota."""
    cores = len(os.sched_getaffinity(0))
    quota = cgroup_quota()
    return max(1, min(cores, math.ceil(quota))) if quota else cores


def cgroup_quota() -> float | None:
    """CPU quota of this container in cores, from cgroup v2 or v1; None when there is none."""
    root = Path("/sys/fs/cgroup")
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            quota = (root / "cpu/cpu.cfs_quota_us").read_text()
            period = (root / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None


class WaitForChief(tf.estimator.SessionRunHook):
    """Holds a worker until the chief has written its first checkpoint.

    A worker that finds the variables uninitialised sleeps 30 s before it looks again (TensorFlow's
    SessionManager.recovery_wait_secs); the checkpoint at step 0 says that they are initialised.
    """

    def __init__(self, model_dir: str) -> None:
        self.model_dir = model_dir

    def begin(self) -> None:
        while tf.train.latest_checkpoint(self.model_dir) is None:
            time.sleep(POLL_SECONDS)


class StopWhenAsked(tf.estimator.SessionRunHook):
    """Ends the chief's training after the step at which SIGTERM comes, with a checkpoint of it.

    Mayfly sends it when a limit of the job is reached; Estimator's own saver writes at the end.
    """

    def __init__(self) -> None:
        self.asked: sigterm.Asked | None = None
        self.stopped = False

    def begin(self) -> None:
        self.asked = sigterm.Asked()

    def after_run(
        self,
        run_context: tf.estimator.SessionRunContext,
        run_values: tf.estimator.SessionRunValues,  # noqa: ARG002
    ) -> None:
        if self.asked:
            self.stopped = True
            run_context.request_stop()


class SyncReplicasHook(tf.estimator.SessionRunHook):
    """SyncReplicasOptimizer's hook with a Coordinator of its own.

    Its token thread blocks inside the session; with the session's Coordinator the chief would wait
    120 s for it at the end, with its own one closing the session ends it.
    """

    def __init__(self, hook: tf.estimator.SessionRunHook) -> None:
        self.hook = hook

    def begin(self) -> None:
        self.hook.begin()

    def after_create_session(self, session: tf1.Session, coord: tf1.train.Coordinator) -> None:  # noqa: ARG002
        self.hook.after_create_session(session, tf1.train.Coordinator())


# --- input -------------------------------------------------------------------------------------


def train_input_fn(
    args: argparse.Namespace, config: tf.estimator.RunConfig
) -> Callable[[], tf.data.Dataset]:
    """Endless shuffled batches of this trainer's share.

    Images are float32 [b, h, w, c] in [-1, 1], labels int32 [b].
    """
    trainers = max(1, config.num_worker_replicas)
    index = config.global_id_in_cluster or 0
    batch = max(1, round(args.batch_size / trainers)) if args.sync else args.batch_size

    def input_fn() -> tf.data.Dataset:
        files = record_files(args.data_dir, "train")
        how = chosen_augmentation(args, total_bytes(files))
        own = files[index::trainers] if len(files) >= trainers else files
        records = read_records(own, args)
        if own is files:
            records = records.shard(trainers, index)
        if total_bytes(own) <= args.cache_mb << 20:
            records = records.cache()
        return (
            records.shuffle(SHUFFLE_RECORDS)
            .repeat()
            .map(lambda image, label: (augment(image, how, args), label), num_parallel_calls=2)
            .batch(batch, drop_remainder=True)
            .map(lambda images, labels: (normalize(images), labels))
            .prefetch(4)
        )

    return input_fn


def eval_input_fn(args: argparse.Namespace) -> Callable[[], tf.data.Dataset]:
    """One pass over the whole held-out set."""

    def input_fn() -> tf.data.Dataset:
        records = read_records(record_files(args.data_dir, "eval"), args)
        return (
            records.batch(EVAL_BATCH)
            .map(lambda images, labels: (normalize(images), labels))
            .prefetch(2)
        )

    return input_fn


def record_files(data_dir: str, split: str) -> list[str]:
    """Sorted paths of a split; FileNotFoundError when there are none."""
    files = sorted(tf.io.gfile.glob(f"{data_dir.rstrip('/')}/{split}*.tfrecords"))
    if not files:
        raise FileNotFoundError(
            f"no {split}*.tfrecords in {data_dir} — was the data set staged there?"
        )
    return list(files)


def total_bytes(files: list[str]) -> int:
    return sum(tf.io.gfile.stat(path).length for path in files)


def read_records(files: list[str], args: argparse.Namespace) -> tf.data.Dataset:
    """(uint8 [h, w, c], int32) for each record, several files in turn."""
    shards = tf.data.Dataset.from_tensor_slices(files)
    records = shards.interleave(
        lambda path: tf.data.TFRecordDataset(path, buffer_size=READ_BUFFER_BYTES),
        cycle_length=4,
        block_length=64,
        num_parallel_calls=2,
    )
    return records.map(lambda record: parse(record, args), num_parallel_calls=2)


def parse(record: tf.Tensor, args: argparse.Namespace) -> tuple[tf.Tensor, tf.Tensor]:
    features = tf.io.parse_single_example(
        record,
        {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        },
    )
    planes = tf.reshape(
        tf.io.decode_raw(features["image"], tf.uint8),
        [args.channels, args.image_size, args.image_size],
    )
    return tf.transpose(planes, [1, 2, 0]), tf.cast(features["label"], tf.int32)


def chosen_augmentation(args: argparse.Namespace, train_bytes: int) -> str:
    """What --augment means for this run; a record is about as large as its image."""
    if args.augment != "auto":
        return args.augment
    records = train_bytes / (args.channels * args.image_size**2)
    epochs = args.train_steps * args.batch_size / max(records, 1)
    return "full" if epochs >= AUGMENT_EPOCHS else "none"


def augment(image: tf.Tensor, how: str, args: argparse.Namespace) -> tf.Tensor:
    """A random crop of the padded image and a random flip (He et al. 2015, section 4.2)."""
    if how in ("crop", "full"):
        pad = args.image_size // 8
        padded = tf.pad(image, [[pad, pad], [pad, pad], [0, 0]])
        image = tf.image.random_crop(padded, [args.image_size, args.image_size, args.channels])
    if how in ("flip", "full"):
        image = tf.image.random_flip_left_right(image)
    return image


def normalize(images: tf.Tensor) -> tf.Tensor:
    """uint8 pixels as float32 in [-1, 1]."""
    return tf.cast(images, tf.float32) / 127.5 - 1.0


# --- model -------------------------------------------------------------------------------------


def model_fn(
    features: Any, labels: Any, mode: str, params: dict[str, Any], config: tf.estimator.RunConfig
) -> tf.estimator.EstimatorSpec:
    """Estimator's model function: softmax cross entropy + L2, accuracy, momentum SGD."""
    training = mode == tf.estimator.ModeKeys.TRAIN
    logits = resnet(features, params, training)
    predictions = {"classes": tf.argmax(logits, 1), "probabilities": tf.nn.softmax(logits)}
    if mode == tf.estimator.ModeKeys.PREDICT:
        outputs = {"serving_default": tf.estimator.export.PredictOutput(predictions)}
        return tf.estimator.EstimatorSpec(mode, predictions, export_outputs=outputs)
    loss = tf1.losses.sparse_softmax_cross_entropy(labels, logits) + l2_loss(params["weight_decay"])
    if not training:
        accuracy = tf1.metrics.accuracy(labels, predictions["classes"])
        return tf.estimator.EstimatorSpec(
            mode, predictions, loss, eval_metric_ops={"accuracy": accuracy}
        )
    optimizer, hooks = make_optimizer(params, config)
    with tf.control_dependencies(tf1.get_collection(tf1.GraphKeys.UPDATE_OPS)):
        train_op = optimizer.minimize(loss, tf1.train.get_or_create_global_step())
    return tf.estimator.EstimatorSpec(mode, predictions, loss, train_op, training_hooks=hooks)


def resnet(images: tf.Tensor, params: dict[str, Any], training: bool) -> tf.Tensor:
    """Logits of a residual network with 6n+2 layers (He et al. 2015, section 4.2)."""
    filters = params["filters"]
    if params["image_size"] > LARGE_IMAGE:
        x = tf.nn.relu(batch_norm(conv(images, filters, 7, 2), training))
        x = tf1.layers.max_pooling2d(x, 3, 2, "same")
    else:
        x = tf.nn.relu(batch_norm(conv(images, filters, 3, 1), training))
    for stage in range(3):
        for block in range(params["blocks"]):
            strides = 2 if stage > 0 and block == 0 else 1
            x = residual_block(x, filters << stage, strides, training)
    return tf1.layers.dense(tf.reduce_mean(x, [1, 2]), params["classes"])


def residual_block(x: tf.Tensor, filters: int, strides: int, training: bool) -> tf.Tensor:
    same = strides == 1 and x.shape[-1] == filters
    shortcut = x if same else batch_norm(conv(x, filters, 1, strides), training)
    y = tf.nn.relu(batch_norm(conv(x, filters, 3, strides), training))
    y = batch_norm(conv(y, filters, 3, 1), training)
    return tf.nn.relu(shortcut + y)


def conv(x: tf.Tensor, filters: int, size: int, strides: int) -> tf.Tensor:
    initializer = tf1.variance_scaling_initializer(2.0)  # He et al. 2015b, for ReLU
    return tf1.layers.conv2d(
        x, filters, size, strides, "same", use_bias=False, kernel_initializer=initializer
    )


def batch_norm(x: tf.Tensor, training: bool) -> tf.Tensor:
    return tf1.layers.batch_normalization(x, training=training, momentum=0.9, epsilon=1e-5)


def l2_loss(weight_decay: float) -> tf.Tensor:
    kernels = [v for v in tf1.trainable_variables() if "kernel" in v.name]
    return weight_decay * tf.add_n([tf.nn.l2_loss(kernel) for kernel in kernels])


HALF = 0.5
SCHEDULES: dict[str, Callable[[tf.Tensor], tf.Tensor]] = {
    "constant": tf.ones_like,
    "linear": lambda done: 1.0 - 0.99 * done,
    "step": lambda done: tf.where(done < HALF, 1.0, tf.where(done < 1.5 * HALF, 0.1, 0.01)),
}


def learning_rate(params: dict[str, Any]) -> tf.Tensor:
    """The rate at this global step: a warm-up times the schedule, both in samples seen."""
    samples = tf.cast(tf1.train.get_or_create_global_step(), tf.float32) * params["batch_size"]
    done = tf.minimum(samples / (params["train_steps"] * params["batch_size"]), 1.0)
    rising = tf.minimum(done / max(params["warmup"], 1e-6), 1.0)
    return params["learning_rate"] * (0.05 + 0.95 * rising) * SCHEDULES[params["schedule"]](done)


def make_optimizer(
    params: dict[str, Any], config: tf.estimator.RunConfig
) -> tuple[tf1.train.Optimizer, list[tf.estimator.SessionRunHook]]:
    rate = learning_rate(params)
    tf1.summary.scalar("learning_rate", rate)
    optimizer = tf1.train.MomentumOptimizer(rate, params["momentum"])
    replicas = config.num_worker_replicas
    if not params["sync"] or replicas <= 1:
        return optimizer, []
    optimizer = tf1.train.SyncReplicasOptimizer(optimizer, replicas, total_num_replicas=replicas)
    return optimizer, [SyncReplicasHook(optimizer.make_session_run_hook(config.is_chief))]


# --- evaluation and export ---------------------------------------------------------------------


def evaluate_until_final(estimator: tf.estimator.Estimator, args: argparse.Namespace) -> None:
    """Evaluate new checkpoints seldom and the final one at once, then export it.

    Estimator's own evaluator sleeps its throttle before and after the last evaluation.
    """
    evaluated, due = 0, time.monotonic() + args.eval_seconds
    while True:
        checkpoint = tf.train.latest_checkpoint(args.job_dir)
        step = int(checkpoint.rsplit("-", 1)[1]) if checkpoint else 0
        final = step >= args.train_steps
        if final or (step > evaluated and time.monotonic() >= due):
            metrics = estimator.evaluate(eval_input_fn(args), checkpoint_path=checkpoint)
            evaluated, due = step, time.monotonic() + args.eval_seconds
            if final:
                export(estimator, args, checkpoint, metrics)
                return
        time.sleep(POLL_SECONDS)


def export(
    estimator: tf.estimator.Estimator,
    args: argparse.Namespace,
    checkpoint: str,
    metrics: dict[str, Any],
) -> None:
    """Write the SavedModel, whose input is uint8 [n, h, w, c], under `<job-dir>/export/final`."""
    shape = [None, args.image_size, args.image_size, args.channels]

    def serving_input_fn() -> tf.estimator.export.TensorServingInputReceiver:
        images = tf1.placeholder(tf.uint8, shape, "image")
        return tf.estimator.export.TensorServingInputReceiver(normalize(images), {"image": images})

    exporter = tf.estimator.FinalExporter("final", serving_input_fn)
    path = f"{args.job_dir.rstrip('/')}/export/{exporter.name}"
    where = exporter.export(estimator, path, checkpoint, metrics, is_the_final_export=True)
    LOG.info("Exported the model at step %s to %s", metrics["global_step"], tf.compat.as_str(where))


if __name__ == "__main__":
    main(sys.argv[1:])
