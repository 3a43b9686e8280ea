"""What the processes of a run know of each other: each publishes beats, and learns from those of others which is lost.

Beats go through the key-value store of jax's coordinator, which is part of the first process, and into a file for the
supervisor of this process. A beat comes from a thread of its own: compilations and long evaluations do not interrupt
it, because it shows that a process is alive; the step in it says how far the process came.
"""

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from loopfeed.preprocess.workers import Worker

BEAT_FILE = "LOOPFEED_BEAT_FILE"
"""The environment variable that names the file in which a process shows its beats to its supervisor."""
SEES_ALL = "LOOPFEED_SUPERVISOR_SEES_ALL"
"""The environment variable that says that the supervisor started all processes, and judges them itself."""
SUPERVISOR = "LOOPFEED_SUPERVISOR"
"""The environment variable with the process ID of the supervisor."""
_FOLDER = "loopfeed/beats"
_LOOK_EVERY_S = 0.25
# At the end, all wait for the last one.
_DONE_EVERY_S = 0.1
# A process that knows that another is gone waits only this long for its beat.
_HURRY_S = 5.0
# A process without a supervisor that has not begun a run may wait for others that never come: it is ended after this.
_UNBEGUN_S = 10.0


class State(StrEnum):
    """What a process does: run, look for the process that it lost, wait for the others, or end the run."""

    RUNNING = "running"
    SEARCHING = "searching"
    DONE = "done"
    FAILED = "failed"
    ENDED = "ended"


@dataclass(frozen=True)
class Beat:
    """What one process says of itself.

    Attributes:
        host: name of its machine.
        step: the last step that it began; None if unknown.
        state: what it does.
        message: why it failed or ended the run.
    """

    host: str
    step: int | None = None
    state: State = State.RUNNING
    message: str = ""


@dataclass
class Peer:
    """What is known of one of the processes: its last beat, that beat as text, and when it came, in seconds."""

    beat: Beat | None
    text: str
    came_s: float


def is_supervised() -> bool:
    """Return whether this process is the child of a supervisor."""
    return BEAT_FILE in os.environ


def signals_file(beat: Path) -> Path:
    """Return the file in which a supervisor counts the signals that it sent to the process with these beats."""
    return beat.with_suffix(".signals")


def num_supervisor_signals() -> int:
    """Return how many signals the supervisor has sent to this process; 0 without a supervisor."""
    if is_supervised():
        with suppress(OSError):
            return int(signals_file(Path(os.environ[BEAT_FILE])).read_text())
    return 0


def describe_fault(number: int, host: str, how: str, step: int | None) -> str:
    """Return the message that a process ended the run.

    Args:
        number: number of the process.
        host: name of its machine.
        how: what happened to it, such as "was killed by SIGKILL".
        step: the last step that it began; None if unknown.
    """
    if step == 0:
        return f"process {number} on {host} {how} before the first step, so the run ends"
    at = "" if step is None else f" after step {step:,}"
    return (
        f"process {number} on {host} {how}{at}, so the run ends: what was saved is intact, and --resume goes on from "
        "the newest snapshot, or from the first step if there is none, with any number of processes"
    )


def find_fault(own: int, peers: Mapping[int, Peer], answered_s: float, now_s: float, limit_s: float) -> str | None:
    """Return the message about the process that ends the run, or None if there is none.

    Args:
        own: number of this process.
        peers: what is known of all processes, this one included.
        answered_s: when the coordinator last answered.
        now_s: the present, on the same clock.
        limit_s: the longest silence of a process.
    """
    beats = {number: peer.beat for number, peer in peers.items() if number != own and peer.beat is not None}
    for beat in beats.values():
        if beat.state is State.ENDED:
            return beat.message
    for number, beat in beats.items():
        if beat.state is State.FAILED:
            return f"{describe_fault(number, beat.host, 'failed', beat.step)}\n  {beat.message}"
    searchers = [peer.beat for peer in peers.values() if peer.beat is not None and peer.beat.state is State.SEARCHING]
    limit_s = min(limit_s, _HURRY_S) if searchers else limit_s
    silent_s = {number: answered_s - peer.came_s for number, peer in peers.items() if number != own}
    if own != 0 and now_s - answered_s > limit_s:
        silent_s = {0: now_s - answered_s}
    for number, seconds in silent_s.items():
        last = peers[number].beat
        is_done = last is not None and last.state is State.DONE
        if seconds > limit_s and (searchers or not is_done or number == 0):
            how = f"has not answered for {seconds:.0f} s (--peer-timeout)" if not searchers else "was lost"
            host, step = ("an unknown host", None) if last is None else (last.host, last.step)
            return describe_fault(number, host, how, step)
    return None


def is_of_runtime(error: BaseException | None) -> bool:
    """Return whether an error comes from the runtime, which also reports the loss of another process."""
    import jax

    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return True
        error = error.__cause__ or error.__context__
    return False


