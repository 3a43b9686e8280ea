"""A thread that calls the host when the device has come so far, so that neither waits for the other."""

import queue
import threading
from collections.abc import Callable
from typing import NamedTuple

from engine.crossing.cuda.driver import CudaDriver


class _Job(NamedTuple):
    event: int
    function: Callable[[], None]


class Collector:
    """Calls functions in the order of `put`, each once its event has passed.

    Args:
        driver: of the events.

    Attributes:
        failure: the exception that ended it, None while there is none: nothing is called from then on.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="cuda-collector", daemon=True)
        self.failure: BaseException | None = None

    def start(self) -> None:
        """Starts the thread; called once."""
        self._thread.start()

    def put(self, event: int, function: Callable[[], None]) -> None:
        """Has `function` called once `event`, which was recorded before, has passed."""
        self._jobs.put(_Job(event, function))

    def close(self, timeout_s: float) -> None:
        """Waits until everything was called; may be called again.

        Raises:
            TimeoutError: it was not in time; the thread is then left to itself.
        """
        self._jobs.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(
                f"what the program emitted must reach the host within {timeout_s:g} s of its end, and did not: the "
                "card, or whoever takes the losses, hangs"
            )

    def _work(self) -> None:
        try:
            with self._driver.current():
                while (job := self._jobs.get()) is not None:
                    self._driver.synchronize(job.event)
                    job.function()
                    # It would keep the launch until the next.
                    del job
        except BaseException as error:  # noqa: BLE001 - raised by whoever launched the program
            self.failure = error
