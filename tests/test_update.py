"""One contract for every optimiser under every schedule, and the possible results of a pull."""

import math
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

from loopfeed.engine.config import OptimizerName, ScheduleName, TrainConfig
from loopfeed.engine.images.unpack import PixelScale
from loopfeed.engine.replicas import AXIS, Replicas
from loopfeed.engine.run.program_settings import runtime_settings
from loopfeed.engine.updates.averages import init_average, update_average
from loopfeed.engine.updates.optim import Hyperparams
from loopfeed.engine.updates.schedules import schedule_values
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.update import (
    Microbatch,
    Weights,
    init_update,
    update_weights,
)

NAMES = get_args(OptimizerName)
# Every optimiser and every schedule: which of them meet does not matter.
SCHEDULE_OF = dict(zip(NAMES, reversed(get_args(ScheduleName)), strict=True))
IMAGES, CLASSES, NUM_BATCHES = 12, 3, 24
# Rates at which each optimiser crosses the toy problem in a hundred updates or so.
RATES = {"sgd": 0.3, "nesterov": 0.3, "adamw": 0.1, "lars": 0.3, "lamb": 0.06, "adam": 0.1, "lion": 0.02, "muon": 0.1}
TOTAL = 120


def values(
    name="sgd", *, total=TOTAL, every=1, most_skips=3, average_decay=0.9, momentum=0.875, decay=1e-4, **schedule
):
    return runtime_settings(TrainConfig(), 0, PixelScale(jnp.zeros(3), jnp.ones(3)))._replace(
        hyperparams=Hyperparams(
            learning_rate=jnp.float32(1),
            momentum=jnp.float32(momentum),
            weight_decay=jnp.float32(decay),
            beta2=jnp.float32(1 - 2**-10),
            trust_coefficient=jnp.float32(0.1),
        ),
        schedule=schedule_values(**({"peak": RATES[name], "total_steps": total, "warmup_steps": 5} | schedule)),
        accumulate_steps=jnp.int32(every),
        average_decay=jnp.float32(average_decay),
        most_skips=jnp.int32(most_skips),
    )


def images(seed=0, count=IMAGES):
    random = np.random.default_rng(seed)
    labels = random.integers(CLASSES, size=count)
    means = np.random.default_rng(99).standard_normal((CLASSES, 4)) * 2
    return np.asarray(means[labels] + random.standard_normal((count, 4)), np.float32), np.asarray(labels, np.int32)


def first_weights(dtype=jnp.float32):
    random = np.random.default_rng(7)
    params = {
        "kernel": jnp.asarray(0.1 * random.standard_normal((4, CLASSES)), dtype),
        "bias": jnp.zeros(CLASSES, dtype),
    }
    return Weights(params, {"mean": jnp.zeros(4)})


def loss_of(params, x, labels):
    logits = (x @ params["kernel"] + params["bias"]).astype(jnp.float32)
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def pull_of(weights, x, labels):
    loss, gradients = jax.value_and_grad(loss_of)(weights.params, x, labels)
    return Microbatch(loss, gradients, {"mean": 0.5 * weights.batch_stats["mean"] + 0.5 * jnp.mean(x, axis=0)})


class Loop:
    """Pulls in one compiled `while_loop` with a donated carry, as the program makes them; counts its traces."""

    def __init__(self, settings):
        self.settings, self.num_traces = settings, 0
        self.compiled = jax.jit(self.loop, donate_argnums=0)

    def start(self, weights):
        # Fresh buffers, as the loop takes them over.
        return jnp.array(0), jnp.array(0), jax.tree.map(jnp.array, weights), init_update(self.settings, weights)

    def loop(self, carry, batches, values, stop_batch):
        self.num_traces += 1

        def goes_on(carry):
            (pulls, *_), gives_up, _ = carry
            return (pulls < stop_batch) & ~gives_up

        def one(carry):
            (pulls, step, weights, state), _, losses = carry
            num_batches, *columns = batches
            x, labels = (column[pulls % num_batches] for column in columns)
            pull = pull_of(weights, x, labels)
            weights, state, outcome = update_weights(self.settings, weights, state, pull, step, values)
            losses = losses.at[step].set(jnp.where(outcome.due, outcome.loss, losses[step]))
            return (pulls + 1, step + outcome.due, weights, state), outcome.gives_up, losses

        losses = jnp.full(TOTAL, -1.0)
        carry, gives_up, losses = lax.while_loop(goes_on, one, (carry, jnp.zeros((), jnp.bool), losses))
        return carry, gives_up, losses

    def __call__(self, carry, batches, values, stop_batch):
        return self.compiled(carry, batches, values, jnp.int32(stop_batch))


