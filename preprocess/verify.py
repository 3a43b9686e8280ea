"""Reads every byte of a split back and compares it with its checksums and its manifest.

Goes on after the first damage and names each damaged file and image. Changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from preprocess.arrays import LABELS, LABELS_PER_SHARD, PIXELS, damage, read_array, shard_key
from preprocess.channels import ChannelSums, channel_sums
from preprocess.location import Location, ShardError, open_location
from preprocess.manifest import FAILURES_KEY, MANIFEST_KEY, Manifest
from preprocess.pack import read_failures
from preprocess.pixels import UNUSED_BITS, unpack_rgb
from preprocess.shards import read_manifest

READ_TIMEOUT_S = 600.0
"""How long one piece of at most 64 MiB may take to be read, in seconds."""

_PIECE_BYTES = 64 << 20
Images = Iterable[NDArray[np.uint32] | str]
"""Images in order: the words ``uint32 [H, W]`` of each, or why it can't be read."""

_READ_ERRORS = (ValueError, OSError, RuntimeError, TimeoutError)


@dataclass(frozen=True)
class Damage:
    """Something that is not as it was packed.

    Attributes:
        file: the file below the split's folder.
        what: what is wrong, in one line.
        images: the images it concerns, by index; empty when it is not about single images.
    """

    file: str
    what: str
    images: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}: {_ranges(self.images)}{self.what}"


def verify_split(
    data: str,
    split: str,
    *,
    context: ts.Context | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Damage, ...]:
    """Check the split ``split`` of the pack at ``data``: files, checksums, labels, pixels, counts and channel figures.

    Args:
        data: a folder or a TensorStore URL.
        split: e.g. ``train``.
        context: needed for ``memory://`` only.
        on_progress: called with (images read, N) after each piece.

    Returns:
        Every damage found, file by file; empty when the split is intact.

    Raises:
        ShardError: there is no such split, it is unfinished, or its manifest can't be read.
    """
    root = open_location(data, context=context, memory_mapped=True)
    manifest = read_manifest(root, split)
    location = root.child(split)
    return (
        *_check_files(location, manifest),
        *_check_failures(location, manifest),
        *_check_labels(location, manifest),
        *_check_pixels(location, manifest, on_progress or (lambda _done, _total: None)),
    )


