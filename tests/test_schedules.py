"""Schedules: optax's own at every step, exact at their edges, and free to change their numbers."""

import math
from itertools import pairwise
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.config import ScheduleName
from loopfeed.engine.updates.schedules import learning_rate_at, momentum_at, schedule_values

SCHEDULES = get_args(ScheduleName)
PEAK = 0.4
# One float32 rounding of the peak is 6e-8 of it; a rate comes of a few.
ROUNDING = 4e-7


@pytest.fixture(scope="module")
def compiled():
    """Each schedule at many steps at once, compiled once for all tests."""
    return {
        name: jax.jit(jax.vmap(lambda step, values, name=name: learning_rate_at(name, step, values), (0, None)))
        for name in SCHEDULES
    }


def rates(compiled, name, steps, values):
    """The rates, as float64 for comparisons; the steps are padded, so that one compilation serves any number."""
    padded = np.zeros(128, np.int32)
    padded[: len(steps)] = steps
    found = compiled[name](padded, values)
    assert found.dtype == jnp.float32
    return np.asarray(found, np.float64)[: len(steps)]


def optax_schedule(name, total, warmup, *, start=0.0, alpha=0.0, drop=0.5, milestones=(), rise=0.25):
    """Return the same schedule from optax, joined as in its `warmup_cosine_decay_schedule`."""
    length = total - warmup
    first = PEAK
    if name == "constant":
        schedule = optax.constant_schedule(PEAK)
    elif name == "step":
        schedule = optax.piecewise_constant_schedule(PEAK, {step - warmup: drop for step in milestones})
    elif name == "cosine":
        schedule = optax.cosine_decay_schedule(PEAK, length, alpha)
    elif name == "linear":
        schedule = optax.linear_schedule(PEAK, PEAK * alpha, length)
    elif name == "polynomial":
        schedule = optax.polynomial_schedule(PEAK, PEAK * alpha, 2.0, length)
    elif name == "exponential":
        # optax takes no decay to 0: the schedule is then 0 after the first step, which the first step shows.
        decayed = optax.exponential_decay(PEAK, length, alpha or 1.0, end_value=PEAK * alpha if alpha else None)
        schedule = decayed if alpha else lambda step: PEAK if step == 0 else 0.0
    elif name == "cosine-restarts":
        starts = [round(length * cycle / 4) for cycle in range(5)]
        cycles = [
            optax.cosine_decay_schedule(PEAK, stop - start, alpha) if stop > start else optax.constant_schedule(0.0)
            for start, stop in pairwise(starts)
        ]
        schedule = optax.join_schedules(cycles, starts[1:-1])
    else:
        schedule = optax.cosine_onecycle_schedule(length, PEAK, rise, div_factor=25.0, final_div_factor=4000.0)
        first = PEAK / 25
    if warmup == 0:
        return schedule
    return optax.join_schedules([optax.linear_schedule(start * first, first, warmup), schedule], [warmup])


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    ("total", "warmup", "start", "alpha", "milestones"),
    [
        (100, 0, 0.0, 0.0, (30, 60, 90)),
        (100, 10, 0.0, 0.01, (30, 60, 80, 90)),
        (97, 7, 0.25, 0.1, (8,)),
        (20, 1, 1.0, 1.0, ()),
        (15, 10, 0.0, 0.0, (10,)),
        (8, 0, 0.0, 0.0, (0, 1)),
    ],
)
def test_equals_optax_at_every_step(compiled, name, total, warmup, start, alpha, milestones):
    expected = optax_schedule(name, total, warmup, start=start, alpha=alpha, milestones=milestones)
    values = schedule_values(
        PEAK,
        total,
        warmup_steps=warmup,
        warmup_start=start,
        final_fraction=alpha,
        drop_factor=0.5,
        milestones=milestones,
    )
    steps = list(range(total + 20))
    reference = np.array([float(expected(step)) for step in steps])
    np.testing.assert_allclose(rates(compiled, name, steps, values), reference, rtol=ROUNDING, atol=ROUNDING * PEAK)


def float64_rate(name, step, total, warmup, *, start, alpha, drop, milestones, rise_steps):  # noqa: C901 - one branch a schedule
    """Return a schedule computed from its description in Python floats."""
    first = PEAK / 25 if name == "one-cycle" else PEAK
    if step < warmup:
        return first * (start + (1 - start) * step / warmup)
    if name == "constant":
        return PEAK
    if name == "step":
        return PEAK * drop ** sum(step >= milestone for milestone in milestones)
    since, length = step - warmup, max(total - warmup, 0)
    done = min(since / length, 1) if length else 1.0

    def cosine(start, end, done):
        return end + (start - end) * math.cos(math.pi * done / 2) ** 2

    if name == "linear":
        return PEAK * (done * alpha + (1 - done))
    if name == "cosine":
        return cosine(PEAK, alpha * PEAK, done)
    if name == "polynomial":
        return PEAK * (alpha + (1 - alpha) * (1 - done) ** 2)
    if name == "exponential":
        return PEAK * alpha**done
    if name == "cosine-restarts":
        starts = [round(length * cycle / 4) for cycle in range(5)]
        if since >= length:
            return PEAK * alpha
        begin = max(each for each in starts if each <= since)
        return cosine(PEAK, alpha * PEAK, (since - begin) / (min(each for each in starts if each > since) - begin))
    if since < rise_steps:
        return cosine(first, PEAK, since / rise_steps)
    falling = length - rise_steps
    return cosine(PEAK, PEAK / 1e5, min((since - rise_steps) / falling, 1) if falling else 1.0)


