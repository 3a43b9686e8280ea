"""A thread that writes snapshots, so that neither the program nor the terminal waits for the disk.

Owns queueing, replacing and giving up; `loopfeed.engine.records.snapshot` owns the files.

Orbax's `CheckpointManager` also commits a step by a rename, with the facts beside the arrays, and keeps the newest N.
It is not used because, as of Orbax 0.12.8, it

- syncs neither its JSON files nor its folders before that rename, so that a power failure can leave an incomplete step;
- removes an old step in place, so that a process killed meanwhile leaves a part of it under the name of a whole one;
- refuses to replace an existing step, which is needed if it is damaged or the run went back to an earlier step;
- makes each save wait for the previous one, whereas here a newer snapshot replaces the one that is waiting.

It would replace the renaming and the removal, about forty lines, but none of the checks.
"""

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from loopfeed.engine.records.folder_state import FolderState
from loopfeed.engine.records.orbax_store import load_orbax
from loopfeed.engine.records.snapshot import keep_newest, snapshot_steps, write_snapshot
from loopfeed.engine.spans import Span
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.system_errors import error_text, is_out_of_room
from loopfeed.preprocess.workers import Worker

_SAY_SKIPPED_EVERY_S = 60.0


class UnwritableFolderError(OSError):
    """Raised at the end of a run in whose folder no snapshot could be written."""


