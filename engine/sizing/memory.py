"""The memory that a program needs on each device, and the largest batch whose program fits. Does not compile."""

from bisect import bisect_right
from collections.abc import Callable, Mapping
from typing import NamedTuple

from loopfeed.engine.config import TrainConfig

START = "starting state, on the first device"
"""The part for the state that was copied to all devices."""
# The largest number of batch sizes that are compiled to find the largest one that fits.
_MOST_COMPILATIONS = 5


class Analysed(NamedTuple):
    """XLA's analysis of a program for one device.

    Attributes:
        memory_bytes: memory by kind, as `loopfeed.engine.run.compilation.Compiled.memory_bytes`.
        step_flops: floating-point operations in a step, None if unknown.
        ring_bytes: host memory for the batches that are read ahead.
    """

    memory_bytes: Mapping[str, int]
    step_flops: float | None
    ring_bytes: int = 0


class LargestBatch(NamedTuple):
    """The largest compiled batch that fits (0 if none), the smallest that does not, and whether none lies between."""

    fits: int
    too_large: int
    is_settled: bool


def program_parts(memory_bytes: Mapping[str, int], state_bytes: int, num_devices: int) -> dict[str, int]:
    """Return what a program needs on one device, in bytes by part; what is reused for results is not counted twice.

    Args:
        memory_bytes: XLA's analysis.
        state_bytes: size of the training state.
        num_devices: number of devices; with several, the first also holds the state that was copied to all of them.
    """
    return {
        "arguments": memory_bytes.get("arguments", 0),
        "results, in new memory": memory_bytes.get("results", 0) - memory_bytes.get("reused", 0),
        "temporaries": memory_bytes.get("temporaries", 0),
        "code": memory_bytes.get("code", 0),
    } | ({START: state_bytes} if num_devices > 1 else {})


def batch_unit(config: TrainConfig, num_devices: int) -> int | None:
    """Return the number of images of which a smaller batch must be a multiple; None if the batch cannot be changed."""
    if config.resume:
        return None
    group = None if config.batch_norm_sync else config.batch_norm_group
    if group is None:
        return num_devices
    return num_devices * group if group <= config.batch // num_devices else None


def find_largest_batch(
    need_of: Callable[[int], int],
    limit_bytes: int,
    *,
    batch: int,
    need_bytes: int,
    fixed_bytes: int,
    unit: int,
    most_compilations: int = _MOST_COMPILATIONS,
) -> LargestBatch:
    """Search for the largest batch that fits, among multiples of `unit` that are about an eighth apart.

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
    counts = range(1, -(-batch // unit))
    sizes = [0, *(count * unit for count in counts if count % _distance(count) == 0), batch]
    needs = {batch: need_bytes}
    low, high = 0, len(sizes) - 1
    for _ in range(most_compilations):
        if high - low == 1:
            break
        too_large = sizes[high]
        other = sizes[low] if low else min((size for size in needs if size > too_large), default=0)
        slope = (needs[too_large] - needs.get(other, fixed_bytes)) / (too_large - other)
        line = too_large - (needs[too_large] - limit_bytes) / max(slope, 1e-9)
        guess = min(max(bisect_right(sizes, line) - 1, low + 1), high - 1)
        needs[sizes[guess]] = need_of(sizes[guess])
        low, high = (guess, high) if needs[sizes[guess]] <= limit_bytes else (low, guess)
    return LargestBatch(sizes[low], sizes[high], is_settled=high - low == 1)


def _distance(count: int) -> int:
    """Return the distance between considered multiples: 96, 104, 112, …, 192, 208, … are eight an octave."""
    return max(1, (1 << count.bit_length()) // 16)
