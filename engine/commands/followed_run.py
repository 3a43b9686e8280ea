"""A run folder that `tail-run` follows: waiting for its start, and reading it again and again.

Must not know: terminals, drawing, jax. What loads numpy is imported where it is first needed, so that `--help` answers
at once.
"""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from loopfeed.engine.commands.tail_frame import Tick
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.storage_options import is_url, parse_pairs
from loopfeed.preprocess.system_errors import status_of

if TYPE_CHECKING:
    from loopfeed.engine.records.loss_log import RunEnd

_START_WAIT_S = 15.0  # run-train imports jax before it creates its folder, which takes long on a busy machine
_POLL_START_S = 0.1


class RunSource(NamedTuple):
    """The folder to read a run from, its name for messages, and a function to call before each reading."""

    folder: Path
    name: str
    refresh: Callable[[], None]


class RunNotFoundError(ValueError):
    """RUN is not a run folder, or its run has not started to train yet."""


class RunSilentError(ValueError):
    """The run has written nothing for longer than the time limit."""


class RunKilledError(ValueError):
    """The process of the run died without writing a result."""


@contextlib.contextmanager
def open_source(run: str, storage_option: tuple[str, ...]) -> Iterator[RunSource]:
    """Yield the folder of a run itself or, for a URL, that of a copy of its logs."""
    if not is_url(run):
        yield RunSource(Path(run), run, lambda: None)
        return
    # TensorStore takes a moment to load.
    from loopfeed.engine.records.stored.following import followed_copy

    with followed_copy(run, parse_pairs(storage_option)) as (folder, refresh):
        yield RunSource(folder, run, refresh)


def await_runs(sources: Sequence[RunSource], once: bool, timeout_s: float) -> None:
    """Wait until a run has a loss log or, unless `once` is true, recorded settings; of several runs, until one has.

    A run locks its folder before it compiles, which may take minutes. Alone, it is then waited for; of several runs, it
    counts as one that has started.

    Raises:
        RunNotFoundError: if a folder exists but is not that of a run, or no run starts to train in time.
    """
    is_alone, started_s, printed = len(sources) == 1, time.monotonic(), ""
    wait_s = 0.0 if once else min(_START_WAIT_S, timeout_s)
    while True:
        for source in sources:
            _refuse_file(source)
            source.refresh()
        missing, is_held = _not_started(sources, once)
        if not missing:
            return
        name, limit_s = missing[0].name, timeout_s if is_held and not once else wait_s
        if time.monotonic() - started_s >= limit_s:
            if is_held:
                raise RunNotFoundError(
                    f"RUN must have started to train, but {name} is still compiling; try again later"
                )
            found = "does not exist" if status_of(missing[0].folder) is None else "contains no loss.jsonl"
            raise RunNotFoundError(f"RUN must be a run folder, but {name} {found}; give the --run-dir of run-train")
        name = printable_line(name)
        message = f"waiting up to {limit_s:g} s for {name} to start"
        if is_held:
            message = f"{name} is starting or compiling; waiting up to {limit_s:g} s"
        if message != printed and (is_alone or not printed):
            click.echo(message, err=True)
            printed = message
        time.sleep(_POLL_START_S)


def _not_started(sources: Sequence[RunSource], once: bool) -> tuple[list[RunSource], bool]:
    """Return the runs that must start, and whether the only one compiles."""
    from loopfeed.engine.records.folder_lock import is_locked
    from loopfeed.engine.records.loss_log import CONFIG_NAME

    is_alone = len(sources) == 1
    missing = [source for source in sources if not _has_started(source.folder, once and is_alone)]
    for source in missing:
        # A run writes its settings once, when it starts.
        started = [(path.stat().st_mtime_ns, path.parent) for path in source.folder.glob(f"*/{CONFIG_NAME}")]
        if started:
            count = f"{len(started)} run folder{'s' * (len(started) > 1)}"
            raise RunNotFoundError(
                f"RUN must be a run folder, but {source.name} contains {count}; give one, such as the newest, "
                f"{max(started)[1]}"
            )
    held = [source for source in missing if is_locked(source.folder)]
    if is_alone:
        return missing, bool(held)
    missing = [source for source in missing if source not in held]
    is_first = len(missing) == len(sources)
    return [source for source in missing if is_first or once or source.folder.exists()], False


