"""Both transports: operands in, results out, once a call."""

import ctypes

import jax
import jax.numpy as jnp
import pytest

from loopfeed.engine.crossing.token import first_token
from loopfeed.engine.crossing.transport import CallbackTransport, InplaceTransport
from tests.called_loop import RESULTS, check_calls


@pytest.mark.parametrize("transport", [InplaceTransport(), CallbackTransport()], ids=lambda each: each.name)
def test_a_host_function_reads_operands_and_writes_results_once_an_iteration(transport):
    check_calls(transport)


def test_the_state_of_a_thread_is_kept_before_anything_else_of_a_call(monkeypatch):
    """A call on a thread of XLA's would otherwise make one; which thread calls cannot be chosen here."""
    transport, calls = InplaceTransport(), []
    monkeypatch.setattr(type(transport._thread_state), "keep", lambda _: calls.append("kept"))

    def program(value):
        return transport.call(lambda *_: calls.append("called"), RESULTS[1:], first_token(), value)

    for _ in range(2):
        jax.block_until_ready(jax.jit(program)(jnp.float32(1)))
    assert calls == ["kept", "called"] * 2


@pytest.mark.parametrize("transport", [InplaceTransport(), CallbackTransport()], ids=lambda each: each.name)
def test_a_call_whose_results_nobody_uses_is_still_made(transport):
    seen = []

    def program(value):
        transport.call(lambda operands, _: seen.append(float(operands[0])), RESULTS[1:], first_token(), value)
        return value + 1

    jax.block_until_ready(jax.jit(program)(jnp.float32(2.5)))
    jax.effects_barrier()
    assert seen == [2.5]


@pytest.mark.parametrize("transport", [InplaceTransport(), CallbackTransport()], ids=lambda each: each.name)
def test_arrays_that_the_host_keeps_are_never_taken_for_those_of_a_later_call(transport):
    kept = []
    values = []

    def host(operands, results):
        kept.append((operands, results))
        values.append([int(operand) for operand in operands])
        results[0][...] = operands[0] + operands[1]

    def program(number):
        return transport.call(host, RESULTS[1:], first_token(), number, number * 7)[1][0]

    compiled = jax.jit(program).lower(jnp.int32(0)).compile()
    sums = []
    # Each argument of a C callback takes its room on the stack: the calls find it at as many different heights.
    for height in range(100):
        number = jnp.int32(height)
        callback = ctypes.CFUNCTYPE(None, *[ctypes.c_int] * height)
        callback(lambda *_, number=number: sums.append(int(compiled(number))))(*range(height))
    assert values == [[number, 7 * number] for number in range(100)]
    assert sums == [8 * number for number in range(100)]
