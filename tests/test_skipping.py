"""Skips: what counts as finite, how skips are counted, and when there were too many."""

import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.updates.skipping import all_finite, count_skips, gives_up, has_finite_norm, init_skips


def tree_with(value, dtype=np.float32):
    return {"kernel": jnp.ones((2, 2), dtype), "deep": [jnp.array([0.0, value], dtype)]}


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
@pytest.mark.parametrize("value", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_single_non_finite_number_is_found(value, dtype):
    assert not has_finite_norm(tree_with(value, dtype))
    assert not all_finite(tree_with(value, dtype))


def test_a_norm_beyond_float32_is_not_finite_though_its_numbers_are():
    assert not has_finite_norm(tree_with(1e20))
    assert all_finite(tree_with(1e20))


def test_skips_are_counted_in_all_and_in_a_row():
    skips = init_skips()
    history = []
    # (due, finite): pulls between two updates change nothing, whatever they hold.
    for due, finite in [(1, 0), (0, 1), (0, 0), (1, 0), (1, 1), (1, 0), (0, 0), (1, 1)]:
        skips = count_skips(skips, jnp.bool(due), jnp.bool(finite))
        history.append((int(skips.total), int(skips.in_a_row)))
    assert history == [(1, 1), (1, 1), (1, 1), (2, 2), (2, 0), (3, 1), (3, 1), (3, 0)]
    assert {leaf.dtype for leaf in skips} == {jnp.dtype(jnp.int32)}


@pytest.mark.parametrize(("in_a_row", "most", "too_many"), [(0, 0, False), (1, 0, True), (3, 3, False), (4, 3, True)])
def test_too_many_skips_in_a_row_stop_the_run(in_a_row, most, too_many):
    skips = init_skips()._replace(total=jnp.int32(9), in_a_row=jnp.int32(in_a_row))
    assert bool(gives_up(skips, jnp.int32(most))) is too_many
