"""How the processor's cores were used while a launch ran, by its own process and by others (Linux).

Owns what of `/proc/stat` counts. Must not know: launches.
"""

import os
from collections.abc import Collection, Iterator
from contextlib import suppress
from pathlib import Path

from loopfeed.engine.runtime.record import CoreUse
from loopfeed.preprocess.control_groups import num_cores

_STAT = Path("/proc/stat")
# The columns of a core: user, nice, system, idle, iowait, irq, softirq, steal. Guests are in the first two.
_NUM_COLUMNS, _IDLE = 8, (3, 4)


def read_core_use() -> CoreUse | None:
    """Return the times since the system and this process started; None if the system does not tell them."""
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks_per_s = float(os.sysconf("SC_CLK_TCK"))
        cores = [*_ticks(_STAT.read_text(encoding="ascii"), os.sched_getaffinity(0))]
        own = os.times()
        busy = sum(sum(ticks) for ticks in cores) - (idle := sum(ticks[at] for ticks in cores for at in _IDLE))
        own_s = own.user + own.system + own.children_user + own.children_system
        if cores and busy:
            return CoreUse(len(cores), num_cores(), own_s, busy / ticks_per_s - own_s, idle / ticks_per_s)
    return None


def _ticks(stat: str, allowed: Collection[int]) -> Iterator[list[int]]:
    """Yield the times of each core that this process may run on."""
    for name, *columns in (line.split() for line in stat.splitlines() if line):
        number = name.removeprefix("cpu")
        if name != number and number.isdigit() and int(number) in allowed:
            yield [int(each) for each in columns[:_NUM_COLUMNS]]
