"""Exclusive ownership of a split while it is being packed, so that two processes do not mix their shards.

On a local file system, a file lock (`loopfeed.preprocess.file_lock`) excludes a second process. In any store, even one
without locks, a record contains the id of the process that began packing last. An earlier process reads this record
before it records or finishes anything, and so detects that a later process took over. (A shard file that is being
written at that moment is still completed; `inspect-shards --verify` finds it.)
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.regular_file import close_quietly
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.split_files import JOURNAL, check_has_no_links, delete_split_files
from loopfeed.preprocess.synced_folders import make_folders

OWNER_KEY = "journal/owner"
LOCK_KEY = "journal/lock"

_LOCK_TRIES = 100


class BusyError(ShardError):
    """Error raised if another process is packing the same split, or the same part of it."""


class Owner:
    """A context manager that holds exclusive permission to write to the split at ``location``.

    It is refused, with a ShardError, for a folder with links in the place of the split's files.

    Args:
        location: the folder of the split.
        run: the id of the owner, by default a new one; see `PartOwner`.
        notify: called with a warning if the store cannot exclude a process that begins at the same moment.
    """

    _owner_key, _lock_key = OWNER_KEY, LOCK_KEY
    _what = "this split"

    def __init__(
        self, location: Location, run: str | None = None, *, notify: Callable[[str], None] = lambda _: None
    ) -> None:
        self._location = location
        self._notify = notify
        self.run = run or uuid.uuid4().hex
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        folder = self._location.local_path
        check_has_no_links(self._location)
        if folder is not None:
            self._descriptor = self._lock(folder / self._lock_key)
        try:
            if not self._location.replace(self._owner_key, self.run.encode()):
                raise BusyError(self._busy())
            if self._location.is_remote and not self._location.refuses_to_replace(self._owner_key, self.run.encode()):
                self._notify(
                    f"warning: the store of {self._location.display} ignores conditional writes, so it cannot stop two "
                    f"preprocess-imagenet commands from packing {self._what} at the same time: start only one"
                )
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # Files that cannot be removed are harmless: the next run takes over the record.
            with suppress(ShardError):
                self.check()
                # Remove them while holding the lock: a process that waits for it then sees that its file is gone, and
                # creates another.
                self._delete_records()
        finally:
            self._unlock()

    def check(self) -> None:
        """Check that no other process has taken over the split.

        Raises:
            BusyError: another process is packing this split.
        """
        if self._location.read(self._owner_key) != self.run.encode():
            raise BusyError(self._busy())

    def _delete_records(self) -> None:
        delete_split_files(self._location, (self._owner_key, self._lock_key))

    def _lock(self, path: Path) -> int | None:
        """Lock the file at ``path``, creating it if needed, and return its descriptor. On Windows, just return None."""
        if sys.platform == "win32":
            return None
        from loopfeed.preprocess.file_lock import FileLockedError, describe_failure, lock_file

        for _ in range(_LOCK_TRIES):
            try:
                make_folders(path.parent)
                return lock_file(path)
            except FileNotFoundError:
                continue  # another process has just removed the folder
            except FileLockedError as error:
                raise BusyError(self._busy()) from error
            except OSError as error:
                raise ShardError(
                    f"{self._location.display}: {describe_failure(self._lock_key, error, 'DEST')}"
                ) from error
        raise BusyError(self._busy())

    def _unlock(self) -> None:
        if self._descriptor is not None:
            close_quietly(self._descriptor)
            self._descriptor = None

    def _busy(self) -> str:
        return (
            f"{self._location.display}: another preprocess-imagenet process is packing {self._what}; stop one "
            "of the two, then run this command again"
        )


class PartOwner(Owner):
    """Exclusive permission to write the blocks of one part of a split; see `loopfeed.preprocess.packing.parts`.

    Other parts have other owners. None of them may write while a process owns the whole split, to finish it or to pack
    it again. With the id ``run`` of an owner, another process may check on its behalf, without entering the context.
    """

    def __init__(
        self,
        location: Location,
        part: Part,
        run: str | None = None,
        *,
        notify: Callable[[str], None] = lambda _: None,
    ) -> None:
        super().__init__(location, run, notify=notify)
        record = f"{JOURNAL}parts/{part.number}-of-{part.count}"
        self._owner_key, self._lock_key = f"{record}.owner", f"{record}.lock"
        self._what = f"part {part} of the split"

    def check(self) -> None:
        """Check that no other process has taken over the part or the split; raise BusyError otherwise."""
        super().check()
        if self._location.read(OWNER_KEY) is not None:
            raise BusyError(
                f"{self._location.display}: another preprocess-imagenet process is finishing or replacing this split; "
                "run this command again once it has ended; if it was killed, run it with --finish first"
            )

    def _delete_records(self) -> None:
        # Another part may be about to write into an empty folder, so no folder is removed.
        self._location.delete_keys((self._owner_key, self._lock_key))
