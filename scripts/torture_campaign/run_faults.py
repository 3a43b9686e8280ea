"""Faults of run folders: changed settings, logs, snapshots and weights."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.torture_campaign.file_faults import PLACE_FAULTS, draw_file_fault
from scripts.torture_campaign.json_faults import JSON_FAULTS
from scripts.torture_campaign.sound_run import FIRST_STEPS, STEPS, SoundRun

RunFault = Callable[[Path, SoundRun, random.Random], str]
TOP_FILES = ("config.json", "loss.jsonl", "eval.jsonl", "control.jsonl", "result.json", "model.safetensors")
_LOGS = ("loss.jsonl", "eval.jsonl", "control.jsonl")

# Another valid value of each setting.
CHANGED_SETTINGS: dict[str, Any] = {
    "seed": 1,
    "momentum": 0.5,
    "learning_rate": 0.5,
    "hue": 0.1,
    "mixup": 0.2,
    "flip": 0.25,
    "weight_decay": 0.01,
    "label_smoothing": 0.1,
    "ema_decay": 0.5,
    "schedule": "cosine",
    "optimizer": "nesterov",
    "image_size": 24,
    "batch": 16,
    "warmup_steps": 150,
    "eval_mirror": True,
    "precision": "bfloat16",
}


def change_setting(name: str) -> RunFault:
    """Return the fault that changes the value of a setting in config.json."""

    def change(run: Path, _base: SoundRun, _draw: random.Random) -> str:
        path = run / "config.json"
        document = json.loads(path.read_text())
        before = document["config"][name]
        document["config"][name] = CHANGED_SETTINGS[name]
        path.write_text(json.dumps(document, indent=2) + "\n")
        return f"config.json: {name} changed from {before!r} to {CHANGED_SETTINGS[name]!r}"

    return change


def flip_weight_signs(run: Path, _base: SoundRun, draw: random.Random) -> str:
    """Flip the signs of one in fifty weights."""
    path = run / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    count = (len(content) - start) // 4
    # Many weights together, because a single one may be in a filter that no image activates.
    for place in draw.sample(range(count), count // 50):
        content[start + 4 * place + 3] ^= 0x80
    path.write_bytes(content)
    return "model.safetensors: the signs of one in fifty weights flipped"


def flip_weight_bit(run: Path, _base: SoundRun, draw: random.Random) -> str:
    """Flip one bit of one weight."""
    path = run / "model.safetensors"
    content = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(content[:8], "little")
    place = draw.randrange(start, len(content))
    content[place] ^= 0x40
    path.write_bytes(content)
    return f"model.safetensors: bit 6 of byte {place} flipped"


LineFault = Callable[[list[bytes], list[bytes], random.Random], str]
"""A function that changes a log's lines, given those of another run, and returns a description."""


def line_fault(name: str, fault: LineFault) -> RunFault:
    """Return the fault that changes the lines of a log."""

    def change(run: Path, base: SoundRun, draw: random.Random) -> str:
        lines = _lines(run / name)
        done = fault(lines, _lines(base.donor / name), draw)
        (run / name).write_bytes(b"".join(lines))
        return f"{name}: {done}"

    return change


def insert_foreign_line(lines: list[bytes], others: list[bytes], draw: random.Random) -> str:
    """Insert a line of another run."""
    at = draw.randrange(len(lines) + 1)
    lines.insert(at, draw.choice(others or [b'{"step": 3, "pull": 2}\n']))
    return f"a line of another run inserted as line {at + 1}"


def duplicate_line(lines: list[bytes], _others: list[bytes], draw: random.Random) -> str:
    """Duplicate a line."""
    at = draw.randrange(len(lines))
    lines.insert(at, lines[at])
    return f"line {at + 1} duplicated"


def swap_lines(lines: list[bytes], others: list[bytes], draw: random.Random) -> str:
    """Swap two lines."""
    if len(lines) < 2:
        return duplicate_line(lines, others, draw)
    one, other = draw.sample(range(len(lines)), 2)
    lines[one], lines[other] = lines[other], lines[one]
    return f"lines {one + 1} and {other + 1} swapped"


