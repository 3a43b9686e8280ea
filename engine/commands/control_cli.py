"""The command `control-run`: ask something of a running training from another terminal, and tell what became of it.

Owns: waiting, withdrawing, and the words. Must not know: jax, or how the run takes a request up.
What reads the log loads numpy, and so is imported where it is first needed: `--help` answers at once.
"""

import math
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import click

from engine.commands.held_signals import signals_held
from engine.control.request import ControlRequest, check_learning_rate_factor
from engine.records.control_requests import CONTROL_FOLDER_NAME, send_request, withdraw
from engine.records.folder_lock import is_locked
from preprocess.commands.completion import complete_folder
from preprocess.commands.grouped_help import GroupedCommand
from preprocess.printable import printable_line

if TYPE_CHECKING:
    from engine.control.event import ControlEvent

_LOOK_EVERY_S = 0.1
_STOPPED = 130

_GROUPS = {
    "What to ask for": ("learning_rate_factor", "snapshot", "evaluate", "stop"),
    "Waiting": ("timeout",),
}
# Click keeps the line breaks of a paragraph that begins with a backspace.
_EPILOG = """\b
Examples:
  control-run runs/first --learning-rate-factor 0.1
  control-run runs/first --snapshot --evaluate
  control-run runs/first --stop
"""


class NotTakenUpError(click.ClickException):
    """The run did not take the request up, or not in time."""

    exit_code = 1


class _WrongRunError(click.ClickException):
    exit_code = 2


def _checked_factor(_context: click.Context, parameter: click.Parameter, value: float | None) -> float | None:
    try:
        check_learning_rate_factor(value)
    except ValueError:
        words = f"must be 0 or from 1.2e-38 to 3.4e38, got {value:g}; 1 is the schedule itself"
        raise click.BadParameter(words, param=parameter) from None
    return value


def _checked_timeout(_context: click.Context, parameter: click.Parameter, value: float) -> float:
    if math.isnan(value):
        raise click.BadParameter("must be a number, got nan; leave it out for the default", param=parameter)
    return value


