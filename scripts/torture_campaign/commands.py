"""Runs the project's commands by a command server, each within a time limit, and tells how they ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
_MOST_READ_BYTES = 1 << 20
_PACKING = frozenset({"preprocess-imagenet", "inspect-shards", "read-pack", "decode-images"})


@dataclass(frozen=True)
class Finished:
    """How a command ended.

    Attributes:
        command: as it was given.
        code: its exit code, or the negative number of the signal that ended it.
        out, err: the first MiB of what it said, as bytes.
        seconds: that it took.
        max_rss_mb: the most memory that it had, in MB.
        hung: whether it was killed at its time limit.
        killed: whether it was killed on purpose.
    """

    command: tuple[str, ...]
    code: int
    out: bytes
    err: bytes
    seconds: float
    max_rss_mb: float
    hung: bool = False
    killed: bool = False

    @property
    def said(self) -> str:
        """Both streams as text; what is no UTF-8 becomes surrogates."""
        return (self.out + b"\n" + self.err).decode(errors="surrogateescape")


@dataclass
class Running:
    """A command under way."""

    server: CommandServer
    command: tuple[str, ...]
    pid: int
    stdout: Path
    stderr: Path
    started_s: float
    killed: bool = False

    def kill(self) -> None:
        """Kill the command and all that it started."""
        self.killed = True
        _kill_group(self.pid)

    def is_over(self) -> bool:
        """Return whether the command has ended."""
        return self.server.has_answer()

    def wait(self, timeout_s: float) -> Finished:
        """Return how the command ended; one that has not by ``timeout_s`` seconds after its start is killed."""
        left = self.started_s + timeout_s - time.monotonic()
        answer, hung = self.server.read_answer(max(0.0, left)), False
        if answer is None:
            hung = True
            _kill_group(self.pid)
            answer = self.server.read_answer(START_TIMEOUT_S)
            if answer is None:
                raise RuntimeError(f"a killed command must end, and {self.command[0]} does not")
        seconds = time.monotonic() - self.started_s
        out, err = _head(self.stdout), _head(self.stderr)
        rss_mb = answer["max_rss_kib"] * 1024 / 1e6
        return Finished(self.command, answer["status"], out, err, seconds, rss_mb, hung, self.killed)


@dataclass
class CommandServer:
    """A started `command_server`; a context manager, for one thread, one command at a time.

    Args:
        flavour: ``packing`` or ``training``: what it has imported.
    """

    flavour: str
    _process: subprocess.Popen[bytes] | None = None
    _read: bytes = b""

    def start(self, command: list[str], folder: Path) -> Running:
        """Start a command in ``folder``, where its stdout and stderr become files beside it."""
        if self._process is None:
            self._process = self._launch()
        assert self._process.stdin is not None
        stdout, stderr = folder.with_name(f"{folder.name}.out"), folder.with_name(f"{folder.name}.err")
        request = {"command": command, "cwd": str(folder), "stdout": str(stdout), "stderr": str(stderr)}
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        self._process.stdin.flush()
        started_s = time.monotonic()
        answer = self.read_answer(START_TIMEOUT_S)
        if answer is None:
            raise RuntimeError(f"the {self.flavour} command server must answer within {START_TIMEOUT_S:g} s")
        return Running(self, tuple(command), answer["pid"], stdout, stderr, started_s)

    def _launch(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.command_server", self.flavour],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=command_environment(),
            start_new_session=True,
        )
        self._process = process
        if self.read_answer(START_TIMEOUT_S) is None:
            raise RuntimeError(f"the {self.flavour} command server must start within {START_TIMEOUT_S:g} s")
        return process

    def has_answer(self) -> bool:
        """Return whether an answer waits to be read."""
        assert self._process is not None
        assert self._process.stdout is not None
        return b"\n" in self._read or bool(select.select([self._process.stdout], [], [], 0)[0])

    def read_answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer, None where none comes in time.

        Raises:
            RuntimeError: the server is gone.
        """
        assert self._process is not None
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                return None
            part = os.read(self._process.stdout.fileno(), 1 << 16)
            if not part:
                raise RuntimeError(f"the {self.flavour} command server ended by itself, {self._process.wait(10)}")
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        return dict(json.loads(line))

    def close(self) -> None:
        """End the server; a command that it still runs dies with it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_TIMEOUT_S)
            for stream in (self._process.stdin, self._process.stdout):
                if stream is not None:
                    with suppress(OSError):
                        stream.close()
            self._process, self._read = None, b""


@dataclass
class Commands:
    """The two servers of one worker; runs a command by the one that has imported it."""

    packing: CommandServer = field(default_factory=lambda: CommandServer("packing"))
    training: CommandServer = field(default_factory=lambda: CommandServer("training"))
    has_ended: bool = False

    def start(self, command: list[str], folder: Path) -> Running:
        """Start a command in ``folder``."""
        if self.has_ended:
            raise RuntimeError("the campaign was stopped")
        server = self.packing if command[0] in _PACKING else self.training
        return server.start(command, folder)

    def run(self, command: list[str], folder: Path, *, timeout_s: float) -> Finished:
        """Run a command in ``folder`` to its end, or kill it at the limit."""
        return self.start(command, folder).wait(timeout_s)

    def end(self) -> None:
        """End both servers, for good."""
        self.has_ended = True
        self.close()

    def close(self) -> None:
        """End both servers; the next command starts them again."""
        self.packing.close()
        self.training.close()


def command_environment() -> dict[str, str]:
    """Return the environment of commands: on the CPU, encoding strictly, of no data set by default."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FEEDLOOP_", "XLA_", "JAX_"))}
    return kept | {
        "JAX_PLATFORMS": "cpu",
        "PYTHONIOENCODING": "utf-8:strict",
        "PYTHONPATH": str(ROOT),
        "OPENBLAS_NUM_THREADS": "1",
        "TERM": "dumb",
    }


def _kill_group(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MOST_READ_BYTES)
