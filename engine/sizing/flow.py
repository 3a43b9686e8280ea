"""How fast one host can bring images to its devices: what each stage moves, and how fast this machine does it.

Also the space that packed images take on disk and in memory, by the sizes of files.
"""

import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import count as count_from
from pathlib import Path

import numpy as np

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.batches import BatchSource, label_words
from loopfeed.engine.feed.feeder import batch_bytes
from loopfeed.engine.feed.shard_batches import ShardBatches, WindowedBatches
from loopfeed.preprocess.pixels import words_of_row
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import PIXELS
from loopfeed.preprocess.shards.checksum import CHECKSUM_BYTES, ENTRY
from loopfeed.preprocess.shards.reader import ShardSplit
from loopfeed.preprocess.workers import Worker, wait_for

# ILSVRC 2012: Russakovsky et al. (2015), arXiv:1409.0575, table 2.
IMAGENET_TRAIN, IMAGENET_VAL = 1_281_167, 50_000
# A label, the checksum of an image beside its pixels and in `checksums/`, and its entry in the index of the shard.
_OTHER_BYTES = 2 + 2 * CHECKSUM_BYTES + ENTRY.size


@dataclass(frozen=True)
class Volume:
    """The size of a set of packed images.

    Attributes:
        num_images: number of images.
        image_bytes: bytes of one image in memory.
        stored_bytes: bytes of one image in the shard files, on average.
        disk_bytes: bytes of all files.
        source: what the numbers come from, in words.
    """

    num_images: int
    image_bytes: int
    stored_bytes: float
    disk_bytes: int
    source: str


def imagenet_volume(size: int, num_images: int = IMAGENET_TRAIN) -> Volume:
    """Return the size of a split of ImageNet-1k, packed as raw pixels with checksums.

    Args:
        size: height and width of the images in pixels.
        num_images: number of images of the split.
    """
    image_bytes = 4 * size * words_of_row(size, "packed")
    disk_bytes = num_images * (image_bytes + _OTHER_BYTES)
    formula = f"ImageNet-1k at {size} px, 4·{size}² + {_OTHER_BYTES} bytes an image"
    return Volume(num_images, image_bytes, image_bytes + CHECKSUM_BYTES, disk_bytes, formula)


def split_volume(split: ShardSplit) -> Volume:
    """Return the size of a packed split: of its files in a local folder, else what its manifest says."""
    manifest, folder = split.manifest, split.location.local_path
    if folder is not None:
        pixels = _size_of(path for path in (folder / PIXELS).rglob("*"))
        return Volume(
            manifest.num_images,
            manifest.image_bytes,
            pixels / manifest.num_images,
            _size_of(folder.rglob("*")),
            "the files of the pack",
        )
    pixels = sum(manifest.shard_bytes(shard) or manifest.max_shard_bytes for shard in range(manifest.num_shards))
    # Of several classes or numbers, which an image has instead of a label.
    target_bytes = 4 * manifest.target_words
    source = "the manifest" if manifest.codec == "raw" else "the manifest: at most, because the shards are compressed"
    disk_bytes = pixels + manifest.num_images * (_OTHER_BYTES + target_bytes)
    return Volume(manifest.num_images, manifest.image_bytes, pixels / manifest.num_images, disk_bytes, source)


def _size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())


# Below this, a measurement of the disk would be one of the system's calls.
_LEAST_BYTES = 16 << 20
# What all threads decode together before they look at the clock: a second's work of a slow disk or network.
_MOST_LOCAL_BYTES, _MOST_REMOTE_BYTES = 64 << 20, 8 << 20
_COPIED_BYTES = 64 << 20
_MOST_BATCHES = 4
_MOST_PLACES = 1 << 16
_PAGE = 4096
_PROBES = 16
# How much longer than its limit a measurement may take, if the disk does not answer.
_STUCK_S = 30.0

DEVICES = "the devices"
READ, DECODE, COPY, LINK = "read from storage", "check and decode", "copy in memory", "copy to devices"
"""The names of the stages."""
MEASURE_S = 1.5
"""How long the disk, and then the decoding of images, is measured, in seconds."""
_COPY_S = 0.3
_CACHED = {True: "page cache", False: "disk", None: "perhaps page cache"}


