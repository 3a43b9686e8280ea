"""Runs the user's command at the events of a run (`on_event`), without ever harming the run.

The command is one line for the shell, in a session of its own, so that neither signals to the run nor its own reach the
other. It is killed when it takes too long, its output is thrown away but for the first line of a failure, and at most
one runs at a time, on a thread that nothing waits for before the end of the run, and there for seconds only.
"""

import json
import math
import os
import queue
import selectors
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from loopfeed.engine.records.evaluation_log import best_until, best_words, better_of, compared_by, value_of
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, RunDescription
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.system_errors import error_text
from loopfeed.preprocess.workers import Worker

EVENTS = ("done", "stopped", "failed", "stalled", "non-finite", "new-best")
"""What $LOOPFEED_EVENT may be."""
# How long a command may take during the run, and at its end the one before the last event, and both together.
_LIMIT_S, _EARLIER_LIMIT_S, _END_LIMIT_S, _INTERRUPTED_LIMIT_S = 10.0, 1.0, 5.0, 1.0
_MOST_QUEUED = 16
_LONGEST_TEXT = 500
_LOOK_EVERY_S = 0.05
_MOST_ERROR_BYTES = 1 << 16

type _Event = dict[str, Any]


class EventCommand:
    """A sink that runs a command at events; a failure of the command is one warning.

    The command gets the event as JSON on its standard input, and in its environment LOOPFEED_EVENT, LOOPFEED_MESSAGE,
    LOOPFEED_RUN_DIR, LOOPFEED_STEP and, of what there is, LOOPFEED_LOSS, LOOPFEED_METRIC and LOOPFEED_VALUE.

    Args:
        command: a line for the shell.
        metric: the metric by which evaluations are compared, as the setting `keep_best`; None is top-1, or the loss.
    """

    is_display = True

    def __init__(self, command: str, metric: str | None) -> None:
        self._command, self._compared = command, metric
        self._best: EvaluationRecord | None = None
        self._step, self._run_dir, self._say = 0, "", lambda _: None
        self._is_finite, self._has_warned = True, False
        self._events: queue.SimpleQueue[_Event | None] = queue.SimpleQueue()
        self._end_at = math.inf
        self._worker: Worker[None] | None = None

    def describe_run(self, description: RunDescription) -> None:
        """Take the run folder and the step, and the best of the evaluations that an earlier launch made."""
        self._step, self._say = description.step, description.notify
        if description.run_dir is not None:
            self._run_dir = os.fspath(description.run_dir)
            self._best = best_until(description.run_dir, self._step, self._compared)

    def open(self) -> None:
        """Do nothing: the thread starts with the first event."""

    def write(self, record: LossRecord) -> None:
        """Note the step, and tell of the first loss that is NaN or infinite."""
        self._step = record.step
        if self._is_finite and not math.isfinite(record.loss):
            self._is_finite = False
            self.tell("non-finite", f"the loss became NaN or infinite at step {record.step}")

    def write_evaluation(self, record: EvaluationRecord) -> None:
        """Tell of an evaluation that is better than all before."""
        self._best = better_of(self._best, record, self._compared)
        if self._best is record:
            words, values = self._describe_best(record)
            self.tell("new-best", f"new {words}", **values, loss=record.loss)

    def close(self) -> None:
        """Do nothing: the end of the run is the last event."""

    def stalled(self, what: str) -> None:
        """Tell that no step has ended for long; safe from any thread."""
        self.tell("stalled", what)

    def end(self, event: str | None, what: str, *, is_interrupted: bool = False, **values: Any) -> None:
        """Tell how the run ended, None if it was told, and wait some seconds; earlier events that wait are dropped."""
        with suppress(queue.Empty):
            while True:
                self._events.get_nowait()
        limit_s = _INTERRUPTED_LIMIT_S if is_interrupted else _END_LIMIT_S
        self._end_at = time.monotonic() + limit_s
        if event in ("done", "stopped") and self._best is not None:
            words, best = self._describe_best(self._best)
            what, values = f"{what}, {words}", values | best
        if event is not None:
            self.tell(event, what, **values)
        self._events.put(None)
        if self._worker is not None:
            self._worker.wait(limit_s + 1)

    def tell(self, event: str, what: str, **values: Any) -> None:
        """Queue an event; returns at once."""
        if self._events.qsize() >= _MOST_QUEUED:
            self._warn(f"{_MOST_QUEUED} events wait for the command, so later ones are left out")
            return
        known = {name: value for name, value in values.items() if value is not None}
        finite = {name: value for name, value in known.items() if isinstance(value, str) or math.isfinite(value)}
        text = printable(f"{Path(self._run_dir).name or 'run'}: {what}")[:_LONGEST_TEXT]
        place = {"run_dir": self._run_dir, "step": self._step, "time": round(time.time(), 3)}
        self._events.put({"event": event, "message": text, **place, **finite})
        if self._worker is None:
            worker = Worker(self._work, "event-command")
            try:
                self._worker = worker.start(is_attended=False)
            except RuntimeError as error:  # the system refuses to start another thread
                self._warn(str(error))

    def _describe_best(self, record: EvaluationRecord) -> tuple[str, dict[str, Any]]:
        """Return words for the best evaluation, and the values that the command gets of it."""
        metric, words = compared_by([record], self._compared), best_words(record, self._compared)
        return f"{words} at step {record.step}", {"metric": metric.name, "value": value_of(metric, record)}

    def _work(self) -> None:
        while (event := self._events.get()) is not None:
            try:
                fault = self._run(event)
            except Exception as error:  # noqa: BLE001 - a command that cannot be run never harms the run
                fault = error_text(error)
            if fault is not None:
                self._warn(fault)

    def _run(self, event: _Event) -> str | None:
        """Run the command and return what is wrong with how it ended, None if nothing is."""
        began, is_last = time.monotonic(), event["event"] in ("done", "stopped", "failed")

        def limit_at() -> float:
            return self._end_at if is_last else min(began + _LIMIT_S, self._end_at - _END_LIMIT_S + _EARLIER_LIMIT_S)

        variables = {f"LOOPFEED_{name.upper()}": str(value) for name, value in event.items() if name != "time"}
        process = subprocess.Popen(
            self._command, shell=True, start_new_session=True, env=os.environ | variables,
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        assert process.stdin is not None
        assert process.stderr is not None
        said, num_read = b"", 0
        with process.stdin, process.stderr, selectors.DefaultSelector() as ready:
            # Less than a pipe holds, so that a command that reads nothing does not hold this thread.
            with suppress(OSError):
                os.write(process.stdin.fileno(), json.dumps(event).encode() + b"\n")
                process.stdin.close()
            ready.register(process.stderr, selectors.EVENT_READ)
            while True:
                has_ended = process.poll() is not None
                if ready.get_map() and ready.select(0 if has_ended else _LOOK_EVERY_S):
                    read = os.read(process.stderr.fileno(), _MOST_ERROR_BYTES)
                    said, num_read = (said + read)[:_LONGEST_TEXT], num_read + len(read)
                    if not read:
                        ready.unregister(process.stderr)
                if has_ended:
                    break
                if time.monotonic() > limit_at():
                    with suppress(OSError):
                        os.killpg(process.pid, signal.SIGKILL)
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(1)
                    return f"it was killed after {time.monotonic() - began:.1f} s"
                if num_read > _MOST_ERROR_BYTES or not ready.get_map():
                    time.sleep(_LOOK_EVERY_S)
        if process.returncode == 0:
            return None
        lines = printable(said.decode(errors="replace").strip()).splitlines()
        how = f"exit status {process.returncode}" if process.returncode > 0 else f"signal {-process.returncode}"
        return f"{how}{': ' + lines[0] if lines else ''}"

    def _warn(self, fault: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            self._say(f"warning: the command of --on-event failed ({fault}); later failures of it are not reported")
