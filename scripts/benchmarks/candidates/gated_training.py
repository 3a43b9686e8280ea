"""`loopfeed.train` as a candidate: one run that makes the requested number of steps per round.

A gate holds back the source of batches: it fills the batches of requested steps and waits before the next. A round is
timed from the opening of the gate to the arrival of its last loss at a sink, so it includes everything between shards
and sinks. The ring is empty when a round starts: nothing is read ahead outside the measured time.
"""

import resource
import sys
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Channel, jax_versions

from loopfeed import TrainConfig, train
from loopfeed.engine.feed.batches import BatchSource, Labels, LendingSource, Lent, Pixels, row_words, whole_of
from loopfeed.engine.feed.feeder import ring_depth
from loopfeed.engine.stream.sinks import LossRecord

_LONG_S = 86_400.0
_MOST_STEPS = 2**31 - 2
_WARM_UNITS = 3


class ReadyBatches:
    """A source whose batches are always ready: noise, or the first batches of another source."""

    thread_safe = True

    def __init__(self, batch: int, size: int, source: BatchSource | None = None) -> None:
        self.batch, self.height, self.width = batch, size, size if source is None else source.width
        self._source, self.whole = source, None if source is None else whole_of(source)
        self._num_first = 2 * ring_depth(self, None)

    def fill(self, step: int, rows: range, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Fill each buffer once and then leave it unchanged; untouched pages would all share one physical page.

        Filled with noise, because a card needs less power for zeros than for images, and so computes faster.
        """
        if step < self._num_first and self._source is not None:
            self._source.fill(step, rows, pixels, labels, timeout_s=timeout_s)
        elif step < self._num_first:
            pixels[...] = np.random.default_rng(step).integers(2**32, size=pixels.shape, dtype=np.uint32)
            labels[...] = 0


class GatedBatches:
    """A source that does not fill a step before it is requested."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source
        self.batch, self.height, self.width = source.batch, source.height, source.width
        self.row_words, self.thread_safe, self.whole = row_words(source), source.thread_safe, whole_of(source)
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


class GatedRun:
    """A training in the background that makes steps on request; also the sink of its losses.

    Args:
        config: its settings.
        source: source of its batches.
        model: a custom model; None uses the registry's model named in `config`.
    """

    def __init__(self, config: TrainConfig, source: BatchSource, model: Any = None) -> None:
        self._config, self._model, self._gate = config, model, GatedBatches(source)
        self._came = threading.Event()
        self._first_step = self._last_step = 0
        self._time_s = self._wait_s = 0.0
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def _train(self) -> None:
        say = partial(print, flush=True)
        train(self._config, batches=self._gate, model=self._model, sinks=[self], notify=say)

    def open(self) -> None:
        """Do nothing, as a sink."""

    def write(self, record: LossRecord) -> None:
        """Record a loss, as a sink: when the last one of a round arrives, and how long the loop waited for batches."""
        # The wait for a round's first batch started before the round.
        self._wait_s += record.wait_ms / 1e3 if record.step > self._first_step else 0.0
        if record.step == self._last_step:
            self._time_s = time.perf_counter()
            self._came.set()

    def write_evaluation(self, record: Any) -> None:
        """Do nothing, as a sink; not called, because nothing is evaluated."""

    def close(self) -> None:
        """Do nothing, as a sink."""

    def make_steps(self, num_steps: int) -> tuple[float, float]:
        """Make steps; return their seconds, and those of them in which the loop waited for batches.

        Raises:
            RuntimeError: the run has ended.
        """
        self._came.clear()
        self._first_step, self._last_step, self._wait_s = self._last_step + 1, self._last_step + num_steps, 0.0
        started = time.perf_counter()
        self._gate.open_to(self._last_step)
        while not self._came.wait(1.0):
            if not self._thread.is_alive():
                raise RuntimeError("the run has ended; its error is above")
        return self._time_s - started, self._wait_s


def own_memory_mb() -> float:
    """Return the memory of this process in MB; on Linux without mapped files."""
    try:
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    except OSError:
        # macOS reports bytes, other systems KiB.
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e6
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024 / 1e6


def serve_training(
    channel: Channel,
    config: dict[str, Any],
    source: BatchSource,
    *,
    amount: float,
    model: Any = None,
    warm_units: int = _WARM_UNITS,
) -> None:
    """Train on `source` and serve its steps; a unit is a chunk of steps.

    Args:
        channel: channel to the benchmark.
        config: settings other than data, batch and steps.
        source: source of the batches.
        amount: amount per step.
        model: a custom model; None uses the registry's model named in `config`.
        warm_units: units run before the first round.
    """
    # Weight decay and schedule have their defaults. The learning rate is small, so that training on the same batches
    # again and again does not diverge.
    settings = TrainConfig(
        steps=_MOST_STEPS, batch=source.batch, learning_rate=1e-3, infeed_timeout_s=_LONG_S, eval_split="off", **config
    )
    run, chunk = GatedRun(settings, source, model), settings.chunk_batches or 1

    def run_units(num_units: int) -> tuple[float, dict[str, float]]:
        seconds, wait_s = run.make_steps(num_units * chunk)
        return seconds, {"waited %": 100 * wait_s / seconds, "own MB": own_memory_mb()}

    run_units(warm_units)
    channel.ready(amount * chunk, versions=jax_versions())
    channel.serve(run_units)
