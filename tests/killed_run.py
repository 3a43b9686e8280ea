"""A small run with everything on, in a process that kills itself at a chosen instant; and what it came to.

`python -m tests.killed_run RUN '{"event": "os.rename", "path": "result.json"}'` trains in RUN and dies by SIGKILL just
before that event, as Python tells it to audit hooks; a write of a log's line is told too, and is torn.
"""

import json
import os
import re
import signal
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path

from engine import train
from engine.config import TrainConfig
from engine.control.request import ControlRequest, new_request_id
from engine.feed.feeder import _LEAST_DEPTH
from engine.records.control_requests import send_request
from tests.toy import CLASSES, Linear, toy_batch

STEPS, SNAPSHOT_EVERY, EVAL_EVERY, ACCUMULATE = 24, 8, 6, 2
EVALUATED = toy_batch(10_000, batch=20)
_WAIT_S = 60.0


def run_config(run: Path, cache: Path, **values) -> TrainConfig:
    """Return the settings: all that a step can depend on is on, but for colours, which take long to compile."""
    everything = TrainConfig(
        run_dir=os.fspath(run),
        compilation_cache=os.fspath(cache),
        steps=STEPS,
        batch=8,
        num_classes=CLASSES,
        accumulate_steps=ACCUMULATE,
        learning_rate=0.1,
        optimizer="nesterov",
        schedule="cosine",
        warmup_steps=3,
        ema_decay=0.9,
        clip_norm=1.0,
        label_smoothing=0.1,
        skip_nonfinite=2,
        crop="random",
        crop_padding=1,
        flip=0.5,
        mixup=0.3,
        erasing=0.25,
        eval_every_steps=EVAL_EVERY,
        snapshot_every_steps=SNAPSHOT_EVERY,
        keep_snapshots=2,
    )
    return replace(everything, **values)


def train_here(run: Path, cache: Path, *, batches=None, notify=lambda _: None, **values) -> None:
    """Runs or resumes the training in this process."""
    config = run_config(run, cache, **values)
    train(config, model=Linear(), batches=batches or paced_batches(run), evaluation=EVALUATED, notify=notify)


def paced_batches(run: Path):
    """Return batches that wait for each snapshot to be on disk, so that the writer leaves out none."""
    # As far behind the snapshot's own batch as the feeder reads ahead: the loop has emitted it by then.
    lag = ACCUMULATE + _LEAST_DEPTH

    def batches(pull):
        step, is_due = divmod((pull - lag), SNAPSHOT_EVERY * ACCUMULATE)
        if step > 0 and is_due == 0:
            wait_for(run / f"snapshots/{step * SNAPSHOT_EVERY}")
        return toy_batch(pull)

    return batches


@dataclass
class Death:
    """Kills the process just before the `nth` event of a kind whose path ends like a pattern.

    Args:
        event: an audit event, or `write` for a log's line, which is then written in half.
        path: regular expression; searched for in the path, or in the line that is written.
        nth: counted from 1.
        after: path in the run folder that is waited for before.
    """

    run: Path
    event: str
    path: str
    nth: int = 1
    after: str = ""

    def __post_init__(self):
        self._guard, self._is_ours = threading.Lock(), threading.local()
        self._write = os.write
        os.write = self._torn_write
        sys.addaudithook(self._hear)

    def _hear(self, event, arguments):
        if event != self.event:
            return
        # The new name of a rename, the only name of everything else.
        path = arguments[1] if event == "os.rename" else arguments[0]
        if self._is_it(os.fspath(path) if isinstance(path, str | os.PathLike) else str(path)):
            die()

    def _torn_write(self, file, content):
        if self.event == "write" and self._is_it(bytes(content).decode(errors="replace")):
            self._write(file, content[: len(content) // 2])
            die()
        return self._write(file, content)

    def _is_it(self, text):
        if not re.search(self.path, text):
            return False
        with self._guard:
            self.nth -= 1
            if self.nth != 0:
                return False
        if self.after:
            wait_for(self.run / self.after)
        return True


def die():
    """Ends the process as nothing else does: no handler, no `finally`, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_WAIT_S)


def wait_for(path: Path) -> None:
    """Waits until a path is there, for a limited time."""
    deadline = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} must appear within {_WAIT_S:g} s")
        time.sleep(0.01)


def asking_batches(run: Path):
    """Return batches that ask for another learning rate after the first snapshot, and die once that took effect."""
    log = run / "control.jsonl"
    is_asked: list[bool] = []

    def batches(pull):
        if pull == SNAPSHOT_EVERY * ACCUMULATE + 2 and not is_asked:
            wait_for(run / f"snapshots/{SNAPSHOT_EVERY}")
            send_request(run, ControlRequest(new_request_id(), learning_rate_factor=0.25, evaluate=True))
            is_asked.append(True)
        if is_asked:
            if log.exists() and (events := log.read_text().splitlines()):
                if len((run / "loss.jsonl").read_text().splitlines()) > json.loads(events[0])["step"]:
                    die()
            else:
                time.sleep(0.5)  # the request is looked for four times a second
        return toy_batch(pull)

    return batches


def read_outcome(run: Path):
    """Return all that must be the same: weights, losses with their rates, and evaluations."""
    logs = ("loss.jsonl", "eval.jsonl")
    losses, evaluations = ([json.loads(line) for line in (run / name).read_text().splitlines()] for name in logs)
    return (
        (run / "model.safetensors").read_bytes(),
        [(line["step"], line["loss"], line["lr"]) for line in losses],
        [{key: value for key, value in line.items() if key != "time"} for line in evaluations],
    )


def main():
    """Trains until it dies."""
    run, cache, death = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    resume = (run / "config.json").exists()
    if death == "asked":
        train_here(run, cache, batches=asking_batches(run), prefetch=1)
        return
    Death(run, **death)
    train_here(run, cache, resume=resume, notify=lambda said: print(said, flush=True))


if __name__ == "__main__":
    main()
