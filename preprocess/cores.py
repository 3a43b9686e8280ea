"""The number of CPU cores that this process may use, which in a container can be smaller than the machine's."""

import math
import os
from collections.abc import Iterator
from contextlib import suppress

from loopfeed.preprocess.control_groups import group_folders

# Of cgroup v1.
_CFS = ("quota", "period")


def num_cores() -> int:
    """Return the number of CPU cores that this process may run on, at least 1.

    This is the number of cores of the scheduler's affinity, or the smallest quota of the process's control groups,
    rounded up: threads that share a part of a core finish sooner than those that leave it idle.
    """
    return min([num_allowed_cores(), *(math.ceil(quota) for quota in _group_quotas())])


def num_allowed_cores() -> int:
    """Return the number of cores of the scheduler's affinity, at least 1, without the quotas of control groups."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _group_quotas() -> Iterator[float]:
    """Yield how many cores' time this process's control groups and the groups above them may use, if limited."""
    for folder in group_folders("cpu"):
        # No such file, or its content is "max".
        with suppress(OSError, ValueError):
            quota, period = (folder / "cpu.max").read_text(encoding="ascii").split()
            yield from _cores(int(quota), int(period))
        with suppress(OSError, ValueError):
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text(encoding="ascii") for name in _CFS)
            yield from _cores(int(quota), int(period))


def _cores(quota_us: int, period_us: int) -> Iterator[float]:
    if quota_us > 0 and period_us > 0:  # v1 writes -1 for no limit
        yield quota_us / period_us
