"""The writer of snapshots: never waited for, newest first, nothing lost at the end, and no fault ends the run."""

import gc
import sys
import threading
import weakref
from functools import partial
from types import SimpleNamespace

import numpy as np

from loopfeed.engine.records import snapshot_writer
from loopfeed.engine.records.snapshot import SnapshotError, read_snapshot, snapshot_steps, write_snapshot
from loopfeed.engine.records.snapshot_writer import SnapshotWriter
from tests.waiting import wait_until

# A bound on what must come, long enough for a loaded machine; never waited for where the code is right.
SOON_S = 20.0
SLOW = "the disk is slow, and that of step {} came before it was written"


class Disk:
    """Stands for `write_snapshot`: makes empty snapshots, holds where a test asks, fails where it asks."""

    def __init__(self, *, held=False, fails=None):
        self.gate, self.entered, self.fails = threading.Event(), threading.Event(), fails or {}
        self.written, self.threads = [], set()
        if not held:
            self.gate.set()

    def write(self, folder, step, pulls, tree, state=None):
        self.threads.add(threading.current_thread())
        self.entered.set()
        assert self.gate.wait(SOON_S)
        if step in self.fails:
            raise self.fails[step]
        (folder / str(step)).mkdir(parents=True)
        self.written.append((step, pulls, tree))

    @property
    def steps(self):
        return [step for step, _, _ in self.written]


def make_writer(folder, disk, *, keep=0, say=None):
    words: list[str] = []
    writer = SnapshotWriter(folder, keep=keep, say=say or words.append, write=disk.write)
    writer.start()
    return writer, words


def test_what_is_submitted_is_written_in_order_on_one_thread_that_is_not_the_callers(tmp_path):
    disk = Disk()
    writer, words = make_writer(tmp_path, disk)
    trees = {step: object() for step in (1, 2, 3)}
    for step, tree in trees.items():
        writer.submit(step, 2 * step, tree)
        wait_until(partial(lambda step: writer.last_step == step, step))
    assert writer.close(SOON_S)
    assert disk.written == [(step, 2 * step, tree) for step, tree in trees.items()]
    assert [thread.name for thread in disk.threads] == ["spare snapshot-writer"]
    assert all(thread.daemon for thread in disk.threads)
    assert words == []


def test_a_newer_snapshot_takes_the_place_of_one_that_waits_and_the_last_is_not_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot_writer, "_SAY_SKIPPED_EVERY_S", 0.0)
    disk = Disk(held=True)
    writer, words = make_writer(tmp_path, disk)
    writer.submit(1, 1, None)
    assert disk.entered.wait(SOON_S)
    for step in (2, 3, 4):
        writer.submit(step, step, None)
    closed = []
    closer = threading.Thread(target=lambda: closed.append(writer.close(SOON_S)), daemon=True)
    closer.start()
    disk.gate.set()
    closer.join(SOON_S)
    assert closed == [True]
    assert disk.steps == [1, 4]
    assert words == [f"snapshot of step {step} skipped: {SLOW.format(step + 1)}" for step in (2, 3)]
    assert writer.last_step == 4


def test_skipped_snapshots_are_counted_and_said_at_most_once_a_minute(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr(snapshot_writer, "time", SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now))
    writer, words = make_writer(tmp_path, Disk())
    for step in (1, 2, 3):
        writer.skip(step, "slow")
    now = 160.0
    writer.skip(4, "slow")
    assert words == [
        "snapshot of step 1 skipped: slow",
        "snapshot of step 4 skipped: slow (3 since the last such line)",
    ]
    assert writer.num_skipped == 4
    writer.close(0)


def test_a_failed_write_is_reported_once_and_the_next_one_is_tried(tmp_path):
    disk = Disk(fails={1: OSError("no\nroom"), 3: SnapshotError("no right"), 4: MemoryError()})
    writer, words = make_writer(tmp_path, disk)
    for step in (1, 2, 3, 4):
        disk.entered.clear()
        writer.submit(step, step, None)
        assert disk.entered.wait(SOON_S)
        wait_until(lambda: writer._writing_step is None)
    assert not writer.close(SOON_S), "the last one is not on disk"
    assert words == [
        "snapshot of step 1 not written: no room; there is no earlier one",
        "snapshot of step 3 not written: no right; the last good one, of step 2, is kept",
        "snapshot of step 4 not written: MemoryError; the last good one, of step 2, is kept",
    ]
    assert writer.last_step == 2
    assert snapshot_steps(tmp_path) == [2]


def test_nothing_is_removed_for_a_snapshot_that_failed(tmp_path):
    for step in (1, 2):
        (tmp_path / str(step)).mkdir()
    writer, words = make_writer(tmp_path, Disk(fails={3: OSError("no room")}), keep=1)
    writer.submit(3, 3, None)
    assert not writer.close(SOON_S)
    assert snapshot_steps(tmp_path) == [1, 2]
    assert words == ["snapshot of step 3 not written: no room; the last good one, of step 2, is kept"]


def test_a_run_that_went_back_keeps_what_it_writes_before_what_it_left_behind(tmp_path):
    """Resumed at 20 since 30 was damaged: 30 must not push out the good ones."""
    for step in (10, 20, 30):
        (tmp_path / str(step)).mkdir()
    disk = Disk()
    writer, _ = make_writer(tmp_path, disk, keep=1)
    writer.submit(25, 25, None)
    wait_until(lambda: writer.last_step == 25)
    assert writer.close(SOON_S)
    assert snapshot_steps(tmp_path) == [25, 30]


