"""Packs a split in parts, at once or one after another, on one or several machines that share the folder.

Each part writes its own blocks (`loopfeed.preprocess.packing.owner`) as shard files and records them in the journal.
Once all are there, one process turns them into the shards of a single machine (`loopfeed.preprocess.packing.recut`) and
writes the manifest. So the bytes of the finished split depend neither on the number of parts nor on their order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from loopfeed.preprocess.packing.finish import failures_of, notes_of, write_manifest
from loopfeed.preprocess.packing.journal import BLOCK_RECORDS, Journal, ShardRecord
from loopfeed.preprocess.packing.owner import OWNER_KEY, BusyError, Owner, PartOwner
from loopfeed.preprocess.packing.pack import PackProgress, PackResult, complete_result, is_whole, make_whole
from loopfeed.preprocess.packing.part import Part, block_range, describe_parts
from loopfeed.preprocess.packing.pipeline import DecodeBudgets, decode_in_order
from loopfeed.preprocess.packing.plan import PackSettings, check_same_plan, decoding_version, describe_count, make_plan
from loopfeed.preprocess.packing.recut import recut
from loopfeed.preprocess.packing.shard_writer import ShardWriter
from loopfeed.preprocess.packing.split_state import (
    CLEARING,
    check_ours,
    find_complete,
    version_to_pack,
    with_existing_shard_images,
)
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import image_key
from loopfeed.preprocess.shards.location import LOCK_SUFFIX, Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.split_files import PARTS, delete_lock_files, delete_split_files

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.targets import SplitTargets
    from loopfeed.preprocess.sources.listing import SourceSplit

OnProgress = Callable[[PackProgress], None]


class MissingShardsError(ShardError):
    """Error raised if a split cannot be finished because parts of it are missing."""


@dataclass(frozen=True)
class PartResult:
    """The result of packing a part of a split.

    Attributes:
        num_shards: number of shard files in the part.
        num_resumed: how many of them were written earlier.
        missing: numbers of the shard files that other parts have not written yet.
        finished: the finished split; None if shard files are missing, or another process is finishing it.
    """

    num_shards: int
    num_resumed: int
    missing: tuple[int, ...]
    finished: PackResult | None


@dataclass(frozen=True)
class SplitJob:
    """A split that is packed in parts: its source, its folder, the settings, and the plan without the parts."""

    source: SourceSplit
    location: Location
    settings: PackSettings
    targets: SplitTargets | None
    plan: dict[str, Any]

    @property
    def num_blocks(self) -> int:
        """Number of blocks."""
        return -(-len(self.source) // self.settings.resolved_shard_images)

    def block_range(self, block: int) -> range:
        """Return the indices of the source images of ``block``."""
        return block_range(block, self.settings.resolved_shard_images, len(self.source))

    def recorded(self, blocks: Sequence[int] | None = None) -> dict[int, ShardRecord]:
        """Return the records of those of ``blocks``, by default all, that are written."""
        return Journal(self.location, folder=BLOCK_RECORDS).recorded(self.plan, blocks)

    def missing(self) -> tuple[int, ...]:
        """Return the numbers of the blocks that are not written."""
        recorded = self.recorded()
        return tuple(block for block in range(self.num_blocks) if block not in recorded)

    def manifest(self) -> Manifest | None:
        """Return the manifest if the split is complete; raise ShardError if it has another plan."""
        return find_complete(self.location, self.plan, can_overwrite=False)

    def begin(self, num_parts: int) -> None:
        """Write the plan unless another part did; raise ShardError if the folder has another plan, or other files."""
        check_ours(self.location)
        plan = self.plan | {PARTS: num_parts}
        found = Journal(self.location).begin_once(plan)
        if found == CLEARING:
            raise ShardError(
                f"{self.location.display}: the deletion of an old pack was interrupted; pack it with --overwrite, or "
                "use another DEST"
            )
        check_same_plan(found, plan, self.location.display, can_overwrite=False)


def open_job(
    source: SourceSplit, location: Location, settings: PackSettings, targets: SplitTargets | None = None
) -> SplitJob:
    """Return the job of packing ``source`` into ``location`` in parts; raise ShardError as `make_plan` does."""
    if settings.shard_images is None:
        settings = with_existing_shard_images(location, settings)
    plan = make_plan(source, settings, targets, format_version=version_to_pack(location))
    return SplitJob(source, location, settings, targets, plan)


def pack_part(
    source: SourceSplit,
    location: Location,
    settings: PackSettings,
    part: Part,
    *,
    on_progress: OnProgress | None = None,
    targets: SplitTargets | None = None,
    notify: Callable[[str], None] = lambda _: None,
) -> PartResult:
    """Pack a part of ``source`` into the folder ``location``, and finish the split if no other part is missing.

    An interrupted part continues with its blocks that are not recorded. The arguments are those of `pack_split`.

    Raises:
        ShardError: as `pack_split`; another process packs the same part; or the pack was begun with other parts.
        KeyboardInterrupt: re-raised once the block being written is recorded; run again to continue.
    """
    job = open_job(source, location, settings, targets)
    blocks = part.blocks(job.num_blocks)
    if job.manifest() is not None:
        return PartResult(len(blocks), len(blocks), (), _finish_unless_busy(job, on_progress))
    job.begin(part.count)
    num_packed = 0
    # A part that is packed already needs no permission: a process that was killed while it finished may still hold it.
    if len(job.recorded(blocks)) < len(blocks):
        with PartOwner(location, part, notify=notify) as owner:
            num_packed = pack_blocks(job, blocks, owner, on_progress)
    num_resumed = len(blocks) - num_packed
    missing = () if job.manifest() is not None else job.missing()
    finished = None
    # In a store without locks, an owner may be another part that is finishing the split.
    if not missing and (location.local_path is not None or location.read(OWNER_KEY) is None):
        finished = _finish_unless_busy(job, on_progress)
    return PartResult(len(blocks), num_resumed, missing, finished)


def _finish_unless_busy(job: SplitJob, on_progress: OnProgress | None) -> PackResult | None:
    """Finish a split, and return None if another process is doing that."""
    try:
        return finish_job(job, on_progress)
    except BusyError:
        return None


def pack_blocks(
    job: SplitJob,
    blocks: Sequence[int],
    owner: Owner,
    on_progress: OnProgress | None = None,
    budgets: DecodeBudgets | None = None,
) -> int:
    """Pack those of ``blocks`` that are not recorded, and return how many those were.

    Raises:
        ShardError: as `pack_part`.
    """
    journal = Journal(job.location, owner, folder=BLOCK_RECORDS)
    recorded = job.recorded(blocks)
    owner.check()
    # The journal is deleted once there is a manifest. If there is none, no record had been deleted when they were read.
    if job.manifest() is not None:
        return 0
    wanted = [block for block in blocks if block not in recorded]
    done = sum(len(job.block_range(block)) for block in blocks if block in recorded)
    failed = sum(len(recorded[block].failures) for block in blocks if block in recorded)
    progress = _Progress(on_progress, sum(len(job.block_range(block)) for block in blocks), done, failed)
    # Unfinished files of a killed process; those of other parts may be in use.
    if (folder := job.location.local_path) is not None:
        for block in wanted:
            (folder / f"{image_key(block)}{LOCK_SUFFIX}").unlink(missing_ok=True)
    settings, ranges = job.settings, [job.block_range(block) for block in wanted]
    outcomes = decode_in_order(
        job.source,
        settings.rule,
        ranges=ranges,
        num_workers=settings.num_workers,
        layout=settings.layout,
        budgets=budgets,
        decoding=decoding_version(Journal(job.location).plan() or job.plan),
    )
    writer = ShardWriter(job.location, journal, settings, len(job.source), [])
    with writer, closing(outcomes):
        begun = ((block, each.start, each.stop) for block, each in zip(wanted, ranges, strict=True))
        writer.write_blocks(outcomes, begun, progress.add)
    return len(wanted)


class _Progress:
    """Counts the images of a part and reports them."""

    def __init__(self, on_progress: OnProgress | None, total: int, done: int, failed: int) -> None:
        self._on_progress, self._total, self._done, self._failed = on_progress, total, done, failed
        self.add(0, 0)

    def add(self, done: int, failed: int) -> None:
        self._done += done
        self._failed += failed
        if self._on_progress is not None:
            self._on_progress(PackProgress(self._done, self._total, self._failed))


def finish_parts(
    source: SourceSplit,
    location: Location,
    settings: PackSettings,
    *,
    on_progress: OnProgress | None = None,
    targets: SplitTargets | None = None,
) -> PackResult:
    """Finish a split of which all parts are packed. The arguments are those of `pack_split`.

    Raises:
        MissingShardsError: a part is missing.
        ShardError: the split was not packed in parts, or as `pack_split`.
    """
    job = open_job(source, location, settings, targets)
    if job.manifest() is None:
        check_ours(location)
        _check_none_missing(job, _num_parts(job))
    return finish_job(job, on_progress)


def finish_job(job: SplitJob, on_progress: OnProgress | None = None) -> PackResult:
    """Finish a split of which all blocks are recorded; raise ShardError if there are others.

    Raises:
        BusyError: another process is finishing the split.
    """
    location = job.location
    manifest = job.manifest()
    if manifest is not None and is_whole(location, manifest):
        return complete_result(location, manifest)
    with Owner(location) as owner:
        journal = Journal(location, owner)
        manifest = job.manifest()
        if manifest is not None:
            delete_lock_files(location)
            repaired = make_whole(job.source, job.targets, location, journal, job.settings, manifest, on_progress)
            _clean_up(job, journal, manifest)
            return complete_result(location, manifest, repaired)
        num_parts = _num_parts(job)
        recorded = job.recorded()
        _check_none_missing(job, num_parts)
        delete_lock_files(location)
        total = len(job.source)
        failed = sum(len(record.failures) for record in recorded.values())

        def show(done: int) -> None:
            if on_progress is not None:
                on_progress(PackProgress(done, total, failed))

        blocks = [recorded[block] for block in range(job.num_blocks)]
        records = recut(location, journal, job.plan, job.settings, blocks, show)
        show(total)
        manifest = write_manifest(job.source, job.targets, location, journal, job.plan, job.settings, records)
        _clean_up(job, journal, manifest)
        # Not those of the shards: images that moved to another one lost theirs.
        return PackResult(manifest, failures_of(records), notes=notes_of(blocks))


def _clean_up(job: SplitJob, journal: Journal, manifest: Manifest) -> None:
    """Delete the blocks beyond the last shard, which images that could not be packed left over, and the journal."""
    extra = range(len(manifest.shard_digests), job.num_blocks)
    delete_split_files(job.location, [image_key(block) for block in extra])
    journal.delete()


def _num_parts(job: SplitJob) -> int:
    """Return the number of parts of the unfinished pack; raise ShardError if there is none, or with another plan."""
    found = Journal(job.location).plan()
    if found is None:
        raise ShardError(
            f"{job.location.display} has no unfinished pack, so there is nothing to finish; start the parts first, "
            "with --part I/N"
        )
    num_parts = found.get(PARTS)
    if not isinstance(num_parts, int):
        check_same_plan(found, job.plan | {PARTS: 2}, job.location.display, can_overwrite=False)
    check_same_plan(found, job.plan | {PARTS: num_parts}, job.location.display, can_overwrite=False)
    assert isinstance(num_parts, int)
    return num_parts


def _check_none_missing(job: SplitJob, num_parts: int) -> None:
    missing = job.missing()
    if not missing:
        return
    what = f"{len(missing):,} of {quantity(job.num_blocks, 'shard')} {'is' if len(missing) == 1 else 'are'} missing"
    if num_parts == 1:
        raise MissingShardsError(f"{job.location.display}: {what}; continue with {describe_count(1)}")
    raise MissingShardsError(
        f"{job.location.display}: {what}: {describe_parts(missing, num_parts)}; start these parts again, or wait for "
        "those that are running"
    )