def stacked(*batches):
    """Their number, and the batches stacked; padded, so that one compilation takes any number."""
    padded = [*batches, *[batches[0]] * (NUM_BATCHES - len(batches))]
    return len(batches), *(np.stack(column) for column in zip(*padded, strict=True))


def form(tree):
    return jax.tree.structure(tree), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(tree)]


@pytest.fixture(scope="module")
def loops():
    """Compiled loops by optimizer and schedule: one compilation serves all tests of both."""
    made: dict[tuple[str, str], Loop] = {}

    def loop(optimizer="sgd", schedule="constant"):
        settings = CompiledSettings(
            optimizer=optimizer, schedule=schedule, accumulates=True, averages=True, average_ramp=False
        )
        return made.setdefault((optimizer, schedule), Loop(settings))

    return loop


@pytest.mark.parametrize(("name", "schedule"), SCHEDULE_OF.items())
def test_converges_in_one_trace_and_keeps_the_carry_s_form(loops, name, schedule):
    loop = loops(name, schedule)
    batches = stacked(*(images(seed) for seed in range(8)))
    start = loop.start(first_weights())
    before = form(start)
    carry, gives_up, losses = loop(start, batches, values(name, milestones=[60, 90]), TOTAL)
    assert form(carry) == before
    assert not gives_up
    pulls, step, _, state = carry
    assert int(pulls) == int(step) == TOTAL
    assert losses[0] > 1.0
    assert losses[-8:].mean() < 0.3
    # The average of the last weights is a solution too.
    assert loss_of(state.average.params, *images(50, 200)) < 0.5
    # Another rate, length, cycle, decay, limit and number of pulls: all runtime values.
    for other in (
        values(name, peak=0.01, total=7, warmup_steps=0, milestones=[3], every=2, decay=0.0, final_fraction=0.5),
        values(name, peak=0.0, total=0, warmup_steps=9, average_decay=0.0, most_skips=0, momentum=0.0),
    ):
        carry, *_ = loop(carry, batches, other, 5)
    assert loop.num_traces == 1


@pytest.mark.parametrize("name", ["adam", "muon"])
def test_pulls_of_a_batch_are_one_batch_of_all_their_images(loops, name):
    every, updates = 4, 6
    small = stacked(*(images(seed) for seed in range(every * updates)))
    large = updates, *(column.reshape(updates, every * IMAGES, *column.shape[2:]) for column in small[1:])
    many = loops(name, SCHEDULE_OF[name])
    one = Loop(CompiledSettings(optimizer=name, schedule=SCHEDULE_OF[name], averages=True, average_ramp=False))
    carry, _, losses = many(many.start(first_weights()), small, values(name, every=every), every * updates)
    expected, _, expected_losses = one(one.start(first_weights()), large, values(name), updates)
    assert int(carry[0]) == every * int(carry[1]) == every * updates
    # Sums of the same terms in another order; Adam's quotient enlarges the rounding of a small gradient.
    for found, wanted in ((carry[2].params, expected[2].params), (carry[3].average.params, expected[3].average.params)):
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), found, wanted)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5, atol=1e-6)


def test_a_run_stopped_at_any_pull_resumes_bit_for_bit(loops):
    loop = loops("adamw", SCHEDULE_OF["adamw"])
    batches = stacked(*(images(seed) for seed in range(9)))
    numbers = values("adamw", total=3, every=3, warmup_steps=1)
    whole, _, losses = loop(loop.start(first_weights()), batches, numbers, 9)
    for stop in range(10):
        carry, _, first = loop(loop.start(first_weights()), batches, numbers, stop)
        assert int(carry[1]) == stop // 3
        assert int(carry[3].accumulated.num_batches) == stop % 3
        # Through the host and back, as a snapshot takes it.
        carry = jax.tree.map(lambda leaf: jnp.array(np.asarray(leaf)), carry)
        carry, _, second = loop(carry, batches, numbers, 9)
        jax.tree.map(np.testing.assert_array_equal, carry, whole)
        np.testing.assert_array_equal(np.where(first == -1, second, first), losses)