def _has_started(run: Path, has_log: bool = False) -> bool:
    from loopfeed.engine.records.loss_log import CONFIG_NAME, LOSS_LOG_NAME

    return (run / LOSS_LOG_NAME).exists() or (not has_log and (run / CONFIG_NAME).exists())


def _refuse_file(source: RunSource) -> None:
    if source.folder.exists() and not source.folder.is_dir():
        raise RunNotFoundError(
            f"RUN must be a run folder, but {source.name} is a file; give the folder that contains it"
        )


class FollowedRun:
    """A run folder that is read again and again; it may not exist yet.

    Attributes:
        source: the folder.
        exists: whether the folder existed at the last read.
        end: how the run had ended at the last read; None if it had not.
        is_killed: whether the process of the run had died without a result at the last read.
        last_step: the newest step of the log, -1 if there is none.
        heard_s: when the logs last grew, on the monotonic clock; at first, when this object was made.
    """

    def __init__(self, source: RunSource) -> None:
        from loopfeed.engine.records.evaluation_log import EvaluationLog
        from loopfeed.engine.records.loss_log import EVALUATION_LOG_NAME, LOSS_LOG_NAME, LossLog

        self.source = source
        self.exists, self.is_killed, self.last_step, self.heard_s = False, False, -1, time.monotonic()
        self.end: RunEnd | None = None
        self._log = LossLog(source.folder / LOSS_LOG_NAME)
        self._evaluation_log, self._num_evaluations = EvaluationLog(source.folder / EVALUATION_LOG_NAME), 0

    def read(self) -> Iterator[Tick]:
        """Yield what is new in the folder, in several ticks if it is much; only the last is caught up."""
        from loopfeed.engine.records.folder_lock import was_killed
        from loopfeed.engine.records.loss_log import read_run_end, read_run_facts

        run = self.source.folder
        # The end is read before the rows, so that all rows written before it are seen.
        self.source.refresh()
        self.exists, self.is_killed = run.exists(), was_killed(run)
        end, facts, more = read_run_end(run), read_run_facts(run), True
        while more:
            batch = self._log.read()
            more = batch.more
            # Read after the rows: an evaluation is written before the row of the next step, so it is never missed.
            evaluations = self._evaluation_log.read()
            if len(batch.rows) or batch.restarted or batch.num_unreadable or len(evaluations) != self._num_evaluations:
                self.heard_s, self._num_evaluations = time.monotonic(), len(evaluations)
            if batch.restarted:
                self.last_step = -1
            if len(batch.rows):
                self.last_step = int(batch.rows.step[-1])
            if more:
                yield Tick(batch, facts, None, evaluations, caught_up=False)
        if end is not None and end.steps_done is not None and self.last_step > end.steps_done:
            end = None  # left over from before the run was resumed
        self.end = end
        yield Tick(batch, facts, end, evaluations, caught_up=True)

    def is_silent(self, timeout_s: float) -> bool:
        """Return whether the logs have not grown for `timeout_s` seconds."""
        return time.monotonic() - self.heard_s >= timeout_s

    def error(self, timeout_s: float) -> RunKilledError | RunSilentError | None:
        """Return why nothing more is expected of a run that has not ended; None if it has, or may go on."""
        if self.end is not None:
            return None
        name, reached = self.source.name, f"after step {self.last_step}"
        if self.last_step < 0:
            reached = "before its first step"
        if self.is_killed:
            return RunKilledError(
                f"the process of {name} died {reached} without a result: resume the run with run-train --resume"
            )
        if not self.is_silent(timeout_s):
            return None
        return RunSilentError(
            f"{name} has written nothing for {timeout_s:g} s (--timeout-s) {reached}: check whether it is still "
            "running, or raise --timeout-s"
        )


def follow(runs: Sequence[FollowedRun], once: bool, interval_s: float, timeout_s: float) -> Iterator[tuple[int, Tick]]:
    """Read run folders in turns, and yield each result with the number of its run, until nothing more comes.

    A run that ended or was killed is read on while another one trains, because it may be resumed.
    """
    while True:
        for number, run in enumerate(runs):
            for tick in run.read():
                yield number, tick
        if once or all(run.end is not None or run.error(timeout_s) is not None for run in runs):
            return
        time.sleep(interval_s)
