"""The wrapper of NVIDIA's driver: its calls, its error messages, and that everything is freed."""

import gc
import os
import re
import threading
import time
import weakref
from functools import partial
from typing import Any

import numpy as np
import pytest

from loopfeed.engine.crossing.cuda import driver as driver_module
from loopfeed.engine.crossing.cuda.arena import Arena
from loopfeed.engine.crossing.cuda.driver import PROTOTYPES, CudaDriver, CudaError, load_functions
from loopfeed.engine.crossing.cuda.transport import Collector
from tests.fake_cuda import FakeCuda


def test_every_function_that_is_declared_is_used(monkeypatch):
    """A prototype that is never called would never be checked."""
    called = set()
    real = CudaDriver._call

    def call(self, name, *arguments):
        called.add(name)
        real(self, name, *arguments)

    monkeypatch.setattr(CudaDriver, "_call", call)
    fake = FakeCuda()
    driver = CudaDriver(functions=fake.functions)
    with driver.current():
        pinned, device = driver.allocate_pinned(64), driver.allocate_device(64)
        stream, before, after = (
            driver.create_stream(),
            driver.create_event(timing=True),
            driver.create_event(timing=True),
        )
        driver.record(before, stream)
        driver.wait_for(stream, before)
        driver.copy_to_device(device, pinned, 64, stream)
        driver.copy_on_device(device + 32, device, 32, stream)
        driver.fill_words(device, 7, 2, stream)
        driver.copy_to_host(pinned, device, 64, stream)
        driver.record(after, stream)
        driver.synchronize(after)
        assert driver.elapsed_s(before, after) > 0
        assert np.frombuffer(fake.peek(pinned, 8), np.uint32).tolist() == [7, 7]
        driver.synchronize_stream(stream)
        driver.synchronize_device()
        driver.free_pinned(pinned)
        driver.free_device(device)
        driver.destroy_event(before)
        driver.destroy_event(after)
        driver.destroy_stream(stream)
    fake.fail("cuInit", 100)
    with pytest.raises(CudaError):
        CudaDriver(functions=fake.functions)
    del driver
    gc.collect()
    assert not fake.violations
    assert fake.left() == []
    assert called | {"cuGetErrorName", "cuGetErrorString", "cuDevicePrimaryCtxRelease_v2"} == set(PROTOTYPES)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (2, "refused cuMemAlloc_v2: CUDA_ERROR_OUT_OF_MEMORY, words of error 2; choose a smaller --batch to use less"),
        (700, "refused cuMemAlloc_v2: CUDA_ERROR_ILLEGAL_ADDRESS, words of error 700$"),
    ],
)
def test_an_error_carries_the_drivers_name_for_it(code, words):
    fake = FakeCuda()
    driver = CudaDriver(functions=fake.functions)
    fake.fail("cuMemAlloc_v2", code)
    with driver.current(), pytest.raises(CudaError, match=words) as caught:
        driver.allocate_device(8)
    assert caught.value.name in words


def test_an_arena_frees_everything_except_memory_in_use():
    fake = FakeCuda()
    arena = Arena(driver := CudaDriver(functions=fake.functions))
    with driver.current():
        held, view = arena.pinned(64), arena.pinned(64)[8:]
        arena.pinned(64)
        arena.device(64), arena.stream(), arena.event(), arena.event(timing=True)
    assert not held.any()
    arena.close()
    assert (fake.num_device_blocks, fake.num_streams) == (0, 0)
    assert fake.left() == ["2 pinned", "the context"]
    held[...] = 1  # it is memory still
    view[...] = 2
    del held, view
    gc.collect()
    assert fake.left() == ["the context"]
    arena.close()
    assert not fake.violations


def test_an_arena_frees_what_it_can_after_a_device_failure():
    fake = FakeCuda()
    arena = Arena(driver := CudaDriver(functions=fake.functions))
    with driver.current():
        arena.stream(), arena.device(8)
    fake.fail("cuCtxSynchronize", 700)
    with pytest.raises(CudaError, match="cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS"):
        arena.close()
    assert (fake.num_device_blocks, fake.num_streams) == (0, 0)


