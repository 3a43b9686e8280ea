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
    """Return the times since the system and this process started; None if the system does not tell them.

    Own are those of the processes that this one started too, such as workers that read, whether they live or not.
    """
    with suppress(OSError, ValueError, IndexError, AttributeError):
        ticks_per_s = float(os.sysconf("SC_CLK_TCK"))
        cores = [*_ticks(_STAT.read_text(encoding="ascii"), os.sched_getaffinity(0))]
        own = os.times()
        live_s = sum(_ticks_of_descendants(os.getpid())) / ticks_per_s
        busy = sum(sum(ticks) for ticks in cores) - (idle := sum(ticks[at] for ticks in cores for at in _IDLE))
        own_s = own.user + own.system + own.children_user + own.children_system + live_s
        if cores and busy:
            return CoreUse(len(cores), num_cores(), own_s, busy / ticks_per_s - own_s, idle / ticks_per_s)
    return None


def _ticks(stat: str, allowed: Collection[int]) -> Iterator[list[int]]:
    """Yield the times of each core that this process may run on."""
    for name, *columns in (line.split() for line in stat.splitlines() if line):
        number = name.removeprefix("cpu")
        if name != number and number.isdigit() and int(number) in allowed:
            yield [int(each) for each in columns[:_NUM_COLUMNS]]


def _ticks_of_descendants(ancestor: int) -> Iterator[int]:
    """Yield the times of each living process below one, with those of its ended children."""
    parents, ticks = dict[int, int](), dict[int, int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, ValueError, IndexError):  # it has ended
            # Behind the name: state, parent, …; user and system time are the 12th and 13th, those of children follow.
            columns = stat.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            number = int(stat.parent.name)
            parents[number], ticks[number] = int(columns[1]), sum(map(int, columns[11:15]))
    below = {ancestor}
    while more := {each for each, parent in parents.items() if parent in below} - below:
        below |= more
    yield from (ticks[each] for each in below - {ancestor})
