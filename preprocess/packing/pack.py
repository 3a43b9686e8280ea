"""Packs one split, from the plan to the manifest, and resumes packing that was interrupted.

Shards are filled in source order with the images that can be decoded, so there are no gaps. Each shard is written whole
and recorded in a journal. The bytes depend only on the plan, not on the number of workers or on interruptions. The
manifest is written last.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.packing.finish import failures_of, notes_of, write_manifest
from loopfeed.preprocess.packing.journal import Failure, Journal, read_failures
from loopfeed.preprocess.packing.owner import Owner
from loopfeed.preprocess.packing.pipeline import decode_in_order
from loopfeed.preprocess.packing.plan import PackSettings, check_same_plan, decoding_version, make_plan
from loopfeed.preprocess.packing.repair import repair_split
from loopfeed.preprocess.packing.shard_writer import ShardWriter
from loopfeed.preprocess.packing.split_state import (
    CLEARING,
    check_ours,
    check_room_of_new,
    find_complete,
    version_to_pack,
    with_existing_shard_images,
)
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import FORMAT_VERSION, MANIFEST_KEY, Manifest
from loopfeed.preprocess.shards.split_files import JOURNAL, delete_lock_files, delete_split_files, split_files
from loopfeed.preprocess.shards.verify import find_lost_files
from loopfeed.preprocess.synced_folders import sync_folder

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.targets import SplitTargets
    from loopfeed.preprocess.sources.listing import SourceSplit


@dataclass(frozen=True)
class PackProgress:
    """Progress in source images: ``done`` of ``total`` have been processed, and ``failed`` of those were left out."""

    done: int
    total: int
    failed: int


@dataclass(frozen=True)
class PackResult:
    """The result of packing a split.

    Attributes:
        manifest: the manifest of the split.
        failures: the images left out, in source order.
        was_complete: whether the split was already complete with the same settings.
        num_resumed: number of source images processed by an earlier, interrupted run.
        repaired: the files of a complete split that were missing or damaged and were packed again.
        notes: what to say about the images; nothing if the split was complete.
    """

    manifest: Manifest
    failures: tuple[Failure, ...]
    was_complete: bool = False
    num_resumed: int = 0
    repaired: tuple[str, ...] = ()
    notes: DecodeNotes = NOTHING


def pack_split(
    source: SourceSplit,
    location: Location,
    settings: PackSettings,
    *,
    overwrite: bool = False,
    on_progress: Callable[[PackProgress], None] | None = None,
    targets: SplitTargets | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> PackResult:
    """Pack ``source`` into the folder ``location``. If packing with the same plan was interrupted there, resume it.

    Args:
        source: the images.
        location: the split's folder, e.g. ``open_location(dest).child("train")``.
        settings: how to pack.
        overwrite: whether to delete the existing pack and start over.
        on_progress: called on the calling thread after each block of images.
        targets: the targets of the images, which are packed instead of their classes; None packs the classes.
        notify: called with warnings about the store.

    Raises:
        ShardError: the folder contains something else or a pack with other settings, the store can't be written, no
            image could be packed, or an image can't be packed and ``on_error`` is ``"fail"``. Finished shards are kept,
            and the next call continues after them.
        KeyboardInterrupt: re-raised once the shard being written is recorded; run again to continue.
    """
    if not overwrite and settings.shard_images is None:
        settings = with_existing_shard_images(location, settings)
    version = FORMAT_VERSION if overwrite else version_to_pack(location)
    plan = make_plan(source, settings, targets, format_version=version)
    manifest = None if overwrite else find_complete(location, plan)
    if manifest is not None and is_whole(location, manifest):
        return complete_result(location, manifest)
    # Checked before the first file is written, so that a folder with other files stays unchanged.
    check_ours(location)
    with Owner(location, notify=notify) as owner:
        return _pack(source, targets, location, Journal(location, owner), plan, settings, overwrite, on_progress)


def _pack(
    source: SourceSplit,
    targets: SplitTargets | None,
    location: Location,
    journal: Journal,
    plan: dict[str, Any],
    settings: PackSettings,
    overwrite: bool,
    on_progress: Callable[[PackProgress], None] | None,
) -> PackResult:
    manifest = _begin(location, journal, plan, settings, len(source), overwrite=overwrite)
    if manifest is not None:
        repaired = make_whole(source, targets, location, journal, settings, manifest, on_progress)
        journal.delete()
        return complete_result(location, manifest, repaired)
    records = journal.records(plan)
    num_resumed = records[-1].stop if records else 0
    total = len(source)
    writer = ShardWriter(location, journal, settings, total, records)
    num_failed = sum(len(record.failures) for record in records)
    if on_progress is not None:
        on_progress(PackProgress(num_resumed, total, num_failed))
    outcomes = decode_in_order(
        source,
        settings.rule,
        ranges=[range(num_resumed, total)],
        num_workers=settings.num_workers,
        layout=settings.layout,
        decoding=decoding_version(journal.plan() or plan),
    )
    with writer, closing(outcomes):
        done = num_resumed
        for block in outcomes:
            num_failed += sum(writer.take(outcome) for outcome in block)
            done += len(block)
            if on_progress is not None:
                on_progress(PackProgress(done, total, num_failed))
        writer.finish(total)
    manifest = write_manifest(source, targets, location, journal, plan, settings, writer.records)
    journal.delete()
    notes = notes_of(writer.records)
    return PackResult(manifest, failures_of(writer.records), num_resumed=num_resumed, notes=notes)


def complete_result(location: Location, manifest: Manifest, repaired: tuple[str, ...] = ()) -> PackResult:
    """Return the result for a split that was complete, once the files ``repaired`` are packed again."""
    return PackResult(manifest, read_failures(location, manifest), was_complete=True, repaired=repaired)


def is_whole(location: Location, manifest: Manifest) -> bool:
    """Return whether a split with a manifest has all its files and no journal."""
    return not location.list_keys(JOURNAL) and not find_lost_files(location, manifest)


def make_whole(
    source: SourceSplit,
    targets: SplitTargets | None,
    location: Location,
    journal: Journal,
    settings: PackSettings,
    manifest: Manifest,
    on_progress: Callable[[PackProgress], None] | None,
) -> tuple[str, ...]:
    """Pack the lost files of a split with a manifest again, and return their names; raise ShardError if impossible."""
    lost = find_lost_files(location, manifest)
    if not lost:
        return ()
    if (refused := next((each for each in lost if each.remedy), None)) is not None:
        raise ShardError(f"{location.display}{refused}")

    def show(done: int, total: int) -> None:
        if on_progress is not None:
            on_progress(PackProgress(done, total, 0))

    return repair_split(source, targets, location, journal, settings, manifest, lost, show)


def _begin(
    location: Location,
    journal: Journal,
    plan: dict[str, Any],
    settings: PackSettings,
    num_images: int,
    *,
    overwrite: bool,
) -> Manifest | None:
    """Prepare the folder for packing; return the manifest if the split is already complete, otherwise None."""
    # Check again: another process may have changed the folder before this one became its owner.
    check_ours(location)
    delete_lock_files(location)
    found = journal.plan()
    if overwrite and found != CLEARING:
        check_room_of_new(location, settings, num_images)
    if overwrite or found == CLEARING:
        _clear(location, journal)
        found = None
    else:
        manifest = find_complete(location, plan)
        if manifest is not None:
            return manifest
    if found is None:
        journal.begin(plan)
    else:
        check_same_plan(found, plan, location.display)
    return None


def _clear(location: Location, journal: Journal) -> None:
    """Delete the pack but no other files; after an interruption, the next run continues the deletion."""
    journal.begin(CLEARING)
    delete_split_files(location, [MANIFEST_KEY])
    if location.local_path is not None:
        sync_folder(location.local_path)
    delete_split_files(location, [key for key in split_files(location) if not key.startswith(JOURNAL)])
    journal.delete()
