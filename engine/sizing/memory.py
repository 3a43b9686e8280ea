"""The memory that a program needs on each device, and the largest batch whose program fits.

Pure arithmetic over the analyses that others make; does not compile.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from loopfeed.engine.config import TrainConfig

MOST_COMPILATIONS = 5
"""The largest number of batch sizes that are compiled to find the largest one that fits."""
START = "starting state, on the first device"
"""The part for the state that was copied to all devices."""
# Steps between the batch sizes that are considered, as a fraction of the size: 96, 104, 112, …, 192, 208, …
_STEPS_PER_OCTAVE = 8


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a run needs, in bytes.

    Attributes:
        parts: what each part needs, by its description; what is reused for results is negative.
    """

    parts: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """The sum of the parts."""
        return sum(self.parts.values())


def program_parts(memory_bytes: Mapping[str, int], state_bytes: int, num_devices: int) -> dict[str, int]:
    """Return what a program needs on one device, by part.

    Args:
        memory_bytes: XLA's analysis, as `loopfeed.engine.run.compilation.Compiled.memory_bytes`.
        state_bytes: size of the training state.
        num_devices: number of devices; with several, the first also holds the state that was copied to all of them.
    """
    reused = memory_bytes.get("reused", 0)
    return {
        "arguments": memory_bytes.get("arguments", 0),
        "results, in new memory": memory_bytes.get("results", 0) - reused,
        "temporaries": memory_bytes.get("temporaries", 0),
        "code": memory_bytes.get("code", 0),
    } | ({START: state_bytes} if num_devices > 1 else {})


@dataclass(frozen=True)
class LargestBatch:
    """The result of the search for the largest batch that fits.

    Attributes:
        fits: the largest batch whose program was compiled and fits; 0 if none did.
        too_large: the smallest batch whose program was compiled and does not fit.
        is_settled: whether no batch size between the two was left to consider.
    """

    fits: int
    too_large: int
    is_settled: bool


def batch_unit(config: TrainConfig, num_devices: int) -> int | None:
    """Return the number of images of which a smaller batch must be a multiple; None if the batch cannot be changed."""
    if config.resume:
        return None
    group = None if config.batch_norm_sync else config.batch_norm_group
    if group is None:
        return num_devices
    own = config.batch // num_devices
    return num_devices * group if group <= own else None


def find_largest_batch(
    need_of: Callable[[int], int],
    limit_bytes: int,
    *,
    batch: int,
    need_bytes: int,
    fixed_bytes: int,
    unit: int,
    most_compilations: int = MOST_COMPILATIONS,
) -> LargestBatch:
    """Search for the largest batch that fits, among multiples of `unit` with few significant bits.

    The need is taken to grow with the batch. Each size is chosen by a straight line through the two known ones nearest
    to the limit.

    Args:
        need_of: batch → the bytes that it needs; compiles a program.
        limit_bytes: the bytes that there are.
        batch, need_bytes: a batch that does not fit, and the bytes that it needs.
        fixed_bytes: an estimate of the bytes that a batch of no images would need.
        unit: number of images of which a batch must be a multiple.
        most_compilations: the largest number of calls of `need_of`.
    """
    fits, too_large = 0, batch
    needs = {batch: need_bytes}
    for _ in range(most_compilations):
        below = [size for size in needs if size <= fits] or [size for size in needs if size > too_large] or [0]
        nearest = min(below, key=lambda size: abs(size - too_large))
        other_bytes = needs.get(nearest, fixed_bytes)
        slope = (needs[too_large] - other_bytes) / (too_large - nearest)
        guess = _rounded(too_large - (needs[too_large] - limit_bytes) / max(slope, 1e-9), unit)
        guess = min(max(guess, _next_size(fits, unit)), _previous_size(too_large, unit))
        if not fits < guess < too_large:
            return LargestBatch(fits, too_large, is_settled=True)
        needs[guess] = need_of(guess)
        if needs[guess] <= limit_bytes:
            fits = guess
        else:
            too_large = guess
    return LargestBatch(fits, too_large, is_settled=_next_size(fits, unit) >= too_large)


def _step(count: int) -> int:
    """Return the distance between the multiples that are considered around `count` times the unit."""
    return max(1, 1 << max(0, count.bit_length() - 1 - (_STEPS_PER_OCTAVE.bit_length() - 1)))


def _rounded(size: float, unit: int) -> int:
    count = int(max(size, 0)) // unit
    return count // _step(count) * _step(count) * unit if count > 0 else 0


def _next_size(size: int, unit: int) -> int:
    """Return the smallest considered size above `size`, itself one or 0."""
    count = size // unit
    return (count + _step(count)) * unit


def _previous_size(size: int, unit: int) -> int:
    """Return the largest considered size below `size`; 0 if there is none."""
    return _rounded(size - 1, unit)
