"""A folder on this machine with copies of shard files of remote packs, for any number of processes at a time.

    DIR/<pack>/pixels/c/<shard>/0/0   a whole file, renamed to this place
    DIR/<pack>/incoming/<shard>       a file that is being written; its writer holds a lock on it
    DIR/<pack>/used/<shard>           its modification time is when the file was last used
    DIR/lock, DIR/size                held while room is made; the bytes of all files, or more

A pack is named by the digest of its manifest, which has the digests of all its shards, so a copy never becomes stale.
The size of a file counts from the moment that it is created, so that several writers together stay below the limit. A
kill leaves at most incoming files without a lock, which are removed later. Knows nothing of stores or images; files
that do not have these names are left alone.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from loopfeed.preprocess.file_lock import FileLockedError, lock_file
from loopfeed.preprocess.regular_file import (
    LinkedPathError,
    check_regular,
    check_unlinked,
    close_quietly,
    open_regular,
    open_unlinked,
    read_regular,
)
from loopfeed.preprocess.shards.arrays import PIXELS, image_key
from loopfeed.preprocess.system_errors import system_reason

IN_USE_S = 300.0
"""A file that was used within this time is not removed to make room for another; two data sets that do not fit at the
same time would otherwise replace each other's files all the time."""

_TOUCH_EVERY_S = 60.0
# After a failure to make room, the files are not listed again for each shard.
_FULL_FOR_S = 60.0
_PACK = re.compile("[0-9a-f]{64}")
_SHARD = re.compile("[0-9]{1,18}")
_LOCK, _SIZE = "lock", "size"
_MOST_SIZE_BYTES = 20


