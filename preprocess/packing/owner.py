"""Who is packing a split: one process at a time, so that no two mix their shards.

Locally a file lock (`preprocess.file_lock`) keeps a second process out. In any store, also one without locks, a record
with the name of the run tells the earlier of two processes that a later one took over, before it notes or finishes
anything more. (A shard file that was on its way in that moment still arrives; `inspect-shards --verify` finds it.)
"""

from __future__ import annotations

import os
import sys
import uuid
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
    """The right to write the split at ``location``; a context manager."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._run = uuid.uuid4().hex.encode()
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        folder = self._location.local_path
        if folder is not None:
            self._descriptor = self._lock(folder / LOCK_KEY)
        try:
            if not self._location.replace(OWNER_KEY, self._run):
                raise ShardError(self._busy())
        except BaseException:
            self._unlock()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            # What can't be tidied up is harmless: the next run takes the record over.
            with suppress(ShardError):
                self.check()
                # While the lock is held: who waits for this very file sees that it is gone and makes another.
                delete_split_files(self._location, (OWNER_KEY, LOCK_KEY))
        finally:
            self._unlock()

    def check(self) -> None:
        """Make sure that nobody took over.

        Raises:
            ShardError: another process packs this split.
        """
        if self._location.read(OWNER_KEY) != self._run:
            raise ShardError(self._busy())

    def _lock(self, path: Path) -> int | None:
        """Lock the file at ``path``, made if need be; None where the system has no locks at all."""
        if sys.platform == "win32":
            return None
        from preprocess.file_lock import FileLockedError, lock_file

        for _ in range(_LOCK_TRIES):
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                return lock_file(path)
            except FileNotFoundError:
                continue  # another process has just removed the folder
            except FileLockedError as error:
                raise ShardError(self._busy()) from error
            except OSError as error:
                raise ShardError(
                    f"{self._location.display}: can't write {LOCK_KEY}: {error.strerror}; choose another DEST or "
                    "mend its rights"
                ) from error
        raise ShardError(self._busy())

    def _unlock(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _busy(self) -> str:
        return (
            f"{self._location.display}: another preprocess-imagenet is packing this split; stop one, "
            "then run this command again"
        )
