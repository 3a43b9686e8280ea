"""A thread that uploads a run folder to a store while the run writes it.

Owns when to upload, the order of the writes, and the end. The order is what keeps the store whole: objects, then the
marker that lists them, then the removal of objects that no marker lists any more. Training never waits for it.
"""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path

from loopfeed.engine.records.stored.capture import FolderCapture
from loopfeed.engine.records.stored.lease import Lease
from loopfeed.engine.records.stored.state import (
    MARKER,
    OBJECTS,
    PART_BYTES,
    Part,
    StoredRunError,
    StoredState,
    is_object,
)
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.workers import Pool, Worker, call_within

UPLOAD_EVERY_S = 10.0
"""How often new lines of the logs are uploaded, and the lease is renewed, in seconds."""
_LOOK_EVERY_S = 0.5
_CONCURRENT = 4
# A store may refuse requests for a moment, as with too many of them, which TensorStore does not repeat. An attempt that
# took as long as this has been repeated by TensorStore already.
_PATIENCE_S, _RETRY_EVERY_S = 20.0, 2.0
_DELETED_AT_ONCE = 1000
# A thread that waits for a store that does not answer is abandoned at a forced end.
_ABANDON_S = 2.0
_MOMENT_S = 2.0


class Mirror:
    """Uploads the state of a run folder at each snapshot, every `UPLOAD_EVERY_S` seconds, and at the end.

    Until `begin` is called, the thread only renews the lease.

    Args:
        location: the folder of the stored run.
        lease: its lease, held.
        run: the run folder on this machine.
        marker: the content of the marker in the store, None if there is none.
        on_marker: called with the contents that the marker may have from now on, None if it may not exist: before each
            write, and with the one content after it.
        is_new: whether the folder replaces what is stored, of which then no object is relied on: it may be damaged.
        part_bytes: the largest object.

    Attributes:
        stored: the state in the store, None if there is none.
    """

    def __init__(
        self,
        location: Location,
        lease: Lease,
        run: Path,
        marker: bytes | None,
        *,
        on_marker: Callable[[Sequence[bytes | None]], None] = lambda _: None,
        is_new: bool = False,
        part_bytes: int = PART_BYTES,
    ) -> None:
        self._location, self._lease, self._run = location, lease, run
        self._on_marker, self._part_bytes = on_marker, part_bytes
        # Beside the last one, those whose write failed: it may have taken effect although the store reported an error.
        self._possible_markers = [marker]
        self.stored = None if marker is None else StoredState.from_bytes(marker, location.display)
        self._continued = None if is_new else self.stored
        self._objects = set() if self._continued is None else set(self._continued.keys)
        # Other objects that were listed there, of earlier processes and of uploads and removals that failed. They are
        # only removed, never relied on, because they may be gone.
        self._remains: set[str] | None = None
        self._unlisted: set[str] = set()
        self._capture: FolderCapture | None = None
        self._renewed_s, self._renewing = time.monotonic(), threading.Lock()
        self._changed = threading.Condition()
        self._is_finishing = self._is_abandoned = False
        self._worker = Worker(self._work, "stored-run")

    def start(self) -> None:
        """Start the thread; call this once."""
        self._worker.start()

    def upload_once(self) -> None:
        """Upload the folder as it is now, before `begin`; the error is raised here.

        Raises:
            ShardError: if the store cannot be written.
            LostFileError: if the folder lacks the newest snapshot in the store.
        """
        steps = [] if self.stored is None else self.stored.snapshot_steps
        self._upload_from(self._new_capture(max(steps, default=0)), is_last=True)

    def begin(self) -> None:
        """Upload the folder from now on, because it contains the run, and nothing in it is taken back any more."""
        capture = self._new_capture()
        with self._changed:
            self._capture = capture
            self._changed.notify_all()

    def check(self) -> None:
        """Raise the error that ended the uploads, if there was one."""
        self._worker.check()

    def finish(self, on_wait: Callable[[], None] = lambda: None) -> None:
        """Upload the last state; raise the error if the uploads failed.

        Each request has a time limit, so that a store that does not answer ends the wait. Call this after `start`.

        Args:
            on_wait: called if this takes more than a moment.
        """
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()
        if not self._worker.wait(_MOMENT_S):
            on_wait()
        self._worker.result()

    def abandon(self) -> None:
        """Upload nothing more; a thread that waits for the store is left behind."""
        with self._changed:
            self._is_abandoned = True
            self._changed.notify_all()
        self._worker.wait(_ABANDON_S)

    def release(self) -> None:
        """Release the lease if the store answers at once, after `finish` or `abandon`."""
        call_within(_ABANDON_S, self._lease.release, "stored-run-release")

    def _work(self) -> None:
        while self._wait():
            self._persist(self._upload)
        if self._capture is not None and not self._is_abandoned:
            self._persist(lambda: self._upload(is_last=True))
            self._persist(lambda: self._remove_unlisted(at_end=True))

    def _persist(self, action: Callable[[], None]) -> None:
        """Act, and act again for a while if the store refuses; raise its error then."""
        stop_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                action()
                return
            except StoredRunError:
                raise
            except ShardError:
                if time.monotonic() + _RETRY_EVERY_S > stop_s:
                    raise
                self._remains = None
            with self._changed:
                if self._changed.wait_for(lambda: self._is_abandoned, _RETRY_EVERY_S):
                    return

    def _new_capture(self, least_step: int = 0) -> FolderCapture:
        return FolderCapture(self._run, self._continued, least_step=least_step, part_bytes=self._part_bytes)

    def _wait(self) -> bool:
        """Wait until there is something to upload, or return False at the end; renew the lease meanwhile."""
        uploaded_s = time.monotonic()
        step = None if self._continued is None else max(self._continued.snapshot_steps, default=None)
        while True:
            with self._changed:
                is_ending = self._changed.wait_for(lambda: self._is_finishing or self._is_abandoned, _LOOK_EVERY_S)
                capture = self._capture
            if is_ending:
                return False
            if capture is not None:
                newest = capture.newest_step()
                is_new = newest is not None and newest != step
                if is_new or time.monotonic() >= uploaded_s + UPLOAD_EVERY_S:
                    return True
            self._persist(self._renew_if_due)

    def _upload(self, *, is_last: bool = False) -> None:
        assert self._capture is not None
        try:
            self._upload_from(self._capture, is_last=is_last)
        except ShardError:
            # What was read may not have arrived: read it again.
            self._capture = self._new_capture(self._capture.least_step)
            raise

    def _upload_from(self, capture: FolderCapture, *, is_last: bool) -> None:
        """Upload what is new, and then the marker."""
        with Pool(_CONCURRENT, "stored-run") as pool:
            uploads = _Uploads(pool, self._location, self._objects, self._renew_if_due)
            files = capture.take(uploads.put, is_last=is_last)
            uploads.finish()
        # Nobody else may have written since.
        self._renew()
        if self.stored is None or files != self.stored.files:
            self._write_marker(StoredState(files, self._lease.launch, round(time.time(), 3)))
            self._remove_unlisted()

    def _write_marker(self, state: StoredState) -> None:
        content = state.to_bytes()
        found, generation = self._location.read_stamped(MARKER)
        if found not in self._possible_markers:
            raise self._replaced()
        self._possible_markers.append(content)
        self._on_marker(self._possible_markers)
        # A condition also keeps a write that the network delayed from undoing this one.
        if self._location.write_if(MARKER, content, generation) is None and self._location.read(MARKER) != content:
            raise self._replaced()
        self._possible_markers = [content]
        self._on_marker(self._possible_markers)
        self.stored = self._continued = state

    def _replaced(self) -> StoredRunError:
        return StoredRunError(
            f"{self._location.display}{MARKER} was replaced during the run by another process: the run stops, so as "
            "not to mix the two. Start it again at another URL, or stop the other one"
        )

    def _remove_unlisted(self, *, at_end: bool = False) -> None:
        """Delete the objects that neither this marker nor the one before lists, of which a reader may be in the middle.

        The first call, and the first after a failure, looks for objects that nobody else removes.
        """
        assert self.stored is not None
        if self._remains is None:
            # Checked, because what is found is removed, and some servers list more than was asked for.
            self._remains = set(filter(is_object, self._location.list_keys(OBJECTS)))
        unlisted = (self._objects | self._remains) - self.stored.keys
        removable = sorted(unlisted if at_end else unlisted & self._unlisted)
        for begin in range(0, len(removable), _DELETED_AT_ONCE):
            some = removable[begin : begin + _DELETED_AT_ONCE]
            self._objects.difference_update(some)
            self._location.delete_keys(some)
            self._remains.difference_update(some)
            self._renew_if_due()
        self._unlisted = unlisted

    def _renew_if_due(self) -> None:
        if time.monotonic() >= self._renewed_s + UPLOAD_EVERY_S:
            self._renew()

    def _renew(self) -> None:
        with self._renewing:
            self._lease.renew()
            self._renewed_s = time.monotonic()


class _Uploads:
    """The uploads of one state, of which a few go on at the same time.

    Args:
        pool: the threads.
        location: the folder of the stored run.
        objects: the names of the objects that are in the store, extended by those that are uploaded.
        meanwhile: called between two uploads.
    """

    def __init__(self, pool: Pool, location: Location, objects: set[str], meanwhile: Callable[[], None]) -> None:
        self._pool, self._location, self._objects, self._meanwhile = pool, location, objects, meanwhile
        self._pending: dict[str, Future[None]] = {}

    def put(self, content: bytes) -> Part:
        """Upload a content unless the store has it, and return its part; wait while too many uploads are under way."""
        part = Part.of(content)
        if part.key not in self._objects and part.key not in self._pending:
            self.finish(_CONCURRENT - 1)
            self._pending[part.key] = self._pool.submit(self._location.write, part.key, content)
        self._meanwhile()
        return part

    def finish(self, most_pending: int = 0) -> None:
        """Wait for the oldest uploads until at most so many are under way."""
        while len(self._pending) > most_pending:
            key = next(iter(self._pending))
            self._pending[key].result()
            self._objects.add(key)
            del self._pending[key]
