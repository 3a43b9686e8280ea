"""Other projects' loaders, each over its own file of the same raw images, in random order: `read_peer.py PROJECT …`.

Needs only NumPy and the standard library besides the project, and runs on the Python of every peer. Each is configured
as its own documentation recommends for speed.
"""

import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Channel, timed, versions_of

channel = Channel()

NUM_CLASSES, LABEL_BYTES, BUFFER = 1000, 4, 1000


class Images:
    """Single images, uint8 [H, W, 3], copied from a mapped array, with their labels."""

    def __init__(self, array: Path) -> None:
        self.array, self.images = array, np.load(array, mmap_mode="r")
        self.labels = np.arange(len(self.images), dtype=np.int32) % NUM_CLASSES

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return a copy of an image and its label."""
        return self.images[index].copy(), int(self.labels[index])

    def records(self) -> Iterator[bytes]:
        """Yield each image as bytes: its label, then its pixels."""
        for image, label in zip(self.images, self.labels, strict=True):
            yield label.tobytes() + image.tobytes()

    def converted(self, suffix: str, convert: Callable[[Path], object]) -> Path:
        """Return the file or folder beside the array with this suffix; create it atomically if it does not exist."""
        target = self.array.with_suffix(suffix)
        if not target.exists():
            unfinished = target.with_name(f"unfinished-{target.name}")
            if unfinished.is_dir():
                shutil.rmtree(unfinished)
            unfinished.unlink(missing_ok=True)
            convert(unfinished)
            unfinished.rename(target)
        return target


class Batches(Images):
    """The same, a batch for a list of indices."""

    def __getitem__(self, index: Any) -> tuple[Any, Any]:
        """Return a copy of the images and their labels."""
        return self.images[index], self.labels[index]


def open_torch(array: Path, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    """Open torch.utils.data.DataLoader over the array, a batch fetched by one fancy index."""
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    data: Any = Batches(array)
    sampler = BatchSampler(RandomSampler(data), batch, drop_last=True)
    loader = DataLoader(data, sampler=sampler, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    return lambda: loader


def open_ffcv(array: Path, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    """Open FFCV's loader over its own file of raw images, kept in the page cache."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.basics import IntDecoder
    from ffcv.fields.rgb_image import SimpleRGBImageDecoder
    from ffcv.loader import Loader, OrderOption
    from ffcv.transforms import Squeeze, ToTensor
    from ffcv.writer import DatasetWriter

    def write(target: Path) -> None:
        fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
        DatasetWriter(str(target), fields, num_workers=2).from_indexed_dataset(Images(array))

    loader = Loader(
        str(Images(array).converted(".beton", write)),
        batch_size=batch,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": [SimpleRGBImageDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    return lambda: loader


def open_grain(array: Path, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    """Open Grain over ArrayRecord files, uncompressed, one record a group; without workers by its own threads."""
    import grain
    from array_record.python.array_record_module import ArrayRecordWriter

    images = Images(array)
    shape = images.images.shape[1:]  # alone in `parse`, of which each worker gets a copy

    def write(target: Path) -> None:
        writer = ArrayRecordWriter(str(target), "group_size:1,uncompressed")
        for record in images.records():
            writer.write(record)
        writer.close()

    def parse(record: bytes) -> tuple[Any, Any]:
        words = np.frombuffer(record, np.uint8)
        return words[LABEL_BYTES:].reshape(shape), words[:LABEL_BYTES].view(np.int32)[0]

    source = grain.sources.ArrayRecordDataSource([str(images.converted(".arrayrecord", write))])
    data = grain.MapDataset.source(source).shuffle(seed=0).repeat().map(parse)
    # By default 16 threads and 500 elements ahead: images here, as batches of them would be 10 GB.
    batches: Any = data.to_iter_dataset(grain.ReadOptions()).batch(batch, drop_remainder=True)
    if workers:
        batches = batches.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    return lambda: batches


def open_webdataset(array: Path, batch: int, workers: int) -> Callable[[], Iterable[Any]]:
    """Open WebDataset over tar shards of 256 images in random order, and samples through a buffer."""
    import webdataset

    images = Images(array)
    shape = images.images.shape[1:]

    def write(target: Path) -> None:
        target.mkdir()
        with webdataset.ShardWriter(str(target / "%05d.tar"), maxcount=256) as writer:
            for index, (image, label) in enumerate(zip(images.images, images.labels, strict=True)):
                writer.write({"__key__": f"{index:08d}", "rgb": image.tobytes(), "cls": str(label).encode()})

    def parse(sample: dict[str, Any]) -> tuple[Any, int]:
        return np.frombuffer(sample["rgb"], np.uint8).reshape(shape), int(sample["cls"])

    urls = [str(path) for path in sorted(images.converted(".tars", write).glob("*.tar"))]
    # Resampled endlessly, as its documentation recommends for training: no worker waits at the end of an epoch.
    data = webdataset.WebDataset(urls, resampled=True, shardshuffle=False).shuffle(BUFFER).map(parse)
    loader = webdataset.WebLoader(data.batched(batch, partial=False), batch_size=None, num_workers=workers)
    return lambda: loader


def open_tensorflow(array: Path, batch: int, workers: int) -> Callable[[], Iterable[Any]]:  # noqa: ARG001
    """Open tf.data over 16 TFRecord files, through a shuffle buffer; parallelism is its own to choose."""
    import tensorflow as tf

    images, num_files = Images(array), 16
    shape = images.images.shape[1:]

    def write(target: Path) -> None:
        target.mkdir()
        writers = [tf.io.TFRecordWriter(str(target / f"{number:03d}.tfrecord")) for number in range(num_files)]
        for index, record in enumerate(images.records()):
            writers[index % num_files].write(record)
        for writer in writers:
            writer.close()

    def parse(records: Any) -> tuple[Any, Any]:
        words = tf.io.decode_raw(records, tf.uint8, fixed_length=LABEL_BYTES + shape[0] * shape[1] * shape[2])
        labels = tf.bitcast(words[:, :LABEL_BYTES], tf.int32)
        return tf.reshape(words[:, LABEL_BYTES:], (batch, *shape)), labels

    folder = images.converted(".tfrecords", write)
    files = tf.data.Dataset.from_tensor_slices([str(path) for path in sorted(folder.glob("*.tfrecord"))])
    options = tf.data.Options()
    options.deterministic = False
    data = (
        files.shuffle(num_files)
        .interleave(tf.data.TFRecordDataset, num_parallel_calls=tf.data.AUTOTUNE, deterministic=False)
        .shuffle(BUFFER)
        .repeat()
        .batch(batch, drop_remainder=True)
        .map(parse, num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
        .with_options(options)
    )
    return lambda: data


# How to open each, the distributions whose versions are told, and how many epochs it reads first.
LOADERS = {
    "torch": (open_torch, ("torch",), 1),
    "ffcv": (open_ffcv, ("ffcv", "torch"), 2),
    "grain": (open_grain, ("grain",), 1),
    "webdataset": (open_webdataset, ("webdataset",), 1),
    "tensorflow": (open_tensorflow, ("tensorflow-cpu",), 1),
}


def main(project: str, array: Path, batch: int, workers: int) -> None:
    """Serve batches, endlessly, after an epoch or two, so that files are in the page cache and workers are running."""
    open_loader, distributions, num_epochs = LOADERS[project]
    epoch = open_loader(array, batch, workers)
    shape = (batch, *np.load(array, mmap_mode="r").shape[1:])

    def repeated() -> Iterator[Any]:
        while True:
            yield from epoch()

    batches = repeated()
    for number in range(num_epochs * len(np.load(array, mmap_mode="r")) // batch):
        found = tuple(next(batches)[0].shape)
        if found != shape:
            raise ValueError(f"every batch must have the shape {shape}, batch {number} has {found}")

    def work(num_units: int) -> None:
        for _ in range(num_units):
            next(batches)

    channel.ready(batch, versions=versions_of(*distributions), facts={"workers": workers})
    channel.serve(timed(work))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
