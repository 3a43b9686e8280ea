"""Updates that would make finite weights infinite: found for every optimiser, and never made."""

from functools import partial
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loopfeed import NonFiniteError, train
from loopfeed.engine.config import OptimizerName, TrainConfig
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.patterns import Group
from loopfeed.engine.run.program_settings import runtime_settings
from loopfeed.engine.updates.optim import Hyperparams
from loopfeed.engine.updates.reach import UNKNOWN, Reach, keeps_finite
from loopfeed.engine.updates.schedules import schedule_values
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.skipping import init_skips
from loopfeed.engine.updates.update import Microbatch, Weights, init_update, update_weights
from tests.toy import Linear, toy_batch, toy_config

SHAPES = {"kernel": (5, 4), "bias": (4,)}


def values(**hyperparams):
    given = {"learning_rate": 0.1, "momentum": 0.875, "weight_decay": 0.01} | hyperparams
    return runtime_settings(TrainConfig(), 0, PixelScale(jnp.zeros(3), jnp.ones(3)))._replace(
        hyperparams=Hyperparams(**{name: jnp.float32(value) for name, value in given.items()}),
        schedule=schedule_values(peak=1.0, total_steps=100, warmup_steps=0),
        accumulate_steps=jnp.int32(1),
        average_decay=jnp.float32(0.9),
        most_skips=jnp.int32(3),
    )


def drawn(seed, dtype=np.float32):
    random = np.random.default_rng(seed)
    return {name: jnp.asarray(random.standard_normal(shape), dtype) for name, shape in SHAPES.items()}


def updater(settings):
    """Return a compiled function of (weights, state, gradients, values, reach)."""

    @jax.jit
    def update(weights, state, gradients, values, reach):
        pull = Microbatch(jnp.float32(0), gradients, {})
        return update_weights(settings, weights, state, pull, jnp.int32(0), values, reach)

    return update


def norm(tree):
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(tree)]
    return np.linalg.norm(np.concatenate(leaves))


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_the_bounds_hold_and_an_update_beyond_float32_changes_nothing(name):
    settings = CompiledSettings(
        optimizer=name, averages=True, groups=(Group("bias", 3.0, 0.0), Group("kernel", 1.0, 2.0))
    )
    update = updater(settings)
    weights = Weights(drawn(0), {})
    state, reach = init_update(settings, weights), jax.tree.map(jnp.asarray, UNKNOWN)
    for step, numbers in enumerate(({}, {"learning_rate": 3.0}, {"momentum": 0.0}, {"weight_decay": 5.0}, {}), 1):
        weights, state, outcome = update(weights, state, drawn(step), values(**numbers), reach)
        assert int(state.skips.total) == 0
        assert norm(weights.params) <= float(outcome.reach.weights) < 1e18
        reach = outcome.reach
    # The last rates overflow at once, or after a few updates; decay only where it is not within a ratio.
    for numbers in ({"learning_rate": 3e38}, {"learning_rate": 1e37, "momentum": 0.99}):
        current = weights, state, reach
        for step in range(8):
            before = current
            *after, outcome = update(*before[:2], drawn(step), values(**numbers), before[2])
            current = *after, outcome.reach
            if int(after[1].skips.total) > int(before[1].skips.total):
                break
        else:
            assert name in ("adam", "adamw", "lamb"), numbers  # of nearly equal gradients, whose updates cancel
            continue
        kept, old = (jax.tree.leaves((each[0], each[1]._replace(skips=init_skips()))) for each in (after, before))
        for found, expected in zip(kept, old, strict=True):
            np.testing.assert_array_equal(found, expected)
            assert np.isfinite(found).all()


def test_a_weight_of_a_narrow_dtype_and_an_average_stay_finite():
    settings = CompiledSettings(averages=True)
    update = updater(settings)
    weights = Weights(drawn(0, jnp.float16), {})
    after, state, _ = update(weights, init_update(settings, weights), drawn(1), values(learning_rate=1e6), UNKNOWN)
    assert int(state.skips.total) == 1
    np.testing.assert_array_equal(after.params["kernel"], weights.params["kernel"])
    # The weights would be finite, but not the way of the average to them.
    far = {name: jnp.full(shape, 2e38) for name, shape in SHAPES.items()}
    weights = Weights(far, {})
    state = init_update(settings, weights)
    state = state._replace(average=Weights(jax.tree.map(jnp.negative, far), {}))
    _, state, _ = update(weights, state, drawn(1), values(), UNKNOWN)
    assert int(state.skips.total) == 1


def test_bounds_far_from_overflow_need_no_look_and_near_it_are_measured_anew():
    settings = CompiledSettings()
    update = updater(settings)
    weights = Weights(drawn(0), {})
    state = init_update(settings, weights)
    for reach, expected in ((Reach(jnp.float32(1e9), jnp.float32(0)), 1e9), (UNKNOWN, norm(weights.params))):
        _, _, outcome = update(weights, state, drawn(1), values(learning_rate=1e-6), reach)
        assert float(outcome.reach.weights) == pytest.approx(expected, rel=1e-4)


def test_infinity_that_was_there_is_no_fault():
    mask, fine = jnp.array([0.0, -jnp.inf]), jnp.array([1.0, 2.0])
    assert keeps_finite({"mask": mask, "x": fine}, {"mask": mask, "x": fine})
    assert not keeps_finite({"mask": mask, "x": fine}, {"mask": mask, "x": fine / 0})
    assert not keeps_finite(mask, jnp.array([jnp.nan, -jnp.inf]))
    assert keeps_finite((), ())


@pytest.mark.parametrize("own", [None, partial(optax.sgd, momentum=0.9), optax.sgd(3e38)])
def test_a_run_ends_with_the_weights_before_the_overflow(own):
    arguments: dict[str, Any] = {"model": Linear(), "batches": toy_batch, "optimizer": own}
    has_user_rate = isinstance(own, optax.GradientTransformation)
    settings: dict[str, Any] = {"learning_rate": None if has_user_rate else 3e38}
    with pytest.raises(NonFiniteError, match=r"or a weight that .*would make"):
        train(toy_config(steps=9, **settings), **arguments)
    result = train(toy_config(steps=9, stop_on_nan=False, **settings), **arguments)
    assert result.num_skipped > 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(result.params))
