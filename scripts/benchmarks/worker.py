"""A candidate's process: started, given work with a time limit, and killed with all of its child processes.

Between its turns the whole process group is stopped (SIGSTOP), so that it neither takes time from the others nor reads
ahead outside its measured time, and finds its queues as it left them.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

_TAIL_LINES = 12
_END_TIMEOUT_S = 5.0


class WorkerError(RuntimeError):
    """A candidate that died, hung or sent an invalid answer; the message contains the end of its log."""


class Ready(NamedTuple):
    """A candidate's ready message.

    Attributes:
        amount: amount per unit of work, > 0.
        versions: versions of the software that does the work.
        facts: other facts to record.
        prepare_s: time of the preparation in seconds.
    """

    amount: float
    versions: dict[str, str]
    facts: dict[str, Any]
    prepare_s: float


class Sample(NamedTuple):
    """An answer: the seconds that the units took, > 0, and other recorded values."""

    seconds: float
    values: dict[str, float]


# Does so many units of work in at most so many seconds.
type Run = Callable[[int, float], Sample]


class Worker:
    """A process that speaks `candidates.protocol`. A context manager, which kills its whole process group at the end.

    Args:
        command: the command to run.
        log: file for its standard error; overwritten.
        environment: environment of the process.
        cwd: working folder of the process.
    """

    def __init__(self, command: Sequence[str], log: Path, *, environment: Mapping[str, str], cwd: Path) -> None:
        self._log, self._unread, self._started = log, b"", time.perf_counter()
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(environment),
                cwd=cwd,
                # In the same session: if the benchmark is killed, the system continues its stopped groups with SIGHUP.
                process_group=0,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    @property
    def process_id(self) -> int:
        """The id of the process and of its group."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Kill the process and its child processes; may be called again."""
        for stream in (self._requests, self._answers):
            with suppress(OSError):
                stream.close()
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)

    def wait_ready(self, timeout_s: float) -> Ready:
        """Wait until the process is ready, at most ``timeout_s`` seconds.

        Raises:
            WorkerError: the process died, was not ready in time, or sent something else; it is then killed.
        """
        match message := self._read(timeout_s, "to be ready"):
            case {
                "ready": True,
                "amount": int() | float() as amount,
                "versions": dict() as versions,
                "facts": dict() as facts,
            } if amount > 0:
                prepare_s = time.perf_counter() - self._started
                self._signal(signal.SIGSTOP)
                return Ready(amount, versions, facts, prepare_s)
        raise self._error(f"sent something other than a ready message: {message!r:.200}")

    def run(self, num_units: int, timeout_s: float) -> Sample:
        """Run ``num_units`` units of work, at most ``timeout_s`` seconds.

        Raises:
            WorkerError: the process died, did not answer in time, or sent something else; it is then killed.
        """
        self._signal(signal.SIGCONT)
        try:
            self._requests.write(f"{num_units}\n".encode())
            self._requests.flush()
        except (OSError, ValueError):  # ValueError if it was closed, because an earlier round failed
            raise self._ended() from None
        match message := self._read(timeout_s, f"to do {num_units} units"):
            case {"seconds": int() | float() as seconds, "values": dict() as values} if seconds > 0:
                self._signal(signal.SIGSTOP)
                return Sample(float(seconds), values)
        raise self._error(f"sent something other than seconds: {message!r:.200}")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self, timeout_s: float, wanted: str) -> Any:
        """Return the next line as JSON."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._answers], [], [], left_s)[0]:
                raise self._error(f"took more than {timeout_s:g} s {wanted}")
            read = os.read(self._answers.fileno(), 1 << 16)
            if not read:
                raise self._ended()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            return json.loads(line)
        except ValueError:
            raise self._error(f"sent something other than an answer: {line!r:.200}") from None

    def _ended(self) -> WorkerError:
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self._error("closed its output")
        return self._error(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")

    def _error(self, what: str) -> WorkerError:
        # A failed process must not take time from the others.
        self.close()
        said = self._log.read_text(encoding="utf-8", errors="replace").splitlines() if self._log.exists() else []
        tail = "".join(f"\n    {line}" for line in said[-_TAIL_LINES:])
        return WorkerError(f"{what}; {self._log} ends with:{tail}" if tail else f"{what}; {self._log} is empty")
