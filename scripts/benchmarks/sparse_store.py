"""Packed splits of any number of images that need almost no disk space: every shard is a link to a single file.

To a reader they are complete: they have every file, every index and checksum, and a manifest of the full length.
"""

import hashlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.packing.shard_file import ShardFile
from loopfeed.preprocess.pixels import LAYOUTS
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    LABELS,
    NUMBERS_PER_SHARD,
    PIXELS,
    checksums_metadata,
    create_array,
    labels_metadata,
    pixels_metadata,
    shard_key,
    words_digest,
    write_array,
)
from loopfeed.preprocess.shards.checksum import crc32c
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.location import Location, open_location
from loopfeed.preprocess.shards.manifest import FORMAT_VERSION, MANIFEST_KEY, Manifest
from loopfeed.preprocess.shards.reader import open_split, read_manifest
from loopfeed.preprocess.shards.split_arrays import open_checksums
from scripts.benchmarks.bench import Settings
from scripts.benchmarks.data import SPLIT, Images, Say, ensure_shards

SIZE, NUM_CLASSES = 32, 10
SHARD_IMAGES = PackSettings(rule=ResizeRule(size=SIZE, resize=SIZE)).resolved_shard_images


def sparse_folder(settings: Settings, num_images: int) -> Path:
    """Return the folder of the split of `num_images` images, which may not exist yet."""
    return settings.folder / "data" / f"sparse-{num_images}-by-{SHARD_IMAGES}-v{FORMAT_VERSION}"


def ensure_sparse(settings: Settings, say: Say, *, num_images: int) -> Path:
    """Create the split of `num_images` images of 32 px if it does not exist."""
    folder = sparse_folder(settings, num_images)
    if (folder / SPLIT / MANIFEST_KEY).exists():
        return folder
    whole = ensure_shards(settings, say, Images(SHARD_IMAGES, SIZE))
    real = whole / SPLIT / PIXELS / shard_key(0, 3)
    say(f"making {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    split = open_location(str(folder)).child(SPLIT)
    metadata = pixels_metadata(num_images, SIZE, SIZE, shard_images=SHARD_IMAGES, codec="raw", checksum=True)
    create_array(split, PIXELS, metadata)
    num_shards = -(-num_images // SHARD_IMAGES)
    num_whole, num_left = divmod(num_images, SHARD_IMAGES)
    _link_all(folder / SPLIT / PIXELS, real, range(num_whole), rank=3)
    if num_left:
        _write_last(whole, folder / SPLIT / PIXELS / shard_key(num_whole, 3), num_left)
    labels = np.arange(NUMBERS_PER_SHARD, dtype=np.uint16) % NUM_CLASSES
    checksums = np.resize(_stored_checksums(whole), NUMBERS_PER_SHARD)
    digests = {
        LABELS: _write_numbers(split, LABELS, labels_metadata, labels, num_images),
        CHECKSUMS: _write_numbers(split, CHECKSUMS, checksums_metadata, checksums, num_images),
    }
    split.write(MANIFEST_KEY, _manifest(num_images, num_shards, digests).to_json().encode())
    return folder


def _stored_checksums(whole: Path) -> NDArray[np.uint32]:
    """Return the checksums of the images of the full shard."""
    split = open_location(str(whole)).child(SPLIT)
    numbers = open_checksums(split, read_manifest(open_location(str(whole)), SPLIT))
    assert numbers is not None
    return numbers.read(np.arange(SHARD_IMAGES), time.monotonic() + 60)


def _write_numbers(
    split: Location,
    name: str,
    metadata: Callable[[int], dict[str, Any]],
    whole: NDArray[np.unsignedinteger[Any]],
    num_images: int,
) -> tuple[str, ...]:
    """Write an array whose full shard files are all the same; return the digests of all shard files."""
    folder = Path(str(split.local_path)) / name
    write_array(split, name, metadata(NUMBERS_PER_SHARD)).write(whole).result(timeout=60)
    first = folder / shard_key(0, 1)
    num_whole, num_left = divmod(num_images, NUMBERS_PER_SHARD)
    if num_whole == 0:
        first.unlink()
    _link_all(folder, first, range(1, num_whole), rank=1)
    stored = create_array(split, name, metadata(num_images))
    digests = [words_digest([whole])] * num_whole
    if num_left:
        stored[num_images - num_left :].write(whole[:num_left]).result(timeout=60)
        digests.append(words_digest([whole[:num_left]]))
    return tuple(digests)


def _write_last(whole: Path, path: Path, num_images: int) -> None:
    """Write the last shard, which has the first images of the full one."""
    words, labels = np.zeros((num_images, SIZE, SIZE), np.uint32), np.zeros(num_images, np.int32)
    with open_split(str(whole), SPLIT) as split:
        split.read_into(np.arange(num_images), words, labels, timeout_s=60)
    shard = ShardFile(path, shard_images=SHARD_IMAGES)
    for image in words:
        shard.add(image, crc32c(image))
    shard.commit().result(timeout=60)


def _link_all(array: Path, target: Path, shards: range, *, rank: int) -> None:
    for shard in shards:
        link = array / shard_key(shard, rank)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def _manifest(num_images: int, num_shards: int, digests: dict[str, tuple[str, ...]]) -> Manifest:
    none = hashlib.sha256().hexdigest()
    counts = [num_images // NUM_CLASSES] * NUM_CLASSES
    counts[0] += num_images % NUM_CLASSES
    return Manifest(
        format_version=FORMAT_VERSION,
        num_images=num_images,
        height=SIZE,
        width=SIZE,
        layout=LAYOUTS["packed"],
        codec="raw",
        checksum=True,
        shard_images=SHARD_IMAGES,
        classes=tuple(ImageClass(f"c{label}", f"class {label}") for label in range(NUM_CLASSES)),
        class_counts=tuple(counts),
        channel_mean=(0.5, 0.5, 0.5),
        channel_std=(0.25, 0.25, 0.25),
        resize_rule={"size": SIZE, "resize": SIZE, "resample": "bicubic"},
        source_digest=none,
        num_failures=0,
        tool_versions={},
        shard_digests=(none,) * num_shards,
        labels_digest=none,
        failures_digest=none,
        label_digests=digests[LABELS],
        checksum_digests=digests[CHECKSUMS],
        metadata_digests=dict.fromkeys((PIXELS, LABELS, CHECKSUMS), none),
    )