class ShardCache:
    """A folder of copies, at most `limit_bytes` large; every failure to write disables writing, with one warning.

    Args:
        folder: the folder, created if necessary.
        limit_bytes: largest size of all files.
        warn: called once, from any thread, with a line of text if files can't be written.

    Raises:
        OSError: the folder can't be created or listed.
    """

    def __init__(self, folder: Path, limit_bytes: int, warn: Callable[[str], None]) -> None:
        self.folder, self.limit_bytes, self._warn = folder, limit_bytes, warn
        self._ungranted = limit_bytes
        self._touched: dict[tuple[str, int], float] = {}
        self._full_until = 0.0
        self._is_disabled = False
        folder.mkdir(parents=True, exist_ok=True)
        for path in self._incoming():
            _remove_if_abandoned(path)

    def grant(self, num_bytes: int) -> int:
        """Return how many of `num_bytes` a split may keep here; each split is granted what others have not been."""
        granted = min(num_bytes, self._ungranted)
        self._ungranted -= granted
        return granted

    def place(self, pack: str, shard: int) -> Path:
        """Return the path of a shard file's copy, which may not exist."""
        return self.folder / pack / image_key(shard)

    def has(self, pack: str, shard: int) -> bool:
        """Return whether there is a copy of a shard file."""
        with suppress(OSError):
            return self.place(pack, shard).exists()
        return False

    def touch(self, pack: str, shard: int) -> None:
        """Note that a file was used; at most once a minute."""
        now = time.monotonic()
        if now - self._touched.get((pack, shard), -_TOUCH_EVERY_S) < _TOUCH_EVERY_S:
            return
        self._touched[pack, shard] = now
        stamp = self.folder / pack / "used" / str(shard)
        with suppress(OSError):
            check_unlinked(self.folder, stamp)
            stamp.parent.mkdir(exist_ok=True)
            stamp.touch()

    def drop(self, pack: str, shard: int) -> None:
        """Remove a file, if it exists."""
        with suppress(OSError):
            check_unlinked(self.folder, self.place(pack, shard))
            self.place(pack, shard).unlink(missing_ok=True)

    def add(
        self, pack: str, shard: int, num_bytes: int, parts: Callable[[], Iterable[bytes]], *, sync: bool = False
    ) -> bool:
        """Write a shard file unless it exists or another process is writing it.

        Args:
            pack, shard: the file.
            num_bytes: its size, or more.
            parts: returns its content in order, called if there is room for it. An exception of it passes through, and
                the file is not added.
            sync: whether the file must be right even if the machine loses its power; not needed if every reader
                verifies it.

        Returns:
            Whether the file is there now.
        """
        place, incoming = self.place(pack, shard), self.folder / pack / "incoming" / str(shard)
        if self._is_disabled:
            return self.has(pack, shard)
        try:
            for path in (place, incoming):
                check_unlinked(self.folder, path)
            incoming.parent.mkdir(parents=True, exist_ok=True)
            descriptor = lock_file(incoming)
        except FileLockedError:
            return False
        except OSError as error:
            return self._disable(error)
        try:
            if not place.exists():
                if not self._reserve(descriptor, num_bytes):
                    incoming.unlink(missing_ok=True)
                    return False
                _write(descriptor, parts())
                if sync:
                    os.fsync(descriptor)
                place.parent.mkdir(parents=True, exist_ok=True)
                incoming.rename(place)
            else:
                incoming.unlink(missing_ok=True)
        except OSError as error:
            incoming.unlink(missing_ok=True)
            return self._disable(error)
        except BaseException:
            incoming.unlink(missing_ok=True)
            raise
        finally:
            close_quietly(descriptor)
        return True

    def _disable(self, error: OSError) -> bool:
        if not self._is_disabled:
            self._is_disabled = True
            self._warn(
                f"warning: {self.folder} can't be written ({system_reason(error) or error}), so no more shards are "
                "cached, and those that are missing are read from the store"
            )
        return False

    def _reserve(self, descriptor: int, num_bytes: int) -> bool:
        """Give a new file its size, after removing others if necessary; return False if there is no room."""
        if time.monotonic() < self._full_until:
            return False
        os.ftruncate(descriptor, 0)  # a killed process may have left a part
        try:
            with self._locked():
                total = self._recorded_size()
                if total is None or total + num_bytes > self.limit_bytes:
                    total = self._make_room(num_bytes)
                if total + num_bytes > self.limit_bytes:
                    self._full_until = time.monotonic() + _FULL_FOR_S
                    return False
                # Recorded first: a kill in between makes the record too large, which is corrected before it matters.
                self._record_size(total + num_bytes)
                os.ftruncate(descriptor, num_bytes)
        except FileLockedError:
            return False
        return True

    @contextmanager
    def _locked(self) -> Iterator[None]:
        descriptor = lock_file(self.folder / _LOCK)
        try:
            yield
        finally:
            close_quietly(descriptor)

    def _recorded_size(self) -> int | None:
        with suppress(OSError, ValueError):
            return int(read_regular(self.folder / _SIZE, max_bytes=_MOST_SIZE_BYTES))
        return None

    def _record_size(self, num_bytes: int) -> None:
        file = open_unlinked(self.folder / _SIZE, os.O_WRONLY | os.O_CREAT | os.O_NONBLOCK)
        try:
            check_regular(os.fstat(file), self.folder / _SIZE)
            os.ftruncate(file, 0)
            os.pwrite(file, str(num_bytes).encode(), 0)
        finally:
            os.close(file)

    def _make_room(self, num_bytes: int) -> int:
        """Remove the files that were not used for longest until there is room; return the bytes of those that are left.

        Files in use stay, and none is removed if that would not suffice.
        """
        files = sorted((_last_use(path), path, size) for path in self._files() if (size := _size_of(path)) is not None)
        total = sum(size for _, _, size in files) + sum(_size_of(path) or 0 for path in self._incoming())
        idle_since, excess, removed = time.time() - IN_USE_S, total + num_bytes - self.limit_bytes, list[Path]()
        freed = 0
        for used, path, size in files:
            if freed >= excess or used > idle_since:
                break
            removed.append(path)
            freed += size
        if freed < excess:
            return total
        for path in removed:
            path.unlink(missing_ok=True)
            with suppress(LinkedPathError):
                check_unlinked(self.folder, _stamp(path))
                _stamp(path).unlink(missing_ok=True)
        return total - freed

    def _packs(self) -> Iterator[Path]:
        with os.scandir(self.folder) as found:
            names = [each.name for each in found if _PACK.fullmatch(each.name) and not each.is_symlink()]
        for name in names:
            yield self.folder / name

    def _files(self) -> Iterator[Path]:
        """Yield the path of each whole file, which another process may just have removed."""
        for pack in self._packs():
            for name in self._numbers(pack / PIXELS / "c"):
                with suppress(LinkedPathError):
                    path = pack / image_key(int(name))
                    check_unlinked(self.folder, path)
                    yield path

    def _incoming(self) -> Iterator[Path]:
        for pack in self._packs():
            for name in self._numbers(pack / "incoming"):
                yield pack / "incoming" / name

    def _numbers(self, folder: Path) -> list[str]:
        """Return the names in a folder that are numbers of shards, none if the folder is missing, or is a link."""
        with suppress(FileNotFoundError, NotADirectoryError, LinkedPathError):
            check_unlinked(self.folder, folder)
            with os.scandir(folder) as found:
                return [each.name for each in found if _SHARD.fullmatch(each.name) and not each.is_symlink()]
        return []


def _size_of(path: Path) -> int | None:
    with suppress(FileNotFoundError):
        return path.stat().st_size
    return None


def _stamp(place: Path) -> Path:
    """Return the stamp of the last use of a file: DIR/<pack>/used/<shard>."""
    return place.parents[4] / "used" / place.parents[1].name


def _last_use(place: Path) -> float:
    """Return when a file was last used, or written if it has no stamp."""
    for path in (_stamp(place), place):
        with suppress(FileNotFoundError):
            return path.stat().st_mtime
    return 0.0


def _write(descriptor: int, parts: Iterable[bytes]) -> None:
    """Write the parts to the start of a file, and cut the file there."""
    size = 0
    for part in parts:
        left = memoryview(part)
        while left:
            num_written = os.pwrite(descriptor, left, size)
            size += num_written
            left = left[num_written:]
    os.ftruncate(descriptor, size)


def _remove_if_abandoned(incoming: Path) -> None:
    """Remove a file whose writer no longer exists; `lock_file` would wait for each that has one."""
    with suppress(OSError), os.fdopen(open_regular(incoming), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # A file that was renamed in the meantime is another's now.
        if os.path.samestat(os.fstat(file.fileno()), incoming.stat()):
            incoming.unlink()
