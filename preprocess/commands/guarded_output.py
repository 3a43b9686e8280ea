"""Escaping of every command's output, so that no control character of a message reaches a terminal or a pipe.

Texts are escaped by `preprocess.printable`. This module must not know what the commands print.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO

from preprocess.commands.suggesting import SuggestingCommand
from preprocess.printable import printable_text


class GuardedStream:
    """A text stream that forwards everything to another stream, with control characters escaped.

    `terminal` is the underlying stream, for code that draws on a terminal and escapes its own texts.
    """

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream

    def write(self, text: str | bytes) -> int:
        """Write the text, escaped; a character that the stream cannot encode is escaped as well.

        Bytes are decoded as UTF-8: click writes a shell's completion script as bytes.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        safe = printable_text(text)
        try:
            self.terminal.write(safe)
        except UnicodeEncodeError as error:
            self.terminal.write(safe.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write every text in ``lines``."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "terminal"):  # no way around the guard
            raise AttributeError(name)
        return getattr(self.terminal, name)


def terminal_of(stream: TextIO) -> TextIO:
    """Return the stream behind a guard, or the stream itself. Only for code that escapes its texts before drawing."""
    return stream.terminal if isinstance(stream, GuardedStream) else stream


class GuardedCommand(SuggestingCommand):
    """A click command that escapes all of its output: results, notices, errors, click's own messages, and tracebacks.

    Only code that draws on a terminal (`terminal_of`) writes control characters.
    """

    def main(self, *args: Any, **values: Any) -> Any:
        """Run the command with stdout and stderr guarded."""
        try:
            with _guarded_output():
                return super().main(*args, **values)
        except SystemExit:
            raise
        except BaseException:
            # The interpreter prints the exception after this function has returned and the guards are gone.
            sys.excepthook = _print_safely
            raise


@contextmanager
def _guarded_output() -> Iterator[None]:
    guards: dict[str, Any] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, GuardedStream):
            guards[name] = GuardedStream(stream)
            setattr(sys, name, guards[name])
    try:
        yield
    finally:
        for name, guard in guards.items():
            # When the reader has gone, click replaces the stream with its own, which must stay.
            if getattr(sys, name) is guard:
                setattr(sys, name, guard.terminal)


def _print_safely(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception as Python does, but escaped."""
    text = printable_text("".join(traceback.format_exception(kind, error, trace)))
    with suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
