"""Faults that occur while a pack is being read or trained on: files that are truncated, removed or replaced."""

from __future__ import annotations

import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path

from scripts.torture_campaign.case import Trial
from scripts.torture_campaign.commands import Finished
from scripts.torture_campaign.oracle import read_lines, read_tree
from scripts.torture_campaign.pack_judging import (
    TRAINING_TIMEOUT_S,
    judge_losses,
    judge_pack_exit,
    judge_read,
)
from scripts.torture_campaign.sound_packs import SoundPack, Training, train_command

LiveFault = Callable[[Path, random.Random], str]
_PAUSE_S = 0.1
_READER_TIMEOUT_S = 30.0
_POLL_EVERY_S = 0.005
_START_TIMEOUT_S = 60.0
_STEPS_BEFORE_FAULT = 20
_SHARDS = tuple(f"train/pixels/c/{number}/0/0" for number in range(3))


def truncate_all(pack: Path, _draw: random.Random) -> str:
    """Truncate every shard of train to 0 bytes in place."""
    for name in _SHARDS:
        os.truncate(pack / name, 0)
    return "every shard of train emptied"


def truncate_one(pack: Path, draw: random.Random) -> str:
    """Truncate a shard of train in place."""
    path = pack / draw.choice(_SHARDS)
    size = path.stat().st_size
    kept = draw.choice([0, 4096, size // 2])
    os.truncate(path, kept)
    return f"{path.relative_to(pack)} truncated from {size} to {kept} bytes"


def remove_one(pack: Path, draw: random.Random) -> str:
    """Remove a shard of train."""
    name = draw.choice(_SHARDS)
    (pack / name).unlink()
    return f"{name} removed"


def replace_one(pack: Path, draw: random.Random) -> str:
    """Rename a copy of another shard over one of train."""
    one, other = draw.sample(_SHARDS, 2)
    shutil.copyfile(pack / other, pack / "copy")
    (pack / "copy").rename(pack / one)
    return f"{one} replaced by a copy of {other}"


def empty_pixels(pack: Path, _draw: random.Random) -> str:
    """Empty the folder of train's shards."""
    shutil.rmtree(pack / "train/pixels/c")
    (pack / "train/pixels/c").mkdir()
    return "train/pixels/c emptied"


def empty_split(pack: Path, draw: random.Random) -> str:
    """Empty the folder of a split."""
    name = draw.choice(["train", "val"])
    shutil.rmtree(pack / name)
    (pack / name).mkdir()
    return f"{name} emptied"


def replace_by_pipe(pack: Path, draw: random.Random) -> str:
    """Replace a shard by a pipe."""
    name = draw.choice(_SHARDS)
    (pack / name).unlink()
    os.mkfifo(pack / name)
    return f"{name} replaced by a pipe"


def rename_pack(pack: Path, _draw: random.Random) -> str:
    """Rename the whole pack."""
    pack.rename(pack.with_name("moved"))
    return "the pack renamed"


LIVE_FAULTS: dict[str, LiveFault] = {
    "truncate-all": truncate_all,
    "truncate-one": truncate_one,
    "remove-one": remove_one,
    "replace-one": replace_one,
    "empty-pixels": empty_pixels,
    "empty-split": empty_split,
    "pipe": replace_by_pipe,
    "move-away": rename_pack,
}


def attempt_on_reader(trial: Trial, base: SoundPack, pack: Path, fault: LiveFault, draw: random.Random) -> None:
    """Apply a fault while the reader is in the middle of the pack."""
    dest, where = trial.folder / "read.json", trial.folder / "reader"
    where.mkdir()
    running = trial.commands.start(["read-pack", str(pack), str(dest), str(_PAUSE_S)], where)
    time.sleep(draw.uniform(1, 6) * _PAUSE_S)
    trial.fault = f"while it is read, {fault(pack, draw)}"
    finished = running.wait(_READER_TIMEOUT_S)
    trial.log.append(finished)
    trial.judge(judge_read(judge_pack_exit(finished, pack), dest, base, read_tree(pack)))


def attempt_on_training(
    trial: Trial, base: SoundPack, pack: Path, fault: LiveFault, draw: random.Random, sound: Training, cache: Path
) -> None:
    """Apply a fault after a training on the pack has made some steps."""
    run, where = trial.folder / "run", trial.folder / "trainer"
    where.mkdir()
    running = trial.commands.start(train_command(pack, run, cache, steps=sound.steps, batch=sound.batch), where)
    deadline = time.monotonic() + _START_TIMEOUT_S
    while not running.is_over() and len(read_lines(run / "loss.jsonl")) < _STEPS_BEFORE_FAULT:
        if time.monotonic() > deadline:
            break
        time.sleep(_POLL_EVERY_S)
    trial.fault = f"while it is trained on, {fault(pack, draw)}"
    finished: Finished = running.wait(TRAINING_TIMEOUT_S)
    trial.log.append(finished)
    trial.judge(judge_losses(finished, pack, run, sound, base))
