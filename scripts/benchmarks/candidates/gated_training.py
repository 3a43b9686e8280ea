"""`loopfeed.train` as a candidate: one run that makes the requested number of steps per round.

A gate holds back the source of batches: it fills the batches of requested steps and waits before the next. A round is
timed from the opening of the gate to the arrival of its last loss at a sink, so it includes everything between shards
and sinks. The ring is empty when a round starts: nothing is read ahead outside the measured time.
"""

import resource
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

from jax.experimental.buffer_callback import buffer_callback
from protocol import Channel, jax_versions

from loopfeed import TrainConfig, train
from loopfeed.engine.crossing.cuda import transport as transport_module
from loopfeed.engine.crossing.cuda.driver import CudaDriver
from loopfeed.engine.crossing.cuda.infeed import StreamedInfeed
from loopfeed.engine.crossing.cuda.transport import CudaTransport
from loopfeed.engine.feed.batches import BatchSource, Labels, LendingSource, Lent, Pixels, row_words
from loopfeed.engine.stream.sinks import LossRecord

LONG_S = 86_400.0
_MOST_STEPS = 2**31 - 2
_WARM_UNITS = 3
# Control words have fewer bytes, batches more.
_FEW_BYTES = 1024


class GatedBatches:
    """A source that does not fill a step before it is requested."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.batch, self.height, self.width = source.batch, source.height, source.width
        self.row_words, self.thread_safe = row_words(source), source.thread_safe
        self._opened = threading.Condition()
        self._stop_step = 0

    def open_to(self, stop_step: int) -> None:
        """Allow the steps before ``stop_step``."""
        with self._opened:
            self._stop_step = stop_step
            self._opened.notify_all()

    def fill(self, step: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Fill a batch once its step is requested."""
        self._await(step)
        self._source.fill(step, rows, pixels, labels, timeout_s=timeout_s)

    def lend(self, step: int, rows: range, labels: Labels, *, timeout_s: float) -> Lent | None:
        """Return what the source lends once its step is requested."""
        self._await(step)
        if isinstance(self._source, LendingSource):
            return self._source.lend(step, rows, labels, timeout_s=timeout_s)
        return None

    def _await(self, step: int) -> None:
        if step >= self._stop_step:
            with self._opened:
                self._opened.wait_for(lambda: step < self._stop_step)


class LastLoss:
    """A sink that records when the last loss of a round arrives, and how long the loop waited for batches.

    Attributes:
        wait_s: seconds waited for the round's batches except the first, whose wait started before the round.
    """

    def __init__(self) -> None:
        self._came = threading.Event()
        self._first_step = self._last_step = 0
        self._time_s = 0.0
        self.wait_s = 0.0

    def open(self) -> None:
        """Do nothing."""

    def write(self, record: LossRecord) -> None:
        """Record a loss."""
        self.wait_s += record.wait_ms / 1e3 if record.step > self._first_step else 0.0
        if record.step == self._last_step:
            self._time_s = time.perf_counter()
            self._came.set()

    def write_evaluation(self, record: Any) -> None:
        """Do nothing; not called, because nothing is evaluated."""

    def close(self) -> None:
        """Do nothing."""

    def begin(self, first_step: int, last_step: int) -> None:
        """Start a round of the given steps (from 1), before any of them runs."""
        self._came.clear()
        self._first_step, self._last_step, self.wait_s = first_step, last_step, 0.0

    def wait(self, ended: threading.Event) -> float:
        """Wait for the round's last loss and return its time; raise RuntimeError if the run has ended."""
        while not self._came.wait(1.0):
            if ended.is_set():
                raise RuntimeError("the run has ended; its error is above")
        return self._time_s


def own_memory_mb() -> float:
    """Return the memory of this process in MB; on Linux without mapped files."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        # macOS reports bytes, other systems KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024 / 1e6


def timed_pulls() -> list[float]:
    """Record for each pull the seconds for which it blocks the thread that launches kernels; return the list.

    This excludes jax's own part before it calls Python.
    """
    times_s: list[float] = []
    enqueue = CudaTransport.enqueue

    def timed_callback(cross: Callable[..., None], *arguments: Any, **settings: Any) -> Any:
        def timed_cross(*buffers: Any) -> None:
            started = time.perf_counter()
            cross(*buffers)
            times_s.append(time.perf_counter() - started)

        return buffer_callback(timed_cross, *arguments, **settings)

    def timed_enqueue(transport: CudaTransport, handler: Any, *arguments: Any) -> Any:
        if getattr(handler, "__func__", None) is not StreamedInfeed._give:
            return enqueue(transport, handler, *arguments)
        with mock.patch.object(transport_module, "buffer_callback", timed_callback):
            return enqueue(transport, handler, *arguments)

    CudaTransport.enqueue = timed_enqueue  # type: ignore[method-assign, assignment]
    return times_s


def leave_out_copies() -> None:
    """Make a card's ring copy only one batch into each of its slots, which is then reused for training."""
    copy = CudaDriver.copy_to_device
    filled: set[int] = set()

    def copy_words(driver: CudaDriver, target: int, source: int, num_bytes: int, stream: int) -> None:
        if num_bytes <= _FEW_BYTES or target not in filled:
            copy(driver, target, source, num_bytes, stream)
            filled.add(target)

    CudaDriver.copy_to_device = copy_words  # type: ignore[method-assign, assignment]


def serve_training(
    channel: Channel,
    config: dict[str, Any],
    source: BatchSource,
    *,
    amount: float,
    model: Any = None,
    warm_units: int = _WARM_UNITS,
) -> None:
    """Train on `source` in the background and serve its steps; a unit is a chunk of steps.

    Args:
        channel: channel to the benchmark.
        config: settings other than data, batch and steps.
        source: source of the batches.
        amount: amount per step.
        model: a custom model; None uses the registry's model named in `config`.
        warm_units: units run before the first round.
    """
    gate, sink, ended, pull_times_s = GatedBatches(source), LastLoss(), threading.Event(), timed_pulls()
    # Weight decay and schedule have their defaults. The learning rate is small, so that training on the same batches
    # again and again does not diverge.
    settings = TrainConfig(
        steps=_MOST_STEPS, batch=source.batch, learning_rate=1e-3, infeed_timeout_s=LONG_S, eval_split="off", **config
    )

    def run() -> None:
        try:
            train(settings, batches=gate, model=model, sinks=[sink], notify=lambda text: print(text, flush=True))
        finally:
            ended.set()

    threading.Thread(target=run, daemon=True).start()
    done = 0

    def run_units(num_units: int) -> tuple[float, dict[str, float]]:
        nonlocal done
        first_step = done + 1
        done += num_units * (settings.chunk_batches or 1)
        sink.begin(first_step, done)
        started = time.perf_counter()
        gate.open_to(done)
        seconds = sink.wait(ended) - started
        values = {"waited %": 100 * sink.wait_s / seconds, "own MB": own_memory_mb()}
        if pull_times_s:
            values["pull µs"] = 1e6 * statistics.median(pull_times_s)
            pull_times_s.clear()
        return seconds, values

    run_units(warm_units)
    channel.ready(amount * (settings.chunk_batches or 1), versions=jax_versions())
    channel.serve(run_units)
