"""Commands of the project, run in forks of one process that has imported it, with limits on time, memory and files.

That process is the fork server of `multiprocessing`; it starts no thread, jax backend or TensorStore before a fork. A
command has its own process group, ends as an interpreter ends, and dies with the campaign.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint, distribution
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parents[2]
OWN_PROGRAMS = {
    "read-pack": "scripts.torture_campaign.pack_oracle:read_pack",
    "decode-images": "scripts.torture_campaign.image_oracle:decode_images",
}
_START_TIMEOUT_S = 120.0
_DATA_LIMIT_BYTES, _FILE_LIMIT_BYTES = 3 << 30, 4 << 30
_MAX_OUTPUT_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1
SERVER = get_context("forkserver")
SERVER.set_forkserver_preload(["scripts.torture_campaign.preloaded"])


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
    """A command that starts when this object is made, in a folder beside which its stdout and stderr are written.

    Attributes:
        command: the command line: a command of the project, one of `OWN_PROGRAMS`, or a module with a ``main``.
        folder: its working folder.
        environment: the orders for the shim (`call_faults`).
    """

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = MappingProxyType({})
    killed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._answers, theirs = SERVER.Pipe(duplex=False)
        for path in output_files(self.folder):
            path.touch()
        given = theirs, list(self.command), self.folder, dict(self.environment)
        self._process = SERVER.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        theirs.close()
        if not self._answers.poll(_START_TIMEOUT_S):
            raise RuntimeError(f"{self.command[0]} was not started within {_START_TIMEOUT_S:g} s")
        self._pid = self._answers.recv()
        self.started_s = time.monotonic()

    def kill(self) -> None:
        """Kill the command and its child processes."""
        self.killed = True
        for kill in (os.kill, os.killpg):  # it may not have its group yet
            with suppress(ProcessLookupError, PermissionError):
                kill(self._pid, signal.SIGKILL)

    def is_over(self) -> bool:
        """Return whether the command has ended."""
        return self._answers.poll()

    def wait(self, timeout_s: float) -> Finished:
        """Wait for the command and return its result; kill it ``timeout_s`` seconds after its start."""
        hung = not self._answers.poll(max(0.0, self.started_s + timeout_s - time.monotonic()))
        if hung:
            self.kill()
        code, max_rss_kib = self._answers.recv()
        self._process.join()
        out, err = map(_head, output_files(self.folder))
        seconds, is_killed = time.monotonic() - self.started_s, self.killed and not hung
        return Finished(tuple(self.command), code, out, err, seconds, max_rss_kib * 1024 / 1e6, hung, is_killed)


def output_files(folder: Path) -> tuple[Path, Path]:
    """Return the files of the stdout and stderr of a command that works in a folder."""
    return folder.with_name(f"{folder.name}.out"), folder.with_name(f"{folder.name}.err")


def set_environment(shim: Path | None) -> None:
    """Set the environment of commands: on the CPU, with strict encoding and without settings of the caller's own.

    Args:
        shim: a library that every command loads, which does nothing without orders.
    """
    for name in [name for name in os.environ if name.startswith(("LOOPFEED_", "XLA_", "JAX_"))]:
        del os.environ[name]
    os.environ |= {
        "JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiles faster
        "PYTHONIOENCODING": "utf-8:strict", "OPENBLAS_NUM_THREADS": "1", "TERM": "dumb",
        **({} if shim is None else {"LD_PRELOAD": os.fspath(shim)}),
    }  # fmt: skip


def load_command(name: str) -> EntryPoint:
    """Return where a command begins."""
    found = distribution("loopfeed").entry_points.select(group="console_scripts", name=name)
    return next(iter(found), EntryPoint(name, OWN_PROGRAMS.get(name, f"{name}:main"), "console_scripts"))


def _serve(answers: Connection, command: list[str], folder: Path, environment: dict[str, str]) -> None:
    """Fork a command; send its process id, then its exit code and its peak memory in KiB."""
    _die_with_parent()
    if (pid := os.fork()) == 0:
        _run(command, folder, environment)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the campaign ends its commands
    answers.send(pid)
    _, status, usage = os.wait4(pid, 0)
    answers.send((os.waitstatus_to_exitcode(status), usage.ru_maxrss))


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    os.setsid()
    _die_with_parent()
    for target, path in enumerate(output_files(folder), start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), target)
    for limit, most in (("DATA", _DATA_LIMIT_BYTES), ("FSIZE", _FILE_LIMIT_BYTES), ("CORE", 0)):
        resource.setrlimit(getattr(resource, f"RLIMIT_{limit}"), (most, most))
    os.chdir(folder)
    if environment:
        os.environ.update(environment)
        ctypes.CDLL(None).torture_arm()  # of the shim, which read the environment when the server started
    sys.argv = command
    try:
        sys.exit(load_command(command[0]).load()())
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:  # noqa: BLE001 - as an interpreter ends
        traceback.print_exc()
        code = 1
    ctypes.pythonapi.Py_Exit(code)  # past the ends of `multiprocessing`, which let the interpreter's own go


def _die_with_parent() -> None:
    """On Linux, have the kernel kill this process when its parent is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_OUTPUT_BYTES)
