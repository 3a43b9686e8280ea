"""Writes a split's shards one after another; each shard is written as a whole and then recorded in the journal.

A raw shard in a local folder is written image by image (`loopfeed.preprocess.packing.shard_file`); any other shard is
filled in memory and written by TensorStore.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.decoding.notes import NOTHING
from loopfeed.preprocess.extents import num_pixels
from loopfeed.preprocess.packing.channels import ChannelSums
from loopfeed.preprocess.packing.journal import Failure, Journal, ShardRecord
from loopfeed.preprocess.packing.pipeline import Outcome, PackedImage
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.packing.shard_file import ShardFile
from loopfeed.preprocess.pixels import words_of_row
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.arrays import PIXELS, image_key, pixels_metadata, write_array
from loopfeed.preprocess.shards.checksum import crc32c
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from loopfeed.preprocess.shards.split_files import is_unsynced
from loopfeed.preprocess.shards.store_errors import write_fault
from loopfeed.preprocess.synced_folders import sync_file

SHARD_TIMEOUT_S = 1800.0
"""Time limit for writing one shard file to a mounted file system, in seconds."""

_LEAST_BYTES_PER_S = 1 << 20


def transfer_timeout_s(location: Location, num_bytes: int) -> float:
    """Return the time limit for reading or writing a file in seconds; for a remote store, enough for 1 MiB/s."""
    return location.timeout_s + num_bytes / _LEAST_BYTES_PER_S if location.is_remote else SHARD_TIMEOUT_S


class _StoredShard:
    """A shard for any store and codec, filled in memory and then written by TensorStore in one operation."""

    def __init__(self, array: ts.TensorStore, first: int, words: NDArray[np.uint32]) -> None:
        self._array, self._first, self._words = array, first, words
        self._num_images = 0

    def add(self, image: NDArray[np.uint32], _checksum: int | None) -> None:
        self._words[self._num_images] = image
        self._num_images += 1

    def commit(self) -> Any:
        # The transaction writes the file in one piece. It copies the words, so the buffer can be reused immediately.
        transaction = ts.Transaction()
        slot = self._array.with_transaction(transaction)[self._first : self._first + self._num_images]
        slot.write(self._words[: self._num_images]).result(timeout=SHARD_TIMEOUT_S)
        return transaction.commit_async()

    def discard(self) -> None:
        """Do nothing, because no file exists before `commit`."""


class _RewrittenShard(_StoredShard):
    """A stored shard that replaces an existing file.

    TensorStore would keep the images of that file beyond those of the shard, so it writes into memory.
    """

    def __init__(
        self,
        memory: Location,
        location: Location,
        key: str,
        array: ts.TensorStore,
        first: int,
        words: NDArray[np.uint32],
    ) -> None:
        super().__init__(array, first, words)
        self._memory, self._location, self._key = memory, location, key

    def commit(self) -> Any:
        super().commit().result(timeout=SHARD_TIMEOUT_S)
        encoded = self._memory.read(self._key)
        assert encoded is not None
        self._location.write(self._key, encoded, timeout_s=transfer_timeout_s(self._location, len(encoded)))
        self._memory.delete(self._key)
        written: Future[None] = Future()
        written.set_result(None)
        return written


class ShardWriter:
    """A writer that fills one shard while writing the previous shard, and records each written shard in the journal.

    Args:
        location: the split's folder.
        journal: where written shards are recorded.
        settings: how to pack.
        num_candidates: number of source images.
        records: the shards that are written already; the next one follows them.
        replaces_blocks: whether shard files replace existing ones, from which their own images may have been read. The
            journal then records a shard once its file is about to be replaced, because the images cannot be read again
            afterwards; see `loopfeed.preprocess.packing.recut`.
        expected_digests: the digests that shards must have to be written, by their numbers; see
            `loopfeed.preprocess.packing.repair`.
    """

    def __init__(
        self,
        location: Location,
        journal: Journal,
        settings: PackSettings,
        num_candidates: int,
        records: Sequence[ShardRecord],
        *,
        replaces_blocks: bool = False,
        expected_digests: Mapping[int, str] | None = None,
    ) -> None:
        self.records = list(records)
        self._expected_digests = expected_digests or {}
        self._location = location
        self._journal = journal
        self._settings, self._shard_images = settings, settings.resolved_shard_images
        self._folder = location.local_path if settings.codec == "raw" else None
        self._timeout_s = SHARD_TIMEOUT_S
        if self._folder is None:
            # The final number of images is not known yet, but the chunks of an array do not depend on its length.
            self._memory = open_location("memory://") if replaces_blocks else None
            self._array = write_array(self._memory or location, PIXELS, metadata_for(num_candidates, settings))
            height, width = settings.rule.stored_shape
            shape = (min(self._shard_images, num_candidates), height, words_of_row(width, settings.layout))
            self._words = np.empty(shape, np.uint32)
            self._timeout_s = transfer_timeout_s(location, self._words.nbytes)
        self._replaces_blocks = replaces_blocks
        self._number = len(records)
        self._writing: tuple[Any, int, ShardRecord] | None = None
        self._shard: ShardFile | _StoredShard | None = None
        self._start = records[-1].stop if records else 0
        self._clear()

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._finish_write()
        finally:
            if self._shard is not None:
                self._shard.discard()

    def add(self, image: PackedImage) -> None:
        """Add an image to the current shard."""
        words = np.ascontiguousarray(image.words, "<u4")
        checksum = crc32c(words) if self._settings.checksum else None
        with self._naming_shard(self._number):
            if self._shard is None:
                self._shard = self._begin_shard()
            self._shard.add(words, checksum)
        self._digest.update(words.data)
        if checksum is not None:
            self._checksums.append(checksum)
        if image.extent is not None:
            self._extents.append(image.extent.to_word())
        self._labels.append(image.label)
        self._sums += image.sums
        if image.notes is not NOTHING:
            self._notes += image.notes
        if len(self._labels) == self._shard_images:
            self._submit(image.index + 1)

    def take(self, outcome: Outcome) -> bool:
        """Add an image, or a failure, and return whether it was a failure.

        Raises:
            ShardError: it is a failure and ``on_error`` is ``"fail"``, or a shard can't be written.
        """
        if self._writing is not None and (self._writing[0] is None or self._writing[0].done()):
            self._finish_write()  # record it now: if the process is killed, it need not be written again
        if isinstance(outcome, PackedImage):
            self.add(outcome)
            return False
        if self._settings.on_error == "fail":
            raise ShardError(
                f"{printable(outcome.path)}: {outcome.reason}; remove the image or pack with --on-error skip"
            )
        self._failures.append(outcome)
        return True

    def write_blocks(
        self,
        outcomes: Iterable[list[Outcome]],
        blocks: Iterable[tuple[int, int, int]],
        on_outcomes: Callable[[int, int], None],
    ) -> None:
        """Write the images of several shard files, and wait until they are on disk.

        Args:
            outcomes: the images, in ascending order; no list has images of two files.
            blocks: the number of each file, its first index, and one past its last.
            on_outcomes: called after each list with the number of its outcomes, and how many of them were failures.

        Raises:
            ShardError: as `take`.
        """
        left, stop = iter(blocks), 0
        for each in outcomes:
            if stop == 0:
                number, start, stop = next(left)
                self.begin_block(number, start)
            on_outcomes(len(each), sum(self.take(outcome) for outcome in each))
            if each[-1].index + 1 == stop:
                self.end_block(stop)
                stop = 0
        self.finish(0)

    def begin_block(self, block: int, start: int) -> None:
        """Let the next image be the first of shard file ``block``; ``start`` is the first index of the block."""
        assert not self._labels
        assert not self._failures
        self._number, self._start = block, start

    def end_block(self, stop: int) -> None:
        """Write the current shard, which may be incomplete or empty; ``stop`` is one past its last source image."""
        if self._start < stop:
            self._submit(stop)

    def finish(self, stop: int) -> None:
        """Write the last shard, as `end_block` does, and wait until it is on disk."""
        self.end_block(stop)
        self._finish_write()

    def _begin_shard(self) -> ShardFile | _StoredShard:
        if self._folder is None:
            first, key = self._number * self._shard_images, image_key(self._number)
            if self._memory is not None:
                return _RewrittenShard(self._memory, self._location, key, self._array, first, self._words)
            self._location.make_folder(key)
            return _StoredShard(self._array, first, self._words)
        path = self._folder / image_key(self._number)
        return ShardFile(path, shard_images=self._shard_images)

    def _clear(self) -> None:
        self._labels: list[int] = []
        self._checksums: list[int] = []
        self._extents: list[int] = []
        self._failures: list[Failure] = []
        self._notes = NOTHING
        self._sums = np.zeros((2, 3), np.int64)
        self._digest = hashlib.sha256()

    def _submit(self, stop: int) -> None:
        self._finish_write()
        labels = np.array(self._labels, np.uint16)
        extents, canvas = np.array(self._extents, np.uint32), self._settings.rule.stored_shape
        # What is beside a picture is black, and is not counted.
        total = num_pixels(extents) if len(extents) else len(labels) * math.prod(canvas)
        sums = ChannelSums.from_array(total, self._sums)
        record = ShardRecord(
            start=self._start,
            stop=stop,
            labels=labels,
            failures=tuple(self._failures),
            sums=sums,
            digest=self._digest.hexdigest(),
            checksums=np.array(self._checksums, np.uint32),
            extents=extents,
            notes=self._notes,
        )
        if record.digest != self._expected_digests.get(self._number, record.digest):
            raise ShardError(
                f"{self._name(self._number)} is missing or damaged and can't be packed again: the images of the source "
                "now have other pixels; restore it, or pack the split again with --overwrite"
            )
        commit = None
        if self._replaces_blocks:
            self._journal.append(self._number, record)
        if self._shard is not None:
            self._journal.check_owner()
            with self._naming_shard(self._number):
                commit = self._shard.commit()
        self._shard = None
        self._writing = (commit, self._number, record)
        self._number += 1
        self._start = stop
        self._clear()

    def _finish_write(self) -> None:
        """Wait until the shard that is being written is on disk, then record it in the journal."""
        if self._writing is None:
            return
        commit, shard, record = self._writing
        try:
            if commit is not None:
                with self._naming_shard(shard):
                    commit.result(timeout=self._timeout_s)
                if is_unsynced(self._location):
                    sync_file(Path(self._location.spec["path"], image_key(shard)))
            if not self._replaces_blocks:
                self._journal.append(shard, record)
        except Exception:
            # Do not wait for a failed shard again. After an interruption, which is no Exception, wait once more.
            self._writing = None
            raise
        self._writing = None
        self.records.append(record)

    def _name(self, shard: int) -> str:
        return f"{self._location.display}{image_key(shard)}"

    def _naming_shard(self, shard: int) -> AbstractContextManager[None]:
        return naming_writes(self._location, image_key(shard), self._timeout_s, f" to continue at shard {shard}")


@contextmanager
def naming_writes(location: Location, key: str, timeout_s: float, then: str = "") -> Iterator[None]:
    """Convert errors of a write into a ShardError that names ``key``; ``then`` is what the next run does."""
    name, again = f"{location.display}{key}", "run the same command again"
    try:
        yield
    except TimeoutError as error:
        raise ShardError(
            f"{name} was not written within {timeout_s:.0f} s; check the disk or the network, then {again}"
        ) from error
    except (ValueError, OSError, RuntimeError) as error:
        outage, again = location.outage(error), again + then
        fault = write_fault(error, again) if outage is None else f"{outage}, then {again}"
        raise ShardError(f"{name} can't be written: {fault}") from error


def metadata_for(num_images: int, settings: PackSettings) -> dict[str, Any]:
    """Return the Zarr metadata of the pixel array for ``num_images`` images."""
    height, width = settings.rule.stored_shape
    return pixels_metadata(
        num_images,
        height,
        words_of_row(width, settings.layout),
        shard_images=settings.resolved_shard_images,
        codec=settings.codec,
        checksum=settings.checksum,
    )