@dataclass(frozen=True)
class Stage:
    """One of the stages through which images come to the devices of a host.

    Attributes:
        name: what is done.
        image_bytes: bytes that it moves for each image.
        images_per_s: images per second that a host can do, None if that was not measured.
        note: how it was measured, or why not.
        is_bounding: whether every image passes through the stage again in every epoch.
    """

    name: str
    image_bytes: float
    images_per_s: float | None
    note: str
    is_bounding: bool = True


@dataclass(frozen=True)
class Flow:
    """The stages of one host, and the images per second that its devices can train on, None if unknown."""

    stages: Sequence[Stage]
    wanted: float | None

    @property
    def bound(self) -> tuple[str, float] | None:
        """What bounds the run, and the images per second of one host that it leaves; None if nothing is known."""
        known = [(each.name, each.images_per_s) for each in self.stages if each.is_bounding and each.images_per_s]
        if self.wanted is not None:
            known.insert(0, (DEVICES, self.wanted))
        return min(known, key=lambda each: each[1]) if known else None


def measure_flow(
    config: TrainConfig,
    source: BatchSource,
    volume: Volume | None,
    *,
    spare_bytes: int | None,
    link_bytes_per_s: float | None,
    wanted: float | None,
) -> Flow:
    """Measure this machine for some seconds, and return what a host moves for each image and how fast it can.

    Args:
        config: the settings.
        source: the training batches.
        volume: the size of the training split, None for batches of the user's own.
        spare_bytes: memory of this machine that the run leaves to the page cache; None if the run is not here.
        link_bytes_per_s: peak rate of a host's links to its GPUs, if the run is not here.
        wanted: images per second that the devices of a host train on, None if unknown.
    """
    image_bytes = batch_bytes(source) / source.batch
    stages = [] if volume is None else _storage_stages(config, source, volume, spare_bytes)
    stages.append(Stage(COPY, image_bytes, measure_copying(_COPY_S) / image_bytes, "1 thread"))
    if link_bytes_per_s is not None:
        stages.append(Stage(LINK, image_bytes, link_bytes_per_s / image_bytes, "peak, not measured"))
    return Flow(stages, wanted)


def _storage_stages(config: TrainConfig, source: BatchSource, volume: Volume, spare_bytes: int | None) -> list[Stage]:
    if isinstance(source, WindowedBatches | ShardBatches):
        # Each order reads the same shards. One that looks ahead cannot be asked for the same batches again; the batches
        # of stages may differ in size.
        source = ShardBatches(source.split, batch=source.batch, seed=config.seed)
    read_rate, read_note, decode_rate, decode_note, fits = None, "no shards are here", None, "no shards are here", False
    if isinstance(source, ShardBatches):
        count, threads = config.reader_threads, quantity(config.reader_threads, "thread")
        decode_rate = measure_decoding(source, num_threads=count, timeout_s=config.infeed_timeout_s, limit_s=MEASURE_S)
        if source.split.location.local_path is None:
            # A store delivers whole images only through the reader.
            read_rate, read_note, decode_note = decode_rate, f"{threads}, with decoding", f"{threads}, with reading"
        else:
            read = measure_reading(source.split, num_threads=count, limit_s=MEASURE_S)
            read_rate, read_note, decode_note = None, "too small a pack", threads
            if read is not None:
                read_rate, read_note = read[0] / volume.stored_bytes, f"{threads}, {_CACHED[read[1]]}"
            fits = spare_bytes is not None and volume.disk_bytes < spare_bytes
    return [
        Stage(READ, volume.stored_bytes, read_rate, read_note, is_bounding=not fits),
        Stage(DECODE, volume.image_bytes, decode_rate, decode_note),
    ]


