"""Callbacks: user-defined objects on the host that are told what a run does, and may send requests to it.

Owns the order of the calls and the identity of the requests. Does not depend on how records reach the host, or on what
a request does in the program.
"""

import inspect
import numbers
import queue
from collections.abc import Iterable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, SupportsFloat

import jax.numpy as jnp

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.request import CALLBACK_ORIGIN, ControlEvent, ControlRequest
from loopfeed.engine.given_values import check_takes
from loopfeed.engine.run.result import TrainResult
from loopfeed.engine.settings import is_number
from loopfeed.engine.stream.function_sink import RecordFunction
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord
from loopfeed.preprocess.suggestions import did_you_mean


class RunHandle:
    """A run as its callbacks see it.

    Attributes:
        config: the settings, with `epochs` converted to `steps`.
        run_dir: the run folder, None without one; of a run that is written to a store, its working copy.
        step: updates done before this launch, 0 in a new run.
        num_images: N of the training split, None for an endless source of batches.
    """

    def __init__(
        self,
        config: TrainConfig,
        board: ControlBoard,
        *,
        run_dir: Path | None = None,
        step: int,
        num_images: int | None,
        is_evaluated: bool,
        events: Sequence[ControlEvent],
    ) -> None:
        self.config, self.step, self.num_images = config, step, num_images
        self.run_dir = run_dir
        self._board, self._is_evaluated = board, is_evaluated
        self._logged = [event for event in events if not event.stop]
        self._occasion, self._numbers = "", count(1)

    def request(
        self,
        *,
        learning_rate_factor: SupportsFloat | None = None,
        snapshot: bool = False,
        evaluate: bool = False,
        stop: bool = False,
    ) -> None:
        """Ask the run for what `control-run` may ask for; call this only inside a method of a callback.

        The request takes effect at the next step that the program begins, which may be some steps or a chunk ahead of
        the record, and is recorded in `control.jsonl` with that step. A run that is resumed from an earlier step, and a
        replay, repeat it at that step; if the callback then makes the same request on the same occasion again, that
        has no further effect. Only stops are not repeated. A request made after the program has begun its last step is
        recorded for the step after it, which only a resumed run makes; in `on_end` a request has no effect.

        Args:
            learning_rate_factor: multiplies the scheduled learning rate until another request changes it; any real
                number, also NumPy's.
            snapshot, evaluate: whether to take a snapshot, or to evaluate, after the step.
            stop: whether to stop before the step.

        Raises:
            ValueError: nothing is requested, a value is out of range, a stop is combined with another request, or the
                run has no folder for a snapshot or no images to evaluate on.
        """
        if stop and (snapshot or evaluate or learning_rate_factor is not None):
            raise ValueError(
                "a request to stop must not ask for anything else, because the run would stop before that takes "
                "effect: make two requests"
            )
        if snapshot and self.run_dir is None:
            raise ValueError("a request for a snapshot needs a run folder, got none: give TrainConfig(run_dir=…)")
        if evaluate and not self._is_evaluated:
            raise ValueError(
                "a request for an evaluation needs images to evaluate on, got none: give train(evaluation=…) or a "
                "data set with an evaluation split"
            )
        request = ControlRequest(
            id=f"{CALLBACK_ORIGIN}-{self._occasion}-{next(self._numbers)}",
            learning_rate_factor=_as_float(learning_rate_factor),
            snapshot=snapshot,
            evaluate=evaluate,
            stop=stop,
        )
        if not any(_is_same(event, request) for event in self._logged):
            self._board.request(request)

    def begin(self, occasion: str) -> None:
        """Number the following requests from 1, as those of an occasion such as "step-12"."""
        self._occasion, self._numbers = occasion, count(1)


def _as_float(factor: Any) -> Any:
    """Return a real number, also one of NumPy or an array [] of JAX, as a float; anything else unchanged."""
    if is_number(factor, numbers.Real):
        return float(factor)
    if getattr(factor, "shape", None) == () and jnp.issubdtype(factor.dtype, jnp.floating):
        return float(factor)
    return factor


def _is_same(event: ControlEvent, request: ControlRequest) -> bool:
    names = ("learning_rate_factor", "snapshot", "evaluate", "stop")
    return event.request == request.id and all(getattr(event, name) == getattr(request, name) for name in names)


class Callback:
    """A base class for callbacks, whose methods do nothing: override those that you need.

    Each method is called once for each occasion, in the order of the run; several callbacks are called in the order in
    which they were given. Calls take place on a thread beside the program, which does not wait for them. An exception
    stops the run at its next step, with its weights and a last snapshot, and is then raised to the caller of `train`;
    no callback is called after it.

    Example:
        >>> class StopAtLoss(Callback):
        ...     def on_fit_begin(self, run):
        ...         self.run = run
        ...     def on_step(self, record):
        ...         if record.loss < 0.1:
        ...             self.run.request(stop=True)
        >>> config = TrainConfig(data="data", steps=10_000, batch=4, learning_rate=1)
        >>> train(config, model=model, callbacks=[StopAtLoss()]).stopped_by
        'callback'
    """

    def on_fit_begin(self, run: RunHandle) -> None:
        """Prepare for a launch, new or resumed; called before its first step, on the thread that called `train`."""

    def on_step(self, record: LossRecord) -> None:
        """Take the loss of an update; with `accumulate_steps`, that of the whole update."""

    def on_epoch(self, epoch: int, record: LossRecord) -> None:
        """Take the end of an epoch, counted from 1, after `on_step` with the same record, which completed it.

        Not called if the number of images is unknown, as with a function for batches.
        """

    def on_evaluation(self, record: EvaluationRecord) -> None:
        """Take the result of an evaluation, after `on_step` of the step that it follows."""

    def on_snapshot(self, step: int, path: Path) -> None:
        """Take note of a snapshot that is on the disk; called before the next record, or at the end of the run.

        Not called for the last snapshot of a run that failed. The folder of a snapshot may be removed once there are
        newer ones (`keep_snapshots`).
        """

    def on_end(self, result: TrainResult) -> None:
        """Take the result that `train` will return, complete or stopped; called on the thread that called `train`.

        Not called if the run failed.
        """


