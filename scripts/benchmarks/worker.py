"""A candidate's process: started, asked with a time limit, killed with all that it started.

While it is not its turn, its whole process group is stopped (SIGSTOP): it neither takes time from the others nor reads
ahead of its own clock, and finds its queues as it left them.
"""

import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

_TAIL_LINES = 12
_END_TIMEOUT_S = 5.0


class WorkerError(RuntimeError):
    """A candidate that died, hung or answered rubbish; the message has the end of its log."""


class Ready(NamedTuple):
    """What a candidate said once it was ready.

    Attributes:
        amount: what one unit of its work comes to, > 0.
        versions: of what does the work.
        facts: whatever else it wants recorded.
        prepare_s: seconds that it took.
    """

    amount: float
    versions: dict[str, str]
    facts: dict[str, Any]
    prepare_s: float


class Sample(NamedTuple):
    """An answer: the seconds that the units took, > 0, and values recorded beside them."""

    seconds: float
    values: dict[str, float]


class Worker:
    """A process that speaks `candidates.protocol`. A context manager, which kills its whole process group at the end.

    Args:
        command: that starts it.
        log: takes what it says on standard error; overwritten.
        environment: of the process.
        cwd: its working folder.
    """

    def __init__(self, command: Sequence[str], log: Path, *, environment: Mapping[str, str], cwd: Path) -> None:
        self._log = log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("wb") as file:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=dict(environment),
                cwd=cwd,
                # Of the same session: where the bench is killed, the system wakes its stopped groups, and hangs up.
                process_group=0,
            )
        self._started = time.perf_counter()
        self._unread = b""

    @property
    def process_id(self) -> int:
        """Of the process, and of its group."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process and whatever it started; may be called again."""
        for stream in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if stream is not None:
                    stream.close()
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)

    def wait_ready(self, timeout_s: float) -> Ready:
        """Waits until it is ready, for so many seconds.

        Raises:
            WorkerError: it died, was not ready in time, or said something else; it is then ended.
        """
        message = self._read(timeout_s, "to be ready")
        match message:
            case {"ready": True, "amount": int() | float() as amount, "versions": dict(), "facts": dict()} if (
                amount > 0
            ):
                prepare_s = time.perf_counter() - self._started
                self._signal(signal.SIGSTOP)
                return Ready(amount, message["versions"], message["facts"], prepare_s)
        raise self._error(f"said something else than that it is ready: {message!r:.200}")

    def run(self, num_units: int, timeout_s: float) -> Sample:
        """Lets it do so many units, for so many seconds at most.

        Raises:
            WorkerError: it died, did not answer in time, or said something else; it is then ended.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self._process.stdin.write(f"{num_units}\n".encode())
            self._process.stdin.flush()
        except OSError:
            raise self._ended() from None
        message = self._read(timeout_s, f"to do {num_units} units")
        match message:
            case {"seconds": int() | float() as seconds, "values": dict() as values} if seconds > 0:
                self._signal(signal.SIGSTOP)
                return Sample(float(seconds), values)
        raise self._error(f"answered something else than seconds: {message!r:.200}")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _read(self, timeout_s: float, wanted: str) -> Any:
        line = self._read_line(timeout_s, wanted)
        try:
            return json.loads(line)
        except ValueError:
            raise self._error(f"printed something else than an answer: {line!r:.200}") from None

    def _read_line(self, timeout_s: float, wanted: str) -> bytes:
        assert self._process.stdout is not None
        pipe, deadline = self._process.stdout.fileno(), time.monotonic() + timeout_s
        while b"\n" not in self._unread:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([pipe], [], [], left_s)[0]:
                raise self._error(f"took more than {timeout_s:g} s {wanted}")
            read = os.read(pipe, 1 << 16)
            if not read:
                raise self._ended()
            self._unread += read
        line, _, self._unread = self._unread.partition(b"\n")
        return line

    def _ended(self) -> WorkerError:
        try:
            code = self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return self._error("closed its output")
        return self._error(f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}")

    def _error(self, what: str) -> WorkerError:
        # Of no use any more, it must not take time from the others.
        self.close()
        try:
            said = self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        except OSError:
            said = []
        tail = "".join(f"\n    {line}" for line in said)
        return WorkerError(f"{what}; {self._log} ends with:{tail}" if tail else f"{what}; {self._log} is empty")
