"""A standard stream of a command: replaces what its encoding lacks, and can end without ending the command.

What a command shows on a terminal decides nothing: a terminal can be closed, lose its reader or have a small alphabet.
Must not know what is written.
"""

from __future__ import annotations

import errno
import io
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TextIO

from loopfeed.preprocess.system_errors import system_reason


class OutputStream:
    """A text stream that writes another character for each that the encoding of the stream behind it lacks.

    Args:
        stream: the stream behind it.
        is_display: whether its errors are ignored, apart from one warning, and nothing more is written after the first.
        warn: called with the warning.
    """

    def __init__(
        self, stream: TextIO, *, is_display: bool = False, warn: Callable[[str], None] = lambda _: None
    ) -> None:
        self._stream, self.is_display, self.warn = stream, is_display, warn
        self._is_gone = False

    def on(self, stream: TextIO) -> OutputStream:
        """Return this stream, a display or not, with another one behind it."""
        return OutputStream(stream, is_display=self.is_display, warn=self.warn)

    def write(self, text: str, *, errors: str = "replace") -> int:
        """Write text; characters that cannot be encoded are replaced as the error handler of this name does."""

        def write() -> None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                # Not the error's encoding, which is "charmap" for every alphabet of single bytes.
                encoding = self._stream.encoding
                self._stream.write(text.encode(encoding, errors).decode(encoding))

        self._try(write)
        return len(text)

    def write_bytes(self, content: bytes) -> None:
        """Write bytes as they are, after all text so far; the stream behind this one must have a buffer of bytes."""

        def write() -> None:
            self._stream.flush()
            self._stream.buffer.write(content)
            self._stream.buffer.flush()

        self._try(write)

    def flush(self) -> None:
        """Flush the stream behind this one."""
        self._try(self._stream.flush)

    def drop(self) -> None:
        """Send what is buffered and all that comes to the null device; otherwise Python's flush at exit would fail."""
        self._is_gone = True
        with suppress(OSError, ValueError, AttributeError):  # not a stream of the system
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def _try(self, action: Callable[[], object]) -> None:
        """Call a function; of a display that is gone, do not, and of one that fails, give the stream up."""
        if self._is_gone:
            return
        try:
            action()
        except (OSError, ValueError) as error:  # ValueError: the stream is closed
            if not self.is_display:
                self._name(error)
                raise
            # A terminal that another program made non-blocking only misses some text.
            if not isinstance(error, BlockingIOError):
                self._give_up(error)

    def _name(self, error: OSError | ValueError) -> None:
        """Add the stream's name, such as "<stdout>", to an error of the system."""
        if isinstance(error, BrokenPipeError) or not isinstance(error, OSError):
            return
        if error.errno is not None and error.filename is None:
            error.filename = getattr(self._stream, "name", None)

    def _give_up(self, error: OSError | ValueError) -> None:
        if self._is_gone:
            return
        self.drop()
        reason = system_reason(error) if isinstance(error, OSError) else error
        name = getattr(self._stream, "name", "the output")
        self.warn(
            f"warning: {name} can no longer be written ({reason}): nothing more is shown there, and the command goes on"
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class ClosedStream(io.TextIOBase):
    """A standard stream that was closed before the command began, as by `>&-`: it cannot be written."""

    encoding = "utf-8"

    def __init__(self, name: str) -> None:
        self.name = name

    def write(self, text: str, /) -> int:  # noqa: ARG002
        """Raise the error that the system gives for a closed descriptor."""
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
