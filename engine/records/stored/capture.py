"""The content of a run folder that is being written, cut into parts so that the parts are a state to resume from.

Owns the order in which files are read, and which bytes are new. Must not know: stores.

A run can be killed at any instant, so any instant of its folder can be resumed from, but the files are read one after
another. `result.json`, after which nothing changes, is therefore read first; then snapshots; then the logs, which are
appended to and so contain every line that a snapshot read before refers to.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.json_lines import end_of_lines
from loopfeed.engine.records.run_folder import (
    CONFIG,
    PROFILE,
    RESULT,
    RUNTIME,
    SNAPSHOTS,
    STALLS,
    WEIGHTS,
    WRITTEN_HERE,
)
from loopfeed.engine.records.snapshot import snapshot_steps
from loopfeed.engine.records.stored.state import PART_BYTES, Part, StoredState
from loopfeed.preprocess.regular_file import open_regular, raise_error, read_at

LOGS = tuple(name for name in WRITTEN_HERE if name.endswith(".jsonl"))
# A smaller object is replaced rather than followed by another.
_LEAST_BYTES = 1 << 16
# A snapshot is replaced by two renames.
_REPLACED_S = 0.1

type Put = Callable[[bytes], Part]


class FolderCapture:
    """Reads a run folder again and again, each time only what is new.

    Once read, the settings, a log and the newest snapshot must not disappear or shrink: a folder that somebody empties
    must not replace what is stored.

    Args:
        run: the run folder.
        known: the state that the folder continues, None for a new run.
        least_step: the step that the newest snapshot must have reached.
        part_bytes: the largest part.

    Attributes:
        least_step: the step of the newest snapshot that was read, or that of the argument.
    """

    def __init__(
        self,
        run: Path,
        known: StoredState | None,
        *,
        least_step: int = 0,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._run, self._part_bytes = run, part_bytes
        self.least_step = least_step
        files = {} if known is None else known.files
        self._logs = {name: _same_beginning(run / name, files.get(name, ())) for name in LOGS}
        self._whole: dict[str, tuple[object, tuple[Part, ...]]] = {}
        self._snapshots: dict[object, dict[str, tuple[Part, ...]]] = {}
        self._others = {name: files[name] for name in files if _is_other(Path(name)) and (run / name).is_file()}

    def take(self, put: Put, *, is_last: bool = False) -> dict[str, tuple[Part, ...]]:
        """Return the parts of every file; `put` is called with each content that was not read before.

        Files that the run itself does not write, such as those of callbacks, are read only if `is_last`, because
        nothing is known about how they change.

        Raises:
            OSError: if a file cannot be read; LostFileError if one was removed or became shorter.
        """
        files = {RESULT: self._read_whole(RESULT, put), **self._read_snapshots(put)}
        for name in (WEIGHTS, RUNTIME, STALLS, PROFILE):
            files[name] = self._read_whole(name, put)
        for name in LOGS:
            files[name] = self._read_log(name, put)
        if is_last:
            self._others = self._read_others(put)
        files[CONFIG] = self._read_whole(CONFIG, put)
        if files[CONFIG] is None:
            raise LostFileError.of(self._run / CONFIG)
        return self._others | {name: parts for name, parts in files.items() if parts is not None}

    def newest_step(self) -> int | None:
        """Return the step of the newest snapshot in the folder, None if there is none."""
        return max(snapshot_steps(self._run / SNAPSHOTS), default=None)

    def _read_whole(self, name: str, put: Put) -> tuple[Part, ...] | None:
        """Return the parts of a file that is replaced whole, None if there is none."""
        try:
            file = os.fdopen(open_regular(self._run / name), "rb")
        except FileNotFoundError:
            return None
        with file:
            found = os.fstat(file.fileno())
            identity = (found.st_ino, found.st_mtime_ns, found.st_size)
            before = self._whole.get(name)
            if before is None or before[0] != identity:
                self._whole[name] = identity, tuple(map(put, self._blocks(file.fileno(), 0)))
        return self._whole[name][1]

    def _read_log(self, name: str, put: Put) -> tuple[Part, ...] | None:
        """Return the parts of a log up to its last complete line, None if there is none."""
        try:
            file = os.fdopen(open_regular(self._run / name), "rb", buffering=0)
        except FileNotFoundError:
            if self._logs[name]:
                raise LostFileError.of(self._run / name) from None
            return None
        with file:
            parts = self._logs[name]
            read, size = sum(part.size for part in parts), os.fstat(file.fileno()).st_size
            if size < read:
                raise LostFileError.of(self._run / name)
            if (size := end_of_lines(file.fileno(), read, size)) > read:
                kept = _num_kept(parts, size - read, self._part_bytes)
                start = sum(part.size for part in parts[:kept])
                self._logs[name] = (*parts[:kept], *map(put, self._blocks(file.fileno(), start, size)))
        return self._logs[name]

    def _read_snapshots(self, put: Put) -> dict[str, tuple[Part, ...]]:
        """Return the parts of the files of all snapshots in the folder, except those that the run removes meanwhile."""
        found: dict[object, dict[str, tuple[Part, ...]]] = {}
        newest = 0
        # Newest first: it is what a resume needs.
        for step in reversed(self._steps()):
            with suppress(FileNotFoundError):  # the run keeps only the newest
                status = (self._run / SNAPSHOTS / str(step)).stat()
                identity = step, status.st_ino, status.st_mtime_ns
                found[identity] = self._snapshots.get(identity) or self._read_snapshot(step, put)
                newest = max(newest, step)
        if newest < self.least_step:
            raise LostFileError.of(self._run / SNAPSHOTS / str(self.least_step))
        self._snapshots, self.least_step = found, newest
        return {name: parts for files in found.values() for name, parts in files.items()}

    def _steps(self) -> list[int]:
        """Return the steps of the snapshots in the folder; look again if the newest is just being replaced."""
        steps = snapshot_steps(self._run / SNAPSHOTS)
        if max(steps, default=0) < self.least_step:
            time.sleep(_REPLACED_S)
            steps = snapshot_steps(self._run / SNAPSHOTS)
        return steps

    def _read_snapshot(self, step: int, put: Put) -> dict[str, tuple[Part, ...]]:
        """Read a snapshot; raise FileNotFoundError if it is removed before all of its few files are open."""
        folder = self._run / SNAPSHOTS / str(step)
        with ExitStack() as stack:
            before = folder.stat()
            paths = _files_below(folder)
            files = [stack.enter_context(path.open("rb", buffering=0)) for path in paths]
            # Moved away before its files are removed, which can be read to the end once they are open.
            if not os.path.samestat(before, folder.stat()):
                raise FileNotFoundError(folder)
            return {
                path.relative_to(self._run).as_posix(): tuple(map(put, self._blocks(file.fileno(), 0)))
                for path, file in zip(paths, files, strict=True)
            }

    def _read_others(self, put: Put) -> dict[str, tuple[Part, ...]]:
        """Return the parts of the files in the folder that the run itself does not write."""
        names = [path.relative_to(self._run) for path in _files_below(self._run)]
        parts = {name.as_posix(): self._read_whole(str(name), put) for name in names if _is_other(name)}
        return {name: each for name, each in parts.items() if each is not None}

    def _blocks(self, file: int, start: int, stop: int | None = None) -> Iterator[bytes]:
        """Yield the bytes of an open file from `start` to `stop`, or its end, in pieces of at most one part."""
        while stop is None or start < stop:
            size = self._part_bytes if stop is None else min(self._part_bytes, stop - start)
            block = read_at(file, size, start)
            if block:
                yield block
            if len(block) < size:
                return
            start += len(block)


def _is_other(name: Path) -> bool:
    """Return whether a file is neither one that a run writes nor a temporary one."""
    return name.parts[0] not in WRITTEN_HERE and not any(part.startswith(".") for part in name.parts)


def _files_below(folder: Path) -> list[Path]:
    """Return the files below a folder, sorted; raise OSError if a folder cannot be listed."""
    found = (Path(inner, name) for inner, _, names in os.walk(folder, onerror=raise_error) for name in names)
    return sorted(path for path in found if path.is_file())


def _num_kept(parts: tuple[Part, ...], new_bytes: int, part_bytes: int) -> int:
    """Return how many parts of a log to keep when `new_bytes` are appended; the others become one with the new bytes.

    Parts of a like size are joined, as in a binary counter: a log of n bytes has O(n / part_bytes + log n) parts, and
    each byte is uploaded O(log n) times.
    """
    kept = len(parts)
    while kept and parts[kept - 1].size < part_bytes and parts[kept - 1].size <= max(new_bytes, _LEAST_BYTES):
        kept -= 1
        new_bytes += parts[kept].size
    return kept


def _same_beginning(path: Path, parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the first of the parts that a log still begins with."""
    kept: list[Part] = []
    with suppress(FileNotFoundError), os.fdopen(open_regular(path), "rb") as file:
        for part in parts:
            if Part.of(file.read(part.size)) != part:
                break
            kept.append(part)
    return tuple(kept)
