"""The end of a command: its last output, an error in a line or two, and an exit that no stuck thread can delay."""

import os
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from engine.settings import SettingError
from preprocess.printable import printable_text

if TYPE_CHECKING:
    from rich.console import Console

_FLUSH_TIMEOUT_S = 1.0


def leave(code: int, *, at_once: bool = False) -> None:
    """Flush the output, and exit at once if the code is not 0, the flush blocks, or the caller asks for it.

    An immediate exit does not join threads, which may be stuck in a source, a compiler or a disk. Otherwise return.
    """
    # If nothing reads the output, a flush blocks for ever, or waits for a blocked thread's lock; no signal ends it.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_TIMEOUT_S)
    if code != 0 or at_once or flusher.is_alive():
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the shell
            continue
        # A full disk or a closed pipe: either this error is being reported already, or nothing can receive it.
        with suppress(OSError):
            stream.flush()


def say_to_stderr(text: str) -> None:
    """Print a message to stderr, if that can still be written."""
    with suppress(OSError):
        click.echo(printable_text(text), err=True)


def say_on_terminal(console: "Console", text: str) -> None:
    """Print a message above what the console draws, without control characters."""
    console.print(printable_text(text), markup=False, highlight=False, soft_wrap=True)


def describe_error(error: Exception, name_setting: Callable[[str], str] = str) -> str:
    """Return the error's message in a line or two; for an unexpected error, mention --traceback.

    Args:
        error: the error.
        name_setting: setting → how the message names it, such as its option.
    """
    text = error.words(name_setting) if isinstance(error, SettingError) else str(error).strip()
    if isinstance(error, BrokenPipeError):
        text = "the reader of the loss stream closed it (broken pipe), and the run stopped at its next step"
    elif "RESOURCE_EXHAUSTED" in text:
        text = f"{text.splitlines()[0]}: the program needs more memory than is free; use a smaller --batch"
    elif not isinstance(error, ValueError | OSError | RuntimeError | ArithmeticError) or not text:
        text = f"{type(error).__name__}: {text} (--traceback shows where)"
    return f"{text}{notes_of(error)}"


def notes_of(error: BaseException) -> str:
    """Return the notes of an error, each on its own line."""
    # jax adds a note about its hidden traceback frames, and no traceback is shown here.
    notes = (note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note)
    return "".join(f"\n  {note}" for note in notes)
