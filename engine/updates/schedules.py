"""Learning-rate schedules and the one-cycle momentum, computed inside the program.

A schedule's name is static, but all its numbers are runtime values, so that another length, peak or drop needs no
recompilation. `step` is the number of updates before the current one, from 0.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, Shaped

from loopfeed.engine.config import ScheduleName

NUM_MILESTONES = 4
MOST_CYCLES = 16
ONE_CYCLE_DIVISOR = 25.0
# A milestone that no step reaches.
_NEVER = 2**31 - 1
_RANGES: dict[str, tuple[float, float]] = {
    "peak": (0, math.inf),
    "total_steps": (0, _NEVER - 1),
    "warmup_steps": (0, _NEVER - 1),
    "warmup_start": (0, math.inf),
    "final_fraction": (0, 1),
    "drop_factor": (0, 1),
    "milestones": (0, _NEVER),
    "rise_fraction": (0, 1),
    "start_divisor": (1, math.inf),
    "final_divisor": (1, math.inf),
    "momentum_high": (0, 1),
    "momentum_low": (0, 1),
    "power": (0, math.inf),
    "restart_cycles": (1, MOST_CYCLES),
    "restart_growth": (1, math.inf),
    "start_step": (0, _NEVER - 1),
}


type Schedule = Callable[[Int32[Array, ""]], Shaped[Array, ""]]
"""Step (number of updates before this one) → learning rate."""

type _Number = Float32[Array, ""] | np.float32
type _Count = Int32[Array, ""] | np.int32


class ScheduleValues(NamedTuple):
    """The runtime values of all schedules; each schedule reads those it needs.

    Attributes:
        peak: the largest learning rate.
        start_step: updates before the current cycle: a run to which a cycle was appended begins anew there.
        total_steps: updates of the cycle (of the run, if none was appended), including the warm-up.
        warmup_steps: updates of the linear rise before the schedule proper.
        warmup_start: start of that rise as a fraction of the schedule's first learning rate.
        final_fraction: learning rate at `total_steps` as a fraction of the peak ("cosine", "linear", "polynomial",
            "exponential", "cosine-restarts").
        drop_factor: factor on the learning rate at each milestone ("step").
        milestones: the first step of each lower learning rate, counted from `start_step`; unused ones are beyond every
            step ("step").
        rise_steps: updates from the warm-up's end to the peak ("one-cycle").
        start_divisor: the peak divided by the first learning rate ("one-cycle").
        final_divisor: the peak divided by the last learning rate ("one-cycle").
        momentum_high, momentum_low: momentum at both ends and at the peak (`momentum_at`).
        power: the exponent ("polynomial").
        restarts: the first step of each cycle, counted from the end of the warm-up; unused ones are beyond every step
            ("cosine-restarts").
    """

    peak: _Number
    total_steps: _Count
    warmup_steps: _Count
    warmup_start: _Number
    final_fraction: _Number
    drop_factor: _Number
    milestones: Int32[Array, "NUM_MILESTONES"] | Int32[np.ndarray, "NUM_MILESTONES"]
    rise_steps: _Count
    start_divisor: _Number
    final_divisor: _Number
    momentum_high: _Number
    momentum_low: _Number
    power: _Number
    restarts: Int32[Array, "MOST_CYCLES"] | Int32[np.ndarray, "MOST_CYCLES"]
    start_step: _Count = np.int32(0)


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
    start_divisor: float = ONE_CYCLE_DIVISOR,
    final_divisor: float = 1e5,
    momentum_high: float = 0.95,
    momentum_low: float = 0.85,
    power: float = 2.0,
    restart_cycles: int = 4,
    restart_growth: float = 1.0,
    start_step: int = 0,
) -> ScheduleValues:
    """Convert Python numbers to the runtime values of a schedule, on the host.

    Args:
        peak, total_steps, warmup_steps, warmup_start, final_fraction, drop_factor: as in `ScheduleValues`.
        milestones: at most NUM_MILESTONES steps, in any order.
        rise_fraction: fraction of the steps after the warm-up up to the peak, in 0 … 1, rounded down to a whole step.
        start_divisor, final_divisor, momentum_high, momentum_low: as in `ScheduleValues`; the defaults are fastai's.
        power: as in `ScheduleValues`.
        restart_cycles: number of cycles, at most MOST_CYCLES.
        restart_growth: length of each cycle, divided by that of the previous one; the lengths are rounded.
        start_step: as in `ScheduleValues`.

    Raises:
        ValueError: if a number is out of range, or there are too many milestones.
    """
    _check_ranges(locals())
    if len(milestones) > NUM_MILESTONES:
        raise ValueError(f"milestones must contain at most {NUM_MILESTONES} steps, got {len(milestones)}: pass fewer")
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
        power=np.float32(power),
        restarts=_restarts(max(total_steps - warmup_steps, 0), restart_cycles, restart_growth),
        start_step=np.int32(start_step),
    )


def _check_ranges(numbers: Mapping[str, Any]) -> None:
    """Raise ValueError if an argument of `schedule_values` is out of range."""
    for name, value in numbers.items():
        low, high = _RANGES[name]
        for number in value if name == "milestones" else (value,):
            if not (low <= number <= high and math.isfinite(number)):
                allowed = f"be finite and at least {low}" if high == math.inf else f"lie in {low} … {high}"
                raise ValueError(f"{name} must {allowed}, got {number}")


def _restarts(length: int, num_cycles: int, growth: float) -> Int32[np.ndarray, "MOST_CYCLES"]:
    """Return the first step of each cycle of `length` steps in all."""
    ends = np.cumsum(np.float64(growth) ** np.arange(num_cycles))
    starts = [0, *(round(length * float(end / ends[-1])) for end in ends[:-1])]
    return np.array([*starts, *[_NEVER] * (MOST_CYCLES - num_cycles)], np.int32)


def learning_rate_at(schedule: ScheduleName, step: Int32[Array, ""], values: ScheduleValues) -> Float32[Array, ""]:
    """Return the learning rate of one update.

    Each schedule begins with a linear rise over the first `warmup_steps`: from `warmup_start` times the schedule's
    first learning rate up to that learning rate, reached at step `warmup_steps` (Goyal et al., 2017,
    arXiv:1706.02677). With a `warmup_start` of 0 the first update has learning rate 0. Then, over the remaining steps,
    and constant from `total_steps`:

    - "constant": the peak.
    - "step": the peak, times `drop_factor` from each milestone on.
    - "cosine": half a cosine from the peak to `final_fraction` of it (Loshchilov and Hutter, 2017, arXiv:1608.03983).
    - "linear": a straight line between the same values.
    - "polynomial": the fraction that remains of the steps, to the power of `power`, between the same values.
    - "exponential": the peak times `final_fraction` to the power of the fraction of the steps that is done.
    - "cosine-restarts": one such half cosine in each cycle (Loshchilov and Hutter, 2017, arXiv:1608.03983).
    - "one-cycle": half a cosine from peak / `start_divisor` up to the peak in `rise_steps`, then half a cosine down to
      peak / `final_divisor` (Smith, 2018, arXiv:1803.09820, in fastai's shape).

    If all steps are warm-up, the schedule is at its end as soon as the warm-up is over.

    Args:
        schedule: name of the schedule, static.
        step: number of updates before this one.
        values: the schedule's runtime values.

    Raises:
        ValueError: if the schedule is unknown.
    """
    if schedule not in _SHAPES:
        raise ValueError(f"schedule must be one of {', '.join(get_args(ScheduleName))}, got {schedule!r}")
    warmup = jnp.asarray(values.warmup_steps)
    step = jnp.maximum(step - values.start_step, 0)
    shape = _SHAPES[schedule]
    after = shape(_Place(jnp.maximum(step - warmup, 0), jnp.asarray(step), values.total_steps - warmup), values)
    first = _first_rate(schedule, values)
    risen = step.astype(jnp.float32) / jnp.maximum(warmup, 1).astype(jnp.float32)
    rising = _blend(first * values.warmup_start, first, risen)
    return jnp.where(step < warmup, rising, after).astype(jnp.float32)


def momentum_at(step: Int32[Array, ""], values: ScheduleValues) -> Float32[Array, ""]:
    """Return the one-cycle momentum of one update; it falls while the learning rate rises, and vice versa.

    It is `momentum_high` until the warm-up is over. Then it follows half a cosine down to `momentum_low` at the peak of
    the learning rate, and half a cosine back up. `step` is as in `learning_rate_at`.
    """
    step = jnp.maximum(step - values.start_step, 0)
    since = jnp.maximum(step - values.warmup_steps, 0)
    place = _Place(since, step, jnp.asarray(values.total_steps - values.warmup_steps))
    return _cycle(place, values, values.momentum_high, values.momentum_low, values.momentum_high)


class _Place(NamedTuple):
    """The position of a step in its schedule.

    Attributes:
        since: steps since the end of the warm-up.
        step: steps since the start of the cycle.
        length: steps from the end of the warm-up to the end of the cycle.
    """

    since: Int32[Array, ""]
    step: Int32[Array, ""]
    length: Int32[Array, ""]


def _first_rate(schedule: ScheduleName, values: ScheduleValues) -> _Number:
    return values.peak / values.start_divisor if schedule == "one-cycle" else values.peak


def _blend(start: _Number, end: _Number, fraction: jax.Array) -> jax.Array:
    """Interpolate linearly between two values; fractions 0 and 1 return exactly `start` and `end`."""
    return start * (1 - fraction) + end * fraction


def _remaining(since: Int32[Array, ""], length: Int32[Array, ""]) -> Float32[Array, ""]:
    """Return the fraction of `length` steps that remains, in 0 … 1; 0 if `length` is 0.

    Subtracts integers: float32 does not distinguish all steps beyond 2²⁴, and 1 - done loses the last digits of a run's
    last learning rates.
    """
    length = jnp.maximum(length, 0)
    remaining = jnp.clip(length - since, 0, length).astype(jnp.float32)
    return remaining / jnp.maximum(length, 1).astype(jnp.float32)


def _half_cosine(remaining: jax.Array) -> jax.Array:
    """Return (1 - cos(π · remaining)) / 2, computed as sin² to avoid cancellation; exactly 1 and 0 at the ends."""
    return jnp.sin(np.float32(np.pi / 2) * remaining) ** 2


def _constant(_: _Place, values: ScheduleValues) -> jax.Array:
    return jnp.asarray(values.peak)


def _step(place: _Place, values: ScheduleValues) -> jax.Array:
    rate = jnp.asarray(values.peak)
    # One multiplication after the other, as in a loop on the host: a power rounds differently.
    for number in range(NUM_MILESTONES):
        rate = jnp.where(place.step >= values.milestones[number], rate * values.drop_factor, rate)
    return rate


def _cosine(place: _Place, values: ScheduleValues) -> jax.Array:
    return _blend(values.peak * values.final_fraction, values.peak, _half_cosine(_remaining(place.since, place.length)))


def _linear(place: _Place, values: ScheduleValues) -> jax.Array:
    return _blend(values.peak * values.final_fraction, values.peak, _remaining(place.since, place.length))


def _polynomial(place: _Place, values: ScheduleValues) -> jax.Array:
    remaining = _remaining(place.since, place.length) ** values.power
    return _blend(values.peak * values.final_fraction, values.peak, remaining)


def _exponential(place: _Place, values: ScheduleValues) -> jax.Array:
    remaining = _remaining(place.since, place.length)
    # The first of very many steps is no done fraction in float32: a final fraction of 0 must not have the exponent 0.
    between = values.peak * jnp.asarray(values.final_fraction) ** jnp.maximum(1 - remaining, 1e-12)
    # Exact at both ends, where compiled code may round the exponent or the power.
    between = jnp.where(place.since > 0, between, values.peak)
    return jnp.where(remaining > 0, between, values.peak * values.final_fraction)


def _cosine_restarts(place: _Place, values: ScheduleValues) -> jax.Array:
    restarts = jnp.asarray(values.restarts)
    start = jnp.max(jnp.where(restarts <= place.since, restarts, 0))
    stop = jnp.minimum(jnp.min(jnp.where(restarts > place.since, restarts, _NEVER)), place.length)
    remaining = _half_cosine(_remaining(place.since - start, stop - start))
    return _blend(values.peak * values.final_fraction, values.peak, remaining)


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
    "polynomial": _polynomial,
    "exponential": _exponential,
    "cosine-restarts": _cosine_restarts,
}
