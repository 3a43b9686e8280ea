"""The ring: every batch once and in order, never further ahead than its depth, and no wait without an end."""

import itertools
import random
import threading
import time
import traceback
from contextlib import closing, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.feed import feeder as feeder_module
from loopfeed.engine.feed.feeder import Feeder, FeederError, batch_bytes
from loopfeed.engine.settings import SettingError

SHAPE = (4, 2, 3)
# A bound on what must come, long enough for a loaded machine; never waited for where the code is right.
SOON_S = 20.0


class Source:
    """Batches that tell their step, filled as slowly and as wrongly as a test asks."""

    batch, height, width = SHAPE

    def __init__(self, *, thread_safe=True, before=lambda step: None):
        self.thread_safe, self._before = thread_safe, before
        self.fills = []
        self._changed = threading.Condition()

    def fill(self, step, rows, pixels, labels, *, timeout_s):
        with self._changed:
            self.fills.append(step)
            self._changed.notify_all()
        self._before(step)
        pixels[...] = batch_of(step)[0]
        labels[...] = batch_of(step)[1]

    def wait_for_fills(self, count):
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.fills) >= count, SOON_S), self.fills


class Lending(Source):
    """Lends two of three batches, and fills the others."""

    def lend(self, step, rows, labels, *, timeout_s):
        if step % 3 == 0:
            return None
        with self._changed:
            self.fills.append(step)
            self._changed.notify_all()
        self._before(step)
        pixels, labels[...] = batch_of(step)
        return SimpleNamespace(images=list(pixels), check=lambda: None)


def test_a_ring_larger_than_the_memory_is_refused_before_it_is_taken(monkeypatch):
    size, refused = (
        batch_bytes(Source()),
        "memory of this machine, 0.0 GB, but [49] of batch 4 take 0.0 GB: use a smaller",
    )
    for source, depth, memory, is_refused in (
        (Source(), 9, 9 * size, False),
        (Source(), 9, 9 * size - 1, True),
        (Lending(), 9, size, False),
        (Source(), 9, None, False),
    ):
        monkeypatch.setattr(feeder_module, "host_memory_bytes", lambda found=memory: found)
        feeder = Feeder(source, start_index=0, stop_index=100, depth=depth, num_threads=1, timeout_s=1)
        with closing(feeder), pytest.raises(SettingError, match=refused) if is_refused else nullcontext():
            feeder.start()


def batch_of(step):
    pixels = np.uint32(1000 * step) + np.arange(np.prod(SHAPE), dtype=np.uint32).reshape(SHAPE)
    return pixels, np.arange(SHAPE[0], dtype=np.int32) + 10 * step


@contextmanager
def running(source, *, steps=12, start=0, depth=3, num_threads=2, timeout_s=SOON_S, num_shards=1):
    """Yield a started feeder; afterwards close it and assert that its threads have ended."""
    feeder = Feeder(
        source,
        start_index=start,
        stop_index=steps,
        depth=depth,
        num_threads=num_threads,
        timeout_s=timeout_s,
        num_shards=num_shards,
    )
    feeder.start()
    try:
        yield feeder
    finally:
        feeder.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feeder-")]


def taken(feeder, step, shard=0):
    pixels = np.zeros((feeder.shard_batch, *SHAPE[1:]), np.uint32)
    labels = np.zeros(feeder.shard_batch, np.int32)
    assert feeder.take(step, shard, pixels, labels) >= 0
    return pixels, labels


def assert_taken(feeder, step, shard=0):
    rows = slice(shard * feeder.shard_batch, (shard + 1) * feeder.shard_batch)
    pixels, labels = taken(feeder, step, shard)
    np.testing.assert_array_equal(pixels, batch_of(step)[0][rows])
    np.testing.assert_array_equal(labels, batch_of(step)[1][rows])


@pytest.mark.parametrize("depth", [1, 3, 6])
def test_a_feeder_is_never_further_ahead_than_its_ring(depth):
    source = Source()
    with running(source, depth=depth, num_threads=4) as feeder:
        for step in range(12 - depth):
            source.wait_for_fills(step + depth)
            # A filler too many would have come by now: the threads have nothing else to do.
            time.sleep(0.01)
            assert sorted(source.fills) == list(range(step + depth))
            assert_taken(feeder, step)


@settings(max_examples=25)
@given(
    seed=st.integers(0, 2**32),
    depth=st.integers(1, 6),
    num_threads=st.integers(1, 6),
    num_shards=st.sampled_from([1, 2, 4]),
    steps=st.integers(1, 25),
    kind=st.sampled_from([Source, Lending]),
)
def test_every_schedule_delivers_each_batch_once_and_in_order(seed, depth, num_threads, num_shards, steps, kind):
    drawn = random.Random(seed)
    pauses_s = [drawn.choice([0, 0, 0.0005, 0.002]) for _ in range(steps)]
    source = kind(before=lambda step: time.sleep(pauses_s[step]))
    with running(source, steps=steps, depth=depth, num_threads=num_threads, num_shards=num_shards) as feeder:
        for step in range(steps):
            for shard in drawn.sample(range(num_shards), num_shards):
                assert_taken(feeder, step, shard)
            time.sleep(drawn.choice([0, 0, 0.001]))
    assert sorted(source.fills) == list(range(steps))


def test_a_source_that_is_not_thread_safe_is_called_from_one_thread_in_order():
    threads = set()
    source = Source(thread_safe=False, before=lambda step: threads.add(threading.get_ident()))
    with running(source, num_threads=4) as feeder:
        for step in range(12):
            assert_taken(feeder, step)
    assert source.fills == list(range(12))
    assert len(threads) == 1


