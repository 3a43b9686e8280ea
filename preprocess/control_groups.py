"""What this process may use of its machine: CPU cores and memory, which control groups can limit (Linux, v1 and v2).

In a container both can be smaller than the machine's.
"""

import math
import os
import posixpath
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_MOUNTS, _MEMBERSHIP = Path("/proc/self/mountinfo"), Path("/proc/self/cgroup")


class _Mount(NamedTuple):
    """Where a hierarchy of groups is mounted.

    Attributes:
        folder: the mount point.
        root: the path, in the hierarchy, of the group that the mount point shows.
        controllers: the names of what it controls (v1); empty for v2, which controls everything.
    """

    folder: Path
    root: str
    controllers: frozenset[str]


def group_folders(controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that this process is in, of v2 and of a controller of v1, and all above them.

    Nothing is yielded on a system without control groups. A folder need not exist.

    Args:
        controller: "cpu" or "memory".
    """
    try:
        mounts = [found for line in _lines(_MOUNTS) if (found := _parse_mount(line)) is not None]
        members = [line.split(":", 2) for line in _lines(_MEMBERSHIP)]
    except OSError:  # not Linux
        return
    for mount in mounts:
        for number, controllers, path in (member for member in members if len(member) == 3):
            is_v2 = number == "0" and not mount.controllers
            if is_v2 or controller in mount.controllers & set(controllers.split(",")):
                yield from _folders(mount, path)


def _folders(mount: _Mount, path: str) -> Iterator[Path]:
    # With a name space of its own, a group outside of it is "/../…"; what is mounted then is its root.
    path, root = posixpath.normpath(path), mount.root.rstrip("/")
    below = path.removeprefix(root) if path == root or path.startswith(f"{root}/") else ""
    folder = mount.folder / below.lstrip("/")
    yield from (each for each in (folder, *folder.parents) if each.is_relative_to(mount.folder))


def _lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()


def _parse_mount(line: str) -> _Mount | None:
    """Return the mount of control groups that a line of mountinfo describes; None if it is of something else."""
    places, _, kinds = line.partition(" - ")
    words, (kind, _, options) = places.split(" "), (*kinds.split(" "), "", "", "")[:3]
    if kind not in ("cgroup", "cgroup2") or len(words) < 5:
        return None
    controllers = frozenset(options.split(",")) if kind == "cgroup" else frozenset()
    return _Mount(Path(_unescape(words[4])), _unescape(words[3]), controllers)


def _unescape(text: str) -> str:
    r"""Return a path of mountinfo, in which a space is \040."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


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


# Of cgroup v2 and v1.
_LIMITS = ("memory.max", "memory.limit_in_bytes")


def host_memory_bytes() -> int | None:
    """Return the memory limit of this process in bytes, or None if it is unknown.

    This is the memory of the machine, or the smallest limit of the process's control groups.
    """
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None
    return min([total, *_group_limits()])


def process_memory_bytes() -> int | None:
    """Return the largest amount of memory that this process has used so far, in bytes, or None if it is unknown."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else 1024 * largest


def _group_limits() -> Iterator[int]:
    """Yield the memory limits of this process's control groups and of the groups above them."""
    for folder in group_folders("memory"):
        for name in _LIMITS:
            with suppress(OSError, ValueError):  # no such file, or its content is "max"
                yield int((folder / name).read_text(encoding="ascii"))
