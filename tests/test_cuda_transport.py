"""The crossings of a card's program: values in, results out, what is emitted in order, nothing left behind."""

import ctypes
import gc
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed.engine.crossing.cuda import transport as cuda_transport
from loopfeed.engine.crossing.cuda.driver import CudaError
from loopfeed.engine.crossing.token import first_token
from tests.called_loop import check_calls
from tests.fake_xla import fake_transport


def check_clean(fake):
    """What must hold at the end of every launch: the transport's own hold of the device alone is left."""
    gc.collect()
    assert fake.violations == []
    assert fake.left() == ["the context"]
    assert fake.num_device_blocks == 0


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_a_call_reads_operands_and_writes_results_once_an_iteration(eagerness):
    transport, fake = fake_transport(eagerness=eagerness)
    check_calls(transport)
    check_clean(fake)


@pytest.mark.parametrize("eagerness", [0.0, 1.0])
def test_what_is_emitted_arrives_in_order_before_the_end(eagerness):
    transport, fake = fake_transport(eagerness=eagerness)
    seen: list[tuple[object, ...]] = []

    def program(steps):
        def body(carry):
            token, step = carry
            token = transport.emit(lambda arrays: seen.append(("number", int(arrays[0]))), token, step)
            token = transport.emit(
                lambda arrays: seen.append(("arrays", arrays[0].tolist(), arrays[1].dtype)),
                token,
                step + jnp.arange(2),
                step > 1,
            )
            return token, step + 1

        return lax.while_loop(lambda carry: carry[1] < steps, body, (first_token(), jnp.int32(0)))

    with transport.running():
        jax.block_until_ready(jax.jit(program)(jnp.int32(600)))
    expected = []
    for step in range(600):
        expected += [("number", step), ("arrays", [step, step + 1], np.bool)]
    assert seen == expected
    check_clean(fake)


def test_a_slow_receiver_is_waited_for(monkeypatch):
    """The host's memory for what is on its way is bounded, and nothing in it is lost."""
    monkeypatch.setattr(cuda_transport, "_MOST_SMALL_BLOCKS", 2)
    transport, fake = fake_transport()
    seen, released = [], threading.Event()

    def take(arrays):
        assert released.wait(30)
        seen.append(int(arrays[0]))

    def program(steps):
        def body(carry):
            token, step = carry
            return transport.emit(take, token, step), step + 1

        return lax.while_loop(lambda carry: carry[1] < steps, body, (first_token(), jnp.int32(0)))[1]

    threading.Timer(0.3, released.set).start()
    with transport.running():
        jax.block_until_ready(jax.jit(program)(jnp.int32(50)))
    assert seen == list(range(50))
    check_clean(fake)


@pytest.mark.timeout(60)
def test_a_hanging_receiver_ends_the_program_in_time(monkeypatch):
    monkeypatch.setattr(cuda_transport, "_MOST_SMALL_BLOCKS", 1)
    monkeypatch.setattr(cuda_transport, "_BLOCK_TIMEOUT_S", 0.2)
    transport, _ = fake_transport()
    released = threading.Event()

    def program(step):
        token = transport.emit(lambda _: released.wait(30), first_token(), step)
        token = transport.emit(lambda _: None, token, step)

        def body(carry):
            token, step = carry
            return transport.emit(lambda _: released.wait(30), token, step), step + 1

        return lax.while_loop(lambda carry: carry[1] < 4, body, (token, step))

    compiled = jax.jit(program).lower(jnp.int32(0)).compile()
    threading.Timer(1.0, released.set).start()
    run(transport, compiled, jnp.int32(0))
    with pytest.raises(TimeoutError, match=r"did not accept the program's records within 0.2 s"):
        raise transport.failure


@pytest.mark.timeout(60)
@pytest.mark.parametrize("function", ["cuMemcpyDtoHAsync_v2", "cuEventRecord"])
def test_the_error_of_a_driver_that_refuses_one_function_is_kept_and_the_program_comes_to_its_end(function):
    transport, fake = fake_transport()
    compiled = jax.jit(emitting(transport)).lower(jnp.int32(0)).compile()
    fake.fail(function, 700, after=3)
    assert run(transport, compiled, jnp.int32(1000)) == 1000
    with pytest.raises(CudaError, match=f"^NVIDIA's driver refused {function}: CUDA_ERROR_ILLEGAL_ADDRESS"):
        raise transport.failure
    assert fake.violations == []


@pytest.mark.timeout(60)
def test_a_driver_that_refuses_even_zeros_ends_the_launch_with_its_own_error():
    transport, fake = fake_transport()

    def program(steps):
        def body(carry):
            token, step = carry
            token, (number,) = transport.call(lambda *_: None, (jax.ShapeDtypeStruct((), jnp.int32),), token, step)
            return token, step + 1 + 0 * number

        return lax.while_loop(lambda carry: carry[1] < steps, body, (first_token(), jnp.int32(0)))[1]

    compiled = jax.jit(program).lower(jnp.int32(0)).compile()
    fake.fail("cuMemcpyDtoHAsync_v2", 700, after=3)
    fake.fail("cuMemsetD32Async", 700)
    with pytest.raises(CudaError, match=r"^NVIDIA's driver refused cuMemcpyDtoHAsync_v2: CUDA_ERROR_ILLEGAL_ADDRESS"):
        run(transport, compiled, jnp.int32(1000))
    assert fake.violations == []


