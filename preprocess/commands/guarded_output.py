"""Escapes all command output so that control characters in a message never reach a terminal or a pipe.

The exception is `write_data`, for data in a format of its own, such as CSV, which only a terminal needs escaped.

Text is escaped by `loopfeed.preprocess.printable`. This module must not know what the commands print.
"""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, TextIO, cast

import click

from loopfeed.preprocess.commands.output_stream import ClosedStream, OutputStream
from loopfeed.preprocess.commands.suggesting import SuggestingCommand
from loopfeed.preprocess.printable import printable_text
from loopfeed.preprocess.stop_signals import stops_as_interrupts
from loopfeed.preprocess.system_errors import describe_system_error

WRONG, STOPPED = 2, 130
"""Exit codes."""

# Surrogates other than those in which Python decodes the bytes 0x80 … 0xff of a name.
_NO_BYTE = re.compile("[\ud800-\udc7f\udd00-\udfff]")


class GuardedStream:
    """A text stream that escapes control characters and forwards the text to another stream.

    `terminal` is that other stream, for code that draws on a terminal and escapes its own text.
    """

    def __init__(self, stream: TextIO | OutputStream) -> None:
        self.terminal = stream if isinstance(stream, OutputStream) else OutputStream(stream)

    def write(self, text: str | bytes) -> int:
        """Write ``text``, escaping control characters and characters that the stream cannot encode.

        Bytes are decoded as UTF-8, because click writes shell completion scripts as bytes.
        """
        if isinstance(text, bytes):
            text = text.decode("utf-8", "surrogateescape")
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self.terminal.write(printable_text(text), errors="backslashreplace")
        return len(text)

    def flush(self) -> None:
        """Flush the other stream."""
        self.terminal.flush()

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each string in ``lines``, escaped as in `write`."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        if name in ("buffer", "terminal"):  # these would bypass the guard
            raise AttributeError(name)
        return getattr(self.terminal, name)


def write_data(text: str) -> None:
    """Write machine-readable text to stdout: escaped if that is a terminal, and otherwise exactly, in UTF-8.

    Bytes of file names that are not UTF-8 (surrogates, as Python decodes names) become those bytes again. Any other
    surrogate, which no encoding has, is escaped.

    Raises:
        OSError: if stdout cannot be written.
    """
    stream = sys.stdout
    if stream is None or stream.isatty() or not hasattr(terminal_of(stream), "buffer"):
        click.echo(text, nl=False)
        return
    content = _NO_BYTE.sub(lambda found: ascii(found[0])[1:-1], text).encode("utf-8", "surrogateescape")
    behind = stream.terminal if isinstance(stream, GuardedStream) else OutputStream(stream)
    behind.write_bytes(content)


def terminal_of(stream: TextIO) -> TextIO:
    """Return the stream on which to draw, behind ``stream`` if that is a `GuardedStream`, otherwise ``stream`` itself.

    Only for code that escapes its own text.
    """
    return cast(TextIO, stream.terminal) if isinstance(stream, GuardedStream) else stream


def show_only_on_stdout() -> None:
    """Say that stdout is only a display from here on, because the result of the command is elsewhere.

    If it can no longer be written, the command goes on without it, after one warning on stderr.
    """
    if isinstance(sys.stdout, GuardedStream):
        sys.stdout.terminal.is_display = True
        sys.stdout.terminal.warn = lambda warning: click.echo(warning, err=True)


def fails_to_print(error: BaseException) -> bool:
    """Return whether an error is of stdout, which a command leaves to `GuardedCommand`: exit code 1."""
    return isinstance(error, OSError) and error.filename == "<stdout>"


@contextmanager
def reporting(command: str, stopped: str, remedy_of_memory: str, *, with_traceback: bool) -> Iterator[None]:
    """Exit with a message if the block is stopped or fails, except if the output can't be written.

    Args:
        command: the name of the command.
        stopped: the message about a signal.
        remedy_of_memory: what to do if there is not enough memory, "" for nothing.
        with_traceback: whether to print the traceback of an error too.
    """
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"\n{stopped}", err=True)
        sys.exit(STOPPED)
    except (ValueError, OSError, MemoryError) as error:
        if isinstance(error, BrokenPipeError) or fails_to_print(error):
            raise  # click exits quietly when the output pipe is closed
        if with_traceback:
            traceback.print_exc()
        text = describe_system_error(error) if isinstance(error, OSError) else str(error)
        if isinstance(error, MemoryError):
            text = f"not enough memory ({text or 'allocation failed'}){remedy_of_memory}"
        click.echo(f"{command}: {text}", err=True)
        sys.exit(WRONG)


class GuardedCommand(SuggestingCommand):
    """A click command that escapes all of its output: results, notices, errors, click's own messages and tracebacks.

    Only code that draws on a terminal (`terminal_of`), and data in a file or a pipe (`write_data`), can contain control
    characters. SIGTERM and SIGHUP interrupt the command as Ctrl-C does. Every command has ``-h`` and ``--version``.
    """

    def __init__(self, *args: Any, context_settings: Mapping[str, Any] | None = None, **values: Any) -> None:
        settings = {"help_option_names": ["-h", "--help"], **(context_settings or {})}
        super().__init__(*args, context_settings=settings, **values)
        click.version_option(package_name="loopfeed")(self)

    def main(self, *args: Any, **values: Any) -> Any:
        """Run the command with stdout and stderr wrapped in `GuardedStream`."""
        _open_missing_descriptors()
        try:
            with _guarded_output(), stops_as_interrupts():
                return super().main(*args, **values)
        except SystemExit:
            raise
        except BaseException as error:
            if fails_to_print(error) and values.get("standalone_mode", True):
                name = values.get("prog_name") or Path(sys.argv[0]).name
                click.echo(f"{name}: {describe_system_error(cast(OSError, error))}", err=True)
                sys.exit(1)
            # The interpreter prints the exception after this function has returned and the guards are gone.
            sys.excepthook = _print_safely
            raise


@contextmanager
def _guarded_output() -> Iterator[None]:
    guards: dict[str, Any] = {}
    streams = {name: getattr(sys, name) for name in ("stdout", "stderr")}
    for name, stream in streams.items():
        if not isinstance(stream, GuardedStream):
            # None was closed by the shell, or the program has no console. No command has its result on stderr.
            behind = cast(TextIO, ClosedStream(f"<{name}>")) if stream is None else stream
            guards[name] = GuardedStream(OutputStream(behind, is_display=name == "stderr"))
            setattr(sys, name, guards[name])
    try:
        yield
    finally:
        for name, guard in guards.items():
            # When the output pipe is closed, click replaces the stream with its own, which must stay.
            if getattr(sys, name) is guard:
                setattr(sys, name, streams[name])


def _open_missing_descriptors() -> None:
    """Open the null device for each standard stream that is closed; else a file of a run could get its number.

    What a library prints would then be written into that file.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free; children of this process get it too.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)


def _print_safely(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Print an uncaught exception as Python does, but with control characters escaped."""
    text = printable_text("".join(traceback.format_exception(kind, error, trace)))
    with suppress(OSError, AttributeError, ValueError):
        sys.stderr.write(text)
        sys.stderr.flush()
