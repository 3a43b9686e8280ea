"""Differences between two computations of the same value, and whether rounding explains them.

Owns the rule. Needs no jax.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

MARGIN = 4.0
"""How many times the effect of random rounding a difference may have."""
LARGEST_EFFECT = 0.01
"""How far rounding alone may move a part of a step, relative to its norm, unless its numbers are coarser."""
_EFFECT_UNITS = 32.0  # the same in units of the coarsest numbers, for bfloat16
_FLOOR_UNITS = 4.0  # below this many units of roundoff, a difference is rounding whatever the effect of random rounding
_MOST_FLIPS = 2  # comparisons of floats that may turn out differently, besides those of random rounding


@dataclass(frozen=True)
class Difference:
    """How two computations of a value, or of several, differ.

    Attributes:
        num_values: number of values.
        largest: the largest difference of two numbers, relative to the largest number of its value; infinite where one
            is finite and the other is not. Of integers and booleans, the share that differs.
        ulp: the same in units in the last place of that largest number; 0 for integers.
        measured: the root mean square of the differences relative to that of the numbers.
        allowed: how large `measured` may be.
        is_finite: whether NaN and infinity are in the same places in both.
    """

    num_values: int
    largest: float
    ulp: float
    measured: float
    allowed: float
    is_finite: bool = True

    @property
    def is_explained(self) -> bool:
        """Whether rounding explains the difference."""
        return self.is_finite and self.measured <= self.allowed

    @property
    def is_identical(self) -> bool:
        """Whether there is no difference."""
        return self.is_finite and self.largest == 0

    @property
    def excess(self) -> float:
        """How many times larger the difference is than allowed; infinite for NaN in one of the two."""
        if self.is_explained:
            return self.measured / self.allowed if self.allowed else 0.0
        return self.measured / self.allowed if self.is_finite and self.allowed else float("inf")


def compare(reference: Any, found: Any, disturbed: Sequence[Any]) -> Difference:
    """Compare a value with its reference.

    A difference is explained by rounding if its root mean square is at most `MARGIN` times that between the reference
    and the same computation in which every operation was disturbed by about its rounding error, or if it is a few units
    of roundoff.

    Args:
        reference: the value, an array of any shape and dtype.
        found: the other computation's.
        disturbed: the value in each of the disturbed computations.
    """
    arrays = [np.asarray(each) for each in (reference, found, *disturbed)]
    if not _is_float(arrays[0].dtype):
        return _compare_exact(arrays[0], arrays[1], arrays[2:])
    unit = float(ml_dtypes.finfo(arrays[0].dtype).eps)
    wide = [each.astype(np.float64).ravel() for each in arrays]
    one, other = wide[0], wide[1]
    is_finite = _same_places(one, other) or any(not _same_places(one, each) for each in wide[2:])
    finite = one[np.isfinite(one)]
    gap = np.abs(_gaps(one, other))
    scale = np.abs(finite).max(initial=0.0)
    size = _root_mean_square(finite)
    effects = [_root_mean_square(_gaps(one, each)) for each in wide[2:]]
    largest = gap.max(initial=0.0)
    relative = largest / scale if scale else (np.inf if largest else 0.0)
    return Difference(
        num_values=1,
        largest=float(relative) if _same_places(one, other) else float("inf"),
        ulp=float(largest / (unit * 2.0 ** np.floor(np.log2(scale)))) if scale else 0.0,
        measured=_ratio(_root_mean_square(gap), size),
        allowed=MARGIN * max((_ratio(each, size) for each in effects), default=0.0) + _FLOOR_UNITS * unit,
        is_finite=is_finite,
    )


def largest_effect(dtypes: Iterable[Any]) -> float:
    """Return how far rounding alone may move a part of a step that computes with numbers of these dtypes."""
    units = [float(ml_dtypes.finfo(dtype).eps) for dtype in map(np.dtype, dtypes) if _is_float(dtype)]
    return max(LARGEST_EFFECT, _EFFECT_UNITS * max(units, default=0.0))


def effect(reference: Sequence[Any], disturbed: Sequence[Any]) -> float:
    """Return how far a disturbance moved some values together: the norm of the differences relative to their norm.

    Together, because a sum that cancels, as the gradient of a bias before a norm, is nothing but rounding. Only floats
    count; 0 if all are 0, and infinite if the disturbance makes NaN or infinity of one.
    """
    pairs = [[np.asarray(each) for each in pair] for pair in zip(reference, disturbed, strict=True)]
    wide = [[each.astype(np.float64).ravel() for each in pair] for pair in pairs if _is_float(pair[0].dtype)]
    if not wide:
        return 0.0
    if not all(_same_places(*pair) for pair in wide):
        return float("inf")
    gaps = np.concatenate([_gaps(*pair) for pair in wide])
    numbers = np.concatenate([one[np.isfinite(one)] for one, _ in wide])
    size = _root_mean_square(numbers) * len(numbers) ** 0.5
    return _root_mean_square(gaps) * len(gaps) ** 0.5 / size if size else 0.0


def join(differences: Sequence[Difference]) -> Difference:
    """Return the difference of several values together: the one with the largest excess decides."""
    worst = max(differences, key=lambda each: (each.excess, each.measured))
    return Difference(
        num_values=sum(each.num_values for each in differences),
        largest=max(each.largest for each in differences),
        ulp=max(each.ulp for each in differences),
        measured=worst.measured,
        allowed=worst.allowed,
        is_finite=all(each.is_finite for each in differences),
    )


def _compare_exact(reference: NDArray[Any], found: NDArray[Any], disturbed: Sequence[NDArray[Any]]) -> Difference:
    """Compare integers or booleans, which rounding changes only through comparisons of floats."""
    size = max(reference.size, 1)
    share = float((reference != found).sum()) / size
    flips = max((float((reference != each).sum()) for each in disturbed), default=0.0)
    return Difference(1, share, 0.0, share, (MARGIN * flips + _MOST_FLIPS) / size)


def _is_float(dtype: np.dtype[Any]) -> bool:
    try:
        ml_dtypes.finfo(dtype)
    except ValueError:
        return False
    return dtype.kind != "c"


def _same_places(one: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    both = ~np.isfinite(one) & ~np.isfinite(other)
    equal = (one == other) | (np.isnan(one) & np.isnan(other))
    return bool((np.isfinite(one) == np.isfinite(other)).all() and equal[both].all())


def _gaps(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the differences where both are finite."""
    both = np.isfinite(one) & np.isfinite(other)
    gaps: NDArray[np.float64] = other[both] - one[both]
    return gaps


def _root_mean_square(numbers: NDArray[np.float64]) -> float:
    # Scaled, because squares of small gradients underflow and those of large numbers overflow.
    scale = float(np.abs(numbers).max(initial=0.0))
    return scale * float(np.sqrt(np.mean(np.square(numbers / scale)))) if scale else 0.0


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (float("inf") if part else 0.0)
