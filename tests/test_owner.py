"""One process packs at a time: a second one is refused, and one that was overtaken records nothing more."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest
import tensorstore as ts

from loopfeed.preprocess.packing.owner import LOCK_KEY, OWNER_KEY, Owner
from loopfeed.preprocess.shards.location import ShardError, open_location
from tests.fake_source import FakeSource, fake_source, files_of, pack

TIMEOUT_S = 60

SLOW = """
import sys, time
from loopfeed.preprocess.packing import pipeline
from tests.fake_source import *
pipeline._MAX_BLOCK_IMAGES = 1
class Slow(FakeSource):
    def read(self, index):
        time.sleep(60 if index == 8 else 0)
        return super().read(index)
s = fake_source(14)
pack(Slow(s.images, s.labels), sys.argv[1])
"""


@pytest.fixture
def packing(tmp_path):
    """Another process that packs 14 images at ``again`` and stands still once its second shard file is written."""
    process = subprocess.Popen([sys.executable, "-c", SLOW, str(tmp_path / "again")])
    try:
        deadline = time.monotonic() + TIMEOUT_S
        train = tmp_path / "again/train"
        while not (train / "pixels/c/1/0/0").exists() or list(train.rglob("*.__lock")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(("is_suspended", "overwrite"), [(False, True), (True, False)])
def test_a_second_process_is_kept_out_until_the_first_one_dies(tmp_path, packing, is_suspended, overwrite):
    if is_suspended:
        packing.send_signal(signal.SIGSTOP)
    before = files_of(tmp_path / "again")
    with pytest.raises(
        ShardError, match=r"train/: another preprocess-imagenet process is packing this split; stop one of"
    ):
        pack(fake_source(9, seed=5), tmp_path / "again", overwrite=overwrite)
    assert files_of(tmp_path / "again") == before
    packing.kill()
    packing.wait()
    assert pack(fake_source(14), tmp_path / "again").num_resumed >= 4
    pack(fake_source(14), tmp_path / "expected")
    assert files_of(tmp_path / "again") == files_of(tmp_path / "expected")


@pytest.mark.parametrize("at", range(1, 14))
def test_a_process_overtaken_in_a_store_without_locks_stops_without_a_record(at):
    context = ts.Context()
    location = open_location("memory://x", context=context).child("train")
    later = fake_source(10, seed=1)

    class Overtaken(FakeSource):
        def read(self, index):
            if index == at:
                pack(later, "memory://x", context=context, overwrite=True)
            return super().read(index)

    source = fake_source(14)
    with pytest.raises(ShardError, match="another preprocess-imagenet process is packing"):
        pack(Overtaken(source.images, source.labels), "memory://x", context=context)
    left = {key: location.read(key) for key in location.list_keys()}
    location = open_location("memory://y", context=context).child("train")
    pack(later, "memory://y", context=context)
    expected = {key: location.read(key) for key in location.list_keys()}
    # A shard under way in that moment still arrives; everything that says what the split holds is the later one's.
    assert {key: left[key] for key in expected if not key.startswith("pixels/c")} == {
        key: value for key, value in expected.items() if not key.startswith("pixels/c")
    }


def test_one_of_two_concurrent_starts_is_refused(monkeypatch):
    location = open_location("memory://x", context=ts.Context())
    read = ts.KvStore.read

    def overtaken(store, key):
        found = read(store, key)
        found.result()
        store.write(key, b"the other").result()
        return found

    monkeypatch.setattr(ts.KvStore, "read", overtaken)
    with pytest.raises(ShardError, match="another preprocess-imagenet"), Owner(location):
        pass
    monkeypatch.undo()
    assert location.read(OWNER_KEY) == b"the other"


def test_a_read_only_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(ShardError, match=r"journal/lock cannot be opened \(Not a directory\): choose another DEST"),
        Owner(open_location(str(tmp_path / "file"))),
    ):
        pass


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("pipe", "cannot be used as a lock (it is a pipe, not a file): remove it"),
        ("folder", "cannot be used as a lock (Is a directory): remove it"),
        (
            "open",
            "cannot be opened (Read-only file system): use another disk, or mount this one so that it can be written, "
            "or choose another DEST",
        ),
        (
            "lock",
            "cannot be locked (Input/output error): try again; if it fails again, check the disk or the network, or "
            "choose another DEST, on a file system with file locks",
        ),
        ("permission", "cannot be locked (Permission denied): choose another DEST, on a file system with file locks"),
    ],
)
def test_a_lock_that_cannot_be_had_says_why_and_what_to_do(tmp_path, monkeypatch, fault, words):
    import fcntl

    def fail(*_):
        raise OSError(number := numbers[fault], os.strerror(number))

    numbers = {"open": errno.EROFS, "lock": errno.EIO, "permission": errno.EACCES}
    (tmp_path / LOCK_KEY).parent.mkdir()
    if fault == "pipe":
        os.mkfifo(tmp_path / LOCK_KEY)
    elif fault == "folder":
        (tmp_path / LOCK_KEY).mkdir()
    elif fault == "open":
        monkeypatch.setattr(os, "open", fail)
    else:
        monkeypatch.setattr(fcntl, "flock", fail)
    with pytest.raises(ShardError) as raised, Owner(open_location(str(tmp_path))):
        pass
    assert str(raised.value) == f"{tmp_path}/: {LOCK_KEY} {words}"


def test_a_lock_file_that_its_holder_removed_is_created_again(tmp_path, monkeypatch):
    import fcntl

    location = open_location(str(tmp_path))
    flock = fcntl.flock
    count = 0

    def removed_at_first(descriptor, how):
        nonlocal count
        flock(descriptor, how)
        count += 1
        if count == 1:
            (tmp_path / LOCK_KEY).unlink()

    monkeypatch.setattr(fcntl, "flock", removed_at_first)
    with Owner(location):
        assert count == 2
        with pytest.raises(ShardError, match="another"), Owner(location):
            pass