# Writes nothing. Reading drops the pages that it is about to read from the page cache, where the system allows that, so
# that the disk is measured, and looks whether they are really gone.
def measure_reading(split: ShardSplit, *, num_threads: int, limit_s: float) -> tuple[float, bool | None] | None:
    """Read pieces of the size of an image from random places of a split's shard files, each place at most once.

    Returns:
        Bytes per second, and whether they came from the page cache, None if the system does not tell; None instead of
        both if the split is not in a local folder, or so small that the rate would mean nothing.
    """
    folder = split.location.local_path
    if folder is None:
        return None
    piece = -(-split.manifest.image_bytes // _PAGE) * _PAGE
    places = _random_places(folder / PIXELS, piece)
    if len(places) * piece < _LEAST_BYTES:
        return None
    is_cached = _is_cached(places[:_PROBES], piece)
    rest = places[_PROBES:]

    def read_one() -> int:
        try:
            place = rest.pop()  # by one thread alone
        except IndexError:
            return 0
        return _read_piece(*place, piece)

    return _rate_of(read_one, num_threads, limit_s), is_cached


def measure_decoding(source: ShardBatches, *, num_threads: int, timeout_s: float, limit_s: float) -> float:
    """Return the images per second that reach memory, checked and decompressed, if their files are in the page cache.

    In an object store they are not: the rate is then that of the store too.
    """
    is_local = source.split.location.local_path is not None
    most_bytes = _MOST_LOCAL_BYTES if is_local else _MOST_REMOTE_BYTES
    count = max(1, min(source.batch, most_bytes // (num_threads * 4 * source.height * source.row_words)))
    words, local = label_words(source), threading.local()

    def fill(batch_index: int) -> int:
        if not hasattr(local, "pixels"):
            local.pixels = np.zeros((count, source.height, source.row_words), np.uint32)
            local.labels = np.zeros((count, words) if words else (count,), np.int32)
        source.fill(batch_index, range(count), local.pixels, local.labels, timeout_s=timeout_s)
        return count

    # The first pass reads the files and checks each image, which happens once.
    started, num_read = time.perf_counter(), 0
    while num_read < _MOST_BATCHES and (num_read == 0 or time.perf_counter() - started < limit_s):
        num_read += bool(fill(num_read))
    numbers = count_from(0)
    return _rate_of(lambda: fill(next(numbers) % num_read), num_threads, limit_s)


def measure_copying(limit_s: float) -> float:
    """Return the bytes per second that one thread copies in memory: the fastest copy, which others disturbed least."""
    source, target = np.ones(_COPIED_BYTES, np.uint8), np.zeros(_COPIED_BYTES, np.uint8)
    started, shortest_s = time.perf_counter(), math.inf
    while (begin := time.perf_counter()) < started + limit_s:
        np.copyto(target, source)
        shortest_s = min(shortest_s, time.perf_counter() - begin)
    return _COPIED_BYTES / shortest_s


def _rate_of(work: Callable[[], int], num_threads: int, limit_s: float) -> float:
    """Call `work` from several threads until the time is over or it returns 0, and return the sum per second."""
    done = [0] * num_threads
    started = time.perf_counter()

    def repeat(number: int) -> None:
        # At least once, however late the thread starts.
        while count := work():
            done[number] += count
            if time.perf_counter() - started >= limit_s:
                break

    workers = [Worker(partial(repeat, number), f"rate-{number}").start() for number in range(num_threads)]
    have_ended = wait_for(workers, limit_s + _STUCK_S)
    for worker in workers:
        worker.check()
    if not have_ended:
        raise TimeoutError(f"reading the data set did not end within {_STUCK_S:g} s: check the disk that it is on")
    return sum(done) / (time.perf_counter() - started)


def _random_places(folder: Path, piece: int) -> list[tuple[Path, int]]:
    """Return files and positions of whole pieces in them, in random order, each at most once."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    ends = np.cumsum([path.stat().st_size // piece for path in files], dtype=np.int64)
    total = int(ends[-1]) if len(files) else 0
    picked = np.random.default_rng(0).choice(total, min(total, _MOST_PLACES), replace=False)
    numbers = np.searchsorted(ends, picked, side="right")
    starts = picked - np.concatenate([[0], ends])[numbers]
    return [(files[number], int(start) * piece) for number, start in zip(numbers, starts, strict=True)]


def _read_piece(path: Path, start: int, size: int) -> int:
    with path.open("rb", buffering=0) as file:
        _drop(file.fileno(), start, size)
        return len(os.pread(file.fileno(), size, start))


def _is_cached(places: list[tuple[Path, int]], size: int) -> bool | None:
    """Return whether most pages are still in the page cache after they were dropped; None if that is unknown."""
    if not hasattr(os, "RWF_NOWAIT"):
        return None
    found = []
    for path, start in places:
        with path.open("rb", buffering=0) as file:
            _drop(file.fileno(), start, size)
            try:
                found.append(os.preadv(file.fileno(), [bytearray(_PAGE)], start, os.RWF_NOWAIT) > 0)
            except BlockingIOError:
                found.append(False)
            except OSError:  # the file system does not support the question
                return None
    return 2 * sum(found) > len(found)


def _drop(file: int, start: int, size: int) -> None:
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError):
            os.posix_fadvise(file, start, size, os.POSIX_FADV_DONTNEED)