def remove_line(lines: list[bytes], _others: list[bytes], draw: random.Random) -> str:
    """Remove a line."""
    at = draw.randrange(len(lines))
    del lines[at]
    return f"line {at + 1} removed"


def insert_invalid_line(lines: list[bytes], _others: list[bytes], draw: random.Random) -> str:
    """Insert something other than a record."""
    at = draw.randrange(len(lines) + 1)
    line = draw.choice(
        [
            b"\n", b"null\n", b"[]\n", b"{}\n", b"{\n", b"\xff\xfe\n", b'{"step": 1e999}\n',
            b'{"step": "\x1b[2J"}\n',
            b'{"step": ' + b"9" * 5000 + b"}\n", b"[" * 100_000 + b"\n", b'{"step": "\\ud800"}\n', b"a" * 3_000_000,
            b'{"step": -1, "loss": 1.0, "lr": 0.1, "images_per_s": 1.0, "wait_ms": 0.0, "time": 1.0}\n',
            b'{"step": 5, "loss": NaN, "lr": null, "images_per_s": 1.0, "wait_ms": 0.0, "time": 1e400}\n',
        ]
    )  # fmt: skip
    lines.insert(at, line)
    return f"{line[:40]!a}, {len(line)} bytes, inserted as line {at + 1}"


def change_digit(lines: list[bytes], _others: list[bytes], draw: random.Random) -> str:
    """Change a digit of the log."""
    content = bytearray(b"".join(lines))
    places = [place for place, byte in enumerate(content) if chr(byte).isdigit()]
    place = draw.choice(places)
    content[place] = ord(str((int(chr(content[place])) + draw.randrange(1, 10)) % 10))
    lines[:] = [bytes(content)]
    return f"another digit at byte {place}"


LINE_FAULTS: dict[str, LineFault] = {
    "line-foreign": insert_foreign_line,
    "line-doubled": duplicate_line,
    "lines-swapped": swap_lines,
    "line-missing": remove_line,
    "line-strange": insert_invalid_line,
    "digit": change_digit,
}


def swap_snapshots(run: Path, _base: SoundRun, _draw: random.Random) -> str:
    """Swap the snapshots of two steps."""
    folder = run / "snapshots"
    (folder / str(FIRST_STEPS)).rename(folder / "between")
    (folder / str(STEPS)).rename(folder / str(FIRST_STEPS))
    (folder / "between").rename(folder / str(STEPS))
    return f"the snapshots of steps {FIRST_STEPS} and {STEPS} swapped"


def rename_snapshot(run: Path, _base: SoundRun, draw: random.Random) -> str:
    """Rename a snapshot to another step."""
    old, new = draw.choice([(STEPS, STEPS + 10), (FIRST_STEPS, 120), (STEPS, 10)])
    (run / f"snapshots/{old}").rename(run / f"snapshots/{new}")
    return f"the snapshot of step {old} renamed to {new}"


def replace_snapshots(run: Path, base: SoundRun, _draw: random.Random) -> str:
    """Take the snapshots of a run with another seed."""
    shutil.rmtree(run / "snapshots")
    shutil.copytree(base.donor / "snapshots", run / "snapshots")
    return "the snapshots are those of a run with another seed"


def replace_snapshot_state(run: Path, base: SoundRun, _draw: random.Random) -> str:
    """Take the arrays of a snapshot of a run with another seed."""
    shutil.rmtree(run / f"snapshots/{STEPS}/state")
    shutil.copytree(base.donor / f"snapshots/{STEPS}/state", run / f"snapshots/{STEPS}/state")
    return f"the arrays of snapshot {STEPS} are those of a run with another seed"


def replace_weights(run: Path, base: SoundRun, _draw: random.Random) -> str:
    """Take the weights of a run with another seed."""
    shutil.copyfile(base.donor / "model.safetensors", run / "model.safetensors")
    return "model.safetensors is that of a run with another seed"


def replace_config(run: Path, base: SoundRun, _draw: random.Random) -> str:
    """Take the settings of a run with another seed."""
    shutil.copyfile(base.donor / "config.json", run / "config.json")
    return "config.json is that of a run with another seed"


def remove_snapshots(run: Path, _base: SoundRun, draw: random.Random) -> str:
    """Remove the newest snapshot, or all of them."""
    name = draw.choice([f"snapshots/{STEPS}", "snapshots"])
    shutil.rmtree(run / name)
    return f"{name} removed"


