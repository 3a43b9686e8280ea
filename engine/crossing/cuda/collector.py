"""A thread that calls host functions when the device reaches an event; neither the host nor the device waits."""

import queue
from collections.abc import Callable
from typing import NamedTuple

from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.preprocess.workers import Worker


class _Job(NamedTuple):
    event: int
    function: Callable[[], None]


class Collector:
    """A queue that calls functions in the order of submission, each after its event has completed.

    Args:
        driver: driver of the events.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._worker = Worker(self._work, "cuda-collector")

    @property
    def failure(self) -> BaseException | None:
        """The exception that ended the thread, after which nothing is called, or None."""
        return self._worker.failure

    def start(self) -> None:
        """Start the thread; call this method only once."""
        self._worker.start()

    def put(self, event: int, function: Callable[[], None]) -> None:
        """Have the thread call `function` once `event` has completed; the event must already be recorded."""
        self._jobs.put(_Job(event, function))

    def close(self, timeout_s: float) -> None:
        """Wait until every function has been called; safe to call repeatedly.

        Raises:
            TimeoutError: if that takes longer than `timeout_s` seconds; the thread is then abandoned.
        """
        self._jobs.put(None)
        if not self._worker.wait(timeout_s):
            raise TimeoutError(
                f"the program's records did not reach the host within {timeout_s:g} s of the program's end: check "
                "with nvidia-smi whether the GPU hangs, and check whether the terminal or disk to which the losses are "
                "written is blocked"
            )

    def _work(self) -> None:
        with self._driver.current():
            while (job := self._jobs.get()) is not None:
                self._driver.synchronize(job.event)
                job.function()
                # Otherwise the job would keep the launch alive until the next job.
                del job
