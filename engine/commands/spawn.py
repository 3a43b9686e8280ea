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
from typing import IO

from engine.commands.command_end import say_to_stderr

BEAT_FILE = "FEEDLOOP_BEAT_FILE"
"""The environment variable that names the file in which a process shows that it is alive, and its last step."""
_LOOK_EVERY_S = 0.2
_BEAT_EVERY_S = 1.0
# Between a request to end and the end by force.
_GRACE_S = 20.0
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
        processes = _start(arguments, beats)
        with _Forwarding(processes):
            fault = _wait(processes, beats, peer_timeout_s)
            if fault is not None:
                say_to_stderr(f"run-train: {fault}")
            _end(processes)
        codes = [process.returncode for process in processes]
    if fault is None:
        return max(codes)
    return next((code for code in codes if code == 2), 1)


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


def _start(arguments: Sequence[str], beats: Sequence[Path]) -> list[subprocess.Popen[str]]:
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
            threading.Thread(target=_relay, args=(number, process.stdout), daemon=True).start()
        processes.append(process)
    return processes


def _relay(number: int, lines: IO[str]) -> None:
    for line in lines:
        say_to_stderr(f"process {number}: {line.rstrip()}")


def _wait(processes: Sequence[subprocess.Popen[str]], beats: Sequence[Path], peer_timeout_s: float) -> str | None:
    """Wait for all processes; return None if all ended well, else what is wrong with the first that did not."""
    while any(process.poll() is None for process in processes):
        for number, process in enumerate(processes):
            code = process.poll()
            if code not in (None, 0, 130):
                how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"failed with exit code {code}"
                return _describe(number, beats[number], how)
            with suppress(FileNotFoundError):
                silent_s = time.time() - beats[number].stat().st_mtime
                if code is None and silent_s > peer_timeout_s:
                    return _describe(number, beats[number], f"has not answered for {silent_s:.0f} s (--peer-timeout)")
        time.sleep(_LOOK_EVERY_S)
    for number, process in enumerate(processes):
        if process.returncode not in (0, 130):
            return _describe(number, beats[number], f"failed with exit code {process.returncode}")
    return None


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
