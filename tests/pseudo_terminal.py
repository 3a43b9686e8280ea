"""A program on a pseudo-terminal, and what it displays."""

import codecs
import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time

LIMIT_S = 60.0  # these waits take tenths of a second on an idle machine
# The terminal controls the program, so that its keys send signals. Signals sent separately would not do: for a key, the
# kernel also discards pending output.
_CONTROLLED = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Terminal:
    """A process on a pseudo-terminal of a given size, and its output."""

    def __init__(self, command, arguments, columns=80, lines=24, **environment):
        self.master, slave = pty.openpty()
        self.resize(columns, lines)
        names = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"}
        base = {name: value for name, value in os.environ.items() if name not in names}
        settings = base | {"TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | environment
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CONTROLLED, *command, *map(str, arguments)], stdin=slave, stdout=slave,
            stderr=slave, env=settings, start_new_session=True,
        )  # fmt: skip
        os.close(slave)
        self.output = ""
        # A read may end within a character.
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))

    def press(self, keys: str) -> None:
        """Type keys; for Ctrl-C, "\\x03", the terminal sends SIGINT."""
        os.write(self.master, keys.encode())

    def read_until(self, pattern: str, start: int = 0) -> None:
        """Read until `pattern` appears after character `start` of the output, ignoring escape sequences."""
        deadline = time.monotonic() + LIMIT_S
        while not re.search(pattern, plain(self.output[start:])):
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.output[-2000:]!r}"
            if not self._read():
                assert re.search(pattern, plain(self.output[start:])), (
                    f"ended without {pattern!r}: {self.output[-2000:]!r}"
                )

    def finish(self) -> int:
        """Read to the end; return the exit code."""
        deadline = time.monotonic() + LIMIT_S
        while self._read():
            assert time.monotonic() < deadline, f"still running: {self.output[-2000:]!r}"
        code = self.process.wait(LIMIT_S)
        os.close(self.master)
        return code

    def _read(self) -> bool:
        """Read some output; return False if the process has closed the terminal."""
        if not select.select([self.master], [], [], 0.1)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:  # Linux reports the end of a pseudo-terminal as EIO
            return False
        self.output += self._decoder.decode(data)
        return bool(data)


def plain(output: str) -> str:
    """Return the output without escape sequences."""
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", output).replace("\r", "")
