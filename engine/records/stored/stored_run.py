"""A run that is written to a store: its lease, its working copy, its uploads, and what is kept if they fail.

Owns the order of these from the first check to the last upload. `loopfeed.engine.run.train` opens it around the run
folder.
"""

import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.folder_lock import is_locked
from loopfeed.engine.records.run_folder import CONFIG
from loopfeed.engine.records.stored.lease import Lease, StoredRunInUseError
from loopfeed.engine.records.stored.mirror import UPLOAD_EVERY_S, Mirror
from loopfeed.engine.records.stored.reading import download, no_run, rename_in_error
from loopfeed.engine.records.stored.state import MARKER, StoredRunError, StoredState
from loopfeed.engine.records.stored.working_copy import WorkingCopy, kept_copies, working_copies
from loopfeed.engine.stream.function_sink import FunctionSink
from loopfeed.engine.stream.sinks import EvaluationProgress
from loopfeed.preprocess.shards.location import Location, open_location


class StoredRun:
    """A run whose working copy is uploaded while it trains.

    Attributes:
        path: the run folder in the working copy.
    """

    def __init__(self, path: Path, mirror: Mirror) -> None:
        self.path, self._mirror, self.has_begun = path, mirror, False

    def begin(self) -> None:
        """Upload the run folder from now on: the run is about to start."""
        self.has_begun = True
        self._mirror.begin()

    def watch(self) -> FunctionSink:
        """Return a sink that stops the run if it cannot be uploaded any more: nobody could resume it elsewhere."""
        return _StoreWatch(self._mirror)


class _StoreWatch(FunctionSink):
    """A sink that raises the error of the uploads, also during an evaluation, which may take long."""

    def __init__(self, mirror: Mirror) -> None:
        super().__init__(lambda _: mirror.check())
        self._mirror = mirror

    def write_progress(self, _progress: EvaluationProgress) -> None:
        """Check the uploads."""
        self._mirror.check()


@contextmanager
def stored_run(
    url: str,
    storage_options: Mapping[str, str],
    *,
    resume: bool,
    overwrite: bool,
    notify: Callable[[str], None],
) -> Iterator[StoredRun]:
    """Hold the lease of a stored run, and upload its working copy inside the block and at its end.

    Args:
        url: the folder of the stored run.
        storage_options: how to reach the store.
        resume: continue the run there; its state is downloaded, unless a working copy on this machine continues it.
        overwrite: replace the run there, at the first upload.
        notify: called with one-line messages.

    Raises:
        StoredRunInUseError: another process is writing the run.
        ShardError: the store cannot be reached, has no run to resume, or has one that may not be overwritten; at the
            end of the block, the run could not be uploaded completely.
    """
    location = open_location(url, storage_options=storage_options)
    lease = Lease(location)
    lease.acquire(notify)
    copy = WorkingCopy(location)
    try:
        marker = location.read(MARKER)
        mirror = Mirror(location, lease, copy.run, marker, on_marker=copy.note_markers, is_new=not resume)
        mirror.start()
    except BaseException:
        lease.release()
        raise
    run = StoredRun(copy.run, mirror)
    is_prepared = is_stored = False
    try:
        _prepare(location, copy, marker, mirror, resume=resume, overwrite=overwrite, notify=notify)
        is_prepared = is_stored = True
        notify(f"working copy: {copy.run}, uploaded at each snapshot, every {UPLOAD_EVERY_S:g} s, and at the end")
        count, num_bytes = kept_copies(copy)
        if count:
            which = "working copy of another run that was" if count == 1 else "working copies of other runs that were"
            notify(
                f"{count} {which} not uploaded completely: {num_bytes / 1e6:,.0f} MB in {working_copies()}; resume "
                "these runs, or remove the folders"
            )
        yield run
        _finish(mirror, url, notify)
    except BaseException as error:
        if is_prepared:
            rename_in_error(error, copy.run, url)
        if run.has_begun:
            is_stored = _end_failed(mirror, error)
        else:
            mirror.abandon()
        if run.has_begun and not is_stored:
            _add_note(error, mirror.stored, copy, url)
        raise
    finally:
        # First, because the next holder of the lease may use the same folder.
        if is_stored:
            copy.remove()
        mirror.release()


