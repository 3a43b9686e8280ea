"""Batches on the device ahead of the program: the right ones, in order, whatever the order in which streams work."""

import gc
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.crossing.cuda import ring
from loopfeed.engine.crossing.cuda.arena import Arena
from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.ring import DeviceRing, Places, Stopwatch
from loopfeed.engine.feed.batches import FunctionBatches
from loopfeed.engine.feed.feeder import Feeder, FeederError
from loopfeed.engine.feed.resizable_batches import SyntheticBatches
from tests.fake_cuda import FakeCuda

BATCH, SIZE = 4, 3
PIXEL_BYTES, LABEL_BYTES = 4 * BATCH * SIZE * SIZE, 4 * BATCH


def pixels_of(step):
    return np.arange(BATCH * SIZE * SIZE, dtype=np.uint32).reshape(BATCH, SIZE, SIZE) + np.uint32(1000 * step)


def labels_of(step):
    return np.full(BATCH, step, np.int32)


class Numbered(SyntheticBatches):
    """Batches that say which step they are; `thread_safe`, so that several threads fill them."""

    def __init__(self, hurry=None):
        super().__init__(batch=BATCH, height=SIZE, width=SIZE, num_classes=10, seed=0)
        self._hurry = hurry

    def fill(self, step, rows, pixels, labels, *, timeout_s):
        if self._hurry is not None:
            self._hurry(step)
        pixels[...], labels[...] = pixels_of(step), labels_of(step)


class Rig:
    """A feeder, a ring and XLA's side of it: memory for what a pull brings, taken up behind it on the same stream."""

    def __init__(self, fake, *, depth=3, num_steps=12, source=None, timeout_s=20.0):
        self.fake, self.driver = fake, CudaDriver(functions=fake.functions)
        self.arena = Arena(self.driver)
        self.feeder = Feeder(
            source or Numbered(),
            start_index=0,
            stop_index=num_steps,
            depth=depth,
            num_threads=2,
            timeout_s=timeout_s,
        )
        self.ring = DeviceRing(self.driver, self.feeder, num_bytes=PIXEL_BYTES + LABEL_BYTES)
        self.stream = fake.new_stream()
        # XLA has one buffer for all steps: what is taken up late is lost.
        self.pixels, self.labels = fake.new_memory(PIXEL_BYTES), fake.new_memory(LABEL_BYTES)
        self.taken_up = []

    def __enter__(self):
        with self.driver.current():
            self.feeder.start(self.arena.pinned)
            self.ring.start(self.arena)
        return self

    def __exit__(self, *_):
        self.ring.close()
        self.feeder.close()
        self.arena.close()

    def give(self, step, **options):
        with self.fake.as_xla():
            is_given = self.ring.give(
                step, Places(self.pixels, self.labels, PIXEL_BYTES, LABEL_BYTES), self.stream, **options
            )
            if is_given:
                self.fake.compute(self.stream, self._take_up)
        return is_given

    def _take_up(self):
        pixels = np.frombuffer(self.fake.peek(self.pixels, PIXEL_BYTES), np.uint32).reshape(BATCH, SIZE, SIZE)
        labels = np.frombuffer(self.fake.peek(self.labels, LABEL_BYTES), np.int32)
        self.taken_up.append((pixels.copy(), labels.copy()))

    def check(self, num_steps):
        self.fake.finish()
        assert len(self.taken_up) == num_steps
        for step, (pixels, labels) in enumerate(self.taken_up):
            np.testing.assert_array_equal(pixels, pixels_of(step))
            np.testing.assert_array_equal(labels, labels_of(step))


@pytest.mark.timeout(300)
@settings(max_examples=100)
@given(
    seed=st.integers(0, 2**32 - 1),
    eagerness=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    depth=st.integers(1, 6),
    most_slots=st.integers(1, 5),
    num_steps=st.integers(1, 24),
    ahead=st.integers(0, 8),
)
def test_every_schedule_delivers_the_batches_in_order_and_frees_everything(
    seed, eagerness, depth, most_slots, num_steps, ahead
):
    """The device works as late as it may, or as early, in any order of its streams; the host looks up now and then."""
    fake = FakeCuda(seed, eagerness)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ring, "num_slots", lambda _: most_slots)
        with Rig(fake, depth=depth, num_steps=num_steps) as rig:
            for step in range(num_steps):
                assert rig.give(step)
                if ahead and step % ahead == 0:
                    with fake.as_xla():
                        rig.driver.synchronize_stream(rig.stream)
            rig.check(num_steps)
        assert fake.violations == []
        assert fake.num_device_blocks == 2  # XLA's own
        del rig
        gc.collect()
        assert fake.left() == []