@pytest.mark.timeout(60)
def test_the_reason_for_a_lost_value_is_raised_after_the_program():
    """The program has come to its end, and its state is good."""
    transport, fake = fake_transport()
    compiled = jax.jit(emitting(transport)).lower(jnp.int32(0)).compile()
    fake.fail("cuEventSynchronize", 700, after=3)
    assert run(transport, compiled, jnp.int32(8)) == 8
    assert isinstance(transport.failure, CudaError)
    assert fake.violations == []


@pytest.mark.timeout(60)
def test_a_receiver_that_hangs_at_the_end_keeps_its_memory(monkeypatch):
    monkeypatch.setattr(cuda_transport, "_CLOSE_TIMEOUT_S", 0.05)
    transport, fake = fake_transport()
    released, seen = threading.Event(), []

    def take(arrays):
        released.wait(30)
        seen.append(int(arrays[0]))

    compiled = jax.jit(emitting(transport, take)).lower(jnp.int32(0)).compile()
    assert run(transport, compiled, jnp.int32(5)) == 5
    assert isinstance(transport.failure, TimeoutError)
    released.set()
    transport._collector.close(30)
    assert seen == list(range(5))
    assert fake.violations == []


def emitting(transport, take=lambda _: None):
    def program(steps):
        def body(carry):
            token, step = carry
            return transport.emit(take, token, step), step + 1

        return lax.while_loop(lambda carry: carry[1] < steps, body, (first_token(), jnp.int32(0)))[1]

    return program


def run(transport, compiled, *arguments):
    with transport.running():
        return jax.block_until_ready(compiled(*arguments))


class LazyXla:
    """XLA's side of the crossings on a stream that works as late as it may: calls come when work is enqueued."""

    def __init__(self, monkeypatch, seed=0):
        self.transport, self.fake = fake_transport(seed=seed, eagerness=0.0)
        self.stream, self.calls = self.fake.new_stream(), list[Any]()
        self.transport._buffers = self

        def buffer_callback(cross, results, *, has_side_effect):
            assert has_side_effect
            self.calls.append(cross)
            return lambda *_: results

        monkeypatch.setattr(cuda_transport, "buffer_callback", buffer_callback)

    def stream_of(self, _):
        return self.stream

    def address_of(self, buffer):
        return buffer

    def call(self, number, outputs=(), inputs=()):
        with self.fake.as_xla():
            self.calls[number](None, [None, *outputs], None, *inputs)  # the token first

    def write(self, address, value):
        """A kernel that writes a number."""
        self.fake.compute(self.stream, lambda: ctypes.memmove(address, int(value).to_bytes(4, "little"), 4))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("seed", range(5))
def test_emitted_values_are_those_at_their_place_in_the_stream(monkeypatch, seed):
    """XLA's buffer is written again by the next step, long before the host is told of this one."""
    xla, seen = LazyXla(monkeypatch, seed), []
    xla.transport.emit(lambda arrays: seen.append(int(arrays[0])), first_token(), jax.ShapeDtypeStruct((), jnp.int32))
    buffer = xla.fake.new_memory(4)
    with xla.transport.running():
        for step in range(40):
            xla.write(buffer, step)
            xla.call(0, [], [buffer])
            xla.write(buffer, 999)
    assert seen == list(range(40))
    assert xla.fake.violations == []


@pytest.mark.timeout(60)
def test_a_call_reads_what_the_stream_has_written_before_it_and_its_results_come_behind(monkeypatch):
    xla, seen = LazyXla(monkeypatch), []

    def host(operands, results):
        seen.append(int(operands[0]))
        results[0][...] = 2 * operands[0]

    number = jax.ShapeDtypeStruct((), jnp.int32)
    xla.transport.call(host, (number,), first_token(), number)
    source, target = xla.fake.new_memory(4), xla.fake.new_memory(4)
    doubled = []
    with xla.transport.running():
        for step in range(10):
            xla.write(source, step)
            xla.call(0, [target], [source])
            xla.fake.compute(xla.stream, lambda: doubled.append(int.from_bytes(xla.fake.peek(target, 4), "little")))
            xla.write(target, 999)
    assert seen == list(range(10))
    assert doubled == [2 * step for step in range(10)]
    assert xla.fake.violations == []


def test_a_launch_interrupted_before_its_program_frees_everything():
    transport, fake = fake_transport()

    def interrupted():
        with transport.running(), transport.driver.current():
            transport.arena.device(64)
            transport.arena.stream()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert fake.num_device_blocks == 0
    check_clean(fake)


def test_an_interrupted_launch_frees_nothing_that_a_running_program_uses():
    transport, fake = fake_transport()

    compiled = jax.jit(emitting(transport)).lower(jnp.int32(0)).compile()

    def interrupted():
        with transport.running(), transport.driver.current():
            transport.arena.device(64)
            jax.block_until_ready(compiled(jnp.int32(3)))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert fake.num_device_blocks == 1


def test_outside_of_a_launch_there_is_no_memory():
    transport, _ = fake_transport()
    for what in ("arena", "collector"):
        with pytest.raises(RuntimeError, match=r"must be open while its program runs, but is closed"):
            getattr(transport, what)


def test_too_little_device_memory_is_reported_before_the_program_runs():
    transport, fake = fake_transport()
    fake.fail("cuMemAlloc_v2", 2)
    with pytest.raises(CudaError, match="CUDA_ERROR_OUT_OF_MEMORY"), transport.running(), transport.driver.current():
        transport.arena.device(64)
    assert fake.num_device_blocks == 0