@click.command(
    cls=GroupedCommand,
    option_groups=_GROUPS,
    epilog=_EPILOG,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.argument("run", type=click.Path(path_type=Path), shell_complete=complete_folder)
@click.option(
    "--learning-rate-factor", type=float, metavar="FACTOR", callback=_checked_factor,
    help="Multiply the schedule's learning rate by this from the next step on, in place of any earlier factor; "
    "1 is the schedule itself.",
)  # fmt: skip
@click.option("--snapshot", is_flag=True, help="Make a snapshot after the next step.")
@click.option("--evaluate", is_flag=True, help="Evaluate after the next step.")
@click.option("--stop", is_flag=True, help="Stop before the next step.")
@click.option(
    "--timeout", type=click.FloatRange(min=0, min_open=True), default=60.0, metavar="S", callback=_checked_timeout,
    help="Withdraw the request when the run has not taken it up in S seconds; 'inf' never does.",
)  # fmt: skip
@click.version_option(package_name="feedloop")
def main(
    run: Path, learning_rate_factor: float | None, snapshot: bool, evaluate: bool, stop: bool, timeout: float
) -> None:
    """Ask something of the training that goes on in folder RUN, and say at which step it took effect.

    Several things may be asked for at once; --stop stands alone. What took effect is in RUN/control.jsonl, and a run
    that is resumed from an earlier step repeats it at the same step, stops excepted.

    Exit codes: 0 it took effect, 1 it did not, or not in time, 2 wrong usage or RUN is no run folder, 130 Ctrl-C
    (what was asked is withdrawn).
    """
    _check_wishes(learning_rate_factor, snapshot=snapshot, evaluate=evaluate, stop=stop)
    request = ControlRequest(learning_rate_factor=learning_rate_factor, snapshot=snapshot, evaluate=evaluate, stop=stop)
    try:
        _check_is_going(run)
        with _sigterm_leaves():
            event = _ask(run, request, timeout)
    except KeyboardInterrupt:
        raise SystemExit(_STOPPED) from None
    except ValueError as error:
        raise NotTakenUpError(printable_line(str(error))) from error
    except OSError as error:
        reason = f"{error.filename or run} must be readable and writable: {error.strerror}; check its permissions"
        raise NotTakenUpError(printable_line(reason)) from error
    for line in _effects(event):
        click.echo(line)


def _check_wishes(factor: float | None, *, snapshot: bool, evaluate: bool, stop: bool) -> None:
    others = {"--learning-rate-factor": factor is not None, "--snapshot": snapshot, "--evaluate": evaluate}
    given = [name for name, is_given in others.items() if is_given]
    if not (given or stop):
        raise click.UsageError(f"something must be asked for, nothing is: give one of {', '.join([*others, '--stop'])}")
    if given and stop:
        raise click.UsageError(
            f"--stop must stand alone, {given[0]} is there too: the run stops before the step that this would act on; "
            "ask for it first, and then for --stop"
        )


def _check_is_going(run: Path) -> None:
    """Refuses a folder in which no process works."""
    from engine.records.loss_log import CONFIG_NAME

    if is_locked(run):
        return
    if not (run / CONFIG_NAME).exists():
        found = "is a file" if run.is_file() else f"holds no {CONFIG_NAME}" if run.is_dir() else "does not exist"
        raise _WrongRunError(
            printable_line(
                f"RUN must be the folder of a run, {run} {found}; give the --run-dir of a run-train that is going"
            )
        )
    raise NotTakenUpError(
        printable_line(f"RUN must be going, no process works in {run}: it has ended; go on with run-train --resume")
    )


def _ask(run: Path, request: ControlRequest, timeout_s: float) -> "ControlEvent":
    """Sends a request and waits until it takes effect; withdraws it where that does not come about.

    Raises:
        NotTakenUpError: where the run ended or the time did.
        ValueError: where the run's log cannot be read.
    """
    _find_event(run, request)  # a log that cannot be read is refused before anything is asked
    deadline = time.monotonic() + timeout_s
    is_sent = False
    try:
        with signals_held():
            send_request(run, request)
            is_sent = True
        while True:
            # Before the log is read: what a run wrote before it ended is then certain to be seen.
            is_going, is_late = is_locked(run), time.monotonic() >= deadline
            event = _find_event(run, request)
            if event is not None:
                return event
            if is_late or not is_going:
                break
            time.sleep(min(_LOOK_EVERY_S, max(0.0, deadline - time.monotonic())))
        is_withdrawn = withdraw(run, request.id)
    except BaseException:
        # Nobody will be there to hear what becomes of it.
        with suppress(OSError):
            if not withdraw(run, request.id) and is_sent:
                click.echo("too late to withdraw: the run has the request already", err=True)
        raise
    event = None if is_withdrawn else _find_event(run, request)
    if event is None:
        raise NotTakenUpError(printable_line(_why_not(run, timeout_s, is_going=is_going, is_withdrawn=is_withdrawn)))
    return event


def _why_not(run: Path, timeout_s: float, *, is_going: bool, is_withdrawn: bool) -> str:
    """Says why a request came to nothing, and what to do."""
    from engine.records.control_log import CONTROL_LOG_NAME

    if not is_going:
        return f"RUN must be going, {run} ended before it took the request up: go on with run-train --resume"
    late = f"a request must be taken up in --timeout {timeout_s:g} s"
    if is_withdrawn:
        return (
            f"{late}, {run} left it in {CONTROL_FOLDER_NAME}/ and it is withdrawn: "
            "see whether the run still makes steps, or raise --timeout"
        )
    return (
        f"{late}, {run} has it and began no step, or chunk of steps, since: it takes "
        f"effect at the next one ({CONTROL_LOG_NAME} then says so); raise --timeout to wait for that"
    )


def _find_event(run: Path, request: ControlRequest) -> "ControlEvent | None":
    from engine.records.control_log import CONTROL_LOG_NAME, read_events

    events = read_events(run / CONTROL_LOG_NAME)
    return next((event for event in events if event.request == request.id), None)


def _effects(event: "ControlEvent") -> Iterator[str]:
    """Says what an event does, a line for each thing."""
    if event.learning_rate_factor is not None:
        yield f"learning-rate factor {event.learning_rate_factor:.6g} from step {event.step}"
    if event.snapshot:
        yield f"snapshot after step {event.step}"
    if event.evaluate:
        yield f"evaluation after step {event.step}"
    if event.stop:
        yield f"stopping before step {event.step}"


@contextmanager
def _sigterm_leaves() -> Iterator[None]:
    """Lets SIGTERM end the command by way of its `except` blocks, so that the request is withdrawn."""

    def leave(number: int, _frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
