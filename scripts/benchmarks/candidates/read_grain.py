"""Grain over ArrayRecord files: uncompressed, one record a group, as its documentation advises for random access.

0 workers: its own threads read ahead, with its own defaults; else so many processes.
"""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peer_data import convert_once, labels_of, make_run, open_images
from protocol import Channel

channel = Channel()

import grain  # noqa: E402
from array_record.python.array_record_module import ArrayRecordWriter  # noqa: E402

LABEL_BYTES = 4


def write(array: Path, target: Path) -> None:
    """Write a record an image: its label, then its pixels."""
    images = open_images(array)
    writer = ArrayRecordWriter(str(target), "group_size:1,uncompressed")
    for image, label in zip(images, labels_of(len(images)), strict=True):
        writer.write(label.tobytes() + image.tobytes())
    writer.close()


def main(array: Path, batch: int, workers: int) -> None:
    """Serve batches."""
    file = convert_once(array.with_suffix(".arrayrecord"), lambda target: write(array, target))
    shape = open_images(array).shape

    def parse(record: bytes) -> tuple[Any, Any]:
        words = np.frombuffer(record, np.uint8)
        return words[LABEL_BYTES:].reshape(shape[1:]), words[:LABEL_BYTES].view(np.int32)[0]

    source = grain.sources.ArrayRecordDataSource([str(file)])
    data = grain.MapDataset.source(source).shuffle(seed=0).repeat().map(parse)
    # By default 16 threads and 500 elements ahead: images here, as batches of them would be 10 GB.
    batches: Any = data.to_iter_dataset(grain.ReadOptions()).batch(batch, drop_remainder=True)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    run = make_run(iter(batches), lambda taken: taken[0].shape, (batch, *shape[1:]), shape[0] // batch)
    channel.ready(batch, versions={"grain": version("grain")}, facts={"workers": workers})
    channel.serve(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
