"""Learning rates (and one-cycle's momentum) by step, computed in the program.

A schedule's name is static, all its numbers are runtime values: another length, peak or drop compiles nothing. `step`
counts the updates done before the one whose rate is asked for, from 0.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from engine.config import ScheduleName

NUM_MILESTONES = 4
# A milestone that no step reaches.
_NEVER = 2**31 - 1


class ScheduleValues(NamedTuple):
    """The numbers of all schedules; each reads those it needs.

    Attributes:
        peak: float32 [], the largest rate.
        total_steps: int32 [], updates of the run, warm-up included.
        warmup_steps: int32 [], updates of the linear rise before the schedule proper.
        warmup_start: float32 [], where that rise starts, as a fraction of the schedule's first rate.
        final_fraction: float32 [], of the peak, at `total_steps` ("cosine", "linear").
        drop_factor: float32 [], what a milestone multiplies the rate by ("step").
        milestones: int32 [NUM_MILESTONES], the first step of each lower rate, counted from the start of the run; those
            not wanted lie beyond every step ("step").
        rise_steps: int32 [], updates after the warm-up up to the peak ("one-cycle").
        start_divisor: float32 [], the peak over the first rate ("one-cycle").
        final_divisor: float32 [], the peak over the last rate ("one-cycle").
        momentum_high, momentum_low: float32 [], at both ends and at the peak (`momentum_at`).
    """

    peak: jax.Array | np.float32
    total_steps: jax.Array | np.int32
    warmup_steps: jax.Array | np.int32
    warmup_start: jax.Array | np.float32
    final_fraction: jax.Array | np.float32
    drop_factor: jax.Array | np.float32
    milestones: jax.Array | NDArray[np.int32]
    rise_steps: jax.Array | np.int32
    start_divisor: jax.Array | np.float32
    final_divisor: jax.Array | np.float32
    momentum_high: jax.Array | np.float32
    momentum_low: jax.Array | np.float32


def schedule_values(
    peak: float,
    total_steps: int,
    *,
    warmup_steps: int = 0,
    warmup_start: float = 0.0,
    final_fraction: float = 0.0,
    drop_factor: float = 0.1,
    milestones: Sequence[int] = (),
    rise_fraction: float = 0.25,
    start_divisor: float = 25.0,
    final_divisor: float = 1e5,
    momentum_high: float = 0.95,
    momentum_low: float = 0.85,
) -> ScheduleValues:
    """Makes a schedule's runtime values of Python numbers, on the host.

    Args:
        peak, total_steps, warmup_steps, warmup_start, final_fraction, drop_factor: as in `ScheduleValues`.
        milestones: at most NUM_MILESTONES steps, in any order.
        rise_fraction: of the steps after the warm-up, in 0 … 1; the peak falls on a whole step.
        start_divisor, final_divisor, momentum_high, momentum_low: as in `ScheduleValues`; fastai's by default.

    Raises:
        ValueError: for a number out of its range, or too many milestones.
    """
    for name, value, low, high in (
        ("peak", peak, 0, math.inf),
        ("total_steps", total_steps, 0, _NEVER - 1),
        ("warmup_steps", warmup_steps, 0, _NEVER - 1),
        ("warmup_start", warmup_start, 0, 1),
        ("final_fraction", final_fraction, 0, 1),
        ("drop_factor", drop_factor, 0, 1),
        ("rise_fraction", rise_fraction, 0, 1),
        ("start_divisor", start_divisor, 1, math.inf),
        ("final_divisor", final_divisor, 1, math.inf),
        ("momentum_high", momentum_high, 0, 1),
        ("momentum_low", momentum_low, 0, 1),
        *(("milestones", step, 0, _NEVER) for step in milestones),
    ):
        if not (low <= value <= high and math.isfinite(value)):
            allowed = f"be finite and at least {low}" if high == math.inf else f"lie in {low} … {high}"
            raise ValueError(f"{name} must {allowed}, got {value}")
    if len(milestones) > NUM_MILESTONES:
        raise ValueError(f"milestones must be at most {NUM_MILESTONES} steps, got {len(milestones)}: leave some out")
    unused = NUM_MILESTONES - len(milestones)
    return ScheduleValues(
        peak=np.float32(peak),
        total_steps=np.int32(total_steps),
        warmup_steps=np.int32(warmup_steps),
        warmup_start=np.float32(warmup_start),
        final_fraction=np.float32(final_fraction),
        drop_factor=np.float32(drop_factor),
        milestones=np.array([*milestones, *[_NEVER] * unused], np.int32),
        rise_steps=np.int32(int(rise_fraction * max(total_steps - warmup_steps, 0))),
        start_divisor=np.float32(start_divisor),
        final_divisor=np.float32(final_divisor),
        momentum_high=np.float32(momentum_high),
        momentum_low=np.float32(momentum_low),
    )


def learning_rate_at(schedule: ScheduleName, step: jax.Array, values: ScheduleValues) -> jax.Array:
    """Gives the learning rate of one update.

    A linear rise over the first `warmup_steps` comes before each schedule: from `warmup_start` of the schedule's first
    rate up to that rate, reached at step `warmup_steps` (Goyal et al., 2017, arXiv:1706.02677). With a `warmup_start`
    of 0 the first update has rate 0. Then, over the remaining steps, and held from `total_steps` on:

    - "constant": the peak.
    - "step": the peak, times `drop_factor` from each milestone on.
    - "cosine": half a cosine from the peak to `final_fraction` of it (Loshchilov and Hutter, 2017, arXiv:1608.03983).
    - "linear": a line between the same ends.
    - "one-cycle": half a cosine from peak / `start_divisor` up to the peak in `rise_steps`, then half a cosine down to
      peak / `final_divisor` (Smith, 2018, arXiv:1803.09820, in fastai's shape).

    A schedule whose steps are all warm-up goes to its end at once where the warm-up is over.

    Args:
        schedule: static.
        step: int32 [], updates done before.
        values: the numbers.

    Returns:
        float32 [].

    Raises:
        ValueError: for an unknown schedule.
    """
    if schedule not in _SHAPES:
        raise ValueError(f"schedule must be one of {', '.join(get_args(ScheduleName))}, got {schedule!r}")
    warmup = jnp.asarray(values.warmup_steps)
    shape = _SHAPES[schedule]
    after = shape(_Place(jnp.maximum(step - warmup, 0), jnp.asarray(step), values.total_steps - warmup), values)
    first = _first_rate(schedule, values)
    risen = step.astype(jnp.float32) / jnp.maximum(warmup, 1).astype(jnp.float32)
    rising = _blend(first * values.warmup_start, first, risen)
    return jnp.where(step < warmup, rising, after).astype(jnp.float32)


def momentum_at(step: jax.Array, values: ScheduleValues) -> jax.Array:
    """Gives one-cycle's momentum of one update, float32 []: the rate's mirror image.

    `momentum_high` until the warm-up is over, down to `momentum_low` at the peak of the rate, and back up, by half
    cosines; `step` as in `learning_rate_at`.
    """
    since = jnp.maximum(step - values.warmup_steps, 0)
    place = _Place(since, step, jnp.asarray(values.total_steps - values.warmup_steps))
    return _cycle(place, values, values.momentum_high, values.momentum_low, values.momentum_high)


class _Place(NamedTuple):
    """Where a step lies: steps since the warm-up, steps since the start, steps from the warm-up to the end."""

    since: jax.Array
    step: jax.Array
    length: jax.Array


type _Number = jax.Array | np.float32


def _first_rate(schedule: ScheduleName, values: ScheduleValues) -> _Number:
    return values.peak / values.start_divisor if schedule == "one-cycle" else values.peak


def _blend(start: _Number, end: _Number, fraction: jax.Array) -> jax.Array:
    """Weighs two values, so that fractions 0 and 1 give `start` and `end` to the bit."""
    return start * (1 - fraction) + end * fraction


def _remaining(since: jax.Array, length: jax.Array) -> jax.Array:
    """The fraction of `length` steps still to go, float32 [] in 0 … 1; 0 where there are none.

    Subtracted as integers: in float32, steps beyond 2²⁴ are no longer told apart, and 1 - done loses the last digits
    of a run's last rates.
    """
    length = jnp.maximum(length, 0)
    left = jnp.clip(length - since, 0, length).astype(jnp.float32)
    return left / jnp.maximum(length, 1).astype(jnp.float32)


def _half_cosine(remaining: jax.Array) -> jax.Array:
    """(1 + cos(π · done)) / 2 by sin², which cancels nothing near its end; exactly 1 and 0 at the ends."""
    return jnp.sin(np.float32(np.pi / 2) * remaining) ** 2


def _constant(_: _Place, values: ScheduleValues) -> jax.Array:
    return jnp.asarray(values.peak)


def _step(place: _Place, values: ScheduleValues) -> jax.Array:
    rate = jnp.asarray(values.peak)
    # One after the other, as a loop on the host would: a power rounds otherwise.
    for number in range(NUM_MILESTONES):
        rate = jnp.where(place.step >= values.milestones[number], rate * values.drop_factor, rate)
    return rate


def _cosine(place: _Place, values: ScheduleValues) -> jax.Array:
    return _blend(values.peak * values.final_fraction, values.peak, _half_cosine(_remaining(place.since, place.length)))


def _linear(place: _Place, values: ScheduleValues) -> jax.Array:
    return _blend(values.peak * values.final_fraction, values.peak, _remaining(place.since, place.length))


def _one_cycle(place: _Place, values: ScheduleValues) -> jax.Array:
    return _cycle(place, values, _first_rate("one-cycle", values), values.peak, values.peak / values.final_divisor)


def _cycle(place: _Place, values: ScheduleValues, first: _Number, middle: _Number, last: _Number) -> jax.Array:
    rise = jnp.asarray(values.rise_steps)
    rising = _blend(middle, first, _half_cosine(_remaining(place.since, rise)))
    falling = _blend(last, middle, _half_cosine(_remaining(place.since - rise, place.length - rise)))
    return jnp.where(place.since < rise, rising, falling)


_SHAPES: dict[ScheduleName, Callable[[_Place, ScheduleValues], jax.Array]] = {
    "constant": _constant,
    "step": _step,
    "cosine": _cosine,
    "linear": _linear,
    "one-cycle": _one_cycle,
}
