"""What a candidate says to the bench that started it: lines of JSON over pipes, standard library alone.

A candidate prepares, says `{"ready": true, …}`, and then does N units of its work for each line `N` that it reads,
answering `{"seconds": …}`; the end of its input ends it. File descriptor 1 is kept for these lines: whatever else is
printed goes to standard error, which is a log. Runs on the Python of every peer (3.10 and later).
"""

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# Seconds, or these and values to record.
Answer = float | tuple[float, dict[str, float]]


class Channel:
    """The candidate's end of the pipes; made before anything that may print."""

    def __init__(self) -> None:
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.set_inheritable(self._answers.fileno(), False)
        os.dup2(2, 1)

    def ready(
        self,
        amount: float,
        *,
        versions: dict[str, str] | None = None,
        facts: dict[str, Any] | None = None,
    ) -> None:
        """Says that all is built, compiled and warm.

        Args:
            amount: what one unit of work comes to: images, bytes, pulls, processes.
            versions: of what does the work.
            facts: to be recorded beside the figures, such as the first loss.
        """
        self._say({"ready": True, "amount": amount, "versions": versions or {}, "facts": facts or {}})

    def serve(self, run: Callable[[int], Answer]) -> None:
        """Answers until the input ends, and ends the process.

        Args:
            run: does so many units; gives the seconds, or these and values to record.
        """
        for line in sys.stdin:
            answer = run(int(line))
            seconds, values = answer if isinstance(answer, tuple) else (answer, {})
            self._say({"seconds": seconds, "values": values})
        # Threads of a program under way, or of a loader, are not waited for.
        sys.stderr.flush()
        os._exit(0)

    def _say(self, message: dict[str, Any]) -> None:
        self._answers.write(json.dumps(message) + "\n")
        self._answers.flush()


def timed(work: Callable[[int], object]) -> Callable[[int], float]:
    """Makes a `run` for `serve` out of work on N units that is over when it returns."""

    def run(num_units: int) -> float:
        started = time.perf_counter()
        work(num_units)
        return time.perf_counter() - started

    return run
