"""Which process ends a run, from what the processes say of themselves and from their silence."""

import os
import re
import signal
import threading
import time

import pytest

from loopfeed.engine.peers import (
    BEAT_FILE,
    SEES_ALL,
    SUPERVISOR,
    Beat,
    Peer,
    Peers,
    State,
    describe_fault,
    find_fault,
    is_of_runtime,
)


def peers(*ages_s: float, **states: State) -> dict[int, Peer]:
    """Processes that were heard from so long ago, at 100 s, some in a state: `p1=State.DONE`."""
    beats = [Beat(f"host{number}", 7, states.get(f"p{number}", State.RUNNING), "why") for number in range(len(ages_s))]
    return {number: Peer(beat, "", 100 - age) for number, (beat, age) in enumerate(zip(beats, ages_s, strict=True))}


@pytest.mark.parametrize(
    ("own", "known", "answered_s", "message"),
    [
        (0, peers(0, 59, 0), 100.0, None),
        (0, peers(0, 61, 0), 100.0, "process 1 on host1 has not answered for 61 s (--peer-timeout) after step 7"),
        (2, peers(0, 61, 0), 100.0, "process 1 on host1 has not answered for 61 s"),
        # A process does not judge itself.
        (1, peers(0, 61, 0), 100.0, None),
        # A coordinator that does not answer hides the beats of all.
        (2, peers(62, 90, 62), 38.0, "process 0 on host0 has not answered for 62 s"),
        (2, peers(30, 30, 30), 70.0, None),
        (0, peers(62, 62), 38.0, None),
        # A process that is done may be silent, but not the coordinator.
        (0, peers(0, 500, p1=State.DONE), 100.0, None),
        (1, peers(61, 61, p0=State.DONE, p1=State.DONE), 39.0, "process 0 on host0 has not answered"),
        # One that knows of a loss does not wait long for the silent one, which may be done.
        (0, peers(0, 6, 1, p0=State.SEARCHING), 100.0, "process 1 on host1 was lost after step 7"),
        (2, peers(1, 6, 1, p0=State.SEARCHING), 100.0, "process 1 on host1 was lost after step 7"),
        (0, peers(0, 6, 1, p0=State.SEARCHING, p1=State.DONE), 100.0, "process 1 on host1 was lost"),
        (0, peers(0, 4, 1, p0=State.SEARCHING), 100.0, None),
        # What a process says of itself is better than any guess.
        (0, peers(0, 6, 1, p0=State.SEARCHING, p2=State.FAILED), 100.0, "process 2 on host2 failed after step 7"),
        (0, peers(0, 61, 1, p2=State.ENDED), 100.0, "why"),
    ],
)
def test_the_process_that_ends_the_run_is_found(own, known, answered_s, message):
    found = find_fault(own, known, answered_s, 100.0, 60.0)
    assert (found is None) if message is None else str(found).startswith(message)


def test_a_process_that_never_showed_itself_is_found_too():
    known = {0: Peer(Beat("host0"), "", 100.0), 1: Peer(None, "", 30.0)}
    assert str(find_fault(0, known, 100.0, 100.0, 60.0)).startswith("process 1 on an unknown host has not answered")


def test_a_failure_is_told_with_its_reason_and_a_hint_to_resume_if_there_is_something():
    found = str(find_fault(0, peers(0, 0, p1=State.FAILED), 100.0, 100.0, 60.0))
    assert re.fullmatch(r"process 1 on host1 failed after step 7, .* --resume goes on .*\n  why", found)
    assert describe_fault(1, "host1", "failed", 0) == "process 1 on host1 failed before the first step, so the run ends"


def test_errors_of_the_runtime_are_recognised_by_their_cause():
    import jax

    lost = RuntimeError("wrapped")
    lost.__cause__ = jax.errors.JaxRuntimeError("Connection closed by peer")
    assert is_of_runtime(lost)
    assert not is_of_runtime(ValueError("data"))


class Store:
    """A coordinator that keeps the last texts, to which process 1 has said something once."""

    def __init__(self) -> None:
        self.texts = {"loopfeed/beats/1": '[1, {"host": "host1", "step": 7, "state": "running", "message": ""}]'}

    def key_value_set(self, key: str, text: str, **_: bool) -> None:
        self.texts[key] = text

    def key_value_dir_get(self, _: str) -> list[tuple[str, str]]:
        return list(self.texts.items())


def test_a_process_whose_supervisor_is_gone_is_only_asked_to_stop_and_judges_the_others_itself(tmp_path, monkeypatch):
    asked, killed, ended = list[int](), list[int](), list[str]()
    is_ended = threading.Event()
    monkeypatch.setenv(BEAT_FILE, str(tmp_path / "0"))
    monkeypatch.setenv(SEES_ALL, "1")
    monkeypatch.setenv(SUPERVISOR, "1" if os.getppid() != 1 else "2")
    monkeypatch.setattr(os, "kill", lambda _, number: asked.append(number))
    monkeypatch.setattr(os, "_exit", killed.append)

    def end(message: str) -> None:
        ended.append(message)
        is_ended.set()
        threading.Event().wait()

    alone = Peers(0.5, end)
    time.sleep(2.0)  # four times the limit, as of a last snapshot
    assert (asked, killed, ended) == ([signal.SIGTERM], [], [])
    alone.join(Store(), 0, 2, "localhost:1")
    assert is_ended.wait(20)
    assert ended[0].startswith("process 1 on host1 has not answered for")
    assert (asked, killed) == ([signal.SIGTERM], [])