@pytest.mark.parametrize(
    ("name", "broken", "accumulates"),
    [("adamw", math.nan, True), ("muon", math.nan, False), ("sgd", math.inf, False)],
)
def test_a_non_finite_update_has_no_effect(loops, name, broken, accumulates):
    loop = loops(name) if accumulates else Loop(CompiledSettings(optimizer=name, averages=True, average_ramp=False))
    every = 2 if accumulates else 1
    good = [images(seed) for seed in range(4 * every)]
    x, labels = images(9)
    x[3, 1] = broken
    # The third update's pulls, only the first of which is broken.
    bad = [(x, labels), images(10)][:every]
    # A constant rate without warm-up and an average without a ramp: nothing but the count tells the steps apart.
    numbers = values(name, every=every, warmup_steps=0)
    with_bad = stacked(*good[: 2 * every], *bad, *good[2 * every :])
    found, gives_up, losses = loop(loop.start(first_weights()), with_bad, numbers, 5 * every)
    expected, _, expected_losses = loop(loop.start(first_weights()), stacked(*good), numbers, 4 * every)
    jax.tree.map(np.testing.assert_array_equal, found[2].params, expected[2].params)
    jax.tree.map(np.testing.assert_array_equal, found[3].opt_state, expected[3].opt_state)
    jax.tree.map(np.testing.assert_array_equal, found[3].average.params, expected[3].average.params)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(found[2:]))
    assert not gives_up
    assert int(found[1]) == 5
    assert (int(found[3].skips.total), int(found[3].skips.in_a_row)) == (1, 0)
    assert not np.isfinite(losses[2])
    np.testing.assert_array_equal(np.delete(np.asarray(losses), 2)[:4], expected_losses[:4])


def test_a_broken_batch_leaves_the_statistics_of_the_others(loops):
    loop = loops()
    x, labels = images(0)
    good, bad = (x, labels), (x * np.nan, labels)
    found = loop(loop.start(first_weights()), stacked(good, bad, good), values(every=2), 3)[0][2]
    expected = loop(loop.start(first_weights()), stacked(good, good), values(every=2), 2)[0][2]
    np.testing.assert_array_equal(found.batch_stats["mean"], expected.batch_stats["mean"])


def test_the_average_is_that_of_the_weights_after_each_update():
    loop = Loop(CompiledSettings(averages=True))
    batches = stacked(*(images(seed) for seed in range(6)))
    expected = init_average(first_weights())
    for pulls in range(1, 7):
        carry, *_ = loop(loop.start(first_weights()), batches, values(), pulls)
        expected = update_average(expected, carry[2], jnp.float32(0.9), jnp.int32(pulls - 1))
        # The compiler may join the product and the sum of the average into one rounding.
        jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-7), carry[3].average, expected)


@pytest.mark.parametrize("decay_all", [False, True])
def test_decay_all_decays_biases(decay_all):
    settings = CompiledSettings(decay_all=decay_all)
    weights = Weights({"bias": jnp.ones(3)}, {})
    pull = Microbatch(jnp.float32(0), {"bias": jnp.zeros(3)}, {})
    numbers = values(decay=0.5, peak=0.5, warmup_steps=0)
    updated, *_ = update_weights(settings, weights, init_update(settings, weights), pull, jnp.int32(0), numbers)
    np.testing.assert_array_equal(updated.params["bias"], 0.75 if decay_all else 1.0)


def test_frozen_statistics_are_not_averaged_over_devices():
    three, given = Replicas(3), jnp.asarray(np.random.default_rng(0).uniform(0.1, 2, 64), jnp.float32)
    settings = CompiledSettings(frozen=(r"norm\.mean",), replicas=three)
    weights = Weights({"bias": jnp.zeros(1)}, {"norm": {"mean": given, "var": given}})

    def on_device(_):
        batch = Microbatch(jnp.float32(1), weights.params, weights.batch_stats)
        return update_weights(settings, weights, init_update(settings, weights), batch, jnp.array(0), values())[0]

    norm = jax.jit(jax.vmap(on_device, axis_name=AXIS))(jnp.zeros(3)).batch_stats["norm"]
    np.testing.assert_array_equal(norm["mean"], [given] * 3)
    assert np.any(norm["var"] != given)  # a third of the sum of three equal numbers


@pytest.mark.parametrize("name", ["lamb", "muon"])
def test_half_precision_weights_keep_their_type(name):
    settings = CompiledSettings(optimizer=name, accumulates=True, averages=True)
    loop = Loop(settings)
    start = loop.start(first_weights(jnp.bfloat16))
    before = form(start)
    x, labels = images(0)
    batches = stacked((x.astype(jnp.bfloat16), labels))
    carry, *_ = jax.eval_shape(loop.loop, start, batches, values(name, every=2), jnp.int32(4))
    assert form(carry) == before
    assert carry[2].params["kernel"].dtype == jnp.bfloat16
    assert carry[3].average.params["kernel"].dtype == jnp.float32
