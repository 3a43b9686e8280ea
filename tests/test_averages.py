"""Moving averages of the weights: the plain recurrence, in float32 whatever is averaged."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import replay_run, train
from loopfeed.engine.updates.averages import init_average, update_average
from tests.toy import Linear, toy_batch, toy_config


def drawn(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {"kernel": jnp.asarray(random.standard_normal((3, 4)), dtype), "stats": {"mean": jnp.full(4, seed, dtype)}}


def as_float64(tree):
    return jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), tree)


def assert_close(found, expected):
    # Twenty steps of two float32 roundings each, of values up to twenty.
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6), found, expected)


@pytest.mark.parametrize(
    ("decay", "ramp", "dtype"),
    [
        (0.0, True, jnp.bfloat16),
        (0.5, False, jnp.bfloat16),
        (0.999, True, np.float32),
        (0.999, False, np.float32),
        (1.0, True, jnp.bfloat16),
        (1.0, False, np.float32),
    ],
)
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


def test_the_average_may_be_donated_beside_what_it_started_from():
    # Arrays that were one buffer could not both be donated.
    made = jax.jit(lambda: (drawn(0), init_average(drawn(0))))()
    tree = drawn(0)
    for pair in (made, (tree, init_average(tree))):
        moved = jax.jit(lambda pair: jax.tree.map(lambda leaf: leaf + 1, pair), donate_argnums=0)(pair)
        assert_close(moved[0], moved[1])


def test_only_floating_point_leaves_are_averaged():
    def weights(step):
        return {
            "mean": jnp.full(3, step, jnp.bfloat16),
            "count": jnp.array([step, 2**24 + 1 + step]),
            "is_first": jnp.array(step == 0),
            "key": jax.random.key(step),
        }

    average = init_average(weights(0))
    assert {name: leaf.dtype for name, leaf in average.items()} == {
        name: leaf.dtype for name, leaf in (weights(0) | {"mean": jnp.zeros(3)}).items()
    }
    moved = update_average(average, weights(1), jnp.float32(0.75), jnp.int32(0), ramp=False)
    np.testing.assert_array_equal(moved["mean"], np.full(3, 0.25, np.float32))
    assert moved["count"].tolist() == [1, 2**24 + 2]
    assert not moved["is_first"]
    assert moved["key"] == jax.random.key(1)


class Counting(Linear):
    """A model whose statistics are an integer, a boolean and a PRNG key, which its evaluation checks."""

    def init(self, key):
        params, batch_stats = super().init(key)
        return params, batch_stats | {"count": jnp.int32(2**24), "is_first": jnp.array(True), "key": jax.random.key(7)}

    def apply(self, params, batch_stats, images, train):
        assert batch_stats["count"].dtype == jnp.int32
        assert batch_stats["is_first"].dtype == jnp.bool
        logits, moved = super().apply(params, batch_stats, images, train)
        others = {
            "count": batch_stats["count"] + 1,
            "is_first": jnp.array(False),
            "key": jax.random.fold_in(batch_stats["key"], 1),
        }
        return logits, (batch_stats | moved | others if train else batch_stats)


def test_a_run_keeps_statistics_of_other_dtypes_with_an_average(tmp_path):
    config = toy_config(steps=6, ema_decay=0.5, run_dir=str(tmp_path), eval_every_steps=3)
    parts = {"model": Counting(), "batches": toy_batch, "evaluation": toy_batch(99)}
    train(replace(config, steps=3), **parts)
    result = train(replace(config, resume=True), **parts)
    assert result.batch_stats["count"] == 2**24 + 6
    assert not result.batch_stats["is_first"]
    key = jax.random.key(7)
    for _ in range(6):
        key = jax.random.fold_in(key, 1)
    assert result.batch_stats["key"] == key
    assert result.batch_stats["batches"].dtype == jnp.float32
    assert replay_run(tmp_path, from_step=0, **parts).differences == ()