def test_the_first_of_very_many_steps_is_behind_the_peak_of_a_decay_to_nothing(compiled):
    values = schedule_values(PEAK, 2**31 - 2, final_fraction=0.0)
    np.testing.assert_array_equal(rates(compiled, "exponential", [0, 1], values), np.array([PEAK, 0], np.float32))


@settings(max_examples=80)
@given(data=st.data())
def test_equals_its_description_for_any_numbers(compiled, data):
    name = data.draw(st.sampled_from(SCHEDULES))
    total = data.draw(st.integers(0, 10**6) | st.integers(0, 5) | st.just(2**31 - 2))
    warmup = data.draw(st.integers(0, 2 * min(total, 10**6)) | st.just(0))
    start, alpha, drop = (data.draw(st.sampled_from([0.0, 0.1, 0.5, 1.0])) for _ in range(3))
    milestones = data.draw(st.lists(st.integers(0, total), max_size=4))
    values = schedule_values(
        PEAK,
        total,
        warmup_steps=warmup,
        warmup_start=start,
        final_fraction=alpha,
        drop_factor=drop,
        milestones=milestones,
    )
    step = data.draw(st.integers(0, 2**31 - 2) | st.integers(0, max(total, 1)))
    expected = float64_rate(
        name,
        step,
        total,
        warmup,
        start=start,
        alpha=alpha,
        drop=drop,
        milestones=milestones,
        rise_steps=int(values.rise_steps),
    )
    # Relative to the rate itself, so that the last rates of a run are as right as the first; a rise from 0 to the peak
    # adds to a small rate an error of its own size at most, and the floor of cos(π/2) in float64 is 1e-33.
    found = rates(compiled, name, [step], values)[0]
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=1e-7 * PEAK if name == "one-cycle" else 1e-12)


@pytest.mark.parametrize("name", SCHEDULES)
def test_edges_are_exact(compiled, name):
    def at(steps, total, warmup):
        values = schedule_values(
            PEAK, total, warmup_steps=warmup, warmup_start=0.25, final_fraction=0.3, milestones=[50]
        )
        return [np.float32(rate) for rate in rates(compiled, name, steps, values)]

    peak = np.float32(PEAK)
    first = peak / np.float32(25) if name == "one-cycle" else peak
    last = {
        "constant": peak,
        "step": peak * np.float32(0.1),
        "cosine": peak * np.float32(0.3),
        "linear": peak * np.float32(0.3),
        "one-cycle": peak / np.float32(1e5),
        "polynomial": peak * np.float32(0.3),
        "exponential": peak * np.float32(0.3),
        "cosine-restarts": peak * np.float32(0.3),
    }[name]
    # Start of the warm-up, its end, the end of the run, and far beyond.
    assert at([0, 10, 100, 2**31 - 2], 100, 10) == [first * np.float32(0.25), first, last, last]
    assert at([0, 100], 100, 0) == [first, last]
    # A run of one step has the peak, as no step is left to rise or to fall in.
    assert at([0], 1, 0) == [peak]
    # A run of none, and one that ends within its warm-up: nothing but the end is left after it.
    held = peak if name == "step" else last
    assert at([0, 1], 0, 0) == [held, held]
    assert at([0, 10, 11], 10, 10) == [first * np.float32(0.25), held, held]
    assert at([0, 20, 21], 10, 20) == [first * np.float32(0.25), held, held]


def test_one_cycle_peaks_on_a_step_and_moves_the_momentum_the_other_way(compiled):
    values = schedule_values(PEAK, 110, warmup_steps=10, rise_fraction=0.25)
    steps = np.arange(111)
    rate = rates(compiled, "one-cycle", steps, values)
    momentum = np.asarray(jax.vmap(lambda step: momentum_at(step, values))(steps), np.float64)
    assert np.argmax(rate) == np.argmin(momentum) == 35
    assert np.float32(rate[35]) == np.float32(PEAK)
    assert np.float32(momentum[35]) == np.float32(0.85)
    np.testing.assert_array_equal(momentum[:11], float(np.float32(0.95)))
    assert np.float32(momentum[110]) == np.float32(0.95)
    # Both are half cosines over the same steps: one is a line of the other on each side of the peak.
    for side, low in ((slice(10, 36), PEAK / 25), (slice(35, 111), PEAK / 1e5)):
        mirrored = 0.95 - 0.1 * (rate[side] - low) / (PEAK - low)
        np.testing.assert_allclose(momentum[side], mirrored, atol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak": -0.1}, r"peak must be finite and at least 0, got -0\.1"),
        ({"peak": math.nan}, "peak must be finite and at least 0, got nan"),
        ({"total_steps": 2**31}, r"total_steps must lie in 0 … 2147483646, got 2147483648"),
        ({"warmup_steps": -1}, "warmup_steps must lie in 0 … 2147483646, got -1"),
        ({"start_divisor": 0.5}, r"start_divisor must be finite and at least 1, got 0\.5"),
        ({"milestones": [3, -3]}, "milestones must lie in 0 … 2147483647, got -3"),
        ({"milestones": [1, 2, 3, 4, 5]}, "milestones must contain at most 4 steps, got 5: pass fewer"),
    ],
)
def test_numbers_out_of_range_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule_values(**({"peak": 0.1, "total_steps": 10} | arguments))


def test_an_unknown_schedule_is_refused():
    unknown: Any = "no"
    with pytest.raises(ValueError, match=r"schedule must be one of constant, step, cosine, .*, got 'no'"):
        learning_rate_at(unknown, jnp.int32(0), schedule_values(0.1, 10))
