"""A finished run of two launches, whose files tests change, and launches that resume it or are refused."""

import json
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from loopfeed import train
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.records.control_requests import send_request
from loopfeed.engine.records.recorded_run import read_recorded
from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps, write_snapshot
from tests.toy import Linear, toy_batch, toy_config

STEPS = 6
EVALUATED = toy_batch(100)
LOGS = ("loss.jsonl", "eval.jsonl", "control.jsonl")


class Untraced(Linear):
    """A model that fails if its program is traced."""

    def apply(self, params, batch_stats, images, train):
        raise AssertionError("the program was traced: the resume was not refused")


def settings(path, **values):
    several: dict[str, Any] = {"steps": STEPS, "snapshot_every_steps": 2, "eval_every_steps": 2, "prefetch": 1}
    return toy_config(run_dir=path, **(several | values))


def run(path, *, batches=toy_batch, **values):
    return train(settings(path, **values), model=Linear(), batches=batches, evaluation=EVALUATED)


def resume(path, *, model=None, notify=lambda _: None, **values):
    config = settings(path, resume=True, **values)
    return train(config, model=model or Linear(), batches=toy_batch, evaluation=EVALUATED, notify=notify)


def refusal(path, **values) -> str:
    """Return the message with which a resume is refused; empty if it is not."""
    try:
        resume(path, model=Untraced(), **values)
    except ValueError as error:
        return str(error)
    except AssertionError:
        return ""
    raise AssertionError("the run continued without a program")


@contextmanager
def holding(path: Path, content: bytes) -> Iterator[None]:
    """Give a file another content while the block runs."""
    before = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(before)


def without_digest(path: Path, folder: Path) -> bytes:
    """Return the bytes of a weights file whose metadata has no digest."""
    with safe_open(path, framework="np") as file:
        metadata = {key: value for key, value in file.metadata().items() if key not in ("digest", "sha256")}
    save_file(load_file(path), folder / "plain.safetensors", metadata)
    return (folder / "plain.safetensors").read_bytes()


def make_chained_run(path: Path) -> None:
    """Make a run of two launches with other settings, a request and several snapshots."""

    def batches(step):
        if step == 1:
            send_request(path, ControlRequest(learning_rate_factor=0.5))
            time.sleep(0.5)
        deadline = time.monotonic() + 60
        while step == 3 and 2 not in snapshot_steps(path / "snapshots"):
            assert time.monotonic() < deadline
            time.sleep(0.005)
        return toy_batch(step)

    run(path, batches=batches, steps=4)
    resume(path, learning_rate=0.05)
    assert snapshot_steps(path / "snapshots") == [2, 4, 6]
    assert all((path / name).stat().st_size for name in LOGS)
    assert read_recorded(path).changes() == (4,)


def make_older(path: Path, folder: Path) -> None:
    """Remove every digest from a run, as in runs of releases without digests."""
    for name in ("config.json", "result.json"):
        values = json.loads((path / name).read_text())
        for key in ("sha256", "continues", "files"):
            values.pop(key, None)
        (path / name).write_text(json.dumps(values))
    (path / "model.safetensors").write_bytes(without_digest(path / "model.safetensors", folder))
    for step in snapshot_steps(path / "snapshots"):
        snapshot = read_snapshot(path / "snapshots", step)
        nested: dict[str, Any] = {}
        for name, leaf in snapshot.leaves.items():
            *above, last = name.split(".")
            inner = nested
            for part in above:
                inner = inner.setdefault(part, {})
            inner[last] = leaf
        shutil.rmtree(path / "snapshots" / str(step))
        write_snapshot(path / "snapshots", step, snapshot.batch_index, nested)
