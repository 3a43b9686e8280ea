"""The protocol between a candidate and the benchmark that started it: lines of JSON over pipes.

A candidate prepares, sends `{"ready": true, …}`, and then does N units of its work for each line `N` that it reads,
answering `{"seconds": …}`; it exits at the end of its input. File descriptor 1 is reserved for these lines: anything
else that is printed goes to standard error, which is a log. Needs only the standard library, and runs on the Python of
every peer (3.10 and later).

With `LOOPFEED_BENCH_NEIGHBOUR` a candidate has a busy process beside it. It belongs to the candidate's process group,
so that the benchmark stops, continues and kills both together.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

# Seconds, or these and values to record.
Answer = float | tuple[float, dict[str, float]]
NEIGHBOUR = "LOOPFEED_BENCH_NEIGHBOUR"
# Spins until its parent has ended.
_SPIN = """
import os
while os.getppid() == {parent}:
    for _ in range(1 << 16):
        pass
"""


class Channel:
    """The candidate's end of the pipes; create it before anything that may print."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.set_inheritable(self._answers.fileno(), False)
        os.dup2(2, 1)
        self._neighbour: int | None = None

    def ready(
        self, amount: float, *, versions: dict[str, str] | None = None, facts: dict[str, Any] | None = None
    ) -> None:
        """Report that everything is built, compiled and warm.

        Args:
            amount: amount per unit of work: images, bytes, pulls, processes.
            versions: versions of the software that does the work.
            facts: facts to record with the figures, such as the first loss.
        """
        if os.environ.get(NEIGHBOUR):
            command = [sys.executable, "-S", "-c", _SPIN.format(parent=os.getpid())]
            self._neighbour = subprocess.Popen(command, stdin=subprocess.DEVNULL).pid
        self._say({"ready": True, "amount": amount, "versions": versions or {}, "facts": facts or {}})

    def serve(self, run: Callable[[int], Answer]) -> None:
        """Answer requests until the input ends, then exit the process.

        Args:
            run: does the given number of units; returns the seconds, or the seconds and values to record.
        """
        for line in sys.stdin:
            before_s, started = cpu_s(self._neighbour), time.perf_counter()
            answer = run(int(line))
            seconds, values = answer if isinstance(answer, tuple) else (answer, {})
            after_s, elapsed_s = cpu_s(self._neighbour), time.perf_counter() - started
            if before_s is not None and after_s is not None:
                values["neighbour's cores"] = (after_s - before_s) / elapsed_s
            self._say({"seconds": seconds, "values": values})
        # Do not wait for the threads of a running program or of a loader.
        sys.stderr.flush()
        os._exit(0)

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def cpu_s(process_id: int | None) -> float | None:
    """Return the time of a core that a process has had in seconds; None without one, or if the system does not tell."""
    try:
        told = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    user, system = told.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def versions_of(*distributions: str) -> dict[str, str]:
    """Return the versions of the software that does the work of a candidate."""
    return {name: version(name) for name in distributions}


def jax_versions() -> dict[str, str]:
    """Return the versions of the software that does the work of a candidate in jax."""
    return versions_of("jax", "jaxlib")


def timed(work: Callable[[int], object]) -> Callable[[int], float]:
    """Return a `run` for `serve` that times ``work``, which must be complete when it returns."""

    def run(num_units: int) -> float:
        started = time.perf_counter()
        work(num_units)
        return time.perf_counter() - started

    return run
