"""Gradient accumulation over pulls: means, due updates, and resuming within an accumulation."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed import train
from loopfeed.engine.records.snapshot import read_snapshot
from loopfeed.engine.updates.update import accumulate, init_accumulation
from tests.toy import Linear, toy_batch, toy_config

gather = jax.jit(accumulate)


def values_of(pull, dtype=np.float32):
    random = np.random.default_rng(pull)
    return jnp.asarray(random.standard_normal(), dtype), {"kernel": jnp.asarray(random.standard_normal((2, 3)), dtype)}


@settings(max_examples=30)
@given(every=st.integers(-1, 5), pulls=st.integers(1, 12))
def test_each_group_returns_its_mean_once(every, pulls):
    accumulated = init_accumulation(values_of(0))
    group: list[Any] = []
    for pull in range(pulls):
        group.append(values_of(pull))
        means, due, accumulated = gather(accumulated, group[-1], jnp.int32(every))
        expected = jax.tree.map(lambda *leaves: np.mean(np.stack(leaves).astype(np.float64), axis=0), *group)
        # Five float32 roundings of values up to three.
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), means, expected)
        assert bool(due) == (len(group) == max(every, 1))
        if due:
            group = []
            assert all(not np.any(leaf) for leaf in jax.tree.leaves(accumulated))
        assert int(accumulated.num_batches) == len(group)


def test_sums_are_float32_and_keep_what_bfloat16_would_lose():
    ones = jax.tree.map(lambda leaf: jnp.ones_like(leaf, jnp.bfloat16), values_of(0))
    accumulated = init_accumulation(ones)
    for _ in range(300):
        means, due, accumulated = gather(accumulated, ones, jnp.int32(300))
    assert due
    assert {leaf.dtype for leaf in jax.tree.leaves(means)} == {jnp.dtype(jnp.float32)}
    # bfloat16 sums of ones end at 256.
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(means))


def test_a_lower_number_of_pulls_ends_the_accumulation_at_once():
    accumulated = init_accumulation(values_of(0))
    for pull in range(3):
        _, due, accumulated = gather(accumulated, values_of(pull), jnp.int32(8))
        assert not due
    (mean, _), due, accumulated = gather(accumulated, values_of(3), jnp.int32(2))
    assert due
    assert float(mean) == pytest.approx(np.mean([values_of(pull)[0] for pull in range(4)]), abs=1e-6)
    assert int(accumulated.num_batches) == 0


def test_the_sums_keep_their_name_in_snapshots(tmp_path):
    config = toy_config(steps=2, accumulate_steps=2, snapshot_every_steps=1, run_dir=tmp_path / "run")
    train(config, model=Linear(), batches=toy_batch)
    leaves = read_snapshot(tmp_path / "run/snapshots", 2).leaves
    assert {"pulls", "update.gathered.num_pulls", "update.gathered.sums.0"} <= set(leaves)
    assert "batch_index" not in leaves