class Peers:
    """This process's part in the run: its beats, and its watch over the others.

    Args:
        peer_timeout_s: the longest silence of a process, in seconds.
        end: called on a thread of its own with the message that ends the run; must end this process.
    """

    def __init__(self, peer_timeout_s: float, end: Callable[[str], None]) -> None:
        self._limit_s, self._end = peer_timeout_s, end
        self._every_s = min(1.0, peer_timeout_s / 20)
        path = os.environ.get(BEAT_FILE)
        self._path = None if path is None else Path(path)
        self._judges = SEES_ALL not in os.environ
        self._host = socket.gethostname()
        # That of the start: the supervisor may be gone by now.
        self._parent = int(os.environ.get(SUPERVISOR, os.getppid()))
        self._orphan_since_s: float | None = None
        self._step: Callable[[], int | None] = lambda: None
        self._state, self._message = State.RUNNING, ""
        self._own, self._peers, self._coordinator = 0, dict[int, Peer](), ""
        self._client: Any = None
        self._now_s = self._answered_s = 0.0
        self._changed, self._is_done_told = threading.Event(), threading.Event()
        self._are_all_done, self._is_left = threading.Event(), threading.Event()
        Worker(self._watch, "peers").start(is_attended=False)

    def join(self, client: Any, own: int, count: int, coordinator: str) -> None:
        """Exchange beats with the others from now on.

        Args:
            client: jax's client of the coordinator.
            own: number of this process.
            count: number of all processes.
            coordinator: address HOST:PORT of the first process.
        """
        self._own, self._coordinator = own, coordinator
        self._answered_s = self._now_s
        self._peers = {number: Peer(None, "", self._now_s) for number in range(count)}
        self._client = client
        Worker(self._exchange, "beats").start(is_attended=False)

    def follow(self, step: Callable[[], int]) -> None:
        """Show the result of a function, the number of steps begun."""
        self._step = step

    def fail(self, message: str, *, is_by_others: bool) -> None:
        """Tell the others that this process fails, and give them time to read it.

        Args:
            message: why it fails.
            is_by_others: whether another process may be the cause. It is then looked for; if it is found, this process
                ends with a message about that one, and the function does not return.
        """
        if self._client is None:
            return
        if is_by_others:
            self._become(State.SEARCHING)
            time.sleep(_HURRY_S + 6 * self._every_s)
            while self._state is State.ENDED:
                time.sleep(_LOOK_EVERY_S)  # the watch has found it, and ends this process
        self._become(State.FAILED, next(iter(message.splitlines()), ""))
        # A supervisor that sees all ends them itself.
        if self._judges:
            self._let_read()

    def leave(self) -> None:
        """Wait until all processes are done; stop watching them, because they may end now."""
        if self._client is None:
            return
        self._become(State.DONE)
        # Not endless: the watch, or the supervisor, ends this process if another is lost; without one, it ends itself.
        self._are_all_done.wait()
        self._is_left.set()

    def interpreter_ends(self) -> None:
        """Say that this process is done or, after an error, that it failed; does not wait for the others."""
        if self._client is None or self._state is not State.RUNNING:
            return
        if (error := getattr(sys, "last_exc", None)) is not None:
            self.fail(f"{type(error).__name__}: {error}", is_by_others=is_of_runtime(error))
        else:
            self._become(State.DONE)
            self._is_done_told.wait(2 * self._every_s)

    def _become(self, state: State, message: str = "") -> None:
        self._message, self._state = message, state
        self._changed.set()

    def _let_read(self) -> None:
        """Wait until the others have read the last beat, for which they need the coordinator in the first process."""
        time.sleep((5 if self._own == 0 else 2) * self._every_s)

    def _exchange(self) -> None:
        count = 0
        while not self._is_left.is_set():
            count += 1
            self._changed.clear()
            own = Beat(self._host, self._step(), self._state, self._message)
            # Without an answer, the watch finds what is to be done.
            with suppress(Exception):
                text = json.dumps([count, asdict(own)])
                self._client.key_value_set(f"{_FOLDER}/{self._own}", text, allow_overwrite=True)
                self._take(dict(self._client.key_value_dir_get(f"{_FOLDER}/")))
                if own.state is State.DONE:
                    self._is_done_told.set()
            if own.state is State.DONE:
                time.sleep(_DONE_EVERY_S)
            else:
                self._changed.wait(self._every_s)

    def _take(self, found: Mapping[str, str]) -> None:
        self._answered_s = self._now_s
        for key, text in found.items():
            peer = self._peers[int(key.rpartition("/")[2])]
            if text != peer.text:
                values = json.loads(text)[1]
                peer.beat, peer.text = Beat(**values | {"state": State(values["state"])}), text
                peer.came_s = self._now_s
        beats = [peer.beat for peer in self._peers.values()]
        if all(beat is not None and beat.state is State.DONE for beat in beats):
            self._are_all_done.set()

    def _watch(self) -> None:
        last = time.monotonic()
        while True:
            time.sleep(_LOOK_EVERY_S)
            # A machine that slept, or a process that was stopped, must not take the time for that of the others.
            self._now_s += min(time.monotonic() - last, 4 * _LOOK_EVERY_S)
            last = time.monotonic()
            self._show()
            if not self._judges or self._client is None or self._is_left.is_set() or self._state is State.FAILED:
                continue
            message = find_fault(self._own, self._peers, self._answered_s, self._now_s, self._limit_s)
            if message is not None:
                self._become(State.ENDED, message)
                self._let_read()
                # In the meantime this process may have failed, or been stopped, by itself.
                if self._state is State.ENDED:
                    self._end(message)

    def _stop_without_supervisor(self) -> None:
        """Stop this process cleanly, however long its last snapshot takes, and judge the others from now on."""
        self._orphan_since_s, self._judges = self._now_s, True
        os.kill(os.getpid(), signal.SIGTERM)

    def _show(self) -> None:
        """Show the supervisor that this process is alive; stop it if its supervisor is gone."""
        if self._path is None:
            return
        if os.getppid() != self._parent and self._orphan_since_s is None:
            self._stop_without_supervisor()
        elif self._step() is None and self._now_s > (self._orphan_since_s or self._now_s) + _UNBEGUN_S:
            os._exit(1)
        first = self._peers[0].beat if self._peers else None
        shown = {
            "step": self._step(),
            "number": self._own,
            "coordinator": self._coordinator,
            "first": None if first is None else [first.host, first.step],
        }
        # The supervisor removes the folder at its end.
        with suppress(OSError):
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps(shown))
            written.replace(self._path)
