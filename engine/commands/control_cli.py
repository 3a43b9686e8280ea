"""The `control-run` command, which sends a request to a run in progress and reports the effect of the request.

Owns waiting, withdrawing and the messages. Must not know: jax, or how the run handles a request.
The modules that read the log load numpy, so they are imported where they are first needed: `--help` answers at once.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from loopfeed.engine.commands.held_signals import signals_held
from loopfeed.engine.control.request import ControlRequest, check_learning_rate_factor
from loopfeed.engine.records.control_requests import CONTROL_FOLDER_NAME, send_request, withdraw
from loopfeed.engine.records.folder_lock import is_locked
from loopfeed.preprocess.commands.completion import complete_folder
from loopfeed.preprocess.commands.grouped_help import GroupedCommand
from loopfeed.preprocess.commands.guarded_output import show_only_on_stdout
from loopfeed.preprocess.commands.suggesting import NamedElsewhere, refuse_nan
from loopfeed.preprocess.printable import printable_line
from loopfeed.preprocess.stop_signals import install, stop_signals, uninstall
from loopfeed.preprocess.storage_options import is_url
from loopfeed.preprocess.system_errors import describe_system_error, status_of

if TYPE_CHECKING:
    from loopfeed.engine.control.request import ControlEvent

_POLL_EVERY_S = 0.1
_STOPPED = 130

_GROUPS = {
    "Requests": ("learning_rate_factor", "snapshot", "evaluate", "stop"),
    "Waiting": ("timeout",),
}
# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """\b
Examples:
  control-run runs/first --learning-rate-factor 0.1
  control-run runs/first --snapshot --evaluate
  control-run runs/first --stop
