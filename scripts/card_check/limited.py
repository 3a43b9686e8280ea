"""Commands with a time limit: each has a session of its own, and leaves no process behind."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

# Of a limit, the last part is for ending by oneself after SIGTERM, at most so many seconds.
_GRACE = 0.1
_MOST_GRACE_S = 5.0
_KILL_LIMIT_S = 5.0


class Outcome(NamedTuple):
    """The end of a command.

    Attributes:
        code: its exit code, negative for a signal; None if it did not end within its limit.
        seconds: how long it ran.
    """

    code: int | None
    seconds: float

    def describe(self) -> str:
        """Return what became of it, in a few words."""
        if self.code is None:
            return f"killed after {self.seconds:.0f} s, because it did not end in its time"
        if self.code < 0:
            return f"killed by signal {-self.code} after {self.seconds:.0f} s"
        return f"exit code {self.code} after {self.seconds:.0f} s"


def run_limited(
    command: Sequence[str], *, log: IO[bytes], limit_s: float, environment: Mapping[str, str], folder: Path
) -> Outcome:
    """Run a command in `folder` until it ends, but at most `limit_s` seconds; its output is written to `log`.

    Whatever it has started is killed with it, also if it ends by itself, and if this process is interrupted.

    Raises:
        OSError: the command cannot be started.
    """
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        env=dict(environment),
        cwd=folder,
        start_new_session=True,
    )
    grace_s = min(_MOST_GRACE_S, _GRACE * limit_s)
    try:
        code: int | None = process.wait(limit_s - grace_s)
    except subprocess.TimeoutExpired:
        code = None
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
    finally:
        _kill_session(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_KILL_LIMIT_S)
    return Outcome(code, time.monotonic() - started)


def _kill_session(leader: int) -> None:
    """Kill all processes of a session, also those in groups of their own; without /proc, only the leader's group."""
    deadline = time.monotonic() + _KILL_LIMIT_S
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
    while (members := _session_members(leader)) and time.monotonic() < deadline:
        for member in members:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(member, signal.SIGKILL)
        time.sleep(0.02)


def _session_members(leader: int) -> list[int]:
    """Return the ids of a session's processes that have not ended."""
    members = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            # The name of the program, in parentheses, may contain anything.
            state, _, _, session, *_ = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except (OSError, ValueError):
            continue
        if int(session) == leader and state not in ("Z", "X"):
            members.append(int(path.parent.name))
    return members