class _FunctionCallback(Callback):
    """A callback that calls a function with each loss and each evaluation."""

    def __init__(self, function: RecordFunction) -> None:
        self._function = function

    def on_step(self, record: LossRecord) -> None:
        self._function(record)

    def on_evaluation(self, record: EvaluationRecord) -> None:
        self._function(record)


def as_callbacks(given: Iterable[Callback | RecordFunction]) -> list[Callback]:
    """Return callbacks as a list, with each function of a record made one.

    Raises:
        ValueError: it is not a list, or one of them is neither a callback nor a function.
    """
    if not isinstance(given, Iterable) or isinstance(given, str | Callback):
        raise ValueError(
            f"callbacks must be a list of callbacks and functions, got {type(given).__name__}: give callbacks=[…]"
        )
    return [as_callback(each) for each in given]


def as_callback(given: Callback | RecordFunction) -> Callback:
    """Return a callback unchanged, and a function of a record as a callback.

    Raises:
        ValueError: it is neither, or has a method `on_…` that is never called.
    """
    if isinstance(given, Callback):
        _check_methods(given)
        return given
    if isinstance(given, type):
        raise ValueError(f"a callback must be an object, got the class {given.__name__}: give {given.__name__}()")
    if callable(given):
        check_takes("a callback that is a function", given, "(record)", 0)
        return _FunctionCallback(given)
    raise ValueError(
        f"a callback must be a loopfeed.Callback or a function of a record, got {type(given).__name__}: derive its "
        "class from loopfeed.Callback"
    )


def _check_methods(given: Callback) -> None:
    """Raise ValueError if `Callback` has no such public method `on_…`, or one with other arguments."""
    kind = type(given)
    known = [name for name in dir(Callback) if name.startswith("on_")]
    for name in known:
        takes = [*inspect.signature(getattr(Callback, name)).parameters][1:]
        check_takes(f"{kind.__name__}.{name}", getattr(given, name), f"({', '.join(takes)})", *takes)
    for name in dir(kind):
        if name.startswith("on_") and name not in known and callable(getattr(kind, name, None)):
            raise ValueError(
                f"a method on_… of a callback must be one of {', '.join(known)}, got {kind.__name__}.{name}"
                f"{did_you_mean(name, known) or f': rename it, for example to _{name}'}"
            )


class Callbacks:
    """The sink that calls the callbacks of a run, all on its one thread.

    Args:
        callbacks: called in this order.
        run: passed to `on_fit_begin`.
    """

    def __init__(self, callbacks: Sequence[Callback], run: RunHandle) -> None:
        self._callbacks, self._run = tuple(callbacks), run
        self._image_at = run.config.step_ranges.image_at
        self._written: queue.SimpleQueue[tuple[int, Path]] = queue.SimpleQueue()
        # That of the step from which a run is resumed was reported by the earlier launch.
        self._last_snapshot = run.step

    def open(self) -> None:
        """Call `on_fit_begin`."""
        self._run.begin(f"begin-{self._run.step}")
        for callback in self._callbacks:
            callback.on_fit_begin(self._run)

    def write(self, record: LossRecord) -> None:
        """Call `on_step`, and `on_epoch` for each epoch that the step completes."""
        self._report_snapshots()
        self._run.begin(f"step-{record.step}")
        for callback in self._callbacks:
            callback.on_step(record)
        for epoch in range(self._epochs_done(record.step - 1) + 1, self._epochs_done(record.step) + 1):
            self._run.begin(f"epoch-{epoch}")
            for callback in self._callbacks:
                callback.on_epoch(epoch, record)

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Call `on_evaluation`."""
        self._report_snapshots()
        self._run.begin(f"evaluation-{record.step}")
        for callback in self._callbacks:
            callback.on_evaluation(record)

    def snapshot_written(self, step: int, path: Path) -> None:
        """Note that a snapshot is on the disk; called from any thread."""
        self._written.put((step, path))

    def close(self) -> None:
        """Report the last snapshots that are on the disk by now."""
        self._report_snapshots()

    def end(self, result: TrainResult) -> None:
        """Report the snapshots written after `close`, and call `on_end`; called after the sink's thread has ended."""
        self._report_snapshots()
        for callback in self._callbacks:
            callback.on_end(result)

    def _epochs_done(self, step: int) -> int:
        num_images = self._run.num_images
        return 0 if num_images is None else self._image_at(step) // num_images

    def _report_snapshots(self) -> None:
        while not self._written.empty():
            step, path = self._written.get()
            # At the end of a run the snapshot of the last step is submitted again.
            if step <= self._last_snapshot:
                continue
            self._last_snapshot = step
            self._run.begin(f"snapshot-{step}")
            for callback in self._callbacks:
                callback.on_snapshot(step, path)
