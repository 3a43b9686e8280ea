"""The supervisor of `run-train`: starts its process, or several on this machine, as children, and ends them together.

`--spawn N` starts N processes; with `--coordinator`, each supervisor has one child, which joins those of the others.
The terminal belongs to the first child; lines of others are prefixed with their number. If a process dies or no longer
answers, one message says which it was and how far it came.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from loopfeed.engine.commands.child_program import child_program
from loopfeed.engine.commands.command_end import say_to_stderr
from loopfeed.engine.peers import BEAT_FILE, SEES_ALL, SUPERVISOR, describe_fault, is_supervised, signals_file
from loopfeed.preprocess.commands.guarded_output import GuardedStream
from loopfeed.preprocess.stop_signals import SignalBursts, install, stop_signals, uninstall
from loopfeed.preprocess.workers import Worker

_LOOK_EVERY_S = 0.2
# Between a request to end and the end by force.
_GRACE_S = 4.0
# After a signal: before the first step, where there is nothing to save, and once a process has ended.
_STOP_GRACE_S, _LAST_GRACE_S = 10.0, 3.0
_CONNECT_S = 3.0
_MOST_RUNTIME_LINES = 20
_WRONG_USAGE, _STOPPED = 2, 130
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PROGRAM = child_program("loopfeed.engine.commands.cli", "main", "main(prog_name='run-train')")


class Outcome(NamedTuple):
    """How the processes ended.

    Attributes:
        code: exit code of the command.
        signals: the signals that this process received and passed on.
    """

    code: int
    signals: frozenset[int]


def supervise(
    arguments: Sequence[str], num_processes: int | None, peer_timeout_s: float, stops: Sequence[int] = ()
) -> Outcome:
    """Run the command in children of this process until they end.

    Args:
        arguments: the arguments of `run-train`, without `--spawn`.
        num_processes: number of processes to start; None for one, which joins others by its own arguments.
        peer_timeout_s: seconds without a sign of life after which a process counts as stuck.
        stops: signals that are passed on as SIGTERM.
    """
    with tempfile.TemporaryDirectory(prefix="loopfeed-") as folder:
        relay = _Relay()
        with _Forwarding(stops) as forwarding:
            children = _start(arguments, num_processes, Path(folder), relay)
            forwarding.to(children)
            fault = _wait(children, peer_timeout_s, forwarding.received)
            # From here on, what the others print is about the end of this one.
            relay.is_quiet = fault is not None
            if fault is not None and fault.message and fault.code != _WRONG_USAGE:
                say_to_stderr(f"run-train: {fault.message}")
            _end(children)
    if fault is not None:
        return Outcome(fault.code, frozenset(forwarding.received))
    # A signal that this process passed on can end a child that does not handle signals yet.
    codes = [_STOPPED if child.process.returncode < 0 else child.process.returncode for child in children]
    return Outcome(max(codes), frozenset(forwarding.received))


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


def keep_runtime_output() -> None:
    """Write to a file of the supervisor what the runtime, not Python, writes to stdout and stderr of this process.

    It says many lines about a lost process, and cannot be told not to. The supervisor shows the last of them if it
    knows no other cause.
    """
    if not is_supervised():
        return
    with suppress(OSError), _runtime_output(Path(os.environ[BEAT_FILE])).open("ab") as file:
        for descriptor, name in ((1, "stdout"), (2, "stderr")):
            stream: GuardedStream = getattr(sys, name)
            stream.flush()
            opened = open(  # noqa: SIM115 - as long as the process lives; with the name that a message about it says
                f"<{name}>",
                "w",
                buffering=1,
                encoding=stream.encoding,
                errors=stream.errors,
                opener=lambda *_, descriptor=descriptor: os.dup(descriptor),
            )
            setattr(sys, name, GuardedStream(stream.terminal.on(opened)))
            os.dup2(file.fileno(), descriptor)


def _runtime_output(beat: Path) -> Path:
    return beat.with_suffix(".runtime")


@dataclass
class _Child:
    """One process, the number by which its supervisor knows it, and the file of its beats.

    Attributes:
        silent_s: the seconds since its last beat, 0 before the first.
    """

    number: int
    process: "subprocess.Popen[str]"
    beat: Path
    silent_s: float = 0.0
    _came_ns: int | None = None
    _num_signals: int = 0

    def read(self) -> dict[str, Any]:
        """Return its last beat; empty before the first."""
        with suppress(OSError):
            return dict(json.loads(self.beat.read_text()))
        return {}

    def look(self, passed_s: float) -> None:
        """Look whether a beat has come in the seconds since the last look.

        These are not taken from a clock, because this process may have been suspended together with its children.
        """
        came_ns = None
        with suppress(FileNotFoundError):
            came_ns = self.beat.stat().st_mtime_ns
        is_silent = came_ns is not None and came_ns == self._came_ns
        self.silent_s = self.silent_s + passed_s if is_silent else 0.0
        self._came_ns = came_ns

    def send(self, number: int) -> None:
        """Send it a signal, and first count it, because a scheduler may send the same signal to it too."""
        self._num_signals += 1
        counted = signals_file(self.beat)
        # The process may read it at any moment.
        with suppress(OSError):
            written = counted.with_suffix(".new-signals")
            written.write_text(str(self._num_signals))
            written.replace(counted)
        with suppress(ProcessLookupError):
            self.process.send_signal(number)

    def describe(self, how: str) -> str:
        """Return the message that it ended the run."""
        beat = self.read()
        return describe_fault(beat.get("number", self.number), socket.gethostname(), how, beat.get("step") or 0)

    def runtime_lines(self) -> str:
        """Return the last lines that the runtime wrote, indented, to be appended to a message."""
        with suppress(OSError):
            lines = _runtime_output(self.beat).read_text(errors="replace").splitlines()
            return "".join(f"\n  {line}" for line in lines[-_MOST_RUNTIME_LINES:])
        return ""


def _start(arguments: Sequence[str], num_processes: int | None, folder: Path, relay: "_Relay") -> list[_Child]:
    own: list[list[str]] = [[]]
    if num_processes is not None:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        total = ["--coordinator", address, "--num-processes", str(num_processes)]
        own = [[*total, "--process-id", str(number)] for number in range(num_processes)]
    children: list[_Child] = []
    for number, words in enumerate(own):
        beat = folder / str(number)
        # Sessions of their own, so that Ctrl-C reaches each of them once, from here.
        process = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, *arguments, *words],
            env=os.environ
            | {BEAT_FILE: str(beat), SUPERVISOR: str(os.getpid())}
            | ({} if num_processes is None else {SEES_ALL: "1"}),
            stdout=None if number == 0 else subprocess.PIPE,
            stderr=None if number == 0 else subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        if process.stdout is not None:
            Worker(partial(relay.pass_on, number, process.stdout), f"relay-{number}").start(is_attended=False)
        children.append(_Child(number, process, beat))
    return children


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
    """Why the processes are ended, empty if the process said it itself, and the exit code of the command."""

    message: str
    code: int


def _wait(children: Sequence[_Child], peer_timeout_s: float, received: Set[int]) -> _Fault | None:
    """Wait for all processes; return None if all ended well, else why they are to be ended."""
    last, stop = time.monotonic(), _Stop(children)
    while True:
        passed_s, last = min(time.monotonic() - last, 4 * _LOOK_EVERY_S), time.monotonic()
        for child in children:
            child.look(passed_s)
        if received and (cut := stop.cut_short(passed_s)) is not None:
            return cut
        is_running = any(child.process.poll() is None for child in children)
        if (fault := _first_fault(children, peer_timeout_s, received)) is not None:
            # The others fail a moment after the one whose fault it is.
            time.sleep(_LOOK_EVERY_S)
            return _first_fault(children, peer_timeout_s, received) or fault
        if not is_running:
            return None
        time.sleep(_LOOK_EVERY_S)


class _Stop:
    """Watches how the processes stop after a signal, which reaches some of them before they train together."""

    def __init__(self, children: Sequence[_Child]) -> None:
        self._children = children
        self._asked_s = self._ended_s = 0.0

    def cut_short(self, passed_s: float) -> _Fault | None:
        """Return why all processes are to be ended once one of them has stopped; None while the others may go on.

        All end if the others have had time to stop too, or if none had begun a step, so that there is nothing to save.

        Args:
            passed_s: seconds since the last call, or since the signal.
        """
        codes = [child.process.poll() for child in self._children]
        if None not in codes:
            return None
        self._asked_s += passed_s
        if any(code == _STOPPED or (code is not None and -code in _STOP_SIGNALS) for code in codes):
            self._ended_s += passed_s
        has_begun = any(child.read().get("step") for child in self._children)
        if self._ended_s > _LAST_GRACE_S or (self._asked_s > _STOP_GRACE_S and not has_begun):
            return _Fault("", _STOPPED)
        return None


def _first_fault(children: Sequence[_Child], peer_timeout_s: float, received: Set[int]) -> _Fault | None:
    """Return the fault that explains the others: of a killed process, else of a silent one, else of any other."""
    killed: list[_Fault] = []
    silent: list[_Fault] = []
    failed: list[_Fault] = []
    for child in children:
        code = child.process.poll()
        if code is None:
            if child.silent_s > peer_timeout_s:
                how = f"has not answered for {child.silent_s:.0f} s (--peer-timeout)"
                silent.append(_Fault(child.describe(how), 1))
        elif code == -signal.SIGABRT:
            # The runtime aborts a process if it loses the first one.
            message = _never_joined(child) or _lost_coordinator(child) if len(children) == 1 else None
            failed.append(_Fault(message or _describe_killed(child, code), 1))
        elif code < 0 and not (received and -code in _STOP_SIGNALS):
            killed.append(_Fault(_describe_killed(child, code), 1))
        elif code > 0 and code != _STOPPED:
            # A process with a supervisor of its own has the terminal, and said why.
            failed.append(_Fault("" if len(children) == 1 else child.describe(f"failed with exit code {code}"), code))
    return next(iter([*killed, *silent, *failed]), None)


def _describe_killed(child: _Child, code: int) -> str:
    is_asked = -code in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    said = "" if is_asked else child.runtime_lines()
    return child.describe(f"was killed by {signal.Signals(-code).name}") + said


def _never_joined(child: _Child) -> str | None:
    """Return the message that others are missing, or None if all have joined."""
    if child.read().get("coordinator"):
        return None
    return (
        "not all processes have joined within --join-timeout: start all of them, with the same --coordinator and "
        "--num-processes"
    )


def _lost_coordinator(child: _Child) -> str | None:
    """Return the message that the first process is gone, or None if it can still be reached."""
    beat = child.read()
    host, _, port = beat.get("coordinator", "").rpartition(":")
    if not beat.get("number") or not host:
        return None
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_CONNECT_S).close()
    except OSError as error:
        name, step = beat.get("first") or (host, None)
        return describe_fault(0, name, f"no longer accepts connections ({error.strerror or error})", step)
    return None


def _end(children: Sequence[_Child]) -> None:
    """End the processes that are still running: ask them, and kill those that do not end in time."""
    deadline = time.monotonic() + _GRACE_S
    for child in children:
        if child.process.poll() is None:
            child.send(signal.SIGTERM)
    for child in children:
        try:
            child.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            child.process.kill()
            child.process.wait()


class _Forwarding:
    """Inside the block, the stop signals of this process are sent to all children instead, one for each request.

    Args:
        stops: other signals, which are sent as SIGTERM.

    Attributes:
        received: the numbers of the signals that came.
    """

    def __init__(self, stops: Sequence[int]) -> None:
        self.received: set[int] = set()
        self._stops, self._children, self._bursts = stops, list[_Child](), SignalBursts()
        self._numbers: tuple[int, ...] = ()

    def __enter__(self) -> "_Forwarding":
        self._numbers = (*map(int, stop_signals()), *self._stops)
        for number in self._numbers:
            install(number, self._forward)
        # The children inherit it: a scheduler may send the signal to them too.
        self._ignored = {number: signal.signal(number, signal.SIG_IGN) for number in self._stops}
        return self

    def to(self, children: Sequence[_Child]) -> None:
        """Forward to these children from now on, and what has come so far."""
        self._children = list(children)
        for number in self.received:
            self._send(number)
        for number, handler in self._ignored.items():
            signal.signal(number, handler)

    def _forward(self, number: int, _: object) -> None:
        self.received.add(number)
        if self._bursts.is_new():
            self._send(number)

    def _send(self, number: int) -> None:
        for child in self._children:
            child.send(signal.SIGTERM if number in self._stops else number)

    def __exit__(self, *_: object) -> None:
        for number in self._numbers:
            uninstall(number)
