"""A command server that runs the project's commands, each with a time limit, and reports how they ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 120.0
_MAX_OUTPUT_BYTES = 1 << 20
_PACKING = frozenset({"preprocess-imagenet", "inspect-shards", "read-pack", "decode-images"})


@dataclass(frozen=True)
class Finished:
    """A finished command.

    Attributes:
        command: the command line.
        code: its exit code, or the negative number of the signal that killed it.
        out, err: the first MiB of its stdout and stderr.
        seconds: its duration in seconds.
        max_rss_mb: its peak memory, in MB.
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
    def output(self) -> str:
        """Both streams as text; bytes that are not UTF-8 become surrogates."""
        return (self.out + b"\n" + self.err).decode(errors="surrogateescape")


@dataclass
class Running:
    """A running command."""

    server: CommandServer
    command: tuple[str, ...]
    pid: int
    stdout: Path
    stderr: Path
    started_s: float
    killed: bool = False

    def kill(self) -> None:
        """Kill the command and its child processes."""
        self.killed = True
        _kill_group(self.pid)

    def is_over(self) -> bool:
        """Return whether the command has ended."""
        return self.server.has_answer()

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the command and return its result; kill it ``timeout_s`` seconds after its start."""
        left = self.started_s + timeout_s - time.monotonic()
        answer, hung = self.server.read_answer(max(0.0, left)), False
        if answer is None:
            hung = True
            _kill_group(self.pid)
            answer = self.server.read_answer(START_TIMEOUT_S)
            if answer is None:
                raise RuntimeError(f"{self.command[0]} did not end after it was killed")
        seconds = time.monotonic() - self.started_s
        out, err = _head(self.stdout), _head(self.stderr)
        rss_mb = answer["max_rss_kib"] * 1024 / 1e6
        return Finished(self.command, answer["status"], out, err, seconds, rss_mb, hung, self.killed)


@dataclass
class CommandServer:
    """A `command_server` process, for one thread and one command at a time.

    Args:
        role: ``packing`` or ``training``, the modules that it has imported.
        shim: a library that is loaded before libc (`call_faults`), if any.
    """

    role: str
    shim: Path | None = None
    _process: subprocess.Popen[bytes] | None = None
    _read: bytes = b""

    def start(self, command: list[str], folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Running:
        """Start a command in ``folder``; its stdout and stderr are written to files beside that folder.

        Args:
            command: the command line.
            folder: its working folder.
            environment: the orders for the shim.
        """
        if self._process is None:
            self._process = self._launch()
        assert self._process.stdin is not None
        stdout, stderr = folder.with_name(f"{folder.name}.out"), folder.with_name(f"{folder.name}.err")
        request = {"command": command, "cwd": str(folder), "stdout": str(stdout), "stderr": str(stderr)} | {
            "environment": dict(environment)
        }
        self._process.stdin.write((json.dumps(request) + "\n").encode())
        self._process.stdin.flush()
        started_s = time.monotonic()
        answer = self.read_answer(START_TIMEOUT_S)
        if answer is None:
            raise RuntimeError(f"the {self.role} command server did not answer within {START_TIMEOUT_S:g} s")
        return Running(self, tuple(command), answer["pid"], stdout, stderr, started_s)

    def _launch(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.command_server", self.role],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=ROOT,
            env=command_environment() | ({} if self.shim is None else {"LD_PRELOAD": str(self.shim)}),
            start_new_session=True,
        )
        self._process = process
        if self.read_answer(START_TIMEOUT_S) is None:
            raise RuntimeError(f"the {self.role} command server did not start within {START_TIMEOUT_S:g} s")
        return process

    def has_answer(self) -> bool:
        """Return whether there is an answer to read."""
        assert self._process is not None
        assert self._process.stdout is not None
        return b"\n" in self._read or bool(select.select([self._process.stdout], [], [], 0)[0])

    def read_answer(self, timeout_s: float) -> dict[str, Any] | None:
        """Return the next answer, or None if there is none in time.

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
                raise RuntimeError(f"the {self.role} command server exited with {self._process.wait(10)}")
            self._read += part
        line, self._read = self._read.split(b"\n", 1)
        return dict(json.loads(line))

    def close(self) -> None:
        """Kill the server; a command that it still runs dies with it."""
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
    """The two servers of one worker; each command runs in the server that has imported it."""

    shim: Path | None = None
    has_ended: bool = False

    def __post_init__(self) -> None:
        self.packing, self.training = CommandServer("packing", self.shim), CommandServer("training", self.shim)

    def start(self, command: list[str], folder: Path, environment: Mapping[str, str] = MappingProxyType({})) -> Running:
        """Start a command in ``folder``."""
        if self.has_ended:
            raise RuntimeError("the campaign was stopped")
        server = self.packing if command[0] in _PACKING else self.training
        return server.start(command, folder, environment)

    def run(
        self,
        command: list[str],
        folder: Path,
        *,
        timeout_s: float,
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> Finished:
        """Run a command in ``folder`` to its end, or kill it at the limit."""
        return self.start(command, folder, environment).wait(timeout_s)

    def end(self) -> None:
        """Kill both servers permanently."""
        self.has_ended = True
        self.close()

    def close(self) -> None:
        """Kill both servers; the next command starts them again."""
        self.packing.close()
        self.training.close()


def command_environment() -> dict[str, str]:
    """Return the environment of commands: on the CPU, with strict encoding and without a default data set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LOOPFEED_", "XLA_", "JAX_"))}
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
        return file.read(_MAX_OUTPUT_BYTES)
