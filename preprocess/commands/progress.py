"""Progress display for long commands: on a terminal, a bar with rate and time left; elsewhere, periodic plain lines."""

from __future__ import annotations

import io
import sys
import time
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Self

from loopfeed.preprocess.commands.guarded_output import terminal_of
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.quantities import quantity

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

LINE_EVERY_S = 10.0
"""Interval between plain lines, in seconds."""


class ImageProgress(AbstractContextManager["ImageProgress"]):
    """A context manager that shows how many images each task has processed. ``show`` may be called often."""

    def __init__(self) -> None:
        self._stream = sys.stderr or io.StringIO()
        self._bar: Progress | None = None
        self._tasks: dict[str, TaskID] = {}
        self._began: dict[str, tuple[float, int]] = {}
        self._last_line_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._stream.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[rate]}"),
                TimeRemainingColumn(compact=True),
                TextColumn("left"),
                console=Console(file=terminal_of(self._stream)),
            )
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, task: str, done: int, total: int) -> None:
        """Show that ``task`` has processed ``done`` of ``total`` images.

        The rate is measured from the first call for the task.
        """
        now = time.monotonic()
        start_s, start_done = self._began.setdefault(task, (now, done))
        rate = (done - start_done) / (now - start_s) if now > start_s else 0.0
        if self._bar is not None:
            from rich.markup import escape

            if task not in self._tasks:
                self._tasks[task] = self._bar.add_task(
                    escape(printable_line(task)), total=total, completed=done, rate=""
                )
            self._bar.update(self._tasks[task], completed=done, rate=f"{rate:,.0f} images/s")
        elif now - self._last_line_s >= LINE_EVERY_S:
            self._last_line_s = now
            left = f", {_clock((total - done) / rate)} left" if rate else ""
            print(f"{task}: {done:,} of {quantity(total, 'image')}, {rate:,.0f}/s{left}", file=self._stream, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
