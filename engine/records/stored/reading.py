"""Copies of stored runs on this machine, for whatever reads a run folder. Every object is checked against its digest.

A run that is in progress replaces its state while it is read: an object that is gone means that there is a newer state,
which is then read instead.
"""

import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

from loopfeed.engine.records.file_errors import name_file
from loopfeed.engine.records.run_folder import CONFIG, EVALUATION_LOG, LOSS_LOG, RESULT, SNAPSHOTS, WEIGHTS
from loopfeed.engine.records.stored.state import MARKER, Part, StoredRunError, StoredState, check_ratio, read_state
from loopfeed.engine.records.stored.working_copy import WorkingCopy
from loopfeed.preprocess.shards.location import Location, open_location
from loopfeed.preprocess.storage_options import is_url
from loopfeed.preprocess.workers import Pool

_TRIES = 10
_CONCURRENT = 8

type Wanted = Callable[[Sequence[str]], Sequence[str]]
"""A function from the names of all files of a stored run to those to download."""


def every_file(names: Sequence[str]) -> Sequence[str]:
    """Return all names."""
    return names


def settings_only(names: Sequence[str]) -> Sequence[str]:
    """Return the names of the files from which the settings of a run are read."""
    return [name for name in names if name == CONFIG]


def logs_only(names: Sequence[str]) -> Sequence[str]:
    """Return the names of the files from which the losses and the evaluations of a run are read."""
    return [name for name in names if name in (LOSS_LOG, EVALUATION_LOG)]


def with_weights(snapshot: int | Literal["best"] | None) -> Wanted:
    """Return what chooses the files from which weights are read: of the snapshots, only one that is needed.

    Args:
        snapshot: the step of the snapshot whose weights to read; None reads those at the end of the run, or else those
            of the newest snapshot. The best one is known only from the logs and all steps, so "best" takes every file.
    """
    if snapshot == "best":
        return every_file

    def wanted(names: Sequence[str]) -> Sequence[str]:
        others = [name for name in names if not name.startswith(f"{SNAPSHOTS}/")]
        steps = {int(name.split("/")[1]) for name in names if name not in others}
        if snapshot is not None and steps and snapshot not in steps:
            found = ", ".join(map(str, sorted(steps)))
            raise StoredRunError(f"there is no snapshot of step {snapshot}: choose another step (available: {found})")
        # Without a result, the newest snapshot says to which settings the weights belong.
        is_needed = snapshot is not None or not {WEIGHTS, RESULT} <= set(others)
        step = max(steps, default=None) if snapshot is None else snapshot
        return [*others, *(name for name in names if is_needed and name.startswith(f"{SNAPSHOTS}/{step}/"))]

    return wanted


@contextmanager
def local_copy(
    run: str | os.PathLike[str],
    storage_options: Mapping[str, str] | None = None,
    wanted: Wanted = every_file,
) -> Iterator[Path]:
    """Yield the folder of a run: the path itself or, for a URL, a temporary copy; error messages name the URL.

    Args:
        run: a run folder, or the URL of a stored run, which may be in progress.
        storage_options: how to reach the store of a URL.
        wanted: chooses the files that are needed.

    Raises:
        ShardError: the store cannot be reached, has no such run, or returns other content than was written.
    """
    url = os.fspath(run)
    if not is_url(url):
        yield Path(run)
        return
    location = open_location(url, storage_options=storage_options)
    with tempfile.TemporaryDirectory(prefix="loopfeed-") as temporary:
        folder = Path(temporary) / "run"
        download(location, folder, wanted)
        with naming(folder, url):
            yield folder


@contextmanager
def resumable_copy(run: str, storage_options: Mapping[str, str] | None, wanted: Wanted) -> Iterator[Path]:
    """Yield the folder as `local_copy` does, but the working copy on this machine if it is what a resume continues."""
    if is_url(run):
        location = open_location(run, storage_options=storage_options)
        copy = WorkingCopy(location)
        if copy.continues(location.read(MARKER)):
            with naming(copy.run, run):
                yield copy.run
            return
    with local_copy(run, storage_options, wanted) as folder:
        yield folder


@contextmanager
def naming(folder: Path, url: str) -> Iterator[None]:
    """Name a stored run by its URL, not by the folder of its copy, in the messages of ValueErrors and in all notes."""
    try:
        yield
    except BaseException as error:
        rename_in_error(error, folder, url)
        raise


def naming_in(notify: Callable[[str], None], folder: Path, run: str | os.PathLike[str]) -> Callable[[str], None]:
    """Return a function that passes messages on, in which the URL of a stored run replaces the folder of its copy."""
    url = os.fspath(run)
    return (lambda message: notify(renamed(message, folder, url))) if is_url(url) else notify


def rename_in_error(error: BaseException, folder: Path, url: str) -> None:
    """Replace the path of a folder by a URL in the message of a ValueError, and in the notes of any error."""
    if isinstance(error, ValueError):
        error.args = tuple(renamed(each, folder, url) if isinstance(each, str) else each for each in error.args)
    if notes := getattr(error, "__notes__", None):
        notes[:] = [renamed(note, folder, url) for note in notes]


def renamed(text: str, folder: Path, url: str) -> str:
    """Return a text in which the path of a folder is replaced by a URL."""
    return text.replace(str(folder), url.rstrip("/"))


