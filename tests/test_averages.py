"""Moving averages of the weights: the plain recurrence, in float32 whatever is averaged."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from engine.updates.averages import init_average, update_average


def drawn(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {"kernel": jnp.asarray(random.standard_normal((3, 4)), dtype), "stats": {"mean": jnp.full(4, seed, dtype)}}


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def assert_close(found, expected):
    # Twenty steps of two float32 roundings each, of values up to twenty.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), found, expected)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999, 1.0])
@pytest.mark.parametrize("ramp", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_equals_the_recurrence(decay, ramp, dtype):
    first = drawn(0, dtype)
    average, expected = init_average(first), as_float64(first)
    for step in range(20):
        new = drawn(1 + step, dtype)
        average = update_average(average, new, jnp.float32(decay), jnp.int32(step), ramp=ramp)
        kept = min(decay, (1 + step) / (10 + step)) if ramp else decay
        expected = jax.tree.map(lambda a, b, kept=kept: kept * a + (1 - kept) * b, expected, as_float64(new))
    assert {leaf.dtype for leaf in jax.tree.leaves(average)} == {jnp.dtype(jnp.float32)}
    assert_close(average, expected)


def test_equals_optax_without_the_ramp():
    average = expected = drawn(0)
    for step in range(5):
        average = update_average(average, drawn(step), jnp.float32(0.75), jnp.int32(step), ramp=False)
        expected = optax.incremental_update(drawn(step), expected, 0.25)
    assert_close(average, expected)


def test_the_average_of_constant_weights_stays_bit_identical():
    tree = drawn(3)
    average = update_average(init_average(tree), tree, jnp.float32(0.9), jnp.int32(7))
    jax.tree.map(np.testing.assert_array_equal, average, tree)


def test_the_average_may_be_donated_beside_what_it_started_from():
    # Arrays that were one buffer could not both be donated.
    made = jax.jit(lambda: (drawn(0), init_average(drawn(0))))()
    tree = drawn(0)
    for pair in (made, (tree, init_average(tree))):
        moved = jax.jit(lambda pair: jax.tree.map(lambda leaf: leaf + 1, pair), donate_argnums=0)(pair)
        assert_close(moved[0], moved[1])


def test_another_decay_or_step_causes_no_retrace():
    num_traces = 0

    @jax.jit
    def move(average, new, decay, step):
        nonlocal num_traces
        num_traces += 1
        return update_average(average, new, decay, step)

    average = init_average(drawn(0))
    for step, decay in enumerate([0.9, 0.0, 1.0]):
        average = move(average, drawn(step), jnp.float32(decay), jnp.int32(step))
    assert num_traces == 1