"""


class RequestNotAcceptedError(click.ClickException):
    """The request did not take effect in time, or the run had already ended."""

    exit_code = 1


class _WrongRunError(click.ClickException):
    exit_code = 2


def _checked_factor(_context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    try:
        check_learning_rate_factor(value)
    except ValueError:
        message = f"must be 0 or from 1.2e-38 to 3.4e38, got {value:g}; 1 restores the schedule"
        raise click.BadParameter(message, param=parameter) from None
    return value


@click.command(cls=GroupedCommand, option_groups=_GROUPS, epilog=_EPILOG)
@click.argument("run", shell_complete=complete_folder)
@click.option(
    "--learning-rate-factor", cls=NamedElsewhere, also_called=("lr", "learning_rate"), type=float,
    metavar="FACTOR", callback=_checked_factor,
    help="Multiply the scheduled learning rate by FACTOR from the next step on. This replaces any earlier "
    "factor; 1 restores the schedule.",
)  # fmt: skip
@click.option("--snapshot", is_flag=True, help="Write a snapshot after the next step.")
@click.option("--evaluate", is_flag=True, help="Evaluate after the next step.")
@click.option("--stop", is_flag=True, help="Stop before the next step.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=60.0, metavar="S", callback=refuse_nan,
    help="Withdraw the request if the run has not accepted it within S seconds; 'inf' waits forever.",
)  # fmt: skip
def main(
    run: str, learning_rate_factor: float | None, snapshot: bool, evaluate: bool, stop: bool, timeout: float
) -> None:
    """Send a request to the run that is training in folder RUN, and print the step at which the request took effect.

    Requests can be combined, except with --stop. RUN/control.jsonl records each request that took effect; if the run is
    resumed from an earlier step, it repeats them at the same steps, except for stops.

    Exit codes: 0 the request took effect, 1 it did not, or not in time, 2 wrong usage or RUN is not a run folder, 130
    Ctrl-C (the request is withdrawn).
    """
    _check_options(learning_rate_factor, snapshot=snapshot, evaluate=evaluate, stop=stop)
    request = ControlRequest(learning_rate_factor=learning_rate_factor, snapshot=snapshot, evaluate=evaluate, stop=stop)
    try:
        if is_url(run):
            raise _WrongRunError(
                f"RUN must be the folder of a run on this machine, got {run}: give the working copy that run-train "
                "printed at its start, on the machine where it runs"
            )
        _check_is_running(Path(run))
        with _exiting_on_sigterm():
            event = _ask(Path(run), request, timeout)
    except KeyboardInterrupt:
        raise SystemExit(_STOPPED) from None
    except ValueError as error:
        raise RequestNotAcceptedError(printable_line(str(error))) from error
    except OSError as error:
        raise RequestNotAcceptedError(printable_line(describe_system_error(error, run))) from error
    show_only_on_stdout()
    for line in _effects(event):
        click.echo(line)


def _check_options(factor: float | None, *, snapshot: bool, evaluate: bool, stop: bool) -> None:
    others = {"--learning-rate-factor": factor is not None, "--snapshot": snapshot, "--evaluate": evaluate}
    given = [name for name, is_given in others.items() if is_given]
    if not (given or stop):
        raise click.UsageError(f"a request is needed, got none: give at least one of {', '.join([*others, '--stop'])}")
    if given and stop:
        raise click.UsageError(
            f"--stop cannot be combined with {given[0]}, because the run would stop before {given[0]} takes effect: "
            f"request {given[0]} first, then --stop"
        )


def _check_is_running(run: Path) -> None:
    """Raise a click error if no process is training in folder `run`."""
    from loopfeed.engine.records.loss_log import CONFIG_NAME

    if is_locked(run):
        return
    if not (run / CONFIG_NAME).exists():
        is_there = status_of(run) is not None
        found = "is a file" if run.is_file() else f"contains no {CONFIG_NAME}" if is_there else "does not exist"
        raise _WrongRunError(
            printable_line(
                f"RUN must be a run folder, but {run} {found}; give the --run-dir of a run that is still training"
            )
        )
    raise RequestNotAcceptedError(
        printable_line(f"the run in {run} must still be training, but it has ended; resume it with run-train --resume")
    )


def _ask(run: Path, request: ControlRequest, timeout_s: float) -> "ControlEvent":
    """Send a request and wait until it takes effect; withdraw it if it does not.

    Raises:
        RequestNotAcceptedError: if the run ended or the time limit passed.
        ValueError: if the run's log cannot be read.
    """
    _find_event(run, request)  # refuse an unreadable log before sending anything
    deadline = time.monotonic() + timeout_s
    is_sent = False
    try:
        with signals_held():
            send_request(run, request)
            is_sent = True
        while True:
            # Checked before the log is read, so that nothing that the run wrote before it ended is missed.
            is_running, is_late = is_locked(run), time.monotonic() >= deadline
            event = _find_event(run, request)
            if event is not None:
                return event
            if is_late or not is_running:
                break
            time.sleep(min(_POLL_EVERY_S, max(0.0, deadline - time.monotonic())))
        is_withdrawn = withdraw(run, request.id)
    except BaseException:
        # The command is about to exit, so nothing would report the effect of the request.
        with suppress(OSError):
            if not withdraw(run, request.id) and is_sent:
                click.echo("too late to withdraw the request: the run has already accepted it", err=True)
        raise
    event = None if is_withdrawn else _find_event(run, request)
    if event is None:
        raise RequestNotAcceptedError(
            printable_line(_why_no_effect(run, timeout_s, is_running=is_running, is_withdrawn=is_withdrawn))
        )
    return event


def _why_no_effect(run: Path, timeout_s: float, *, is_running: bool, is_withdrawn: bool) -> str:
    """Return a message that says why a request had no effect and what to do about it."""
    from loopfeed.engine.records.control_log import CONTROL_LOG_NAME

    if not is_running:
        return f"{run} ended before the request took effect: resume the run with run-train --resume"
    if is_withdrawn:
        return (
            f"{run} did not accept the request within {timeout_s:g} s (--timeout), so it was withdrawn from "
            f"{CONTROL_FOLDER_NAME}/: check whether the run still makes progress, or raise --timeout"
        )
    return (
        f"{run} accepted the request, but did not start a step or chunk within {timeout_s:g} s (--timeout). The "
        f"request takes effect at the next one (see {CONTROL_LOG_NAME}); raise --timeout to wait longer"
    )


def _find_event(run: Path, request: ControlRequest) -> "ControlEvent | None":
    from loopfeed.engine.records.control_log import CONTROL_LOG_NAME, read_events

    events = read_events(run / CONTROL_LOG_NAME)
    return next((event for event in events if event.request == request.id), None)


def _effects(event: "ControlEvent") -> Iterator[str]:
    """Yield one line of text for each action of an event."""
    if event.learning_rate_factor is not None:
        yield f"learning-rate factor {event.learning_rate_factor:.6g} from step {event.step}"
    if event.snapshot:
        yield f"snapshot after step {event.step}"
    if event.evaluate:
        yield f"evaluation after step {event.step}"
    if event.stop:
        yield f"stopping before step {event.step}"


@contextmanager
def _exiting_on_sigterm() -> Iterator[None]:
    """Raise SystemExit when SIGTERM or SIGHUP arrives in the block, so that exception handlers withdraw the request."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    numbers = [number for number in stop_signals() if number != signal.SIGINT]
    for number in numbers:
        install(number, leave)
    try:
        yield
    finally:
        for number in numbers:
            uninstall(number)
