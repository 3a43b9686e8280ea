"""Verifies every byte of a split against its checksums and against the digests in its manifest.

Continues after the first damage and reports each damaged file and image. Changes nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from itertools import chain, groupby
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.extents import are_outside
from loopfeed.preprocess.pixels import UNUSED_BITS
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import check_regular
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    EXTENTS,
    GROUPS,
    MAX_NUMBERS_BYTES,
    METADATA_KEY,
    NAME_OFFSETS,
    NAMES,
    PIXELS,
    WEIGHTS,
    damage,
    image_key,
    read_array,
    shard_key,
    words_digest,
)
from loopfeed.preprocess.shards.damages import Damage, with_names
from loopfeed.preprocess.shards.location import MAX_VALUE_BYTES, Location, ShardError, open_location
from loopfeed.preprocess.shards.manifest import FAILURES_KEY, MANIFEST_KEY, Manifest
from loopfeed.preprocess.shards.shard_sizes import describe_truncated, describe_wrong_end, describe_wrong_size
from loopfeed.preprocess.shards.split_arrays import are_weights, number_metadata, open_pixels
from loopfeed.preprocess.shards.split_files import JOURNAL
from loopfeed.preprocess.shards.splits import read_manifest
from loopfeed.preprocess.shards.targets import has_excess_bits
from loopfeed.preprocess.system_errors import reading_remedy

READ_TIMEOUT_S = 600.0
"""Time limit for reading one piece of at most 64 MiB, in seconds."""

_PIECE_BYTES = 64 << 20
type Fault = tuple[str, str]
"""Why an image can't be read, and what to do if it is perhaps not damaged, else ""."""
type Images = Iterable[NDArray[np.uint32] | Fault]
"""Images in order: the words ``uint32 [H, row_words]`` of each, or why it can't be read."""

_READ_ERRORS = (ValueError, OSError, RuntimeError, TimeoutError)


