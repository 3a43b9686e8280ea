"""Packs one split, from the plan to the manifest, and resumes packing that was interrupted.

Shards are filled in source order with the images that can be decoded, so there are no gaps. Each shard is written whole
and recorded in a journal. The bytes depend only on the plan, not on the number of workers or on interruptions. The
manifest is written last.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from preprocess.packing.channels import ChannelSums
from preprocess.packing.journal import Failure, Journal, ShardRecord, read_failures
from preprocess.packing.numbers import checksum_numbers, create_metadata, label_numbers, target_numbers
from preprocess.packing.owner import LOCK_KEY, OWNER_KEY, Owner
from preprocess.packing.pipeline import PackedImage, decode_in_order
from preprocess.packing.plan import PackSettings, check_same_plan, is_plan, make_plan, plan_of
from preprocess.packing.shard_writer import ShardWriter, metadata_for
from preprocess.printable import printable
from preprocess.quantities import quantity
from preprocess.shards.arrays import CHECKSUMS, PIXELS
from preprocess.shards.location import Location, ShardError
from preprocess.shards.manifest import FAILURES_KEY, FORMAT_VERSION, MANIFEST_KEY, Manifest, is_manifest
from preprocess.shards.split_files import JOURNAL, PLAN_KEY, delete_lock_files, delete_split_files, split_files

if TYPE_CHECKING:
    from preprocess.shards.targets import SplitTargets
    from preprocess.sources.listing import SourceSplit

# Replaces the plan in the journal while an old pack is being deleted.
_CLEARING = {"clearing": True}


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
    """

    manifest: Manifest
    failures: tuple[Failure, ...]
    was_complete: bool
    num_resumed: int


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
        settings = _with_existing_shard_images(location, settings)
    plan = make_plan(source, settings, targets)
    if not overwrite and targets is None:
        plan["format_version"] = _version_to_pack(location)
    manifest = None if overwrite else _complete(location, plan)
    if manifest is not None and not location.list_keys(JOURNAL):
        return PackResult(manifest, read_failures(location), was_complete=True, num_resumed=0)
    # Checked before the first file is written, so that a folder with other files stays unchanged.
    _check_ours(location)
    with Owner(location, notify) as owner:
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
    manifest = _begin(location, journal, plan, overwrite=overwrite)
    if manifest is not None:
        journal.delete()
        return PackResult(manifest, read_failures(location), was_complete=True, num_resumed=0)
    records = journal.records(plan)
    num_resumed = records[-1].stop if records else 0
    total = len(source)
    writer = ShardWriter(location, journal, settings, total, records)
    num_failed = sum(len(record.failures) for record in records)
    if on_progress is not None:
        on_progress(PackProgress(num_resumed, total, num_failed))
    outcomes = decode_in_order(
        source, settings.rule, start=num_resumed, num_workers=settings.num_workers, layout=settings.layout
    )
    with writer, closing(outcomes):
        done = num_resumed
        for block in outcomes:
            for outcome in block:
                if isinstance(outcome, PackedImage):
                    writer.add(outcome)
                    continue
                if settings.on_error == "fail":
                    raise ShardError(
                        f"{printable(outcome.path)}: {outcome.reason}; remove the image or pack with --on-error skip"
                    )
                writer.add_failure(outcome)
                num_failed += 1
            done += len(block)
            if on_progress is not None:
                on_progress(PackProgress(done, total, num_failed))
        writer.finish(total)
    manifest = _finish(source, targets, location, journal, plan, settings, writer.records)
    journal.delete()
    return PackResult(manifest, _failures(writer.records), was_complete=False, num_resumed=num_resumed)


def _with_existing_shard_images(location: Location, settings: PackSettings) -> PackSettings:
    """Return the settings with the ``shard_images`` of any existing pack, because the default may have changed."""
    found = Journal(location).plan()
    if found is None or not is_plan(found):
        text = location.read(MANIFEST_KEY)
        if text is None or not is_manifest(text):
            return settings
        found = plan_of(Manifest.from_json(text, where=f"{location.display}{MANIFEST_KEY}"))
    if found.get("resize_rule") != settings.rule.to_json():
        return settings  # packed with other settings, which is reported later
    return replace(settings, shard_images=found.get("shard_images"))


def _version_to_pack(location: Location) -> int:
    """Return the format version to write: the version of the unfinished pack if there is one, otherwise the newest."""
    found = (Journal(location).plan() or {}).get("format_version")
    return 1 if found == 1 else FORMAT_VERSION


def _complete(location: Location, plan: dict[str, Any]) -> Manifest | None:
    """Return the manifest, or None if the split is incomplete; raise ShardError if the split has a different plan."""
    text = location.read(MANIFEST_KEY)
    if text is None or Journal(location).plan() == _CLEARING:
        return None
    if not is_manifest(text):
        _check_ours(location)
    manifest = Manifest.from_json(text, where=f"{location.display}{MANIFEST_KEY}")
    # A complete pack remains valid whatever versions of the tools and of the format it was made with.
    unchecked = {"tool_versions": dict(manifest.tool_versions), "format_version": manifest.format_version}
    check_same_plan(plan_of(manifest), plan | unchecked, location.display)
    return manifest


