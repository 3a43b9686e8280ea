"""The end of a command: flushed output, a short error message, and an exit that a stuck thread cannot delay."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import click

from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.printable import printable_text
from loopfeed.preprocess.system_errors import cause_of, describe_system_error
from loopfeed.preprocess.workers import call_within

if TYPE_CHECKING:
    from rich.console import Console

DONE, FAILED, WRONG_USAGE, STOPPED = 0, 1, 2, 130
"""The exit codes of commands."""
_FLUSH_TIMEOUT_S = 1.0


@dataclass
class CommandEnd:
    """How a command ends: its exit code, which it may set before it ends."""

    code: int = DONE


@contextmanager
def ending(command: str, stopped: str, *, traceback: bool) -> Iterator[CommandEnd]:
    """Run a command in the block, then leave with its exit code, after a message if it was stopped or failed.

    Args:
        command: its name.
        stopped: the message about a signal.
        traceback: whether to raise an error instead, with its traceback.
    """
    end = CommandEnd()
    try:
        yield end
    except KeyboardInterrupt:
        say_to_stderr(f"{command}: {stopped}")
        end.code = STOPPED
    except Exception as error:
        if traceback:
            raise
        from loopfeed.engine.commands.setting_options import option_names

        say_to_stderr(f"{command}: {describe_error(error, option_names(click.get_current_context()))}")
        end.code = WRONG_USAGE if isinstance(error, ValueError) else FAILED
    leave(end.code)


def leave(code: int, *, at_once: bool = False) -> None:
    """Flush the output, then exit at once if the code is not 0, the flush blocks, or `at_once` is true; else return.

    An immediate exit does not join threads, which may be stuck in a batch source, the compiler or a disk write.
    """
    # If nothing reads the output, a flush can block forever or wait for a blocked thread's lock; no signal ends it.
    has_flushed = call_within(_FLUSH_TIMEOUT_S, _flush, "flush")
    # One that is given up may hold what Python needs to end, such as the lock of stdin.
    has_stuck_logger = any(thread.name.startswith("logger-") for thread in threading.enumerate())
    if code != 0 or at_once or has_stuck_logger or not has_flushed:
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the shell
            continue
        # A full disk or a closed pipe: either this error is being reported already, or nothing can receive it.
        with suppress(OSError, ValueError):
            stream.flush()


def say_to_stderr(text: str) -> None:
    """Print a message to stderr; ignore the error if stderr cannot be written."""
    with suppress(OSError, ValueError):
        click.echo(printable_text(text), err=True)


def say_in_time(text: str, limit_s: float) -> None:
    """Print a message to stdout; if nothing reads it within so many seconds, go on without it.

    Raises:
        Exception: whatever printing raised.
    """
    # The end of the command does not wait for it either (`leave`).
    call_within(limit_s, lambda: click.echo(text), "say")


def say_on_terminal(console: "Console", text: str) -> None:
    """Remove control characters from a message and print it above the live display, broken between words."""
    from loopfeed.engine.runtime.report import wrap_words

    lines = (wrap_words(line, console.width) for line in printable_text(text).split("\n"))
    console.print("\n".join(lines), markup=False, highlight=False, soft_wrap=True)


def describe_error(error: Exception, name_setting: Callable[[str], str] = str) -> str:
    """Return a short message about an error, followed by its notes; for an unexpected error, mention --traceback.

    Args:
        error: the error.
        name_setting: maps the name of a setting to the one to show, such as its option.
    """
    text = error.render(name_setting) if isinstance(error, SettingError) else str(error).strip()
    if isinstance(error, BrokenPipeError):
        # Only an error from the system has a number; any other already has a message.
        text = text if error.errno is None else "the reader of the output closed it (broken pipe)"
    elif isinstance(error, OSError) and error.errno is not None and type(error).__str__ is OSError.__str__:
        notes = notes_of(error)
        # The note of `loopfeed.engine.records.file_errors` says the same, and that the file was to be written.
        is_told = notes.startswith(f"\n  {error.filename} cannot be written")
        return notes.strip() if is_told else f"{describe_system_error(error)}{notes}"
    elif "RESOURCE_EXHAUSTED" in text and isinstance(error, RuntimeError) and cause_of(error) is None:
        # The program's; a file system that has no room, or a map without memory, has another remedy.
        text = f"{text.splitlines()[0]}: the program needs more memory than is free; use a smaller --batch"
    elif not isinstance(error, ValueError | OSError | RuntimeError | ArithmeticError) or not text:
        text = f"{type(error).__name__}: {text} (--traceback shows its origin)"
    return f"{text}{notes_of(error)}{_described_lines(error)}"


def _described_lines(error: Exception) -> str:
    """Return the lines of the user's own code in which an error was raised, "" if it was not raised there."""
    from loopfeed.engine.python_calls import user_lines

    lines = user_lines(error)
    return "\n".join(["\n  raised in your code (--traceback shows all of it):", *lines]) if lines else ""


def notes_of(error: BaseException) -> str:
    """Return the notes attached to an error, each on a new, indented line."""
    # jax adds a note about hidden traceback frames, but no traceback is shown here.
    notes = (note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note)
    return "".join(f"\n  {note}" for note in notes)
