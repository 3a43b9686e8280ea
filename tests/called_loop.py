"""A loop that calls the host through any transport."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from loopfeed.engine.crossing.token import first_token

RESULTS = (jax.ShapeDtypeStruct((2, 3), jnp.uint32), jax.ShapeDtypeStruct((), jnp.int32))


def check_calls(transport):
    """Assert that a host function reads its operands and writes its results once per iteration."""
    seen = []

    def host(operands, results):
        step, vector = operands
        seen.append((int(step), vector.tolist()))
        results[0][...] = int(step) * 10 + np.arange(6).reshape(2, 3)
        results[1][...] = -int(step)

    def program(steps):
        def body(carry):
            token, step, total, negative = carry
            token, (table, number) = transport.call(host, RESULTS, token, step, jnp.array([0.5, 2.0]) * step)
            return token, step + 1, total + table.sum(), negative + number

        before = first_token(), jnp.int32(0), jnp.uint32(0), jnp.int32(0)
        return lax.while_loop(lambda carry: carry[1] < steps, body, before)[1:]

    with transport.running():
        _, total, negative = jax.block_until_ready(jax.jit(program)(jnp.int32(4)))
    assert seen == [(step, [0.5 * step, 2.0 * step]) for step in range(4)]
    assert int(total) == sum(6 * 10 * step + 15 for step in range(4))
    assert int(negative) == -6