def verify_split(
    data: str,
    split: str,
    *,
    context: ts.Context | None = None,
    storage_options: Mapping[str, str] | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> tuple[Damage, ...]:
    """Check the split ``split`` of the pack at ``data``: files, checksums, metadata, labels or targets, and pixels.

    Args:
        data: a folder or a TensorStore URL.
        split: name of the split, e.g. ``train``.
        context: TensorStore's shared resources; needed only for ``memory://``.
        storage_options: how to reach a remote store, such as ``{"endpoint": "http://127.0.0.1:9000"}``.
        on_progress: called with (images read, N) after each piece.

    Returns:
        All damage found, ordered by file; empty if the split is intact.

    Raises:
        ShardError: the split does not exist or is unfinished, or its manifest is damaged or was changed.

    Example:
        >>> verify_split("data", "val")
        ()
    """
    # Not mapped, so that a file that is truncated in the meantime is an error of a single read.
    root = open_location(data, context=context, storage_options=storage_options)
    manifest = read_manifest(root, split)
    location = root.child(split)
    files = list(_check_files(location, manifest))
    unreadable = {each.file for each in files if each.is_unreadable}
    contents = (
        *_check_failures(location, manifest, unreadable),
        *chain.from_iterable(check_numbers(location, manifest, name, unreadable) for name in manifest.number_arrays),
        *_check_pixels(location, manifest, unreadable, on_progress or (lambda _done, _total: None)),
    )
    # A missing file is reported once, with its images if it has any.
    reported = {each.file for each in contents}
    rest = (*files, *_check_metadata(location, manifest, unreadable))
    found = (*(each for each in rest if each.file not in reported), *contents)
    return with_names(location, manifest, found)


def find_lost_files(location: Location, manifest: Manifest) -> tuple[Damage, ...]:
    """Check whether a split has all its files, without reading pixels.

    Shard files must exist and, if they are local, have the right size; all other files must be as they were
    written.

    Args:
        location: the folder of the split.
        manifest: its manifest.

    Returns:
        The damage found, once a file; empty if nothing is missing.
    """
    found = {each.file: each for each in _check_required(location, manifest, set(location.list_keys()))}
    unreadable = set(found)
    for shard in range(manifest.num_shards):
        file = image_key(shard)
        if file not in found and (what := describe_wrong_size(location, manifest, shard)) is not None:
            found[file] = Damage(file, what)
    for each in (
        *_check_failures(location, manifest, unreadable),
        *chain.from_iterable(check_numbers(location, manifest, name, unreadable) for name in manifest.number_arrays),
        *_check_metadata(location, manifest, unreadable),
    ):
        found.setdefault(each.file, each)
    # Other bytes in the manifest, with the same values, are no loss.
    found.pop(MANIFEST_KEY, None)
    return tuple(found[file] for file in sorted(found))


def _check_required(location: Location, manifest: Manifest, found: set[str]) -> Iterator[Damage]:
    """Yield the damage of each file that a split must have and that is missing or can't be read."""
    max_bytes = _max_bytes(manifest)
    for key in sorted(max_bytes):
        if (damage := _file_damage(location, key, max_bytes[key], is_listed=key in found)) is not None:
            yield damage


def _max_bytes(manifest: Manifest) -> dict[str, int]:
    """Return the keys of all files that a split must have, and the largest size of each in bytes."""
    expected = {MANIFEST_KEY, FAILURES_KEY, *(f"{name}/{METADATA_KEY}" for name in (PIXELS, *manifest.number_arrays))}
    max_bytes = dict.fromkeys(expected, MAX_VALUE_BYTES)
    images = [image_key(shard) for shard in range(manifest.num_shards)]
    max_bytes |= dict.fromkeys(images, manifest.max_shard_bytes)
    for name in manifest.number_arrays:
        rank, parts = manifest.shards_of(name).rank, range(manifest.num_parts(name))
        max_bytes |= dict.fromkeys([f"{name}/{shard_key(part, rank)}" for part in parts], MAX_NUMBERS_BYTES)
    return max_bytes


def _check_files(location: Location, manifest: Manifest) -> Iterator[Damage]:
    found = set(location.list_keys())
    yield from _check_required(location, manifest, found)
    if any(key.startswith(JOURNAL) for key in found):
        yield Damage(
            JOURNAL,
            "the folder belongs to a preprocess-imagenet command that is still running or was killed just before it "
            "finished; run the same command again to remove the folder",
        )
    for key in sorted(key for key in found - _max_bytes(manifest).keys() if not key.startswith(JOURNAL)):
        yield Damage(printable(key), "the file does not belong to the split")


def _file_damage(location: Location, key: str, max_bytes: int, *, is_listed: bool) -> Damage | None:
    """Return the damage if a required file can't be read. Even a listed key may be a broken link or a pipe."""
    folder = location.local_path
    if folder is None:
        return None if is_listed else Damage(key, "the file is missing")
    try:
        status = (folder / key).stat()
        check_regular(status, folder / key, max_bytes=max_bytes)
    except (FileNotFoundError, NotADirectoryError):
        return Damage(key, "the file is missing")
    except OSError as error:
        return Damage(key, str(error.strerror), is_unreadable=True, remedy=reading_remedy(error, ""))
    return None


def _check_failures(location: Location, manifest: Manifest, unreadable: set[str]) -> Iterator[Damage]:
    text = None if FAILURES_KEY in unreadable else location.read(FAILURES_KEY)
    if text is not None and hashlib.sha256(text).hexdigest() != manifest.failures_digest:
        yield Damage(FAILURES_KEY, "the file has changed since it was written")


def _check_metadata(location: Location, manifest: Manifest, unreadable: set[str]) -> Iterator[Damage]:
    """Check that no byte of the manifest or of the arrays' metadata has changed.

    A change that has no effect on this program may still affect other readers.
    """
    if location.read(MANIFEST_KEY) != manifest.to_json().encode():
        yield Damage(MANIFEST_KEY, "the values are unchanged, but the bytes differ from those written")
    for name, digest in manifest.metadata_digests.items():
        key = f"{name}/{METADATA_KEY}"
        text = None if key in unreadable else location.read(key)
        if text is not None and hashlib.sha256(text).hexdigest() != digest:
            yield Damage(key, "the file has changed since it was written")


def check_numbers(location: Location, manifest: Manifest, name: str, unreadable: set[str]) -> Iterator[Damage]:
    """Check one of the `number_arrays` of a manifest.

    Yields the damage of each file except those named ``unreadable``, which are known to be damaged.
    """
    metadata = number_metadata(manifest, name)
    array = yield from _opened(location, name, lambda: read_array(location, name, metadata), unreadable)
    if array is None:
        return
    digests: list[str] = []
    together = hashlib.sha256()
    has_invalid = False
    shards = manifest.shards_of(name)
    for part, (start, stop) in enumerate(shards.ranges(manifest.length_of(name))):
        file = f"{name}/{shard_key(part, shards.rank)}"
        if file in unreadable:
            continue
        try:
            numbers = array[start:stop].read().result(timeout=READ_TIMEOUT_S)
        except _READ_ERRORS as error:
            yield Damage(file, damage(error), remedy=reading_remedy(error, ""))
            continue
        digests.append(words_digest([numbers]))
        if name == manifest.label_array:
            together.update(np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("<")).data)
        if (wrong := describe_wrong_end(location, file, shards.per_shard // shards.per_chunk)) is not None:
            yield Damage(file, wrong)
        if (found := _invalid_numbers(manifest, name, numbers)) is not None:
            has_invalid = True
            what, rows = found
            yield Damage(file, what, () if name == NAME_OFFSETS else tuple((rows + start).tolist()))
    are_as_packed = tuple(digests) == (manifest.digests_of(name) or tuple(digests))
    if name == manifest.label_array:
        are_as_packed &= together.hexdigest() == manifest.labels_digest
    if len(digests) == manifest.num_parts(name) and not has_invalid and not are_as_packed:
        yield Damage(name, f"the {name} differ from those that were packed")


def _invalid_numbers(manifest: Manifest, name: str, numbers: NDArray[Any]) -> tuple[str, NDArray[np.intp]] | None:
    """Return what is wrong with numbers that no image can have, and their rows; None if all are possible."""
    if name in (CHECKSUMS, NAMES):
        return None
    if name == NAME_OFFSETS:
        what, are_invalid = "offsets beyond the bytes of the names, or descending", numbers > manifest.name_bytes
        are_invalid[1:] |= numbers[1:] < numbers[:-1]
    elif name == WEIGHTS:
        what, are_invalid = "weights that are negative or not finite", ~are_weights(numbers)
    elif name == GROUPS:
        what, are_invalid = f"groups outside 0..{manifest.num_groups - 1}", numbers >= manifest.num_groups
    elif name == EXTENTS:
        what = f"places outside the canvas of {manifest.width} × {manifest.height} pixels"
        are_invalid = are_outside(numbers, manifest.height, manifest.width)
    elif manifest.targets is None:
        what, are_invalid = f"labels outside 0..{manifest.num_classes - 1}", numbers >= manifest.num_classes
    elif manifest.targets.kind == "classes":
        what = f"bits of classes outside 0..{manifest.num_classes - 1}"
        are_invalid = has_excess_bits(numbers, manifest.num_classes)
    else:
        what, are_invalid = "targets that are not finite", ~np.isfinite(numbers).all(axis=1)
    rows = np.flatnonzero(are_invalid)
    return (what, rows) if len(rows) else None


def _check_pixels(
    location: Location, manifest: Manifest, unreadable: set[str], on_progress: Callable[[int, int], None]
) -> Iterator[Damage]:
    array = yield from _opened(location, PIXELS, lambda: open_pixels(location, manifest), unreadable)
    if array is None:
        return
    pieces = _read_ahead(array, manifest, unreadable)
    for shard, group in groupby(pieces, key=lambda piece: piece[0] // manifest.shard_images):
        file = image_key(shard)
        broken: dict[Fault, list[int]] = {}
        found = words_digest(_readable(group, broken, manifest, on_progress))
        truncation = describe_truncated(location, manifest, shard) if broken else None
        if truncation is not None:
            broken = {(truncation, ""): sorted(index for indices in broken.values() for index in indices)}
        for (what, remedy), indices in broken.items():
            yield Damage(file, what, tuple(indices), remedy=remedy)
        if not broken and found != manifest.shard_digests[shard]:
            yield Damage(file, "its images differ from those that were packed in this file")
        elif not broken and (wrong := describe_wrong_size(location, manifest, shard)) is not None:
            yield Damage(file, wrong)


def _readable(
    pieces: Iterable[tuple[int, int, Images]],
    broken: dict[Fault, list[int]],
    manifest: Manifest,
    on_progress: Callable[[int, int], None],
) -> Iterator[NDArray[np.uint32]]:
    """Yield the readable images of ``pieces``; add unreadable and invalid ones to ``broken``, grouped by fault."""
    for start, stop, images in pieces:
        for index, words in enumerate(images, start=start):
            if isinstance(words, tuple):
                broken.setdefault(words, []).append(index)
                continue
            if manifest.pixel_layout == "packed" and np.any(words & np.uint32(UNUSED_BITS)):
                broken.setdefault(("pixels whose low byte is not 0", ""), []).append(index)
            yield words
        on_progress(stop, manifest.num_images)


def _read_ahead(array: ts.TensorStore, manifest: Manifest, unreadable: set[str]) -> Iterator[tuple[int, int, Images]]:
    """Yield ``start, stop`` and the images of each piece, reading the next piece while the current one is checked."""
    pieces = (
        (start, stop)
        for start, stop in _pieces(manifest)
        if image_key(start // manifest.shard_images) not in unreadable
    )
    first_piece = next(pieces, None)
    if first_piece is None:
        return
    start, stop = first_piece
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
    """Yield ``start, stop`` of each piece, which is at most 64 MiB (but at least one image) of one shard file."""
    most = max(1, _PIECE_BYTES // manifest.image_bytes)
    for shard in range(manifest.num_shards):
        first, last = manifest.shard_range(shard)
        for start in range(first, last, most):
            yield start, min(start + most, last)


def _one_by_one(array: ts.TensorStore, start: int, stop: int) -> Images:
    """Yield each image, or the reason why it can't be read."""
    for index in range(start, stop):
        try:
            yield array[index].read().result(timeout=READ_TIMEOUT_S)
        except _READ_ERRORS as error:
            yield damage(error), reading_remedy(error, "")


def _opened(
    location: Location, name: str, open_array: Callable[[], ts.TensorStore], unreadable: set[str]
) -> Generator[Damage, None, ts.TensorStore | None]:
    """Open the array and return it; if that fails, yield the damage and return None."""
    key = f"{name}/{METADATA_KEY}"
    if key in unreadable:
        return None
    try:
        return open_array()
    except ShardError as error:
        cause = error.__cause__ or error
        if remedy := reading_remedy(cause, ""):
            yield Damage(key, damage(cause), remedy=remedy)
        # A missing file has already been reported.
        elif location.read(key) is not None:
            yield Damage(key, str(error).removeprefix(f"{location.display}{name}: "))
        return None
