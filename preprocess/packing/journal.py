"""The journal of an unfinished pack: one small record per finished shard, so that packing can resume.

A record is written after its shard file and contains everything that the manifest needs from that shard, so nothing is
read or decoded twice. The journal is deleted once the manifest is written.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.json_digest import json_digest
from loopfeed.preprocess.packing.channels import ChannelSums
from loopfeed.preprocess.packing.owner import LOCK_KEY, OWNER_KEY, Owner
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import PIXELS, image_key
from loopfeed.preprocess.shards.location import MAX_VALUE_BYTES, Location, ShardError
from loopfeed.preprocess.shards.manifest import FAILURES_KEY, Manifest
from loopfeed.preprocess.shards.split_files import JOURNAL, PLAN_KEY, delete_split_files, split_files

SHARD_RECORDS = f"{JOURNAL}shards/"
BLOCK_RECORDS = f"{JOURNAL}blocks/"
_RECORD_DIGEST, _NOTES, _EXTENTS = "sha256", "notes", "extents"
_FEW_SHARDS = 4
AGAIN = "pack with --overwrite or, in parts, into another DEST"
"""The remedy for an unfinished pack that cannot be continued. No part may overwrite, as others may be packing."""
# A path of 4,096 bytes, each escaped, and a reason.
_LONGEST_FAILURE_BYTES = 1 << 16


@dataclass(frozen=True)
class Failure:
    """An image that could not be packed.

    Attributes:
        index: its position in the source's pack order.
        path: its name in the source.
        label: its class, 0-based; 0 in a pack with targets.
        reason: why it could not be packed, in one line.
    """

    index: int
    path: str
    label: int
    reason: str

    def to_json(self) -> str:
        """Return the failure as a line of ``failures.jsonl``, without the newline."""
        # ASCII escapes, because a file name need not be UTF-8.
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, line: bytes) -> Failure:
        """Parse the output of `to_json`; raise TypeError or ValueError for anything else."""
        failure = cls(**json.loads(line))
        are_numbers = all(type(each) is int and 0 <= each < 1 << 48 for each in (failure.index, failure.label))
        if not are_numbers or not isinstance(failure.path, str) or not isinstance(failure.reason, str):
            raise TypeError("a line is not that of an image")
        return failure


def read_failures(location: Location, manifest: Manifest) -> tuple[Failure, ...]:
    """Return the failures recorded in the split at ``location``, as many as its manifest counts.

    Raises:
        ShardError: ``failures.jsonl`` is missing or damaged.
    """
    text = location.read(FAILURES_KEY, max_bytes=min(MAX_VALUE_BYTES, manifest.num_failures * _LONGEST_FAILURE_BYTES))
    where = f"{location.display}{FAILURES_KEY}"
    if text is None:
        raise ShardError(f"{where} is missing; pack the split again with --overwrite")
    try:
        if (found := text.count(b"\n")) != manifest.num_failures:
            raise ValueError(f"it has {quantity(found, 'line')}, not {manifest.num_failures:,}")
        return tuple(Failure.from_json(line) for line in text.split(b"\n")[:-1])
    except (TypeError, ValueError, RecursionError) as error:
        raise ShardError(f"{where} is damaged ({error}); pack the split again with --overwrite") from error


def failures_text(failures: Iterable[Failure]) -> bytes:
    """Return the content of ``failures.jsonl``."""
    return "".join(f"{failure.to_json()}\n" for failure in failures).encode()


@dataclass(frozen=True)
class ShardRecord:
    """The journal's record of a finished shard, which states the source images it covers and the contents of its file.

    Attributes:
        start: index of the first source image of the shard.
        stop: index one past the last source image; the next shard starts there.
        labels: uint16 ``[n]``, the classes of the images in the shard file; n is 0 if only failures were left.
        failures: the source images from ``start`` to ``stop`` that could not be packed.
        sums: channel sums of the images in the shard file.
        digest: SHA-256 of the shard file's pixels as little-endian words, hexadecimal.
        checksums: uint32 ``[n]``, the CRC-32C of each image in the shard file; ``[0]`` if images have no checksums.
        extents: uint32 ``[n]``, the words of `loopfeed.preprocess.extents`; ``[0]``, and not on disk, without a canvas.
        notes: what the pack should say about the images; on disk only if there is something to say.

    On disk there is one more field, the SHA-256 of all others.
    """

    start: int
    stop: int
    labels: NDArray[np.uint16]
    failures: tuple[Failure, ...]
    sums: ChannelSums
    digest: str
    checksums: NDArray[np.uint32]
    extents: NDArray[np.uint32]
    notes: DecodeNotes = NOTHING

    def to_json(self) -> str:
        """Return the record as JSON text."""
        values = {
            "start": self.start,
            "stop": self.stop,
            "labels": self.labels.tolist(),
            "failures": [asdict(failure) for failure in self.failures],
            "sums": asdict(self.sums),
            "digest": self.digest,
            "checksums": self.checksums.tolist(),
            **({_EXTENTS: self.extents.tolist()} if len(self.extents) else {}),
        } | ({_NOTES: self.notes.to_json()} if self.notes != NOTHING else {})
        return json.dumps(values | {_RECORD_DIGEST: json_digest(values)})

    @classmethod
    def from_json(cls, text: bytes, *, format_version: int, has_checksums: bool, has_extents: bool) -> ShardRecord:
        """Parse the output of `to_json`; raise KeyError, TypeError or ValueError for anything else.

        Args:
            text: the record.
            format_version: the version of the pack. A record of version 1 may have neither checksums nor a digest.
            has_checksums: whether the images of the pack have checksums.
            has_extents: whether they are whole pictures on a canvas.
        """
        values: dict[str, Any] = dict(json.loads(text))
        is_first = format_version == 1 and not {"checksums", _RECORD_DIGEST} & values.keys()
        if not is_first and values.pop(_RECORD_DIGEST) != json_digest(values):
            raise ValueError("the record has changed since it was written")
        num_checksums = len(values["labels"]) if has_checksums and not is_first else 0
        if len(values.get("checksums", ())) != num_checksums:
            raise ValueError(f"the record has {quantity(len(values['checksums']), 'checksum')}, not {num_checksums}")
        if len(values.get(_EXTENTS, ())) != len(values["labels"]) * has_extents:
            raise ValueError("the record must have an extent for each image of whole pictures, otherwise none")
        sums = values["sums"]
        return cls(
            start=values["start"],
            stop=values["stop"],
            labels=np.array(values["labels"], np.uint16),
            failures=tuple(Failure(**failure) for failure in values["failures"]),
            sums=ChannelSums(sums["num_pixels"], tuple(sums["total"]), tuple(sums["squares"])),
            digest=values["digest"],
            checksums=np.array(values.get("checksums", ()), np.uint32),
            extents=np.array(values.get(_EXTENTS, ()), np.uint32),
            notes=DecodeNotes.from_json(values.get(_NOTES, {})),
        )


class Journal:
    """The journal of a split that is being packed."""

    def __init__(self, location: Location, owner: Owner | None = None, *, folder: str = SHARD_RECORDS) -> None:
        """Open the journal of the split at ``location``.

        With ``owner``, nothing is recorded once another process has taken over the split. Records are in ``folder``:
        `SHARD_RECORDS` or, for a pack in parts, `BLOCK_RECORDS` (see `loopfeed.preprocess.packing.parts`).
        """
        self._location = location
        self._owner = owner
        self._folder = folder

    def plan(self) -> dict[str, Any] | None:
        """Return the plan of the unfinished pack, or None if there is no unfinished pack.

        Raises:
            ShardError: the plan is not JSON.
        """
        text = self._location.read(PLAN_KEY)
        if text is None:
            return None
        try:
            return dict(json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise ShardError(
                f"{self._location.display}{PLAN_KEY}: the plan of the unfinished pack is damaged; clear the folder "
                "by hand and pack again"
            ) from error

    def begin(self, plan: dict[str, Any]) -> None:
        """Write the plan; from then on, packing can resume after an interruption."""
        self._location.write(PLAN_KEY, json.dumps(plan).encode())

    def begin_once(self, plan: dict[str, Any]) -> dict[str, Any]:
        """Write the plan unless there is one, and return the plan that is there; of several processes, one writes."""
        while (found := self.plan()) is None:
            self._location.create(PLAN_KEY, json.dumps(plan).encode())
        return found

    def append(self, shard: int, record: ShardRecord) -> None:
        """Record shard ``shard`` as finished. Its file must already have been written."""
        self.check_owner()
        self._location.write(self._key(shard), record.to_json().encode())

    def check_owner(self) -> None:
        """Raise ShardError if another process has taken over the split."""
        if self._owner is not None:
            self._owner.check()

    def records(self, plan: Mapping[str, Any]) -> list[ShardRecord]:
        """Return the records of shards 0, 1, 2, …, ending before the first shard that is unfinished or lacks its file.

        Args:
            plan: the plan of the pack.

        Raises:
            ShardError: a record is unreadable or does not continue the previous one.
        """
        records: list[ShardRecord] = []
        for shard, record in sorted(self.recorded(plan).items()):
            if shard != len(records):
                break
            if record.start != (records[-1].stop if records else 0):
                raise ShardError(self._damaged(self._key(shard)))
            records.append(record)
        return records

    def recorded(self, plan: Mapping[str, Any], shards: Sequence[int] | None = None) -> dict[int, ShardRecord]:
        """Return the records of ``shards``, by default all, by number, without those whose shard file is missing.

        Raises:
            ShardError: a record is unreadable.
        """
        if shards is None:
            keys, searched = split_files(self._location, self._folder), [f"{PIXELS}/"]
        else:
            keys = [self._key(each) for each in shards]
            # One listing of all files takes less time than many listings of one.
            few = len(shards) <= _FEW_SHARDS
            searched = [image_key(each) for each in shards] if few else [f"{PIXELS}/"]
        files = {key for prefix in searched for key in self._location.list_keys(prefix)}
        found: dict[int, ShardRecord] = {}
        for key, text in zip(keys, self._location.read_all(keys), strict=True):
            shard = int(key.removeprefix(self._folder).removesuffix(".json"))
            if text is None:
                continue
            try:
                record = ShardRecord.from_json(
                    text,
                    format_version=plan["format_version"],
                    has_checksums=plan["checksum"],
                    has_extents="canvas" in plan["resize_rule"],
                )
            except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
                raise ShardError(self._damaged(key)) from error
            if not len(record.labels) or image_key(shard) in files:
                found[shard] = record
        return found

    def delete(self) -> None:
        """Delete the journal if it exists."""
        # Delete the plan last: while it exists, the remaining files are recognised as part of a pack.
        kept = (PLAN_KEY, OWNER_KEY, LOCK_KEY)
        delete_split_files(self._location, [key for key in split_files(self._location, JOURNAL) if key not in kept])
        delete_split_files(self._location, [PLAN_KEY])

    def _damaged(self, key: str) -> str:
        return f"{self._location.display}{key}: the journal of the unfinished pack is damaged; {AGAIN}"

    def _key(self, shard: int) -> str:
        return f"{self._folder}{shard:08d}.json"
