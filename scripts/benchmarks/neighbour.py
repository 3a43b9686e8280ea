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
from typing import Any, Self

from scripts.benchmarks.worker import END_TIMEOUT_S, Run, Sample

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
    """A process that computes all the time, and is stopped except inside `run_beside`. A context manager: kills it."""

    def __init__(self) -> None:
        command = [sys.executable, "-S", "-c", _SPIN.format(parent=os.getpid())]
        # A group of its own in the same session, as a worker's: see `worker.py`.
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
        self.send(signal.SIGSTOP)

    @property
    def process_id(self) -> int:
        """The id of the process."""
        return self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.send(signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(END_TIMEOUT_S)

    def send(self, number: signal.Signals) -> None:
        """Send a signal: SIGCONT lets it compute, SIGSTOP stops it."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, number)

    def cpu_s(self) -> float:
        """Return the time of a core that it has had in seconds; NaN if the system does not tell."""
        try:
            told = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="utf-8")
        except OSError:
            return float("nan")
        user, system = told.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def run_beside(self, run: Run, num_units: int, timeout_s: float) -> Sample:
        """Let a candidate do its units of work beside it; also tells how much of a core the neighbour had.

        Raises:
            WorkerError: raised by the candidate.
        """
        self.send(signal.SIGCONT)
        try:
            before_s, started = self.cpu_s(), time.perf_counter()
            sample = run(num_units, timeout_s)
            cores = (self.cpu_s() - before_s) / (time.perf_counter() - started)
        finally:
            self.send(signal.SIGSTOP)
        return Sample(sample.seconds, sample.values | ({} if cores != cores else {"neighbour's cores": cores}))
