"""The protocol between a candidate and the benchmark that started it: lines of JSON over pipes.

A candidate prepares, sends `{"ready": true, …}`, and then does N units of its work for each line `N` that it reads,
answering `{"seconds": …}`; it exits at the end of its input. File descriptor 1 is reserved for these lines: anything
else that is printed goes to standard error, which is a log. Needs only the standard library, and runs on the Python of
every peer (3.10 and later).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

# Seconds, or these and values to record.
Answer = float | tuple[float, dict[str, float]]


class Channel:
    """The candidate's end of the pipes; create it before anything that may print."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.set_inheritable(self._answers.fileno(), False)
        os.dup2(2, 1)

    def ready(
        self, amount: float, *, versions: dict[str, str] | None = None, facts: dict[str, Any] | None = None
    ) -> None:
        """Report that everything is built, compiled and warm.

        Args:
            amount: amount per unit of work: images, bytes, pulls, processes.
            versions: versions of the software that does the work.
            facts: facts to record with the figures, such as the first loss.
        """
        self._say({"ready": True, "amount": amount, "versions": versions or {}, "facts": facts or {}})

    def serve(self, run: Callable[[int], Answer]) -> None:
        """Answer requests until the input ends, then exit the process.

        Args:
            run: does the given number of units; returns the seconds, or the seconds and values to record.
        """
        for line in sys.stdin:
            answer = run(int(line))
            seconds, values = answer if isinstance(answer, tuple) else (answer, {})
            self._say({"seconds": seconds, "values": values})
        # Do not wait for the threads of a running program or of a loader.
        sys.stderr.flush()
        os._exit(0)

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


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
