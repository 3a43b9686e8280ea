"""A small run with most settings enabled, in a process that kills itself at a chosen instant, and its results.

`python -m tests.killed_run RUN '{"event": "os.rename", "path": "result.json"}'` trains in RUN and dies by SIGKILL just
before that audit event; the event `write` is the write of a log's line, of which half is then written.
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

from loopfeed import train
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.request import ControlRequest, new_request_id
from loopfeed.engine.feed.feeder import _LEAST_DEPTH
from loopfeed.engine.records.control_requests import send_request
from tests.toy import CLASSES, Linear, toy_batch

STEPS, SNAPSHOT_EVERY, EVAL_EVERY, ACCUMULATE = 24, 8, 6, 2
EVALUATED = toy_batch(10_000, batch=20)
_WAIT_S = 60.0


def run_config(run: Path, cache: Path, **values) -> TrainConfig:
    """Return settings that enable everything that a step can depend on, except colours, which compile slowly."""
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
        stop_patience=STEPS,
        snapshot_every_steps=SNAPSHOT_EVERY,
        keep_snapshots=2,
    )
    return replace(everything, **values)


def train_here(run: Path, cache: Path, *, batches=None, notify=lambda _: None, **values) -> None:
    """Run or resume the training in this process."""
    config = run_config(run, cache, **values)
    train(config, model=Linear(), batches=batches or paced_batches(run), evaluation=EVALUATED, notify=notify)


def paced_batches(run: Path):
    """Return batches that wait until each snapshot is on disk, so that the writer skips none."""
    # The feeder reads this many batches ahead; by then the loop has emitted the snapshot.
    lag = ACCUMULATE + _LEAST_DEPTH

    def batches(pull):
        step, is_due = divmod((pull - lag), SNAPSHOT_EVERY * ACCUMULATE)
        if step > 0 and is_due == 0:
            wait_for(run / f"snapshots/{step * SNAPSHOT_EVERY}")
        return toy_batch(pull)

    return batches


@dataclass
class Death:
    """Kills the process just before the `nth` event whose path matches a pattern.

    Args:
        event: an audit event, or `write` for a log's line, half of which is then written.
        path: regular expression, searched for in the path or the written line.
        nth: counted from 1.
        after: path in the run folder that must exist before.
    """

    run: Path
    event: str
    path: str
    nth: int = 1
    after: str = ""

    def __post_init__(self):
        self._guard, self._is_ours = threading.Lock(), threading.local()
        self._write = os.write
        os.write = self._write_or_tear
        sys.addaudithook(self._on_event)

    def _on_event(self, event, arguments):
        if event != self.event:
            return
        # The new name of a rename, the only name of everything else.
        path = arguments[1] if event == "os.rename" else arguments[0]
        if event == "os.truncate" and isinstance(path, int):
            path = Path(f"/proc/self/fd/{path}").readlink()
        if self._is_due(os.fspath(path) if isinstance(path, str | os.PathLike) else str(path)):
            die()

    def _write_or_tear(self, file, content):
        if self.event == "write" and self._is_due(bytes(content).decode(errors="replace")):
            self._write(file, content[: len(content) // 2])
            die()
        return self._write(file, content)

    def _is_due(self, text):
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
    """Kill the process with SIGKILL: no handler, no `finally`, no flush."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(_WAIT_S)


def wait_for(path: Path) -> None:
    """Wait until a path exists; raise TimeoutError after a while."""
    deadline = time.monotonic() + _WAIT_S
    while not path.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{path} must appear within {_WAIT_S:g} s")
        time.sleep(0.01)


def requesting_batches(run: Path):
    """Return batches that request another learning rate after the first snapshot, and die when it has taken effect."""
    log = run / "control.jsonl"
    is_requested: list[bool] = []

    def batches(pull):
        if pull == SNAPSHOT_EVERY * ACCUMULATE + 2 and not is_requested:
            wait_for(run / f"snapshots/{SNAPSHOT_EVERY}")
            send_request(run, ControlRequest(new_request_id(), learning_rate_factor=0.25, evaluate=True))
            is_requested.append(True)
        if is_requested:
            if log.exists() and (events := log.read_text().splitlines()):
                if len((run / "loss.jsonl").read_text().splitlines()) > json.loads(events[0])["step"]:
                    die()
            else:
                time.sleep(0.5)  # requests are polled four times a second
        return toy_batch(pull)

    return batches


def read_outcome(run: Path):
    """Return everything that must be the same: weights, losses with learning rates, and evaluations."""
    logs = ("loss.jsonl", "eval.jsonl")
    losses, evaluations = ([json.loads(line) for line in (run / name).read_text().splitlines()] for name in logs)
    return (
        (run / "model.safetensors").read_bytes(),
        [(line["step"], line["loss"], line["lr"]) for line in losses],
        [{key: value for key, value in line.items() if key != "time"} for line in evaluations],
    )


def main():
    """Train until the process is killed."""
    run, cache, death = Path(sys.argv[1]), Path(sys.argv[2]), json.loads(sys.argv[3])
    resume = (run / "config.json").exists()
    if death == "requested":
        train_here(run, cache, batches=requesting_batches(run), prefetch=1)
        return
    Death(run, **death)
    train_here(run, cache, resume=resume, notify=lambda message: print(message, flush=True))


if __name__ == "__main__":
    main()
