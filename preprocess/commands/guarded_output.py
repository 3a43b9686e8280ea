"""The last gate of every command: no control character reaches a terminal or a pipe, whatever a message holds.

Must not know: what the commands say. Texts are made safe by `preprocess.printable`.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO

from preprocess.printable import printable_text
from preprocess.suggestions import SuggestingCommand


class GuardedStream:
    """A text stream that passes everything on to another one, control characters as their escapes.

    `terminal` is the stream behind it, for those who draw on a terminal and make their own texts safe.
    """

    def __init__(self, stream: TextIO) -> None:
        self.terminal = stream

    def write(self, text: str | bytes) -> int:
        """Write the text, made safe; a character that the stream cannot encode is escaped as well.

        Bytes, as which click writes a shell's completion script, are text in UTF-8.
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
        """Write each of the texts."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "terminal"):  # no way around the guard
            raise AttributeError(name)
        return getattr(self.terminal, name)


def terminal_of(stream: TextIO) -> TextIO:
    """Return the stream behind a guard, or the stream itself: only for what makes its texts safe before it draws."""
    return stream.terminal if isinstance(stream, GuardedStream) else stream


class GuardedCommand(SuggestingCommand):
    """A click command whose every output is made safe: results, notices, errors, click's own, and tracebacks.

    Only what draws on a terminal (`terminal_of`) writes control characters.
    """

    def main(self, *args: Any, **values: Any) -> Any:
        """Run the command with stdout and stderr guarded."""
        try:
            with _guarded_output():
                return super().main(*args, **values)
        except SystemExit:
            raise
        except BaseException:
            # The interpreter prints it once this function has been left, and the guards with it.
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
            # Where the reader has gone, click has put a stream of its own there, which must stay.
            if getattr(sys, name) is guard:
                setattr(sys, name, guard.terminal)


def _print_safely(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an exception that nobody caught, as Python does, made safe."""
    text = printable_text("".join(traceback.format_exception(kind, error, trace)))
    with suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
