"""Handlers of signals that act in one process, and commands that signals stop."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import click
import pytest

from loopfeed.preprocess.commands.guarded_output import GuardedCommand
from loopfeed.preprocess.stop_signals import install, stop_signals, stops_as_interrupts, uninstall

ROOT = Path(__file__).parents[1]
LIMIT_S = 60


@pytest.fixture(autouse=True)
def _default_handlers():
    """Whoever started the tests may ignore SIGHUP, and another test may have left a handler."""
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, signal.SIG_DFL if handler is None else handler)


# Two handlers above each other; a child forked from a thread; what the signal does there and here.
FORKED = """
import os, signal, sys, threading, time
from loopfeed.preprocess.stop_signals import install
seen = []
install(signal.SIGTERM, lambda number, frame: seen.append("first"))
install(signal.SIGTERM, lambda number, frame: seen.append("second"))
statuses = []
def fork():
    for _ in range(8):
        child = os.fork()
        if child == 0:
            time.sleep(60)
            os._exit(7)
        os.kill(child, signal.SIGTERM)  # often before Python has set the child up
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
fork()
thread = threading.Thread(target=fork)
thread.start()
thread.join()
signal.raise_signal(signal.SIGTERM)
print(statuses, seen)
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""


def test_a_forked_child_has_the_handlers_from_before():
    words = [sys.executable, "-c", FORKED]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.stdout == f"{[-signal.SIGTERM] * 16} ['second']\n", done.stderr


# Python calls a handler in a hook of the fork, registered here so that it runs amid those of the module.
SIGNALLED = """
import os, signal, time
has_sent = []
def send():
    has_sent or has_sent.append(os.kill(os.getpid(), signal.SIGTERM))
os.register_at_fork(before=send)
from loopfeed.preprocess.stop_signals import stops_as_interrupts
try:
    with stops_as_interrupts():
        child = os.fork()
        if child == 0:
            os._exit(0)
        print(os.waitpid(child, 0)[1], flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_a_signal_that_comes_during_a_fork_is_handled_after_it():
    done = subprocess.run([sys.executable, "-c", SIGNALLED], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S)
    assert (done.stdout, done.stderr) == ("0\ninterrupted\n", "")


def test_a_handler_that_another_replaced_is_not_restored():
    before = signal.getsignal(signal.SIGHUP)
    install(signal.SIGHUP, lambda *_: None)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        uninstall(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        assert stop_signals() == (signal.SIGINT, signal.SIGTERM)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_every_command_is_interrupted_by_these_signals():
    @click.command(cls=GuardedCommand)
    def command():
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(click.Abort):
        command.main([], standalone_mode=False)
    thread = threading.Thread(target=lambda: stops_as_interrupts().__enter__())
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


STOPPED_PACK = """
import os, signal, sys
from loopfeed.preprocess.packing import pipeline
decode = pipeline.decode_stored
def stop(encoded, rule, **shared):
    os.kill(os.getpid(), int(sys.argv.pop()) if len(sys.argv) > 6 else 0)
    return decode(encoded, rule, **shared)
pipeline.decode_stored = stop
from loopfeed.preprocess.commands.cli import main
main(sys.argv[1:6])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_packing_is_stopped_as_by_ctrl_c(tmp_path, number):
    from PIL import Image

    (tmp_path / "photos/cat").mkdir(parents=True)
    for name in range(8):
        Image.new("RGB", (8, 8)).save(tmp_path / f"photos/cat/{name}.png")
    words = [sys.executable, "-c", STOPPED_PACK, "photos", "packed", "--size", "8", "--workers=1", str(int(number))]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
    assert done.returncode == 130, done.stderr
    assert "Stopped. Run the same command again to continue." in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_interrupts_a_command_once(number):
    with stops_as_interrupts():
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
        # The next one ends the process.
        assert signal.getsignal(number) is signal.SIG_DFL
