"""The cache of shard files: bytes as in the store, below its limit, for several processes, after kills and damage."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopfeed.engine.feed.shard_batches import WindowedBatches
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.shards.shard_cache import IN_USE_S, ShardCache
from tests.delayed_store import DelayedStore
from tests.fake_source import fake_source, pack, packed_words

pytestmark = pytest.mark.timeout(120)
ROOT = Path(__file__).parents[1]
PACK = "a" * 64
OTHER = "b" * 64
NUM_IMAGES, SHARD_IMAGES = 37, 8
NUM_SHARDS = 5


def cache_of(folder, limit_bytes=1 << 30, warned=None):
    return ShardCache(folder, limit_bytes, (warned if warned is not None else []).append)


def add(cache, shard, content=b"x" * 100, *, pack_name=PACK):
    return cache.add(pack_name, shard, len(content), lambda: [content[:40], content[40:]])


def age(cache, shard, seconds, *, pack_name=PACK):
    """Make a file look as if it had not been used for so long."""
    cache.touch(pack_name, shard)
    stamp = cache.folder / pack_name / "used" / str(shard)
    os.utime(stamp, (time.time() - seconds,) * 2)


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_is_added_once_and_whole(tmp_path):
    cache = cache_of(tmp_path / "new")
    assert add(cache, 3)
    assert cache.place(PACK, 3).read_bytes() == b"x" * 100
    assert add(cache, 3, b"other")
    assert cache.place(PACK, 3).read_bytes() == b"x" * 100
    assert files(tmp_path / "new") == [f"{PACK}/pixels/c/3/0/0", "lock", "size"]
    cache.drop(PACK, 3)
    assert add(cache, 3, b"other")
    assert cache.place(PACK, 3).read_bytes() == b"other"


def test_files_that_were_not_used_for_longest_are_removed_first(tmp_path):
    cache = cache_of(tmp_path, 450)
    (tmp_path / "notes.txt").write_text("of the user")
    for shard in range(4):
        assert add(cache, shard)
    for shard, seconds in ((0, 400), (1, 900), (2, 10), (3, 600)):
        age(cache, shard, seconds)
    assert add(cache, 4, pack_name=OTHER)
    assert [cache.place(PACK, shard).exists() for shard in range(4)] == [True, False, True, True]
    assert add(cache, 5, pack_name=OTHER)
    assert [cache.place(PACK, shard).exists() for shard in range(4)] == [True, False, True, False]
    assert (tmp_path / "notes.txt").exists()
    # What was used lately stays; nothing is removed if that would not suffice.
    assert not add(cache, 6, b"y" * 300, pack_name=OTHER)
    assert not cache.place(OTHER, 6).exists()
    assert [cache.place(PACK, shard).exists() for shard in range(4)] == [True, False, True, False]
    assert sum(path.stat().st_size for path in tmp_path.rglob("pixels/c/*/0/0")) == 400
    assert IN_USE_S == 300


def test_the_size_of_a_file_counts_while_it_is_written(tmp_path):
    caches = [cache_of(tmp_path, 250) for _ in range(2)]
    begun, go_on = threading.Event(), threading.Event()

    def parts():
        begun.set()
        assert go_on.wait(30)
        yield b"x" * 200

    writer = threading.Thread(target=lambda: caches[0].add(PACK, 0, 200, parts))
    writer.start()
    assert begun.wait(30)
    assert not add(caches[1], 1)
    assert not caches[1].add(PACK, 0, 200, parts)  # another writes it
    assert not caches[1].place(PACK, 0).exists()
    go_on.set()
    writer.join(30)
    assert caches[0].place(PACK, 0).stat().st_size == 200


def test_a_failure_of_the_store_leaves_nothing_and_passes_through(tmp_path):
    cache = cache_of(tmp_path)

    def parts():
        yield b"x" * 50
        raise ValueError("not there")

    with pytest.raises(ValueError, match="not there"):
        cache.add(PACK, 0, 100, parts)
    assert files(tmp_path) == ["lock", "size"]


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), PermissionError(13, "Permission denied")])
def test_a_full_disk_is_one_warning(tmp_path, monkeypatch, fault):
    warned: list[str] = []
    cache = cache_of(tmp_path, warned=warned)
    assert add(cache, 0)

    def fails(*_):
        raise fault

    with monkeypatch.context() as patched:
        patched.setattr("loopfeed.preprocess.shards.shard_cache.os.pwrite", fails)
        assert not add(cache, 1)
    assert not add(cache, 2)
    assert add(cache, 0)
    assert len(warned) == 1
    assert "can't be written" in warned[0]
    assert files(tmp_path) == [f"{PACK}/pixels/c/0/0/0", "lock", "size"]


WRITER = f"""
import sys, time
from pathlib import Path
from loopfeed.preprocess.shards.shard_cache import ShardCache
def parts():
    yield b"x" * 50
    print("begun", flush=True)
    time.sleep(600)
