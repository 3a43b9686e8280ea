"""Exclusive ownership of a split while it is being packed, so that two processes do not mix their shards.

On a local file system, a file lock (`preprocess.file_lock`) excludes a second process. In any store, even one without
locks, a record contains the id of the process that began packing last. An earlier process reads this record before it
records or finishes anything, and so detects that a later process took over. (A shard file that is being written at that
moment is still completed; `inspect-shards --verify` finds it.)
"""

from __future__ import annotations

import os
import sys
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from preprocess.shards.location import Location, ShardError
from preprocess.shards.split_files import delete_split_files

OWNER_KEY = "journal/owner"
LOCK_KEY = "journal/lock"

_LOCK_TRIES = 100


class Owner:
    """A context manager that holds exclusive permission to write to the split at ``location``.

    Args:
        location: the folder of the split.
        notify: called with a warning if the store cannot exclude a process that begins at the same moment.
    """

    def __init__(self, location: Location, notify: Callable[[str], None] = lambda _: None) -> None:
        self._location = location
        self._notify = notify
        self._run = uuid.uuid4().hex.encode()
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        folder = self._location.local_path
        if folder is not None:
            self._descriptor = self._lock(folder / LOCK_KEY)
        try:
            if not self._location.replace(OWNER_KEY, self._run):
                raise ShardError(self._busy())
            if self._location.is_remote and not self._location.refuses_to_replace(OWNER_KEY, self._run):
                self._notify(
                    f"warning: the store of {self._location.display} ignores conditional writes, so it cannot stop two "
                    "preprocess-imagenet commands from packing this split at the same time: start only one"
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
                delete_split_files(self._location, (OWNER_KEY, LOCK_KEY))
        finally:
            self._unlock()

    def check(self) -> None:
        """Check that no other process has taken over the split.

        Raises:
            ShardError: another process is packing this split.
        """
        if self._location.read(OWNER_KEY) != self._run:
            raise ShardError(self._busy())

    def _lock(self, path: Path) -> int | None:
        """Lock the file at ``path``, creating it if needed, and return its descriptor. On Windows, just return None."""
        if sys.platform == "win32":
            return None
        from preprocess.file_lock import FileLockedError, describe_failure, lock_file

        for _ in range(_LOCK_TRIES):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                return lock_file(path)
            except FileNotFoundError:
                continue  # another process has just removed the folder
            except FileLockedError as error:
                raise ShardError(self._busy()) from error
            except OSError as error:
                raise ShardError(f"{self._location.display}: {describe_failure(LOCK_KEY, error, 'DEST')}") from error
        raise ShardError(self._busy())

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _busy(self) -> str:
        return (
            f"{self._location.display}: another preprocess-imagenet process is packing this split; stop one of the "
            "two, then run this command again"
        )