@pytest.mark.timeout(60)
def test_the_next_batches_are_copied_while_the_program_computes():
    fake = FakeCuda(eagerness=1.0)
    with Rig(fake, depth=8):
        # All of them fit, and nothing was given yet.
        deadline = time.monotonic() + 30
        while fake.calls["cuMemcpyHtoDAsync_v2"] < 12 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert fake.calls["cuMemcpyHtoDAsync_v2"] == 12


@pytest.mark.timeout(60)
def test_the_stream_waits_for_a_late_batch_and_the_wait_is_reported():
    fake, released = FakeCuda(eagerness=1.0), threading.Event()
    with Rig(fake, source=Numbered(lambda step: step != 2 or released.wait(30))) as rig:
        with rig.driver.current():
            stopwatch = Stopwatch(rig.arena.event(timing=True), rig.arena.event(timing=True))
        rig.give(0)
        rig.give(1)
        threading.Timer(0.2, released.set).start()
        assert rig.give(2, stopwatch=stopwatch)
        rig.check(3)
        with rig.driver.current():
            assert rig.driver.elapsed_s(*stopwatch) > 0
    assert fake.violations == []


@pytest.mark.timeout(60)
def test_a_stopwatch_runs_while_the_stream_waits_and_no_longer():
    fake, released = FakeCuda(eagerness=0.0), threading.Event()
    # Nobody waits for the copy of a step before the next is there.
    with Rig(fake, source=Numbered(lambda step: step == 0 or released.wait(30))) as rig:
        with rig.driver.current():
            stopwatch = Stopwatch(rig.arena.event(timing=True), rig.arena.event(timing=True))
        rig.give(0, stopwatch=stopwatch)
        fake.work(rig.stream)  # as far as it comes without the copy
        assert (fake.has_passed(stopwatch.before), fake.has_passed(stopwatch.after)) == (True, False)
        fake.finish()
        released.set()
        kinds = [kind for stream, kind in fake.log if stream == rig.stream]
        assert kinds == ["record", "wait", "record", "device to device", "device to device", "record", "compute"]


@pytest.mark.timeout(60)
def test_a_cancelled_wait_returns_nothing():
    fake, released, cancelled = FakeCuda(), threading.Event(), threading.Event()
    with Rig(fake, source=Numbered(lambda _: released.wait(30))) as rig:
        threading.Timer(0.1, cancelled.set).start()
        assert not rig.give(0, is_cancelled=cancelled.is_set)
        released.set()
        rig.check(0)


@pytest.mark.timeout(60)
def test_a_stalled_source_is_reported_in_time():
    fake, released = FakeCuda(), threading.Event()
    with Rig(fake, source=Numbered(lambda _: released.wait(30)), timeout_s=0.3) as rig:
        with pytest.raises(FeederError, match=r"the batch of pull 1 did not arrive within 0.3 s"):
            rig.give(0)
        released.set()


@pytest.mark.timeout(60)
def test_an_exception_of_the_source_is_raised_when_its_step_is_due():
    def batches(step):
        if step == 2:
            raise ConnectionResetError("the store is gone")
        return pixels_of(step), labels_of(step)

    fake = FakeCuda()
    with Rig(fake, source=FunctionBatches(batches)) as rig:
        rig.give(0)
        rig.give(1)
        for _ in range(2):
            with pytest.raises(ConnectionResetError, match="the store is gone"):
                rig.give(2)
        rig.check(2)
    assert fake.violations == []


@pytest.mark.timeout(60)
def test_closing_a_ring_ends_all_waits():
    fake, released = FakeCuda(), threading.Event()
    with Rig(fake, source=Numbered(lambda _: released.wait(30))) as rig:
        threading.Timer(0.1, rig.ring.close).start()
        with pytest.raises(FeederError, match="closed while the program waited"):
            rig.give(0)
        released.set()


@pytest.mark.timeout(60)
def test_memory_of_the_host_outlives_a_reader_that_hangs_in_it():
    """A store that was given up still writes where it was told to."""
    fake, released = FakeCuda(), threading.Event()
    written = []

    def hang(step):
        if step == 1:
            released.wait(30)

    class Hanging(Numbered):
        def fill(self, step, rows, pixels, labels, *, timeout_s):
            super().fill(step, rows, pixels, labels, timeout_s=timeout_s)
            written.append(step)

    with Rig(fake, source=Hanging(hang)) as rig:
        rig.give(0)
        feeder = rig.feeder
    assert any(kind.endswith("pinned") for kind in fake.left())
    released.set()
    for worker in feeder._workers:
        worker.wait(30)
    assert 1 in written
    del rig, feeder, worker
    gc.collect()
    assert fake.left() == []
    assert fake.violations == []