def test_a_slot_is_filled_again_only_when_every_shard_has_taken():
    source = Source()
    with running(source, depth=1, num_shards=4) as feeder:
        for shard in (2, 0, 3):
            assert_taken(feeder, 0, shard)
        time.sleep(0.02)
        assert source.fills == [0]
        assert_taken(feeder, 0, 1)
        source.wait_for_fills(2)


def test_shards_may_be_taken_concurrently():
    failures = []
    with running(Source(), steps=30, depth=2, num_shards=4) as feeder:
        together = threading.Barrier(4)

        def take_all(shard):
            try:
                for step in range(30):
                    together.wait(SOON_S)
                    assert_taken(feeder, step, shard)
            except Exception as error:  # noqa: BLE001 - shown by the test's own thread
                failures.append(error)
                together.abort()

        threads = [threading.Thread(target=take_all, args=(shard,)) for shard in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SOON_S)
    assert failures == []


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_exception_of_the_source_is_raised_when_its_step_is_due(num_threads, kind):
    raised = kind("shard 3 is gone")

    def fail_at_seven(step):
        if step == 7:
            raise raised

    source = Source(before=fail_at_seven)
    with running(source, depth=3, num_threads=num_threads) as feeder:
        for step in range(7):
            assert_taken(feeder, step)
        with pytest.raises(kind, match="shard 3 is gone") as caught:
            taken(feeder, 7)
    assert caught.value is raised
    assert "fail_at_seven" in [frame.name for frame in traceback.extract_tb(raised.__traceback__)]


def test_a_stalled_source_is_an_error_within_the_limit():
    go_on = threading.Event()
    source = Source(before=lambda step: go_on.wait(SOON_S) if step == 1 else None)
    message = (
        r"^the batch of pull 2 did not arrive within 0\.05 s because the source has stalled or is too slow: "
        r"check the storage, or raise --infeed-timeout\. Its thread is at \S*threading\.py:\d+ \(wait\), called from "
        r".*, called from \S*test_feeder\.py:\d+ \(<lambda>\)"
    )
    with running(source, num_threads=1, timeout_s=0.05) as feeder:
        source.wait_for_fills(2)
        assert_taken(feeder, 0)
        with pytest.raises(FeederError, match=message):
            taken(feeder, 1)
        go_on.set()


def test_a_source_that_waits_for_jax_is_told_so():
    go_on = threading.Event()
    module: dict[str, Any] = {}
    exec(compile("def result(event): event.wait(20)", "/lib/site-packages/jax/_src/array.py", "exec"), module)
    source = Source(before=lambda _: module["result"](go_on))
    message = r"its source waits for a result of jax, .* set PJRT_NPROC .*array\.py:1 \(result\)"
    with running(source, num_threads=1, timeout_s=0.05) as feeder:
        with pytest.raises(FeederError, match=message):
            taken(feeder, 0)
        go_on.set()


def test_a_wait_ends_when_no_thread_is_left(monkeypatch):
    monkeypatch.setattr(feeder_module, "_LOOK_EVERY_S", 0.01)
    with running(Source(), steps=2, timeout_s=3600) as feeder:
        assert_taken(feeder, 0)
        assert_taken(feeder, 1)
        with pytest.raises(FeederError, match=r"^the batch of pull 3 cannot arrive: every reader thread has ended$"):
            taken(feeder, 2)


def test_closing_ends_the_wait_of_a_taker():
    go_on = threading.Event()
    source = Source(before=lambda step: go_on.wait(SOON_S))
    failures: list[str] = []

    def take():
        try:
            taken(feeder, 0)
        except FeederError as error:
            failures.append(str(error))

    with running(source, num_threads=1, timeout_s=3600) as feeder:
        taker = threading.Thread(target=take)
        taker.start()
        source.wait_for_fills(1)
        closer = threading.Thread(target=feeder.close)
        closer.start()
        taker.join(SOON_S)
        assert not taker.is_alive()
        go_on.set()
        closer.join(SOON_S)
    assert failures == ["the feeder was closed while pull 1 waited for its batch"]


def test_closing_does_not_wait_for_sources_that_are_stuck(monkeypatch):
    monkeypatch.setattr(feeder_module, "_CLOSE_TIMEOUT_S", 0.1)
    go_on = threading.Event()
    source = Source(before=lambda step: go_on.wait(SOON_S))
    with running(source, depth=8, num_threads=8) as feeder:
        source.wait_for_fills(8)
        started = time.monotonic()
        feeder.close()
        # Far more than the limit, far less than the source's own: the threads are left to themselves.
        assert time.monotonic() - started < SOON_S / 2
        assert not go_on.is_set()
        monkeypatch.setattr(feeder_module, "_CLOSE_TIMEOUT_S", SOON_S)
        go_on.set()


@pytest.mark.usefixtures("no_spare_threads")
def test_closing_works_if_a_thread_could_not_start(monkeypatch):
    start, started = threading.Thread.start, itertools.count()

    def refuse_the_second(thread):
        if next(started) == 1:
            raise RuntimeError("can't start new thread")
        start(thread)

    feeder = Feeder(Source(), start_index=0, stop_index=3, depth=2, num_threads=2, timeout_s=1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse_the_second)
        with pytest.raises(RuntimeError, match="can't start new thread"):
            feeder.start()
    feeder.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("feeder-")]


def test_memory_is_bounded_by_the_ring():
    buffers = set()

    class Remembering(Source):
        def fill(self, step, rows, pixels, labels, *, timeout_s):
            buffers.add(pixels.__array_interface__["data"][0])
            super().fill(step, rows, pixels, labels, timeout_s=timeout_s)

    with running(Remembering(), steps=50, depth=3) as feeder:
        for step in range(50):
            assert_taken(feeder, step)
    assert len(buffers) == 3
