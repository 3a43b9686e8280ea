"""The lock of a run folder: one holder, in this process or another, until it releases the lock or ends."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from loopfeed.engine.records.folder_lock import (
    LOCK_NAME,
    FolderInUseError,
    FolderLock,
    is_leftover,
    is_locked,
    was_killed,
)
from loopfeed.engine.records.whole_file import write_whole

LIMIT_S = 60

HOLDER = """
import sys, time
from pathlib import Path
from loopfeed.engine.records.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]))
lock.acquire()
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock of `tmp_path`."""
    process = subprocess.Popen([sys.executable, "-c", HOLDER, tmp_path], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate(timeout=LIMIT_S)


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_lock_is_held_from_acquire_to_release(tmp_path):
    lock = FolderLock(tmp_path)
    for _ in range(2):
        assert not is_locked(tmp_path)
        lock.acquire()
        assert is_locked(tmp_path)
        assert json.loads((tmp_path / LOCK_NAME).read_bytes()) == {"pid": os.getpid(), "host": os.uname().nodename}
        lock.release()
    assert not is_locked(tmp_path)
    assert (tmp_path / LOCK_NAME).read_bytes() == b""
    assert names(tmp_path) == [LOCK_NAME]


def test_a_second_holder_in_this_process_is_refused(tmp_path):
    with FolderLock(tmp_path) as first:
        message = rf"{tmp_path} is in use by process {os.getpid()} on host .+: wait for it to end, or stop it"
        for lock in (FolderLock(tmp_path), first):
            with pytest.raises(FolderInUseError, match=message):
                lock.acquire()
        FolderLock(tmp_path).release()
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)


def test_another_process_is_refused_with_the_name_of_the_holder(tmp_path, holder):
    assert is_locked(tmp_path)
    with pytest.raises(FolderInUseError, match=rf"in use by process {holder.pid} on host {os.uname().nodename}:"):
        FolderLock(tmp_path).acquire()
    assert is_locked(tmp_path)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_lock_ends_with_its_process(tmp_path, holder, number):
    holder.send_signal(number)
    holder.wait(LIMIT_S)
    assert not is_locked(tmp_path)
    assert b"pid" in (tmp_path / LOCK_NAME).read_bytes()  # the record stays, and counts for nothing
    with FolderLock(tmp_path):
        assert json.loads((tmp_path / LOCK_NAME).read_bytes())["pid"] == os.getpid()


def test_a_child_made_by_fork_does_not_keep_it(tmp_path):
    # The child shares the open file; run apart, for a fork beside threads is a warning.
    program = (
        "import os, signal, sys\nfrom pathlib import Path\n"
        "from loopfeed.engine.records.folder_lock import FolderLock, is_locked\n"
        "lock = FolderLock(Path(sys.argv[1]))\nlock.acquire()\nchild = os.fork()\n"
        "if not child:\n    signal.pause()\n"
        "lock.release()\nprint(is_locked(Path(sys.argv[1])))\nos.kill(child, signal.SIGKILL)\nos.waitpid(child, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("False\n", "")


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="open files are counted in /proc")
def test_refused_and_checking_processes_keep_no_file_open(tmp_path):
    with FolderLock(tmp_path):
        before = len(names(Path("/proc/self/fd")))
        assert is_locked(tmp_path)
        with pytest.raises(FolderInUseError):
            FolderLock(tmp_path).acquire()
        assert len(names(Path("/proc/self/fd"))) == before
    assert not is_locked(tmp_path)
    assert len(names(Path("/proc/self/fd"))) == before - 1


def test_one_of_many_threads_gets_the_lock(tmp_path):
    locks = [FolderLock(tmp_path) for _ in range(8)]
    barrier, outcomes = threading.Barrier(len(locks)), []

    def compete(lock):
        barrier.wait(LIMIT_S)
        try:
            lock.acquire()
            outcomes.append("held")
        except FolderInUseError:
            outcomes.append("refused")

    threads = [threading.Thread(target=compete, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert sorted(outcomes) == ["held"] + ["refused"] * 7
    for lock in locks:
        lock.release()
    assert not is_locked(tmp_path)


def test_a_concurrent_check_is_waited_for(tmp_path, monkeypatch):
    (tmp_path / LOCK_NAME).touch()
    looking = os.open(tmp_path / LOCK_NAME, os.O_RDONLY)
    fcntl.flock(looking, fcntl.LOCK_SH)
    monkeypatch.setattr("loopfeed.preprocess.file_lock.time.sleep", lambda _: fcntl.flock(looking, fcntl.LOCK_UN))
    assert not is_locked(tmp_path)  # those who look don't see each other
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
    os.close(looking)


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_lock_file_that_its_holder_removed_is_created_again(tmp_path, monkeypatch, is_made_again):
    path, flock, calls = tmp_path / LOCK_NAME, fcntl.flock, []

    def removed_at_first(file, how):
        flock(file, how)
        calls.append(how)
        if len(calls) == 1:
            path.unlink()
            if is_made_again:
                path.touch()

    monkeypatch.setattr(fcntl, "flock", removed_at_first)
    with FolderLock(tmp_path):
        assert len(calls) == 2
        assert is_locked(tmp_path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder, reason in ((tmp_path / "file", "Not a directory"), (tmp_path / "no", "No such file or directory")):
        with pytest.raises(ValueError, match=rf"{folder} must be a folder that can be locked, .* \({reason}\): choose"):
            FolderLock(folder).acquire()


def test_without_system_locks_everyone_is_admitted_and_the_record_counts(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
        with FolderLock(tmp_path):
            pass
    assert not is_locked(tmp_path)


def test_a_file_system_that_refuses_the_lock_is_named_as_the_reason(tmp_path, monkeypatch):
    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    (tmp_path / LOCK_NAME).touch()
    monkeypatch.setattr(fcntl, "flock", fail)
    for act in (FolderLock(tmp_path).acquire, FolderLock(tmp_path).check):
        with pytest.raises(
            ValueError, match=r"cannot be locked \(Input/output error\): try again; .*choose another folder, on"
        ):
            act()


@pytest.mark.parametrize("written_ns", [1, 2**62])
def test_what_was_there_before_the_lock_is_told_without_dates(tmp_path, written_ns):
    path = tmp_path / "result.json"
    path.write_text("{}")
    os.utime(path, ns=(written_ns, written_ns))
    assert not is_leftover(tmp_path, "result.json")
    with FolderLock(tmp_path, leftover="result.json"):
        assert is_leftover(tmp_path, "result.json")
        assert not is_leftover(tmp_path, "config.json")
        write_whole(path, b"{}")
        os.utime(path, ns=(written_ns, written_ns))
        assert not is_leftover(tmp_path, "result.json")
    (tmp_path / "new").mkdir()
    with FolderLock(tmp_path / "new", leftover="result.json"):
        (tmp_path / "new" / "result.json").write_text("{}")
        os.utime(tmp_path / "new" / "result.json", ns=(written_ns, written_ns))
        assert not is_leftover(tmp_path / "new", "result.json")


def test_a_killed_holder_is_distinguished_from_working_ended_and_remote_ones(tmp_path, holder):
    assert not was_killed(tmp_path)
    holder.kill()
    holder.wait(LIMIT_S)
    assert was_killed(tmp_path)
    record = json.loads((tmp_path / LOCK_NAME).read_text())
    (tmp_path / LOCK_NAME).write_text(json.dumps(record | {"host": "elsewhere"}))
    assert not was_killed(tmp_path)
    with FolderLock(tmp_path):
        assert not was_killed(tmp_path)
    assert not was_killed(tmp_path)
    assert not was_killed(tmp_path / "nowhere")


def test_a_lock_is_released_at_the_end_of_with_and_after_an_error(tmp_path):
    def fail():
        assert is_locked(tmp_path)
        raise LookupError

    with pytest.raises(LookupError), FolderLock(tmp_path):
        fail()
    assert not is_locked(tmp_path)


@pytest.mark.parametrize("record", [b"", b"{", b"[1]", b"{}", b"[" * 5000, b"\xff"])
def test_an_empty_record_names_no_holder(tmp_path, record):
    with FolderLock(tmp_path):
        (tmp_path / LOCK_NAME).write_bytes(record)
        with pytest.raises(FolderInUseError, match="is in use by another process: wait for it to end, or stop it"):
            FolderLock(tmp_path).acquire()