def _prepare(
    location: Location,
    copy: WorkingCopy,
    marker: bytes | None,
    mirror: Mirror,
    *,
    resume: bool,
    overwrite: bool,
    notify: Callable[[str], None],
) -> None:
    """Make the working copy contain what the launch starts from: nothing, or the run to resume, as it is in the store.

    Raises:
        ShardError, ValueError: if there is no run to resume, or one that may not be overwritten.
    """
    if is_locked(copy.run):
        raise StoredRunInUseError(
            f"the working copy {copy.run} of {location.display} is in use by another process: stop it"
        )
    if not resume:
        if not overwrite:
            _check_is_free(location, copy, marker)
        copy.remove()
        copy.prepare()
        copy.note_markers([marker])
    elif copy.continues(marker) and _upload_kept(copy, mirror, notify):
        pass
    elif marker is None:
        raise no_run(location, is_resumed=True)
    else:
        copy.remove()
        copy.prepare()
        try:
            download(location, copy.run)
        except BaseException:
            copy.remove()
            raise
        copy.note_markers([marker])


def _upload_kept(copy: WorkingCopy, mirror: Mirror, notify: Callable[[str], None]) -> bool:
    """Upload what a kept working copy has and the store lacks; return False if the copy lacks what the store has."""
    copy.prepare()
    try:
        # Processes on other machines resume from the store.
        mirror.upload_once()
    except LostFileError as error:
        notify(f"warning: {error.filename} was removed, so the working copy is replaced by what is in the store")
        return False
    notify(f"continuing the working copy {copy.run}, whose last state is in the store now")
    return True


def check_url_is_free(
    url: str, storage_options: Mapping[str, str], *, overwrite: bool, notify: Callable[[str], None]
) -> None:
    """Check that `stored_run` would start a run at a URL, without writing anything.

    Raises:
        ShardError: as `stored_run`.
    """
    location = open_location(url, storage_options=storage_options)
    Lease(location).check_free(notify)
    if not overwrite:
        _check_is_free(location, WorkingCopy(location), location.read(MARKER))


def _check_is_free(location: Location, copy: WorkingCopy, marker: bytes | None) -> None:
    """Raise StoredRunError if a URL or its working copy contains an earlier run."""
    found = None
    if marker is not None:
        found = f"{location.display} contains {MARKER} of an earlier run"
    elif (copy.run / CONFIG).exists():
        found = f"the working copy of an earlier run at {location.display} is kept in {copy.run}"
    if found is not None:
        raise StoredRunError(
            f"the run folder must be new, but {found}: choose another URL (--run-dir), continue the run (--resume) or "
            "overwrite it (--overwrite)"
        )


def _finish(mirror: Mirror, url: str, notify: Callable[[str], None]) -> None:
    """Upload the last state of a run; raise its error, or KeyboardInterrupt if the user does not wait for it."""
    try:
        mirror.finish(
            lambda: notify(f"uploading the last state to {url}; press Ctrl-C to keep it on this machine only")
        )
    except KeyboardInterrupt:
        raise KeyboardInterrupt("stopped before the last state of the run was uploaded") from None


def _end_failed(mirror: Mirror, error: BaseException) -> bool:
    """End the uploads of a run that failed, and return whether all that it wrote is in the store."""
    if not isinstance(error, Exception):
        # A forced stop: its threads may still be writing, and the user does not want to wait.
        mirror.abandon()
        return False
    try:
        mirror.finish()
    except Exception as fault:  # noqa: BLE001 - the error of the run is raised
        if fault is not error:
            error.add_note(f"the run could not be uploaded either: {fault}")
        return False
    return True


def _add_note(error: BaseException, stored: StoredState | None, copy: WorkingCopy, url: str) -> None:
    steps = [] if stored is None else stored.snapshot_steps
    held = "no state of the run" if stored is None else "the run's last whole state"
    if steps:
        held += f", with the snapshot of step {steps[-1]:,}"
    error.add_note(
        f"{url} holds {held}; the working copy is kept in {copy.run}. To continue when the store can be reached: "
        f"run-train --run-dir {shlex.quote(url)} --resume (on this machine from the working copy)"
    )
