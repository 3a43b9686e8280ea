"""`run-train --spawn N`: starts N processes of the same command on this machine, and ends all of them together.

The first process has the terminal; lines of the others are prefixed with their number. If one process dies or no longer
answers, the others are ended, and one message says which it was and how far it came.
"""

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, NamedTuple

from engine.commands.command_end import say_to_stderr

BEAT_FILE = "FEEDLOOP_BEAT_FILE"
"""The environment variable that names the file in which a process shows that it is alive, and its last step."""
_LOOK_EVERY_S = 0.2
_BEAT_EVERY_S = 0.25
# Between a request to end and the end by force.
_GRACE_S = 4.0
_WRONG_USAGE = 2
_PROGRAM = "from engine.commands.cli import main; main(prog_name='run-train')"


def supervise(arguments: Sequence[str], num_processes: int, peer_timeout_s: float) -> int:
    """Run the command in several processes, and return its exit code.

    Args:
        arguments: the arguments of `run-train`, without `--spawn`.
        num_processes: number of processes.
        peer_timeout_s: seconds without a sign of life after which a process counts as stuck.
    """
    with tempfile.TemporaryDirectory(prefix="feedloop-") as folder:
        beats = [Path(folder) / str(number) for number in range(num_processes)]
        relay = _Relay()
        processes = _start(arguments, beats, relay)
        with _Forwarding(processes):
            fault = _wait(processes, beats, peer_timeout_s)
            # From here on, what the others print is about the end of this one.
            relay.is_quiet = fault is not None
            if fault is not None and fault.code != _WRONG_USAGE:
                say_to_stderr(f"run-train: {fault.message}")
            _end(processes)
    return max(process.returncode for process in processes) if fault is None else fault.code


def without_option(arguments: Sequence[str], option: str) -> list[str]:
    """Return the arguments of a command without an option and its value, `--option VALUE` or `--option=VALUE`."""
    kept: list[str] = []
    words = iter(arguments)
    for word in words:
        if word == option:
            next(words, None)
        elif not word.startswith(f"{option}="):
            kept.append(word)
    return kept


def _start(arguments: Sequence[str], beats: Sequence[Path], relay: "_Relay") -> list[subprocess.Popen[str]]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes: list[subprocess.Popen[str]] = []
    for number, beat in enumerate(beats):
        own = ["--coordinator", f"localhost:{port}", "--num-processes", str(len(beats)), "--process-id", str(number)]
        # Sessions of their own, so that Ctrl-C reaches each of them once, from here.
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments, *own],
            env=os.environ | {BEAT_FILE: str(beat)},
            stdout=None if number == 0 else subprocess.PIPE,
            stderr=None if number == 0 else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if process.stdout is not None:
            threading.Thread(target=relay.pass_on, args=(number, process.stdout), daemon=True).start()
        processes.append(process)
    return processes


class _Relay:
    """Passes the lines of the other processes on, with their numbers.

    Attributes:
        is_quiet: whether to drop them.
    """

    def __init__(self) -> None:
        self.is_quiet = False

    def pass_on(self, number: int, lines: IO[str]) -> None:
        """Pass on all lines of one process."""
        for line in lines:
            # What the runtime says about its own connections is for its developers.
            if not self.is_quiet and not line.startswith("[Gloo]"):
                say_to_stderr(f"process {number}: {line.rstrip()}")


class _Fault(NamedTuple):
    """Why the processes are ended, and the exit code of the command."""

    message: str
    code: int


def _wait(processes: Sequence[subprocess.Popen[str]], beats: Sequence[Path], peer_timeout_s: float) -> _Fault | None:
    """Wait for all processes; return None if all ended well, else why they are to be ended."""
    while True:
        is_running = any(process.poll() is None for process in processes)
        if (fault := _first_fault(processes, beats, peer_timeout_s)) is not None:
            # The others fail a moment after the one whose fault it is.
            time.sleep(_LOOK_EVERY_S)
            return _first_fault(processes, beats, peer_timeout_s) or fault
        if not is_running:
            return None
        time.sleep(_LOOK_EVERY_S)


def _first_fault(
    processes: Sequence[subprocess.Popen[str]], beats: Sequence[Path], peer_timeout_s: float
) -> _Fault | None:
    """Return the fault that explains the others: of a killed process, else of a silent one, else of any other."""
    killed: list[_Fault] = []
    silent: list[_Fault] = []
    failed: list[_Fault] = []
    for number, (process, beat) in enumerate(zip(processes, beats, strict=True)):
        code = process.poll()
        if code is None:
            with suppress(FileNotFoundError):
                silent_s = time.time() - beat.stat().st_mtime
                if silent_s > peer_timeout_s:
                    how = f"has not answered for {silent_s:.0f} s (--peer-timeout)"
                    silent.append(_Fault(_describe(number, beat, how), 1))
        elif code < 0:
            # The runtime aborts a process if another one is lost.
            kind = failed if code == -signal.SIGABRT else killed
            kind.append(_Fault(_describe(number, beat, f"was killed by {signal.Signals(-code).name}"), 1))
        elif code not in (0, 130):
            failed.append(_Fault(_describe(number, beat, f"failed with exit code {code}"), code))
    return next(iter([*killed, *silent, *failed]), None)


def _describe(number: int, beat: Path, how: str) -> str:
    step = beat.read_text() if beat.exists() else ""
    at = f"after step {int(step):,}" if step.isdecimal() and int(step) else "before the first step"
    return (
        f"process {number} on {socket.gethostname()} {how} {at}, so the run ends: the newest snapshot is intact, and "
        "--resume goes on from it, with any number of processes"
    )


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    """End the processes that are still running: ask them, and kill those that do not end in time."""
    deadline = time.monotonic() + _GRACE_S
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class Beat:
    """Shows the supervisor, each second, that this process is alive and how far it came; does nothing without one."""

    def __init__(self) -> None:
        path = os.environ.get(BEAT_FILE)
        self._path = None if path is None else Path(path)
        self._step: Callable[[], int] = lambda: 0
        if self._path is not None:
            threading.Thread(target=self._work, daemon=True).start()

    @staticmethod
    def is_watched() -> bool:
        """Return whether there is a supervisor, which then acts before the runtime does."""
        return BEAT_FILE in os.environ

    def follow(self, step: Callable[[], int]) -> None:
        """Show the result of a function, the number of steps done."""
        self._step = step

    def _work(self) -> None:
        assert self._path is not None
        while True:
            # The supervisor removes the folder at its end.
            with suppress(OSError):
                self._path.write_text(str(self._step()))
            time.sleep(_BEAT_EVERY_S)


class _Forwarding:
    """Inside the block, SIGINT and SIGTERM of this process are sent to all processes instead."""

    def __init__(self, processes: Sequence[subprocess.Popen[str]]) -> None:
        self._processes = processes
        self._before: dict[int, object] = {}

    def __enter__(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._forward)

    def _forward(self, number: int, _: object) -> None:
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.send_signal(number)

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