def _check_ours(location: Location) -> None:
    """Raise ShardError if the folder contains files but no pack, to protect other programs' files."""
    plan = Journal(location).plan()
    if plan is not None and (plan == _CLEARING or is_plan(plan)):
        return
    text = location.read(MANIFEST_KEY)
    if text is not None and is_manifest(text):
        return
    others = [key for key in location.list_keys() if key not in (OWNER_KEY, LOCK_KEY)]
    if others:
        named = next((key for key in (MANIFEST_KEY, PLAN_KEY) if key in others), others[0])
        raise ShardError(
            f"{location.display} contains files but no pack ({printable(named)}); choose an empty folder as DEST or "
            "clear this one by hand"
        )


def _begin(location: Location, journal: Journal, plan: dict[str, Any], *, overwrite: bool) -> Manifest | None:
    """Prepare the folder for packing; return the manifest if the split is already complete, otherwise None."""
    # Check again: another process may have changed the folder before this one became its owner.
    _check_ours(location)
    delete_lock_files(location)
    found = journal.plan()
    if overwrite or found == _CLEARING:
        _clear(location, journal)
        found = None
    else:
        manifest = _complete(location, plan)
        if manifest is not None:
            return manifest
    if found is None:
        journal.begin(plan)
    else:
        check_same_plan(found, plan, location.display)
    return None


def _clear(location: Location, journal: Journal) -> None:
    """Delete the pack but no other files; after an interruption, the next run continues the deletion."""
    journal.begin(_CLEARING)
    delete_split_files(location, [MANIFEST_KEY])
    delete_split_files(location, [key for key in split_files(location) if not key.startswith(JOURNAL)])
    journal.delete()


def _finish(
    source: SourceSplit,
    targets: SplitTargets | None,
    location: Location,
    journal: Journal,
    plan: dict[str, Any],
    settings: PackSettings,
    records: list[ShardRecord],
) -> Manifest:
    """Write the metadata, the labels or targets, the checksums, ``failures.jsonl`` and the manifest; return the latter.

    Raises:
        ShardError: no image could be packed, or the store can't be written.
    """
    labels = np.concatenate([record.labels for record in records])
    failures = _failures(records)
    if not len(labels):
        raise ShardError(
            f"none of the {quantity(len(source), 'image')} of {source.name!r} could be packed; correct the "
            "source. The first "
            f"failure is {printable(failures[0].path)}: {failures[0].reason}"
        )
    if targets is None:
        numbers = label_numbers(labels, len(source.classes))
    else:
        packed = np.delete(np.arange(len(source)), np.array([failure.index for failure in failures], np.int64))
        numbers = target_numbers(targets, packed, len(source.classes))
    checksums = None
    if settings.checksum and plan["format_version"] > 1:
        checksums = checksum_numbers(np.concatenate([record.checksums for record in records]))
    noted = "".join(f"{failure.to_json()}\n" for failure in failures).encode()
    journal.check_owner()
    metadata_digests = {PIXELS: create_metadata(location, PIXELS, metadata_for(len(labels), settings))}
    metadata_digests[numbers.name] = numbers.write(location)
    if checksums is not None:
        metadata_digests[CHECKSUMS] = checksums.write(location)
    fields = numbers.manifest_fields | {
        "failures_digest": hashlib.sha256(noted).hexdigest(),
        "checksum_digests": () if checksums is None else checksums.digests,
        "metadata_digests": metadata_digests,
    }
    if plan["format_version"] == 1:
        del fields["label_digests"], fields["metadata_digests"]
    manifest = _manifest_of(source, plan, settings, records, len(labels), fields)
    location.write(FAILURES_KEY, noted)
    journal.check_owner()
    location.write(MANIFEST_KEY, manifest.to_json().encode())
    return manifest


def _manifest_of(
    source: SourceSplit,
    plan: dict[str, Any],
    settings: PackSettings,
    records: list[ShardRecord],
    num_images: int,
    fields: dict[str, Any],
) -> Manifest:
    """Return the manifest of a split of ``num_images``; ``fields`` are those of the labels, and the digests."""
    sums = sum((record.sums for record in records), ChannelSums())
    return Manifest(
        format_version=plan["format_version"],
        num_images=num_images,
        height=settings.rule.size,
        width=settings.rule.size,
        layout=plan["layout"],
        codec=settings.codec,
        checksum=settings.checksum,
        shard_images=settings.resolved_shard_images,
        classes=tuple(source.classes),
        channel_mean=sums.mean(),
        channel_std=sums.std(),
        resize_rule=plan["resize_rule"],
        source_digest=plan["source_digest"],
        num_failures=sum(len(record.failures) for record in records),
        tool_versions=plan["tool_versions"],
        shard_digests=tuple(record.digest for record in records if len(record.labels)),
        **fields,
    )


def _failures(records: Sequence[ShardRecord]) -> tuple[Failure, ...]:
    return tuple(failure for record in records for failure in record.failures)
