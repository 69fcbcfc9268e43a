"""A user's program that knows nothing of Mayfly: linear regression, the Estimator way."""

import argparse

import numpy as np
import tensorflow as tf

parser = argparse.ArgumentParser()
parser.add_argument("--data-dir")
parser.add_argument("--job-dir")
parser.add_argument("--train-steps", type=int)
parser.add_argument("--slope", type=float)
args = parser.parse_args()


def samples(count):
    x = np.random.uniform(-1, 1, count).astype(np.float32)
    y = (args.slope * x).astype(np.float32)
    return tf.data.Dataset.from_tensor_slices(({"x": x}, y))


tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
estimator = tf.estimator.LinearRegressor(
    [tf.feature_column.numeric_column("x")],
    model_dir=args.job_dir,
    config=tf.estimator.RunConfig(save_checkpoints_steps=100, log_step_count_steps=20),
)
tf.estimator.train_and_evaluate(
    estimator,
    tf.estimator.TrainSpec(lambda: samples(1000).repeat().batch(32), max_steps=args.train_steps),
    tf.estimator.EvalSpec(lambda: samples(100).batch(50), start_delay_secs=5, throttle_secs=2),
)
