"""tf.data over TFRecord files of raw pixels, through a shuffle buffer of 1,000; parallelism is its own to choose."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_data import convert_once, labels_of, make_run, open_images
from protocol import Channel

channel = Channel()

import tensorflow as tf  # noqa: E402

NUM_FILES, BUFFER, LABEL_BYTES = 16, 1000, 4


def write(array: Path, target: Path) -> None:
    """Write a record an image: its label, then its pixels."""
    images = open_images(array)
    labels = labels_of(len(images))
    target.mkdir()
    for number in range(NUM_FILES):
        with tf.io.TFRecordWriter(str(target / f"{number:03d}.tfrecord")) as writer:
            for index in range(number, len(images), NUM_FILES):
                writer.write(labels[index].tobytes() + images[index].tobytes())


def main(array: Path, batch: int, workers: int) -> None:  # noqa: ARG001
    """Serve batches."""
    folder = convert_once(array.with_suffix(".tfrecords"), lambda target: write(array, target))
    shape = open_images(array).shape
    record_bytes = LABEL_BYTES + shape[1] * shape[2] * shape[3]

    def parse(records: Any) -> tuple[Any, Any]:
        words = tf.io.decode_raw(records, tf.uint8, fixed_length=record_bytes)
        labels = tf.bitcast(words[:, :LABEL_BYTES], tf.int32)
        return tf.reshape(words[:, LABEL_BYTES:], (batch, *shape[1:])), labels

    files = tf.data.Dataset.from_tensor_slices([str(path) for path in sorted(folder.glob("*.tfrecord"))])
    options = tf.data.Options()
    options.deterministic = False
    data = (
        files.shuffle(NUM_FILES)
        .interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
        .shuffle(BUFFER)
        .repeat()
        .batch(batch, drop_remainder=True)
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )
    run = make_run(iter(data), lambda taken: taken[0].shape, (batch, *shape[1:]), shape[0] // batch)
    channel.ready(batch, versions={"tensorflow": version("tensorflow-cpu")})
    channel.serve(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