def _check_files(location: Location, manifest: Manifest) -> Iterator[Damage]:
    expected = {MANIFEST_KEY, FAILURES_KEY, f"{PIXELS}/zarr.json", f"{LABELS}/zarr.json"}
    expected |= {f"{PIXELS}/{shard_key(shard, 3)}" for shard in range(manifest.num_shards)}
    expected |= {f"{LABELS}/{shard_key(shard, 1)}" for shard in range(-(-manifest.num_images // LABELS_PER_SHARD))}
    found = set(location.list_keys())
    for key in sorted(expected - found):
        yield Damage(key, "the file is missing")
    for key in sorted(found - expected):
        yield Damage(key, "the file does not belong to the split")


def _check_failures(location: Location, manifest: Manifest) -> Iterator[Damage]:
    if location.read(FAILURES_KEY) is None:
        return
    try:
        num_failures = len(read_failures(location))
    except ShardError as error:
        yield Damage(FAILURES_KEY, str(error))
        return
    if num_failures != manifest.num_failures:
        yield Damage(FAILURES_KEY, f"{num_failures} failures noted, the manifest says {manifest.num_failures}")


def _check_labels(location: Location, manifest: Manifest) -> Iterator[Damage]:
    array = yield from _opened(location, LABELS, "uint16", (manifest.num_images,))
    if array is None:
        return
    counts = np.zeros(1 << 16, np.int64)
    is_whole = True
    for start in range(0, manifest.num_images, LABELS_PER_SHARD):
        stop = min(start + LABELS_PER_SHARD, manifest.num_images)
        file = f"{LABELS}/{shard_key(start // LABELS_PER_SHARD, 1)}"
        try:
            labels = array[start:stop].read().result(timeout=READ_TIMEOUT_S)
        except _READ_ERRORS as error:
            is_whole = False
            yield Damage(file, damage(error))
            continue
        counts += np.bincount(labels, minlength=1 << 16)
        foreign = np.flatnonzero(labels >= manifest.num_classes)
        if len(foreign):
            images = tuple((foreign + start).tolist())
            yield Damage(file, f"labels outside 0..{manifest.num_classes - 1}", images)
    if is_whole and tuple(counts[: manifest.num_classes].tolist()) != manifest.class_counts:
        label = int(np.flatnonzero(counts[: manifest.num_classes] != np.array(manifest.class_counts))[0])
        yield Damage(
            LABELS,
            f"{counts[label]} images of class {manifest.classes[label].id}, the manifest says "
            f"{manifest.class_counts[label]}; other classes may differ too",
        )


def _check_pixels(location: Location, manifest: Manifest, on_progress: Callable[[int, int], None]) -> Iterator[Damage]:
    array = yield from _opened(location, PIXELS, "uint32", (manifest.num_images, manifest.height, manifest.width))
    if array is None:
        return
    sums = ChannelSums()
    for start, stop, images in _read_ahead(array, manifest):
        file = f"{PIXELS}/{shard_key(start // manifest.shard_images, 3)}"
        broken: dict[str, list[int]] = {}
        for index, words in enumerate(images, start=start):
            if isinstance(words, str):
                broken.setdefault(words, []).append(index)
                continue
            if np.any(words & np.uint32(UNUSED_BITS)):
                broken.setdefault("pixels with a low byte that is not 0", []).append(index)
            sums += ChannelSums.from_array(words.size, channel_sums(unpack_rgb(words)[None])[0])
        for what, indices in broken.items():
            yield Damage(file, what, tuple(indices))
        on_progress(stop, manifest.num_images)
    # With an image unread the sums must differ, and the damage has been named.
    if sums.num_pixels == manifest.num_images * manifest.height * manifest.width:
        yield from _check_channels(sums, manifest)


def _check_channels(sums: ChannelSums, manifest: Manifest) -> Iterator[Damage]:
    figures = (("mean", sums.mean(), manifest.channel_mean), ("std", sums.std(), manifest.channel_std))
    for name, found, noted in figures:
        if found != noted:
            yield Damage(PIXELS, f"the channel {name} is {found}, the manifest says {noted}: some pixel has changed")


def _read_ahead(array: ts.TensorStore, manifest: Manifest) -> Iterator[tuple[int, int, Images]]:
    """Runs of images ``start, stop`` with their words, each read while the one before is being looked at."""
    pieces = _pieces(manifest)
    start, stop = next(pieces)
    reading = array[start:stop].read()
    for following in [*pieces, None]:
        current, first, last = reading, start, stop
        if following is not None:
            start, stop = following
            reading = array[start:stop].read()
        try:
            yield first, last, current.result(timeout=READ_TIMEOUT_S)
        except _READ_ERRORS:
            yield first, last, _one_by_one(array, first, last)


def _pieces(manifest: Manifest) -> Iterator[tuple[int, int]]:
    """The images in runs of at most 64 MiB (or one image), none across two shard files."""
    most = max(1, _PIECE_BYTES // manifest.image_bytes)
    for shard in range(manifest.num_shards):
        first, last = manifest.shard_range(shard)
        for start in range(first, last, most):
            yield start, min(start + most, last)


def _one_by_one(array: ts.TensorStore, start: int, stop: int) -> Images:
    """Each image, or why it can't be read."""
    for index in range(start, stop):
        try:
            yield array[index].read().result(timeout=READ_TIMEOUT_S)
        except _READ_ERRORS as error:
            yield damage(error)


def _opened(
    location: Location, name: str, dtype: str, shape: tuple[int, ...]
) -> Generator[Damage, None, ts.TensorStore | None]:
    """Returns the array, or None after yielding the damage that keeps it from being checked."""
    try:
        array = read_array(location, name)
    except ShardError as error:
        yield Damage(f"{name}/zarr.json", str(error))
        return None
    if (array.dtype.name, array.shape) != (dtype, shape):
        found = f"{array.dtype.name} {list(array.shape)}"
        yield Damage(f"{name}/zarr.json", f"the array is {found}, the manifest says {dtype} {list(shape)}")
        return None
    return array


def _ranges(images: tuple[int, ...]) -> str:
    """Images as text, e.g. ``images 3, 7–9: ``; empty for none."""
    if not images:
        return ""
    runs = []
    for _, run in groupby(enumerate(images), key=lambda pair: pair[1] - pair[0]):
        indices = [index for _, index in run]
        runs.append(str(indices[0]) if len(indices) == 1 else f"{indices[0]}–{indices[-1]}")
    shown = runs if len(runs) <= 12 else [*runs[:12], f"… {len(images)} in all"]
    return f"image{'s' if len(images) > 1 else ''} {', '.join(shown)}: "
