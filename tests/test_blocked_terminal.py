"""A run whose output pipe is not read: signals, losses and the end of the run still arrive."""

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from loopfeed.preprocess.stop_signals import BURST_S
from tests.toy import toy_batch

pytestmark = pytest.mark.integration  # whole programs, or large networks

# Far more than a run needs to end, far less than the minute for which it would wait for a sink.
SOON_S = 30.0
STEPS = 10**8


class BlockedRun:
    """`run-train` with a toy model, its output a full pipe that nobody reads."""

    def __init__(self, folder, batches="tests.toy:toy_batch"):
        self.folder = folder / "run"
        self._reader, writer = os.pipe()
        options = ["--steps", STEPS, "--batch", 8, "--num-classes", 3, "--run-dir", self.folder]
        options += ["--model", "tests.toy:Linear", "--batches", batches]
        self.process = subprocess.Popen(
            [sys.executable, "-c", "from loopfeed.engine.commands.cli import main; main()", *map(str, options)],
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            # Unbuffered, the standard streams have no lock that a thread in a blocked write keeps from all others.
            env={name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"},
        )
        os.close(writer)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate(timeout=SOON_S)
        os.close(self._reader)

    @property
    def steps(self):
        log = self.folder / "loss.jsonl"
        return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []

    def wait_for_steps(self, count):
        deadline = time.monotonic() + 120
        while not (steps := self.steps) or steps[-1] < count:
            assert self.process.poll() is None, self.process.communicate()[1]
            assert time.monotonic() < deadline, f"only {len(steps)} steps"
            time.sleep(0.1)

    def finish(self):
        _, errors = self.process.communicate(timeout=SOON_S)
        return self.process.returncode, errors


# A line of the terminal is at least 60 bytes, so that the 64 KiB of the pipe are full after 1,100 of them.
FULL_STEPS = 3000


@pytest.mark.timeout(240)
def test_a_signal_ends_the_run_and_every_loss_is_in_the_file(tmp_path):
    with BlockedRun(tmp_path) as run:
        # The file goes on while the terminal stands still.
        run.wait_for_steps(FULL_STEPS)
        run.process.send_signal(signal.SIGTERM)
        code, errors = run.finish()
        assert code in (1, 130), errors
        end = json.loads((run.folder / "result.json").read_text())
        assert FULL_STEPS <= end["steps_done"] < STEPS
        assert run.steps == list(range(1, end["steps_done"] + 1))
        assert (run.folder / "model.safetensors").exists()


def stuck(step):
    if step == 3000:
        threading.Event().wait(600)
    return toy_batch(step)


@pytest.mark.timeout(240)
def test_a_second_signal_quits_at_once(tmp_path):
    # The source stands still too, so that the program waits for it when the signals come.
    with BlockedRun(tmp_path, "tests.test_blocked_terminal:stuck") as run:
        run.wait_for_steps(3000)
        run.process.send_signal(signal.SIGINT)
        time.sleep(2 * BURST_S)
        run.process.send_signal(signal.SIGINT)
        code, errors = run.finish()
        assert code == 130, errors
        assert run.steps == list(range(1, 3001))