class SnapshotWriter:
    """A thread that writes snapshots one at a time; a newer snapshot replaces the one that is queued.

    Only the best one is not replaced: it stays in the queue beside the newest. A failure does not stop the run: it is
    reported, and the last good snapshot is kept. Only if there is none yet, a second try fails too, and the reason is
    not a lack of room, every snapshot to come is expected to fail, and `on_hopeless` is called.

    Args:
        folder: the folder of the snapshots; created if missing.
        keep: how many of the newest snapshots to keep on disk; 0 keeps all.
        find_best: steps of the snapshots on disk → the step of the one to keep beside the newest, None for none.
        say: called from any thread with one line about a snapshot that was dropped or an error; must not block
            (`loopfeed.engine.stream.notices`).
        write: (folder, step, batch_index, tree, state) → None, writes a snapshot whole or not at all.
        on_written: called on this object's thread with the step and the path of each snapshot on the disk.
        on_hopeless: called on this object's thread if no snapshot was written yet, and none is expected to be.
        on_ended: called on this object's thread with the seconds that each write took, successful or not.

    Attributes:
        failure: why no snapshot was ever written, although there were some to write; None if one was.
        writes: how long writing each snapshot on the disk took.
        num_bytes: bytes of the arrays of these snapshots.
        num_skipped: number of snapshots that were dropped because a newer one came before they were written.
        worker: the thread.

    Raises:
        ValueError: if `keep` is negative.
    """

    def __init__(
        self,
        folder: Path,
        *,
        keep: int,
        say: Callable[[str], None],
        find_best: Callable[[list[int]], int | None] = lambda _: None,
        write: Callable[[Path, int, int, Any, FolderState | None], None] = write_snapshot,
        on_written: Callable[[int, Path], None] = lambda *_: None,
        on_hopeless: Callable[[], None] = lambda: None,
        on_ended: Callable[[float], None] = lambda _: None,
    ) -> None:
        if keep < 0:
            raise ValueError(f"the number of snapshots to keep must be 0 (all) or more, got {keep}: choose another")
        self._folder, self._keep, self._write = folder, keep, write
        self._say, self._on_written, self._on_hopeless, self._on_ended = say, on_written, on_hopeless, on_ended
        self.failure: UnwritableFolderError | None = None
        self._find_best, self._finding = find_best, threading.Lock()
        self.writes, self.num_bytes, self.num_skipped = Span(), 0, 0
        self._changed = threading.Condition()
        self._waiting: list[_Submitted] = []
        self._writing_step: int | None = None
        self._last_step: int | None = None
        self._is_last_written = True
        self._num_unsaid, self._say_again_at = 0, 0.0
        self._is_closed = False
        self.worker = Worker(self._work, "snapshot-writer")

    def start(self) -> None:
        """Start the thread, which imports Orbax first, as a resume does; call this once.

        Do not call this while a program is traced: importing Orbax changes what jax compares when it looks up a traced
        function, so that a program whose tracing began earlier gets a different key in the cache on disk.
        """
        self.worker.start(is_attended=False)

    @property
    def last_step(self) -> int | None:
        """The step of the last snapshot written or, before the first write, of the newest snapshot in the folder."""
        with self._changed:
            return self._last_step

    @property
    def unwritten_step(self) -> int | None:
        """The step of the newest queued snapshot, or else of the one being written; None if there is neither."""
        with self._changed:
            return self._waiting[-1].step if self._waiting else self._writing_step

    def is_best(self, step: int) -> bool:
        """Return whether a snapshot of this step would be the best of all on the disk and on their way there."""
        return self._best_with(step) == step

    def _best_with(self, step: int) -> int | None:
        """Return the best of the steps on the disk, those on their way, and this one; this one after an error."""
        with self._changed:
            coming = [self._writing_step, *(each.step for each in self._waiting), step]
        try:
            return self._best_of(
                sorted({*snapshot_steps(self._folder), *(each for each in coming if each is not None)})
            )
        except Exception:  # noqa: BLE001 - rather a snapshot too many than none
            return step

    def _best_of(self, steps: list[int]) -> int | None:
        with self._finding:
            return self._find_best(steps)

    def submit(self, step: int, batch_index: int, tree: Any, state: FolderState | None = None) -> None:
        """Queue a snapshot and return at once; after `close`, drop the snapshot instead.

        Args:
            step: the number of updates done.
            batch_index: the number of batches used.
            tree: a pytree of NumPy arrays, which must not be changed afterwards.
            state: the state of the run's other files.
        """
        best = self._best_with(step) if self._waiting else None
        with self._changed:
            if self._is_closed:
                self._say(f"snapshot of step {step} skipped: it was submitted after the end of the run")
                return
            dropped = [each.step for each in self._waiting if each.step != best]
            self._waiting = [each for each in self._waiting if each.step == best]
            self._waiting.append(_Submitted(step, batch_index, tree, state))
            self._is_last_written = False
            self._changed.notify_all()
        for each in dropped:
            if each != step:
                self.skip(each, f"the disk is slow, and that of step {step} came before it was written")

    def skip(self, step: int, why: str) -> None:
        """Count a snapshot that is not written and say why, but at most once a minute; the next line has the number."""
        self.num_skipped += 1
        self._num_unsaid += 1
        if time.monotonic() >= self._say_again_at:
            before = f" ({self._num_unsaid:,} since the last such line)" if self._num_unsaid > 1 else ""
            self._say(f"snapshot of step {step} skipped: {why}{before}")
            self._num_unsaid, self._say_again_at = 0, time.monotonic() + _SAY_SKIPPED_EVERY_S

    def close(self, timeout_s: float) -> bool:
        """Accept no more snapshots, and wait at most `timeout_s` for pending ones to be written; can be called again.

        A snapshot that is not written in time is reported, but the daemon thread continues with it.

        Args:
            timeout_s: the limit in seconds.

        Returns:
            Whether the last submitted snapshot is on disk; True if none was submitted.
        """
        with self._changed:
            # Said once, and not at all if the first wait was interrupted: then the user chose not to wait.
            was_closed, self._is_closed = self._is_closed, True
            self._changed.notify_all()
        has_ended = self.worker.wait(timeout_s)
        with self._changed:
            queued = [self._writing_step, *(each.step for each in self._waiting)]
            is_written = self._is_last_written
        unwritten = [f"of step {step}" for step in queued if step is not None]
        if unwritten and not has_ended and not was_closed:
            self._say(
                f"snapshot {' and '.join(unwritten)} not written within {timeout_s:.3g} s: "
                f"check the disk of {self._folder}; {self._describe_last()}"
            )
        return is_written

    def _work(self) -> None:
        # If either fails, the first write fails too, and reports it.
        with suppress(Exception):
            load_orbax()
        with suppress(Exception):
            found = snapshot_steps(self._folder)
            with self._changed:
                self._last_step = found[-1] if found else None
        while self._write_next():
            pass

    def _write_next(self) -> bool:
        """Wait for a snapshot and write it; returning from this function frees the arrays before the next wait."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            if not self._waiting:
                return False
            submitted = self._waiting.pop(0)
            self._writing_step = submitted.step
        is_written = self._write_one(submitted)
        with self._changed:
            self._writing_step = None
            if is_written:
                self._last_step = submitted.step
            if not self._waiting:
                self._is_last_written = is_written
        if is_written:
            self._on_written(submitted.step, self._folder / str(submitted.step))
            self._remove_older(submitted.step)
        return True

    def _write_one(self, submitted: "_Submitted") -> bool:
        started = time.perf_counter()
        try:
            self._write_or_retry(submitted)
        except Exception as error:  # noqa: BLE001 - a failed snapshot must not stop the run
            self._say(f"snapshot of step {submitted.step} not written: {error_text(error)}; {self._describe_last()}")
            if self.last_step is None:
                self._note_failure(error)
            return False
        finally:
            self._on_ended(time.perf_counter() - started)
        self.failure = None
        self.writes.add(time.perf_counter() - started)
        self.num_bytes += sum(int(getattr(leaf, "nbytes", 0)) for leaf in jax.tree.leaves(submitted.tree))
        return True

    def _write_or_retry(self, submitted: "_Submitted") -> None:
        """Write a snapshot; try the first one twice, because a run does not stop for an error that passes."""
        values = submitted.step, submitted.batch_index, submitted.tree, submitted.state
        try:
            self._write(self._folder, *values)
        except Exception as error:
            if self.last_step is not None or is_out_of_room(error.__cause__ or error):
                raise
            self._write(self._folder, *values)

    def _note_failure(self, error: Exception) -> None:
        """Keep the error of a first snapshot, and give up hope unless it may be for lack of room."""
        place = printable(self._folder)
        self.failure = UnwritableFolderError(
            f"no snapshot could be written in {place}, so the run cannot be resumed: {error_text(error)}"
        )
        self.failure.__cause__ = error
        if not is_out_of_room(error.__cause__ or error):
            self._on_hopeless()

    def _remove_older(self, newest: int) -> None:
        try:
            best = self._best_of([step for step in snapshot_steps(self._folder) if step <= newest])
            keep_newest(self._folder, self._keep, up_to=newest, best=best)
        except Exception as error:  # noqa: BLE001 - the next write reports a full disk; the run continues
            self._say(f"old snapshots not removed: {error_text(error)}; remove them from {self._folder} by hand")

    def _describe_last(self) -> str:
        last = self.last_step
        return "there is no earlier one" if last is None else f"the last good one, of step {last}, is kept"


@dataclass(frozen=True)
class _Submitted:
    step: int
    batch_index: int
    tree: Any
    state: FolderState | None
