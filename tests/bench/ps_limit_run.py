"""On a node: how fast trainers step that only wait, then hand a gradient to one parameter server.

Usage: ps_limit_run.py PROGRAM WAIT_MS. A simulation: variables have the shapes of cifar10.py's
ResNet-8, a trainer fetches all, waits and hands in a gradient of the same size. Trainers are
processes with one session each. Prints trainers → steps per second as JSON.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import time

import tensorflow as tf

tf1 = tf.compat.v1
COUNTS = (1, 2, 4, 8, 12, 16, 24)
SECONDS = 8.0
TARGET = "127.0.0.1:23240"
# Kernels of ResNet-8 with 16 filters; its few hundred other numbers are left out.
SHAPES = (
    *((3, 3, 3, 16), (3, 3, 16, 16), (3, 3, 16, 16)),
    *((1, 1, 16, 32), (3, 3, 16, 32), (3, 3, 32, 32)),
    *((1, 1, 32, 64), (3, 3, 32, 64), (3, 3, 64, 64), (64, 10)),
)


def graph() -> tuple[list[tf.Tensor], list[tf.Tensor], tf.Operation]:
    """Variables on the parameter server, places for their gradients, and the update."""
    with tf.device("/job:ps/task:0"):
        variables = [
            tf1.get_variable(f"v{i}", shape, use_resource=True) for i, shape in enumerate(SHAPES)
        ]
        gradients = [tf1.placeholder(tf.float32, shape) for shape in SHAPES]
        optimizer = tf1.train.MomentumOptimizer(1e-6, 0.9)
        update = optimizer.apply_gradients(list(zip(gradients, variables)))
    return variables, gradients, update


def serve() -> None:
    """The parameter server."""
    tf.distribute.Server({"ps": [TARGET]}, job_name="ps", task_index=0).join()


def train(wait_s: float, begin: float, counted: object) -> None:
    """Step from `begin` on for some seconds; the steps are added to the counter."""
    with tf.Graph().as_default():
        variables, gradients, update = graph()
        with tf1.Session(f"grpc://{TARGET}") as session:
            time.sleep(max(0.0, begin - time.time()))
            steps, end = 0, begin + SECONDS
            while time.time() < end:
                values = session.run(variables)
                time.sleep(wait_s)
                session.run(update, dict(zip(gradients, values)))
                steps += 1
    with counted.get_lock():  # type: ignore[attr-defined]
        counted.value += steps  # type: ignore[attr-defined]


def initialize() -> None:
    """Give the variables their first values."""
    with tf.Graph().as_default():
        graph()
        with tf1.Session(f"grpc://{TARGET}") as session:
            session.run(tf1.global_variables_initializer())


def measure(count: int, wait_s: float) -> float:
    """Steps per second of so many trainers together."""
    counted = multiprocessing.Value("l", 0)
    begin = time.time() + 4 + 0.3 * count
    trainers = [
        multiprocessing.Process(target=train, args=(wait_s, begin, counted)) for _ in range(count)
    ]
    for one in trainers:
        one.start()
    for one in trainers:
        one.join()
    return round(counted.value / SECONDS, 2)


def main() -> int:
    """Measure all counts."""
    wait_s = float(sys.argv[2]) / 1000
    server = multiprocessing.Process(target=serve, daemon=True)
    server.start()
    first = multiprocessing.Process(target=initialize)  # this process stays free of TF's threads
    first.start()
    first.join(60)
    print(json.dumps({count: measure(count, wait_s) for count in COUNTS}))
    server.kill()
    return 0


if __name__ == "__main__":
    sys.exit(main())
