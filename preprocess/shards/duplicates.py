"""Finds images with exactly the same pixels: in two splits of a pack, or twice in one split under two labels.

The checksums that a pack has narrow the search, so that few images are read. Owns the search; knows no output.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import CHECKSUMS, EXTENTS
from loopfeed.preprocess.shards.checksum import crc32c
from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.shards.reader import ShardSplit, list_splits, open_split
from loopfeed.preprocess.shards.split_arrays import open_numbers
from loopfeed.preprocess.shards.stored_pixels import without_maps

MOST_COMPARED = 1024
"""How many images are read where the search must be quick."""
_PIECE_BYTES = 64 << 20
_READ_TIMEOUT_S = 600.0
_FIRST = 3

type OnProgress = Callable[[str, int, int], None]
"""(name of a split, images read, images to read)."""


@dataclass(frozen=True)
class SameImage:
    """An image, and one with its pixels: their indices, and their names, which are None in packs without names."""

    index: int
    name: str | None
    other_index: int
    other_name: str | None

    def __str__(self) -> str:
        return f"{_shown(self.index, self.name)} = {_shown(self.other_index, self.other_name)}"


@dataclass(frozen=True)
class SamePixels:
    """Images of a split with exactly the pixels, and the extents, of images of another split, or under another label.

    Attributes:
        split: the split.
        other: the other split; the same one if its images have the pixels twice, under two labels.
        num_images: how many images of `split` these are.
        is_all: whether all images that could be the same were compared; otherwise there may be more.
        first: the first of them.
    """

    split: str
    other: str
    num_images: int
    is_all: bool
    first: tuple[SameImage, ...]

    def __str__(self) -> str:
        least = "" if self.is_all else "at least "
        images = quantity(self.num_images, "image")
        are = "is" if self.num_images == 1 else "are"
        what = f"{least}{images} of {self.split} {are} in {self.other} too, pixel for pixel"
        if self.split == self.other:
            what = f"{least}{images} of {self.split} {are} there under another label too, pixel for pixel"
        more = f" and {self.num_images - len(self.first):,} more" if self.num_images > len(self.first) else ""
        return f"{what}: {', '.join(map(str, self.first))}{more}"


def _shown(index: int, name: str | None) -> str:
    return f"image {index}" if name is None else f"{printable(name)} (image {index})"


def find_same_pixels(
    data: str,
    splits: Sequence[str],
    *,
    storage_options: Mapping[str, str] | None = None,
    most_compared: int | None = None,
    on_progress: OnProgress = lambda _name, _done, _total: None,
) -> list[SamePixels]:
    """Return which images of the splits of a pack have exactly the same pixels, as far as that matters.

    Splits are compared if their images have the same size and layout. Memory: 24 bytes per image, 64 MiB of pixels, and
    50 bytes per image that is read.

    Args:
        data: a folder or a TensorStore URL.
        splits: the names of complete splits.
        storage_options: how to reach a remote store.
        most_compared: read at most so many images, and none of splits without checksums; None reads what is needed.
        on_progress: called after each piece that was read.

    Raises:
        ShardError: a split is damaged, or can't be read.
    """
    alike: dict[tuple[object, ...], list[str]] = defaultdict(list)
    opened: dict[str, ShardSplit] = {}
    try:
        for name in splits:
            split = opened[name] = open_split(data, name, storage_options=storage_options)
            if most_compared is None or split.manifest.checksum_digests:
                manifest = split.manifest
                alike[manifest.height, manifest.width, manifest.pixel_layout, manifest.is_whole].append(name)
        return [
            each
            for names in alike.values()
            for each in _same_pixels({name: opened[name] for name in names}, most_compared, on_progress)
        ]
    finally:
        for split in opened.values():
            split.close()


def same_pixels_warnings(data: str, *, storage_options: Mapping[str, str] | None = None) -> list[str]:
    """Return a warning for each two splits of a pack, and each split, that have the same images; a quick search.

    A pack that can't be read has none: whoever reads it reports it.
    """
    with suppress(ShardError):
        splits = list_splits(data, storage_options=storage_options)
        found = find_same_pixels(data, splits, storage_options=storage_options, most_compared=MOST_COMPARED)
        return [f"warning: {each}" for each in found]
    return []


def _same_pixels(
    splits: Mapping[str, ShardSplit], most_compared: int | None, on_progress: OnProgress
) -> Iterator[SamePixels]:
    """Yield what is the same in splits whose images have the same size and layout."""
    starts = np.cumsum([0, *(each.num_images for each in splits.values())])
    keys = np.concatenate([_keys(name, split, on_progress) for name, split in splits.items()])
    places, is_all = _candidates(keys, most_compared)
    del keys
    digests, labels = np.empty((len(places), 2), np.uint64), np.empty(len(places), np.uint64)
    for (name, split), start, stop in zip(splits.items(), starts, starts[1:], strict=False):
        rows = np.flatnonzero((places >= start) & (places < stop))
        _read(name, split, places[rows] - start, rows, digests, labels, on_progress)
    order = np.lexsort((places, digests[:, 1], digests[:, 0]))
    places, digests, labels = places[order], digests[order], labels[order]
    groups = np.cumsum(np.any(digests != np.roll(digests, 1, axis=0), axis=1)) if len(places) else places
    of_split = np.searchsorted(starts, places, "right") - 1
    found = _Found(tuple(splits.items()), starts, places, groups, of_split, is_all)
    for number in range(len(splits)):
        yield from found.under_two_labels(number, labels)
    for one, other in combinations(range(len(splits)), 2):
        yield from found.in_both(one, other)


def _keys(name: str, split: ShardSplit, on_progress: OnProgress) -> NDArray[np.uint64]:
    """Return a number for each image, uint64 ``[N]``, which is equal if the pixels and the extents are."""
    location, indices = without_maps(split.location), np.arange(split.num_images)
    checksums, extents = (open_numbers(location, split.manifest, array) for array in (CHECKSUMS, EXTENTS))
    deadline = time.monotonic() + _READ_TIMEOUT_S
    keys = np.zeros(len(indices), np.uint64)
    if checksums is not None:
        keys[:] = checksums.read(indices, deadline)
    else:
        for at, _, words in _pieces(name, split, indices, on_progress):
            keys[at : at + len(words)] = [crc32c(np.ascontiguousarray(each, "<u4")) for each in words]
    if extents is not None:
        keys |= extents.read(indices, deadline).astype(np.uint64) << np.uint64(32)
    return keys


def _candidates(keys: NDArray[np.uint64], most: int | None) -> tuple[NDArray[np.int64], bool]:
    """Return the places of keys that are there more than once, up to ``most``, and whether these are all."""
    order = np.argsort(keys, kind="stable")
    ordered = keys[order]
    follows = ordered[1:] == ordered[:-1]
    places = order[np.append(follows, False) | np.insert(follows, 0, False)] if len(keys) else order
    is_all = most is None or len(places) <= most
    return np.sort(places if is_all else places[:most]), is_all


def _read(
    name: str,
    split: ShardSplit,
    indices: NDArray[np.int64],
    rows: NDArray[np.intp],
    digests: NDArray[np.uint64],
    labels: NDArray[np.uint64],
    on_progress: OnProgress,
) -> None:
    """Read images, and write the digest of each one's pixels and extent, and its label as a number, to its row."""
    for at, words_of_labels, words in _pieces(name, split, indices, on_progress):
        for place, (image, label) in enumerate(zip(words, words_of_labels, strict=True), at):
            extent, own = (label[:1], label[1:]) if split.manifest.is_whole else (label[:0], label)
            digest = hashlib.blake2b(np.ascontiguousarray(image, "<u4"), digest_size=16)
            digest.update(extent.tobytes())
            digests[rows[place]] = np.frombuffer(digest.digest(), np.uint64)
            (labels[rows[place]],) = np.frombuffer(hashlib.blake2b(own.tobytes(), digest_size=8).digest(), np.uint64)