ShardCache(Path(sys.argv[1]), 1000, print).add({PACK!r}, 0, 100, parts)
"""


def test_what_a_killed_process_left_is_removed_and_never_read(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    assert process.stdout.readline() == b"begun\n"
    incoming = tmp_path / PACK / "incoming/0"
    cache = cache_of(tmp_path)
    assert incoming.exists()  # its writer lives
    assert not add(cache, 0)
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert not cache.place(PACK, 0).exists()
    later = cache_of(tmp_path)
    assert not incoming.exists()
    assert add(later, 0)
    assert later.place(PACK, 0).read_bytes() == b"x" * 100


# Splits that are read through a cache


@pytest.fixture
def stored(tmp_path):
    """A pack in a store, by codec, and the store."""
    for codec in ("raw", "blosc"):
        pack(fake_source(NUM_IMAGES), tmp_path / "store" / codec, shard_images=SHARD_IMAGES, codec=codec)
    with DelayedStore(tmp_path / "store") as store:
        yield store


def opened(store, cache, codec="raw"):
    options = {"endpoint": store.endpoint, "credentials": "anonymous"}
    return open_split(f"s3://bucket/{codec}", "train", storage_options=options, cache=cache)


def read(split, indices):
    pixels = np.zeros((len(indices), 4, 4), np.uint32)
    labels = np.zeros(len(indices), np.int32)
    split.read_into(np.asarray(indices, np.int64), pixels, labels, timeout_s=30)
    return pixels, labels


def check(split, indices):
    pixels, labels = packed_words(fake_source(NUM_IMAGES))
    found = read(split, indices)
    np.testing.assert_array_equal(found[0], pixels[indices])
    np.testing.assert_array_equal(found[1], labels[indices])


def wait_until_cached(split, shards=range(NUM_SHARDS)):
    split.copies.request(shards)
    for shard in shards:
        split.copies.wait(shard, timeout_s=30)
    assert all(map(split.copies.is_present, shards))


def pixel_requests(store):
    return [key for key, _ in store.requests if "/pixels/c/" in key]


ALL = np.random.default_rng(0).permutation(NUM_IMAGES)


@pytest.mark.integration
@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_images_come_from_the_store_and_then_from_the_copies(stored, tmp_path, codec):
    for _ in range(2):
        with opened(stored, cache_of(tmp_path / "cache"), codec) as split:
            check(split, ALL[:9])
            check(split, ALL)
            wait_until_cached(split)
            before = len(pixel_requests(stored))
            check(split, ALL)
            assert len(pixel_requests(stored)) == before
            split.check_unchanged()
    # The second time, nothing was read from the store.
    whole = [key for key, given in stored.requests if "/pixels/c/" in key]
    with opened(stored, cache_of(tmp_path / "cache"), codec) as split:
        check(split, ALL)
    assert len(pixel_requests(stored)) == len(whole)
    for path in (tmp_path / "cache").rglob("pixels/c/*/0/0"):
        shard = path.parents[1].name
        assert path.read_bytes() == (tmp_path / "store" / codec / "train/pixels/c" / shard / "0/0").read_bytes()


@pytest.mark.integration
@pytest.mark.parametrize(
    ("codec", "fault"), [("raw", "flipped"), ("blosc", "flipped"), ("blosc", "cut"), ("raw", "empty")]
)
def test_damaged_copies_are_read_from_the_store_and_copied_again(stored, tmp_path, codec, fault):
    with opened(stored, cache_of(tmp_path / "cache"), codec) as split:
        wait_until_cached(split)
    (path,) = (tmp_path / "cache").rglob("pixels/c/2/0/0")
    sound = path.read_bytes()
    path.write_bytes({"flipped": sound[:5] + b"\1" + sound[6:], "cut": sound[:-9], "empty": b""}[fault])
    with opened(stored, cache_of(tmp_path / "cache"), codec) as split:
        check(split, ALL)
        deadline = time.monotonic() + 30
        while not path.exists() or path.read_bytes() != sound:
            check(split, ALL)
            assert time.monotonic() < deadline
            time.sleep(0.1)
        wait_until_cached(split)
        before = len(pixel_requests(stored))
        check(split, ALL)
        assert len(pixel_requests(stored)) == before


@pytest.mark.integration
def test_damage_in_the_store_is_not_hidden_by_the_cache(stored, tmp_path):
    path = tmp_path / "store/raw/train/pixels/c/1/0/0"
    path.write_bytes(b"\1" + path.read_bytes()[1:])
    with opened(stored, cache_of(tmp_path / "cache")) as split:
        for _ in range(3):
            with pytest.raises(ValueError, match=r"image 8 \(.+\) in pixels/c/1/0/0: the checksum does not match"):
                read(split, ALL)
            split.copies.wait(1, timeout_s=30)
        check(split, ALL[ALL >= 16])


@pytest.mark.integration
def test_the_windowed_order_reads_each_shard_once_into_the_cache(stored, tmp_path):
    with opened(stored, cache_of(tmp_path / "cache")) as split:
        pixels, labels = packed_words(fake_source(NUM_IMAGES))
        how: dict[str, Any] = {"seed": 1, "window_gb": 1e-3, "first_batch": 0, "num_threads": 2, "timeout_s": 30}
        source = WindowedBatches(split, batch=4, rows=range(4), **how)
        assert source.order.block_images == SHARD_IMAGES
        # Labels and checksums first, and then answers so late that the images would be asked for before.
        split.load_numbers(timeout_s=30)
        stored.delay_s = 0.05
        for batch_index in range(20):
            found = np.zeros((4, 4, 4), np.uint32), np.zeros(4, np.int32)
            source.fill(batch_index, range(source.batch), *found, timeout_s=30)
            images = source.order.images_at(np.arange(4 * batch_index, 4 * batch_index + 4))
            np.testing.assert_array_equal(found[0], pixels[images])
            np.testing.assert_array_equal(found[1], labels[images])
        source.close()
    assert sorted(pixel_requests(stored)) == [f"raw/train/pixels/c/{shard}/0/0" for shard in range(NUM_SHARDS)]


READER = """
import sys
import numpy as np
from pathlib import Path
from tests.test_shard_cache import ALL, cache_of, check, opened, wait_until_cached
class Store: endpoint = sys.argv[2]
with opened(Store, cache_of(Path(sys.argv[1]))) as split:
    for start in range(0, len(ALL), 3):
        check(split, ALL[start : start + 3])
    print("read", flush=True)
    while not all(map(split.copies.is_present, range(5))):
        check(split, ALL)
print("done", flush=True)
"""


@pytest.mark.integration
def test_processes_share_a_cache_even_if_one_is_killed(stored, tmp_path):
    """Each reads all images; the first is killed early, and every shard is in the cache in the end."""
    stored.delay_s = 0.05
    words = [sys.executable, "-c", READER, str(tmp_path / "cache"), stored.endpoint]
    processes = [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)]
    deadline = time.monotonic() + 60
    while not list((tmp_path / "cache").rglob("incoming/*")):
        assert time.monotonic() < deadline, processes[0].communicate()
    processes[0].send_signal(signal.SIGKILL)
    processes += [subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE) for _ in range(2)]
    ends = [process.communicate(timeout=90) for process in processes]
    assert [process.returncode for process in processes[1:]] == [0, 0], ends
    with opened(stored, cache_of(tmp_path / "cache")) as split:
        wait_until_cached(split)
        check(split, ALL)
    whole = Counter(key for key, given in stored.requests if given.startswith("bytes=0-") and "/pixels/c/" in key)
    assert set(whole.values()) <= {1, 2, 3}
    assert not list((tmp_path / "cache").rglob("incoming/*"))
