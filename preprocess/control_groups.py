"""The control groups that limit this process: what a container may use of its machine (Linux, cgroup v1 and v2)."""

import posixpath
import re
from collections.abc import Iterator
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