def test_a_failed_removal_is_reported_and_the_run_continues(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise PermissionError("not yours")

    monkeypatch.setattr(snapshot_writer, "keep_newest", fail)
    writer, words = make_writer(tmp_path, Disk(), keep=1)
    writer.submit(1, 1, None)
    assert writer.close(SOON_S)
    assert words == [f"old snapshots not removed: not yours; remove them from {tmp_path} by hand"]
    assert writer.last_step == 1


def test_a_hanging_disk_is_abandoned_at_the_limit_and_reported(tmp_path):
    (tmp_path / "7").mkdir()
    disk = Disk(held=True)
    writer, words = make_writer(tmp_path, disk)
    writer.submit(8, 8, None)
    assert disk.entered.wait(SOON_S)
    writer.submit(9, 9, None)
    assert not writer.close(0.05)
    assert not writer.close(0)
    assert words == [
        f"snapshot of step 8 and of step 9 not written within 0.05 s: check the disk of {tmp_path}; "
        "the last good one, of step 7, is kept"
    ]
    disk.gate.set()
    assert writer.close(SOON_S), "what was given up is written, if the disk ever goes on"
    assert disk.steps == [8, 9]


def test_submitting_never_waits_for_a_disk_that_hangs(tmp_path):
    disk = Disk(held=True)
    writer, words = make_writer(tmp_path, disk)
    submitter = threading.Thread(target=lambda: [writer.submit(step, step, None) for step in range(1000)], daemon=True)
    submitter.start()
    submitter.join(SOON_S)
    assert not submitter.is_alive()
    assert not disk.written
    disk.gate.set()
    assert writer.close(SOON_S)
    assert disk.steps[-1] == 999
    assert (len(words), writer.num_skipped + len(disk.steps)) == (1, 1000)


def test_the_arrays_are_freed_once_they_are_written(tmp_path):
    """A state is as large as the model and its moments: it must not stay in memory up to the next snapshot."""
    disk = Disk()
    done = threading.Event()

    def write(folder, step, pulls, tree, state=None):
        done.set()

    writer = SnapshotWriter(tmp_path, keep=0, say=lambda line: None, write=write)
    writer.start()
    array = np.zeros(10)
    gone = weakref.ref(array)
    writer.submit(1, 1, {"a": array})
    del array
    assert done.wait(SOON_S)

    def is_gone():
        gc.collect()
        return gone() is None

    wait_until(is_gone)
    assert writer.close(SOON_S)
    assert not disk.written


def test_orbax_is_imported_early_and_its_failure_is_reported_by_the_write(tmp_path, monkeypatch):
    loaded = threading.Event()
    monkeypatch.setattr(snapshot_writer, "load_orbax", loaded.set)
    writer, _ = make_writer(tmp_path, Disk())
    assert loaded.wait(SOON_S)
    assert writer.close(SOON_S)

    def fail():
        raise ImportError("no Orbax")

    monkeypatch.setattr(snapshot_writer, "load_orbax", fail)
    writer, words = make_writer(tmp_path, Disk(fails={1: ImportError("no Orbax")}))
    writer.submit(1, 1, None)
    assert not writer.close(SOON_S)
    assert words == ["snapshot of step 1 not written: no Orbax; there is no earlier one"]


def test_real_snapshots_of_a_run_that_is_stopped(tmp_path):
    """The whole way: some steps, an earlier run's rest beside them, and the final snapshot at the close."""
    folder = tmp_path / "snapshots"
    write_snapshot(folder, 1, 1, {"w": np.zeros(3)})
    words: list[str] = []
    writer = SnapshotWriter(folder, keep=2, say=words.append)
    writer.start()
    for step in (2, 3):
        writer.submit(step, step, {"w": np.full(3, float(step))})
        wait_until(partial(lambda step: writer.last_step == step, step))
    writer.submit(4, 4, {"w": np.full(3, 4.0)})
    assert writer.close(SOON_S)
    assert snapshot_steps(folder) == [3, 4]
    assert read_snapshot(folder, 4).leaves["w"].tolist() == [4.0] * 3
    assert words == []
    assert "orbax.checkpoint" in sys.modules


def test_a_writer_that_was_never_started_closes(tmp_path):
    writer = SnapshotWriter(tmp_path, keep=0, say=print)
    assert writer.close(SOON_S)
    assert not list(tmp_path.iterdir())


def test_a_pending_snapshot_is_reported(tmp_path):
    disk = Disk(held=True)
    writer, _ = make_writer(tmp_path, disk)
    assert writer.unwritten_step is None
    writer.submit(1, 1, None)
    assert disk.entered.wait(SOON_S)
    assert writer.unwritten_step == 1
    writer.submit(2, 2, None)
    assert writer.unwritten_step == 2
    disk.gate.set()
    assert writer.close(SOON_S)
    assert writer.unwritten_step is None


def test_closing_without_a_snapshot_succeeds_and_later_ones_are_ignored(tmp_path):
    disk = Disk()
    writer, words = make_writer(tmp_path, disk)
    assert writer.close(SOON_S)
    assert writer.last_step is None
    writer.submit(1, 1, None)
    assert writer.close(SOON_S)
    assert (disk.written, words) == ([], ["snapshot of step 1 skipped: it was submitted after the end of the run"])
    assert not (tmp_path / "1").exists()
