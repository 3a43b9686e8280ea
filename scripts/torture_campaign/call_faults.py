"""Faults in the file calls of a command below one folder, drawn from the calls that it makes without a fault.

`fault_shim.c`, loaded before libc, makes them: an error, half of the bytes, or a delay.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_SOURCE = Path(__file__).with_name("fault_shim.c")
_BUILD_TIMEOUT_S = 60.0
_HALF = -1
_CHANGING = ("create", "write", "fsync", "rename", "truncate", "unlink", "mkdir")
"""The calls that change a file system, by the names that the shim gives them."""
_ALL = ("open", "create", "read", "write", "fsync", "rename", "truncate", "mmap", "close", "unlink", "mkdir", "stat",
        "list")  # fmt: skip
# What a disk or a file server may answer besides EIO and ESTALE, which any call can meet.
_OTHER_ERRORS = {
    "open": ("EINTR",),
    "create": ("EINTR", "ENOSPC"),
    "read": ("EINTR",),
    "write": ("EINTR", "ENOSPC", "ENOSPC"),
    "fsync": ("EINTR", "ENOSPC"),
    "mkdir": ("ENOSPC",),
    "rename": ("ENOSPC",),
    "close": ("ENOSPC",),
    "mmap": ("ENOMEM", "ENODEV"),
}
type Calls = Mapping[tuple[str, str], int]
"""How often a command makes each call on each class of paths."""


@dataclass(frozen=True)
class CallFault:
    """A change of some file calls of a command.

    Attributes:
        call: the call, by its name in the shim.
        pattern: the paths below the folder, `*` for any part.
        nth: the first call of such paths that changes, from 1.
        count: how many there are without the fault.
        change: the name of an error, "short" or "delay".
        others: which calls change after it: "once" for none, "same" for the same calls of such paths, or names of calls
            of all paths.
    """

    call: str
    pattern: str
    nth: int
    count: int
    change: str
    others: str | tuple[str, ...]

    def __str__(self) -> str:
        others = {"once": "once", "same": "and all later ones"}.get(str(self.others), "and all later calls of any path")
        return f"{self.call} {self.nth} of {self.count} of {self.pattern}: {self.change}, {others}"

    @property
    def number(self) -> int | None:
        """The number of the error, if it is one."""
        return getattr(errno, self.change, None)

    def environment(self, root: Path, log: Path) -> dict[str, str]:
        """Return the shim's orders: the fault below ``root``; calls that changed are appended to ``log``."""
        others = self.others if isinstance(self.others, str) else f",{','.join(self.others)},"
        change = _HALF if self.change == "short" else self.number or 0
        delay_ms = 0 if self.change != "delay" else 1000 if self.others == "once" else 20
        fault = f"{self.call} {self.nth} {others} {change} {delay_ms} {self.pattern}"
        return watching(root, log) | {"TORTURE_FAULT": fault}


def watching(root: Path, log: Path) -> dict[str, str]:
    """Return the shim's orders to change nothing and to append each call below ``root`` to ``log``."""
    return {"TORTURE_ROOT": os.fspath(root), "TORTURE_LOG": os.fspath(log)}


def read_calls(log: Path) -> Calls:
    """Return how often each call occurs on each class of paths; numbers and random names of one class differ."""
    lines = log.read_text(encoding="utf-8").splitlines() if log.is_file() else []
    calls = (line.partition("\t")[::2] for line in lines)
    return Counter((call, re.sub(r"[0-9a-f]{8,}|\d+|[ \[\]?*]", "*", path)) for call, path in calls)


def draw_call_fault(calls: Calls, draw: random.Random) -> CallFault:
    """Draw one of the calls, then one of its classes of paths, its occurrence and its change.

    Threads make a few calls more or fewer each time, which must not lead to another fault.
    """
    salt, part = draw.random(), draw.random()

    def pick(items: Iterable[str]) -> str:
        return min(items, key=lambda item: random.Random(f"{salt}/{item}").random())

    call = pick({call for call, _ in calls})
    pattern = pick({pattern for each, pattern in calls if each == call})
    count = calls[call, pattern]
    nth = draw.choice([1, count, 1 + int(part * count)])
    changes = ["EIO", "EIO", "ESTALE", "delay", *_OTHER_ERRORS.get(call, ())]
    change = draw.choice([*changes, "short", "short"] if call in ("read", "write") else changes)
    others: str | tuple[str, ...] = draw.choice(["once", "once", "same"])
    if change == "EINTR":  # for ever would be a signal that never stops
        others = "once"
    elif change == "ENOSPC" and draw.random() < 0.5:  # the disk is full
        others = _CHANGING
    elif change in ("EIO", "ESTALE") and draw.random() < 0.2:  # the disk or its server is gone
        others = _ALL
    return CallFault(call, pattern, nth, count, change, others)


def build_shim(folder: Path) -> Path | str:
    """Build the shim in a folder; return its path, or why there is none."""
    compiler = shutil.which("cc")
    if sys.platform != "linux" or compiler is None:
        return "needs Linux" if compiler is not None else "needs a C compiler (cc)"
    shim = folder / "fault_shim.so"
    words = [compiler, "-std=gnu17", "-O1", "-shared", "-fPIC", "-o", os.fspath(shim), os.fspath(_SOURCE), "-ldl"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_BUILD_TIMEOUT_S, check=False)
    return shim if done.returncode == 0 else f"{compiler} cannot build it: {done.stderr.strip().splitlines()[-1:]}"