@pytest.mark.timeout(60)
def test_an_idle_collector_holds_no_reference_to_past_calls():
    """Whoever is interrupted leaves one that waits for ever."""
    fake = FakeCuda(eagerness=1.0)
    arena, collector = Arena(driver := CudaDriver(functions=fake.functions)), Collector(driver)
    collector.start()
    called = threading.Event()

    class Sink:
        def take(self):
            called.set()

    sink = Sink()
    watched = weakref.ref(sink)
    with driver.current():
        event, stream = arena.event(), arena.stream()
        driver.record(event, stream)
        collector.put(event, sink.take)
    assert called.wait(30)
    del sink
    deadline = time.monotonic() + 30
    while watched() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
        gc.collect()
    collector.close(30)
    arena.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_a_collector_calls_in_order_each_when_its_event_has_passed(eagerness):
    fake = FakeCuda(eagerness=eagerness)
    arena, collector = Arena(driver := CudaDriver(functions=fake.functions)), Collector(driver)
    collector.start()
    seen = []

    def note(block, number):
        seen.append(int(block.view(np.uint32)[number]))

    with driver.current():
        block, device, stream = arena.pinned(400), arena.device(400), arena.stream()
        for number in range(100):
            event = arena.event()
            driver.fill_words(device + 4 * number, number, 1, stream)
            driver.copy_to_host(block.ctypes.data + 4 * number, device + 4 * number, 4, stream)
            driver.record(event, stream)
            collector.put(event, partial(note, block, number))
    collector.close(30)
    assert seen == list(range(100))
    del block
    arena.close()
    assert not fake.violations


@pytest.mark.timeout(60)
def test_a_collector_keeps_what_failed_and_calls_nothing_after_it():
    fake = FakeCuda()
    arena, collector = Arena(driver := CudaDriver(functions=fake.functions)), Collector(driver)
    collector.start()
    with driver.current():
        event = arena.event()
    fake.fail("cuEventSynchronize", 700)
    collector.put(event, lambda: pytest.fail("called"))
    collector.close(30)
    assert isinstance(collector.failure, CudaError)
    collector.close(30)
    arena.close()


def hang(released):
    released.wait(30)


@pytest.mark.timeout(60)
def test_a_collector_whose_receiver_hangs_is_abandoned():
    fake, released = FakeCuda(), threading.Event()
    arena, collector = Arena(driver := CudaDriver(functions=fake.functions)), Collector(driver)
    collector.start()
    with driver.current():
        collector.put(arena.event(), partial(hang, released))
    with pytest.raises(TimeoutError, match=r"did not reach the host within 0.05 s of the program's end"):
        collector.close(0.05)
    released.set()
    collector.close(30)


def test_calls_that_may_wait_release_the_gil(monkeypatch):
    """Of ctypes' flags 4 is that of a call that keeps it."""
    monkeypatch.setattr(driver_module, "LIBRARY", None)  # this process itself
    monkeypatch.setattr(driver_module, "PROTOTYPES", {"getppid": (), "getpid": ()})
    monkeypatch.setattr(driver_module, "_BRIEF", {"getppid"})
    functions = load_functions()
    kept: Any = functions("getppid")
    given_up: Any = functions("getpid")
    assert (kept(), given_up()) == (os.getppid(), os.getpid())
    assert [bool(function._flags_ & 4) for function in (kept, given_up)] == [True, False]
    monkeypatch.undo()
    waits = {
        name for name in PROTOTYPES if re.search("Synchronize|Alloc|Free|Create|Destroy|Ctx(Retain|Release)", name)
    }
    asks = {"cuInit", "cuGetErrorName", "cuGetErrorString", "cuDeviceGet"}
    assert set(PROTOTYPES) - waits - asks == driver_module._BRIEF


def test_a_driver_without_a_function_is_too_old(monkeypatch):
    monkeypatch.setattr(driver_module, "LIBRARY", None)
    with pytest.raises(CudaError, match="does not have the function cuInit: install a newer driver"):
        CudaDriver()
