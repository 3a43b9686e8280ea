"""A busy process beside a candidate, and the share of the cores that a candidate then has a right to.

The share is that of a scheduler which treats threads alike, as Linux does within one session, to which both processes
belong: of n + 1 threads that always want to run on n cores, each gets n / (n + 1) of a core. So a program with a thread
for each core should keep n / (n + 1) of its speed: two thirds on two cores. It loses more if its threads wait for the
one that was interrupted, or spin meanwhile.
"""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from scripts.benchmarks.measure import Runner
from scripts.benchmarks.worker import Sample

_END_TIMEOUT_S = 5.0
# Spins until its parent has ended, in case that it is killed.
_SPIN = """
import os
while os.getppid() == {parent}:
    for _ in range(1 << 16):
        pass
"""


def fair_share(num_cores: int) -> float:
    """Return the part of its speed that a program with a thread for each core keeps beside one busy thread."""
    return num_cores / (num_cores + 1)


class Neighbour:
    """A process that computes all the time, and is stopped except inside `busy`. A context manager, which kills it."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _SPIN.format(parent=os.getpid())]
        # A group of its own in the same session, as a worker's: see `worker.py`.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        self._signal(signal.SIGSTOP)

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._signal(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)

    def resume(self) -> None:
        """Let it compute."""
        self._signal(signal.SIGCONT)

    def pause(self) -> None:
        """Stop it."""
        self._signal(signal.SIGSTOP)

    def cpu_s(self) -> float | None:
        """Return the time of a core that it has had in seconds; None if the system does not tell."""
        try:
            told = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return None
        user, system = told.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)


class BesideNeighbour:
    """Measures what another runner measures, with the neighbour busy meanwhile.

    Args:
        runner: the runner that does the work.
        neighbour: is paused again when the work is done.
    """

    def __init__(self, runner: Runner, neighbour: Neighbour) -> None:
        self._runner = runner
        self._neighbour = neighbour

    def run(self, num_units: int, timeout_s: float) -> Sample:
        """Do ``num_units`` units of work; also tells how much of a core the neighbour had.

        Raises:
            WorkerError: raised by the runner.
        """
        self._neighbour.resume()
        try:
            before_s, started = self._neighbour.cpu_s(), time.perf_counter()
            sample = self._runner.run(num_units, timeout_s)
            after_s, elapsed_s = self._neighbour.cpu_s(), time.perf_counter() - started
        finally:
            self._neighbour.pause()
        if before_s is None or after_s is None:
            return sample
        return Sample(sample.seconds, sample.values | {"neighbour's cores": (after_s - before_s) / elapsed_s})
