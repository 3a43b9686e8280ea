"""How a command ends: the last words, an error in a line or two, and the exit that no stuck thread holds up."""

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
    """Flushes what was said; exits at once where the code is not 0, nobody reads, or the caller asks for it.

    A thread that is stuck in a source, a compiler or a disk can't be joined. Otherwise it returns.
    """
    # Where nobody reads, a flush waits for ever, or for the lock of the thread that does, which no signal ends.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_TIMEOUT_S)
    if code != 0 or at_once or flusher.is_alive():
        os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        if stream is None:  # closed by the shell
            continue
        # A full disk or a closed pipe: either it is the failure that is being told, or there is nobody to tell.
        with suppress(OSError):
            stream.flush()


def say_to_stderr(text: str) -> None:
    """Says something, where stderr can still be written."""
    with suppress(OSError):
        click.echo(printable_text(text), err=True)


def say_on_terminal(console: "Console", text: str) -> None:
    """Says something above what the console draws, without control characters."""
    console.print(printable_text(text), markup=False, highlight=False, soft_wrap=True)


def describe_error(error: Exception, name_setting: Callable[[str], str] = str) -> str:
    """Return the error in a line or two; one that is no rule of ours says where the rest is.

    Args:
        error: what went wrong.
        name_setting: gives the option of a setting, by which a message about settings then names them.
    """
    text = error.words(name_setting) if isinstance(error, SettingError) else str(error).strip()
    if isinstance(error, BrokenPipeError):
        text = "the reader of the loss stream went away (broken pipe); the run ended at its next step"
    elif "RESOURCE_EXHAUSTED" in text:
        text = f"{text.splitlines()[0]}: the program needs more memory than there is; a smaller --batch needs less"
    elif not isinstance(error, ValueError | OSError | RuntimeError | ArithmeticError) or not text:
        text = f"{type(error).__name__}: {text} (--traceback shows where)"
    return f"{text}{notes_of(error)}"


def notes_of(error: BaseException) -> str:
    """Gives the notes of an error, each on a line of its own behind it."""
    # jax notes how its own frames of a traceback can be seen, of which there is none here.
    told = (note for note in getattr(error, "__notes__", ()) if "JAX_TRACEBACK_FILTERING" not in note)
    return "".join(f"\n  {note}" for note in told)