def _pieces(
    name: str, split: ShardSplit, indices: NDArray[np.int64], on_progress: OnProgress
) -> Iterator[tuple[int, NDArray[np.int32], NDArray[np.uint32]]]:
    """Yield the place in ``indices`` of each piece, its labels, int32 ``[b, words]``, and its pixels."""
    step = max(1, _PIECE_BYTES // split.manifest.image_bytes)
    for at in range(0, len(indices), step):
        some = indices[at : at + step]
        words = np.empty((len(some), split.height, split.row_words), np.uint32)
        labels = np.empty((len(some), *split.label_row), np.int32)
        split.read_into(some, words, labels, timeout_s=_READ_TIMEOUT_S)
        yield at, labels.reshape(len(some), -1), words
        on_progress(name, at + len(some), len(indices))


@dataclass(frozen=True, eq=False)
class _Found:
    """Images with their groups, which have the same pixels, in the order of groups and then of places.

    Attributes:
        splits: the splits by name.
        starts: the first place of each split, and the end of the last.
        places: int64 ``[n]``, the place of each image among the images of all splits.
        groups, of_split: integer ``[n]``, the number of its group, and of its split.
        is_all: whether these are all images that could be the same.
    """

    splits: tuple[tuple[str, ShardSplit], ...]
    starts: NDArray[np.int64]
    places: NDArray[np.int64]
    groups: NDArray[np.int64]
    of_split: NDArray[np.intp]
    is_all: bool

    def in_both(self, one: int, other: int) -> Iterator[SamePixels]:
        """Yield the images of the split ``other`` that are in the split ``one`` too, if there are any."""
        firsts: dict[int, int] = {}
        for row in np.flatnonzero(self.of_split == one).tolist():
            firsts.setdefault(int(self.groups[row]), row)
        rows = np.flatnonzero((self.of_split == other) & np.isin(self.groups, [*firsts]))
        yield from self._described(rows, lambda row: firsts[int(self.groups[row])], other, one)

    def under_two_labels(self, number: int, labels: NDArray[np.uint64]) -> Iterator[SamePixels]:
        """Yield the images of a split that are in it under another label too, if there are any."""
        own = np.flatnonzero(self.of_split == number)
        pairs = np.unique(np.stack([self.groups[own].astype(np.uint64), labels[own]], axis=1), axis=0)
        numbers, counts = np.unique(pairs[:, 0], return_counts=True)
        rows = own[np.isin(self.groups[own], numbers[counts > 1].astype(np.int64))]

        def other_of(row: int) -> int:
            return next(
                int(each) for each in rows if self.groups[each] == self.groups[row] and labels[each] != labels[row]
            )

        yield from self._described(rows, other_of, number, number)

    def _described(
        self, rows: NDArray[np.intp], other_of: Callable[[int], int], number: int, other: int
    ) -> Iterator[SamePixels]:
        if not len(rows):
            return
        first = rows[np.argsort(self.places[rows], kind="stable")[:_FIRST]].tolist()
        others = [other_of(row) for row in first]
        images = zip(
            *self._indices_and_names(first, number),
            *self._indices_and_names(others, other),
            strict=True,
        )
        (name, _), (other_name, _) = self.splits[number], self.splits[other]
        yield SamePixels(name, other_name, len(rows), self.is_all, tuple(SameImage(*each) for each in images))

    def _indices_and_names(self, rows: list[int], number: int) -> tuple[list[int], list[str] | list[None]]:
        indices = self.places[rows] - self.starts[number]
        names = self.splits[number][1].names(indices)
        return indices.tolist(), [None] * len(rows) if names is None else names