def download(location: Location, folder: Path, wanted: Wanted = every_file) -> StoredState:
    """Download the files of a stored run to a new folder, and return the state that they are from.

    Raises:
        ShardError: as `local_copy`.
    """
    have: dict[str, tuple[Part, ...]] = {}
    read = ReadParts()

    def copy(state: StoredState) -> StoredState:
        names = wanted(list(state.files))
        for name in have.keys() - set(names):
            _remove_file(folder, name)
            del have[name]
        missing = [name for name in names if have.get(name) != state.files[name]]
        check_room(location, folder.parent, state, missing)
        # Logs and other small files change most often, and so come first.
        for name in sorted(missing, key=lambda name: sum(part.size for part in state.files[name])):
            have.pop(name, None)
            try:
                _download_file(location, folder / name, state.files[name], read)
            except GoneError:
                _remove_file(folder, name)
                raise
            have[name] = state.files[name]
        return state

    found = read_whole(location, copy)
    if found is None:
        raise no_run(location)
    return found


def read_whole[Read](location: Location, read: Callable[[StoredState], Read]) -> Read | None:
    """Call `read` with the state of a stored run, again with a newer one if an object of it is gone meanwhile.

    Returns:
        What `read` returned; None if there is no run.

    Raises:
        ShardError: the store cannot be read, or lacks an object.
    """
    for _ in range(_TRIES):
        state = read_state(location)
        if state is None:
            return None
        try:
            return read(state)
        except GoneError as error:
            gone = error
    raise StoredRunError(
        f"{location.display} lacks {gone} although its {MARKER} lists it: try again and, if it is still missing, "
        "restore that object, or train the run again with --overwrite"
    )


def read_stored_file(location: Location, name: str) -> bytes | None:
    """Return the content of one file of a stored run, None if there is no such run or file.

    Raises:
        ShardError: as `local_copy`.
    """

    def read(state: StoredState) -> bytes | None:
        return b"".join(read_parts(location, state.files[name])) if name in state.files else None

    return read_whole(location, read)


def no_run(location: Location, *, is_resumed: bool = False) -> StoredRunError:
    """Return the error for a URL at which there is no run, to read or to resume."""
    if location.local_path is not None and (location.local_path / CONFIG).is_file():
        remedy = f"a run is in this folder itself: give its path, {location.local_path}"
    elif is_resumed:
        remedy = "give the URL of a run (--run-dir), or start a run without --resume"
    else:
        remedy = "give the URL of a run"
    return StoredRunError(f"there is no run at {location.display}, which contains no {MARKER}: {remedy}")


class GoneError(Exception):
    """An object is not in the store; the message is its name."""


class ReadParts:
    """Counts what was read of a stored run: a marker may list one object again and again, beside others that lie."""

    def __init__(self) -> None:
        self._parts: set[Part] = set()
        self._num_bytes = self._stored_bytes = 0

    def add(self, part: Part, location: Location) -> None:
        """Count a part that has been read; raise StoredRunError if a few objects make too many bytes."""
        self._num_bytes += part.size
        self._stored_bytes += part.size if part not in self._parts else 0
        self._parts.add(part)
        try:
            check_ratio(self._num_bytes, self._stored_bytes)
        except ValueError as error:
            raise StoredRunError(f"{location.display}{MARKER} cannot be read ({error}): choose another URL") from error


def check_room(location: Location, folder: Path, state: StoredState, names: Sequence[str]) -> None:
    """Raise StoredRunError if the disk of a folder has too little space for the files of a stored run."""
    usage = shutil.disk_usage(folder)
    num_bytes = sum(part.size for name in names for part in state.files[name])
    # Some file systems report no sizes.
    if usage.total and usage.free < num_bytes:
        raise StoredRunError(
            f"a copy of {location.display} needs {num_bytes / 1e6:,.1f} MB of disk space in {folder}, but only "
            f"{usage.free / 1e6:,.1f} MB are free: make room there, or set TMPDIR (for a resume XDG_CACHE_HOME) to a "
            "folder on another disk"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _download_file(location: Location, path: Path, parts: Sequence[Part], read: ReadParts) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            for content in read_parts(location, parts, read):
                file.write(content)
    except OSError as error:  # a full disk
        name_file(error, path)
        raise


def _remove_file(folder: Path, name: str) -> None:
    """Remove a file, and the folders that it leaves empty: an empty folder of a snapshot would be a damaged one."""
    path = folder / name
    path.unlink(missing_ok=True)
    with suppress(OSError):  # one contains other files
        for parent in path.parents:
            if parent == folder:
                return
            parent.rmdir()


def read_parts(location: Location, parts: Sequence[Part], read: ReadParts | None = None) -> Iterator[bytes]:
    """Yield the contents of parts, of which a few are downloaded at the same time; `read` counts them over many files.

    Raises:
        ShardError: an object cannot be read, or has changed since it was written.
        GoneError: an object is not in the store.
    """
    read = read or ReadParts()
    with Pool(_CONCURRENT, "stored-parts") as pool:
        for begin in range(0, len(parts), _CONCURRENT):
            some = parts[begin : begin + _CONCURRENT]
            for part, content in zip(some, pool.map(lambda part: _read_part(location, part), some), strict=True):
                read.add(part, location)
                yield content


def _read_part(location: Location, part: Part) -> bytes:
    content = location.read(part.key, max_bytes=part.size)
    if content is None:
        raise GoneError(part.key)
    if Part.of(content) != part:
        raise StoredRunError(
            f"{location.display}{part.key} has changed since the run wrote it (its sha256 is "
            f"{Part.of(content).sha256[:12]} now): restore that object, or train the run again with "
            "--overwrite"
        )
    return content
