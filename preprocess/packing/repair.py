"""Packs again what a finished split has lost: missing or truncated files, and changed ones of few bytes.

A file is only written if its content is that which the manifest records, so the split is byte-identical to the one that
was packed, or a ShardError says why it cannot be.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.packing.finish import (
    Numbers,
    column_numbers,
    column_of,
    create_metadata,
    label_numbers,
    target_numbers,
)
from loopfeed.preprocess.packing.journal import Failure, Journal, failures_text, read_failures
from loopfeed.preprocess.packing.pipeline import PackedImage, decode_in_order
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.packing.shard_writer import ShardWriter, transfer_timeout_s
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    EXTENTS,
    METADATA_KEY,
    PIXELS,
    column_metadata,
    damage,
    image_key,
)
from loopfeed.preprocess.shards.checksum import crc32c
from loopfeed.preprocess.shards.damages import Damage
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import FAILURES_KEY, Manifest
from loopfeed.preprocess.shards.split_arrays import open_pixels, pixel_metadata
from loopfeed.preprocess.shards.split_files import sync_written
from loopfeed.preprocess.shards.verify import check_numbers
from loopfeed.preprocess.system_errors import reading_remedy

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.targets import SplitTargets
    from loopfeed.preprocess.sources.listing import SourceSplit

_READ_BYTES = 16 << 20


def repair_split(
    source: SourceSplit,
    targets: SplitTargets | None,
    location: Location,
    journal: Journal,
    settings: PackSettings,
    manifest: Manifest,
    damages: Sequence[Damage],
    on_image: Callable[[int, int], None],
) -> tuple[str, ...]:
    """Pack the files of ``damages`` again, and return their names.

    Args:
        source, targets, settings: as for `loopfeed.preprocess.packing.pack.pack_split`; their plan is that of the
            split.
        location: the folder of the split.
        journal: the journal of this process, which owns the split.
        manifest: the manifest of the split.
        damages: what `loopfeed.preprocess.shards.verify.find_lost_files` found.
        on_image: called with the number of images that were decoded again, and that of all that must be.

    Raises:
        ShardError: the source no longer gives what was packed, or the store can't be read or written.
    """
    files = {each.file for each in damages}
    _write_metadata(location, manifest, files)
    if f"{EXTENTS}/{METADATA_KEY}" in files:
        # Without it the places could not be checked.
        files |= {each.file for each in check_numbers(location, manifest, EXTENTS, set())}
    if _lost_places(files) or (FAILURES_KEY in files and manifest.num_failures):
        _write_outcomes(source, location, journal, settings, manifest, files, on_image)
    elif FAILURES_KEY in files:
        location.write(FAILURES_KEY, b"")
    failed = [failure.index for failure in read_failures(location, manifest)]
    packed = np.delete(np.arange(len(source)), np.array(failed, np.int64))
    shards = [shard for shard in range(manifest.num_shards) if image_key(shard) in files]
    if shards:
        _pack_shards(source, location, journal, settings, manifest, packed, shards, on_image)
    arrays = {each.split("/")[0] for each in files}
    if manifest.label_array in arrays:
        _write_labels(source, targets, location, journal, manifest, packed, files)
    if arrays & manifest.column_digests.keys():
        _write_columns(source, location, journal, manifest, packed, files)
    if CHECKSUMS in arrays:
        numbers = column_of(CHECKSUMS, _checksums(location, manifest))
        if numbers.digests != manifest.checksum_digests:
            raise _lost(location, CHECKSUMS, "the images in the shard files are not those that were packed")
        _write_numbers(location, journal, numbers, files)
    sync_written(location)
    return tuple(sorted(files))


def _lost_places(files: set[str]) -> set[str]:
    return {each for each in files if each.split("/")[0] == EXTENTS} - {f"{EXTENTS}/{METADATA_KEY}"}


def _write_labels(
    source: SourceSplit,
    targets: SplitTargets | None,
    location: Location,
    journal: Journal,
    manifest: Manifest,
    packed: NDArray[np.int64],
    files: set[str],
) -> None:
    if targets is None:
        labels = np.array([source.image(index).label for index in packed.tolist()], np.uint16)
        numbers = label_numbers(labels, manifest.num_classes)
    else:
        numbers = target_numbers(targets, packed, manifest.num_classes)
    if numbers.manifest_fields["labels_digest"] != manifest.labels_digest:
        raise _lost(location, manifest.label_array, "the source now has others")
    _write_numbers(location, journal, numbers, files)


def _write_columns(
    source: SourceSplit,
    location: Location,
    journal: Journal,
    manifest: Manifest,
    packed: NDArray[np.int64],
    files: set[str],
) -> None:
    """Write the names, weights and groups again, as far as they were lost."""
    arrays = {each.split("/")[0] for each in files}
    for numbers in column_numbers(source, packed):
        if numbers.name in arrays:
            if numbers.digests != manifest.digests_of(numbers.name):
                raise _lost(location, numbers.name, "the source now has others")
            _write_numbers(location, journal, numbers, files)


def _write_outcomes(
    source: SourceSplit,
    location: Location,
    journal: Journal,
    settings: PackSettings,
    manifest: Manifest,
    files: set[str],
    on_image: Callable[[int, int], None],
) -> None:
    """Decode all images again, and write the places of whole pictures and the failures, as far as they were lost."""
    failures: list[Failure] = []
    places = np.empty(len(source), np.uint32)
    done = num_packed = 0
    outcomes = decode_in_order(
        source,
        settings.rule,
        ranges=[range(len(source))],
        num_workers=settings.num_workers,
        layout=settings.layout,
    )
    with closing(outcomes):
        for block in outcomes:
            failures += [each for each in block if isinstance(each, Failure)]
            extents = [each.extent for each in block if isinstance(each, PackedImage)]
            places[num_packed : num_packed + len(extents)] = [0 if each is None else each.to_word() for each in extents]
            num_packed, done = num_packed + len(extents), done + len(block)
            on_image(done, len(source))
    noted, numbers = failures_text(failures), column_of(EXTENTS, places[:num_packed])
    if hashlib.sha256(noted).hexdigest() != manifest.failures_digest:
        lost = FAILURES_KEY if FAILURES_KEY in files else EXTENTS
        raise _lost(location, lost, "other images of the source fail now, or for other reasons")
    if manifest.is_whole and numbers.digests != manifest.extent_digests:
        raise _lost(location, EXTENTS, "the pictures of the source now have other sizes")
    if _lost_places(files):
        _write_numbers(location, journal, numbers, files)
    location.write(FAILURES_KEY, noted)


def _write_numbers(location: Location, journal: Journal, numbers: Numbers, files: set[str]) -> None:
    journal.check_owner()
    # Damaged files first, because TensorStore reads a file before it writes a part of it.
    location.delete_keys([each for each in files if each.startswith(f"{numbers.name}/c/")])
    numbers.write(location)


def _write_metadata(location: Location, manifest: Manifest, files: set[str]) -> None:
    """Write the lost metadata of the pixels and the extents; the other arrays are written whole."""
    metadata = {PIXELS: pixel_metadata(manifest), EXTENTS: column_metadata(EXTENTS, manifest.num_images)}
    for name, values in metadata.items():
        if (key := f"{name}/{METADATA_KEY}") not in files:
            continue
        digest = create_metadata(location, name, values)
        if manifest.metadata_digests and digest != manifest.metadata_digests[name]:
            raise _lost(location, key, "this version of TensorStore writes it in another form")


def _pack_shards(
    source: SourceSplit,
    location: Location,
    journal: Journal,
    settings: PackSettings,
    manifest: Manifest,
    packed: NDArray[np.int64],
    shards: Sequence[int],
    on_image: Callable[[int, int], None],
) -> None:
    if manifest.codec != "raw":
        location.delete_keys([image_key(shard) for shard in shards])
    indices = [packed[slice(*manifest.shard_range(shard))] for shard in shards]
    total, done = sum(map(len, indices)), 0

    def show(num_images: int, _num_failures: int) -> None:
        nonlocal done
        done += num_images
        on_image(done, total)

    outcomes = decode_in_order(
        source,
        settings.rule,
        ranges=[each for shard in indices for each in _runs(shard)],
        num_workers=settings.num_workers,
        layout=settings.layout,
    )
    expected = {shard: manifest.shard_digests[shard] for shard in shards}
    writer = ShardWriter(location, journal, settings, manifest.num_images, [], expected_digests=expected)
    blocks = ((shard, int(each[0]), int(each[-1]) + 1) for shard, each in zip(shards, indices, strict=True))
    with writer, closing(outcomes):
        writer.write_blocks(outcomes, blocks, show)


def _runs(indices: NDArray[np.int64]) -> Iterator[range]:
    """Yield the runs of consecutive numbers in ascending ``indices``."""
    for run in np.split(indices, np.flatnonzero(np.diff(indices) != 1) + 1):
        yield range(int(run[0]), int(run[-1]) + 1)


def _checksums(location: Location, manifest: Manifest) -> NDArray[np.uint32]:
    """Return the CRC-32C, uint32 ``[N]``, of all images in the shard files."""
    array: Any = open_pixels(location, manifest)
    step = max(1, _READ_BYTES // manifest.image_bytes)
    timeout_s = transfer_timeout_s(location, step * manifest.image_bytes)
    found = np.empty(manifest.num_images, np.uint32)
    for start in range(0, manifest.num_images, step):
        stop = min(start + step, manifest.num_images)
        try:
            words = array[start:stop].read().result(timeout=timeout_s)
        except (ValueError, OSError, RuntimeError) as error:
            if remedy := reading_remedy(error, ""):
                raise ShardError(f"{location.display}{PIXELS}: {damage(error)}; {remedy}") from error
            raise _lost(location, CHECKSUMS, f"the images can't be read; {location.remedy}") from error
        found[start:stop] = [crc32c(np.ascontiguousarray(each, "<u4")) for each in words]
    return found


def _lost(location: Location, key: str, why: str) -> ShardError:
    return ShardError(
        f"{location.display}{key} is missing or damaged and can't be packed again: {why}; restore it, or pack the "
        "split again with --overwrite"
    )