def empty_folder(run: Path, _base: SoundRun, _draw: random.Random) -> str:
    """Remove everything in the folder."""
    for entry in list(run.iterdir()):
        if entry.is_dir():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)
    return "the folder emptied"


def remove_folder(run: Path, _base: SoundRun, _draw: random.Random) -> str:
    """Remove the folder with its contents."""
    # Renamed first, because the run may be creating files in it.
    shutil.rmtree(run.rename(run.with_name("removed")), ignore_errors=True)
    return "the folder removed"


def replace_log_by_copy(run: Path, _base: SoundRun, _draw: random.Random) -> str:
    """Replace the loss log by a copy of itself, as many editors do."""
    copy = run.with_name("copy")
    shutil.copyfile(run / "loss.jsonl", copy)
    copy.rename(run / "loss.jsonl")
    return "loss.jsonl replaced by a copy of itself"


def replaced_file(key: str, how: str) -> RunFault:
    """Return the fault that replaces one file by something else."""

    def replace(run: Path, _base: SoundRun, draw: random.Random) -> str:
        return f"{key}: {PLACE_FAULTS[how](run / key, draw)}"

    return replace


LIVE_FAULTS: dict[str, RunFault] = {
    "emptied": empty_folder,
    "folder-removed": remove_folder,
    "config-removed": replaced_file("config.json", "removed"),
    "log-removed": replaced_file("loss.jsonl", "removed"),
    "log-copied": replace_log_by_copy,
}
"""Faults of the folder of a running training, by name: what the run writes afterwards is lost or incomplete."""


def named_faults(base: SoundRun) -> dict[str, RunFault]:
    """Return the faults that are always tried, by name."""
    faults: dict[str, RunFault] = {f"setting-{name}": change_setting(name) for name in CHANGED_SETTINGS}
    faults |= {"weights-byte": flip_weight_signs, "weights-bit": flip_weight_bit, "weights-foreign": replace_weights}
    faults |= {"snapshots-swapped": swap_snapshots, "snapshot-renamed": rename_snapshot}
    faults |= {"snapshots-foreign": replace_snapshots, "snapshot-state-foreign": replace_snapshot_state}
    faults |= {"snapshots-removed": remove_snapshots, "config-foreign": replace_config}
    for name in _LOGS[:2]:
        faults |= {f"{fault}:{name}": line_fault(name, LINE_FAULTS[fault]) for fault in LINE_FAULTS}
    snapshot = next(key for key in sorted(base.tree) if key.startswith(f"snapshots/{STEPS}/state/ocdbt"))
    for key in (*TOP_FILES, snapshot):
        for how in ("pipe", "dangling"):
            faults[f"{how}:{key if key in TOP_FILES else 'snapshot'}"] = replaced_file(key, how)
    control = _LOGS[2]
    faults |= {f"{fault}:{control}": line_fault(control, LINE_FAULTS[fault]) for fault in LINE_FAULTS}
    faults[f"removed:{control}"] = replaced_file(control, "removed")
    return faults


def draw_run_fault(run: Path, base: SoundRun, draw: random.Random) -> str:
    """Apply one drawn fault to a copy of the sound run; return its description."""
    chance = draw.random()
    if chance < 0.25:
        name = draw.choice(_LOGS)
        return line_fault(name, draw.choice(list(LINE_FAULTS.values())))(run, base, draw)
    if chance < 0.35:
        faults = [
            swap_snapshots,
            rename_snapshot,
            replace_snapshot_state,
            remove_snapshots,
            replace_config,
            flip_weight_bit,
        ]
        return draw.choice(faults)(run, base, draw)
    key = draw.choice(TOP_FILES) if chance < 0.75 else draw.choice([each for each in base.tree if "/" in each])
    fault = draw.choice(JSON_FAULTS) if key.endswith(".json") and draw.random() < 0.6 else draw_file_fault(draw)
    return f"{key}: {fault(run / key, draw)}"


def _lines(path: Path) -> list[bytes]:
    if not path.exists():  # a run without requests has no control.jsonl
        return []
    return path.read_bytes().splitlines(keepends=True)
