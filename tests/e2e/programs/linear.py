"""A user's program that knows nothing of Mayfly: softmax regression, the Estimator way."""

import argparse

import tensorflow as tf
import tensorflow_io  # noqa: F401  (registers hdfs://)

PIXELS = 3 * 32 * 32


def records(pattern, train):
    def parse(record):
        spec = {
            "image": tf.io.FixedLenFeature([], tf.string),
            "label": tf.io.FixedLenFeature([], tf.int64),
        }
        example = tf.io.parse_single_example(record, spec)
        pixels = tf.cast(tf.io.decode_raw(example["image"], tf.uint8), tf.float32) / 255.0
        return {"pixels": tf.reshape(pixels, [PIXELS])}, example["label"]

    def input_fn():
        dataset = tf.data.TFRecordDataset(sorted(tf.io.gfile.glob(pattern)), buffer_size=8 << 20)
        if train:
            dataset = dataset.shuffle(2000).repeat()
        return dataset.map(parse).batch(128).prefetch(2)

    return input_fn


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data-dir", required=True)
    parser.add_argument("--job-dir", required=True)
    parser.add_argument("--train-steps", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    tf.compat.v1.logging.set_verbosity(tf.compat.v1.logging.INFO)
    column = tf.feature_column.numeric_column("pixels", shape=[PIXELS])
    config = tf.estimator.RunConfig(save_checkpoints_steps=200, log_step_count_steps=50)
    estimator = tf.estimator.LinearClassifier(
        [column],
        arguments.job_dir,
        n_classes=10,
        config=config,
        # At the default, 0.2, accuracy goes up and down between 0.6 and 0.8 from step to step.
        optimizer=lambda: tf.keras.optimizers.legacy.SGD(0.01),
    )
    serving = tf.estimator.export.build_parsing_serving_input_receiver_fn(
        tf.feature_column.make_parse_example_spec([column])
    )
    exporter = tf.estimator.FinalExporter("model", serving)
    tf.estimator.train_and_evaluate(
        estimator,
        tf.estimator.TrainSpec(
            records(f"{arguments.data_dir}/train*", True), max_steps=arguments.train_steps
        ),
        tf.estimator.EvalSpec(
            records(f"{arguments.data_dir}/eval*", False),
            steps=None,
            exporters=[exporter],
            throttle_secs=30,
        ),
    )


if __name__ == "__main__":
    main()
