"""The kind ``packs``: damage of packs at rest, under a reader and under a training."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import zarr

from scripts.torture_campaign.case import Judgement, Trial, Verdict, judge_exit
from scripts.torture_campaign.commands import Finished
from scripts.torture_campaign.damage import damage, replace
from scripts.torture_campaign.oracle import changed_keys, read_lines, read_logs, read_split, read_tree
from scripts.torture_campaign.pack_oracle import LAYOUTS, SPLITS, SoundPack, make_sound_pack

type PackFault = Callable[[Path, random.Random], object]
type Tree = Mapping[str, bytes]

_READER_TIMEOUT_S = 20.0
"""Each read has a limit of 3 s, and 10 s more to find the damaged image."""
_TRAINING_TIMEOUT_S = 60.0
_LIVE_TIMEOUT_S = 30.0
_PAUSE_S = 0.1
_POLL_EVERY_S = 0.005
_SHORT, _LONG = (3, 8), (300, 32)
"""Steps and batch of trainings on damaged packs, and of those during which a pack is damaged."""
_STEPS_BEFORE_FAULT = 20
_TRAINED_SHARE, _LIVE_SHARE = 0.15, 0.05
_LIVE_LAYOUTS = ("raw", "large")
_OTHER_LAYOUTS = ("dense", "blosc", "large", "whole")
_TRIED_ON_OTHER_LAYOUTS = ("shards-swapped", "shards-of-splits-swapped", "splits-swapped", "labels-swapped",
                           "labels-permuted")  # fmt: skip
_SHARDS = tuple(f"train/pixels/c/{number}/0/0" for number in range(3))
_VAL_SHARD = "val/pixels/c/0/0/0"
_ARRAYS = ("labels", "checksums", "extents", "names", "name_offsets")
_NAMES = ("manifest.json", "failures.jsonl", "zarr.json", "pixels", *_ARRAYS, "train", "val")
_WEAKER_CLAIM = "every pixel and label is as it was packed"
# The message that a training must print about a val split that it cannot evaluate on.
_WITHOUT_EVALUATION = re.compile(
    r"\bval\b.*\b(?:not|no|un\w+|without|missing|damaged)\b|\b(?:no|not|without)\b.*\bval\b"
)
EXEMPTIONS = {
    "pixels without checksums": "without checksums (--no-checksum) a reader cannot detect changed pixels; "
    "inspect-shards --verify does",
    "bits without effect": "for compressed images without checksums inspect-shards --verify compares the pixels, and "
    "says so; some bits of the compressed bytes do not affect any pixel",
    "a missing split": "a split whose folder is missing, empty or contains other files does not exist: a pack is the "
    "splits in its folder",
    "a split under another name": "the name of a split is the name of its folder: a renamed folder is a sound split "
    "with another name",
}
"""The faults that commands need not detect, each with its reason; the table counts them separately."""


def _swap(pack: Path, one: str, other: str) -> None:
    between = pack / "between"
    (pack / one).rename(between)
    (pack / other).rename(pack / one)
    between.rename(pack / other)


def _link_shard(link: Callable[[Path, Path], object], others: tuple[str, ...] = ()) -> PackFault:
    """Return the fault that makes one shard a copy of another, or a link to it."""

    def fault(pack: Path, draw: random.Random) -> None:
        one, *found = draw.sample(_SHARDS, 2)
        (pack / one).unlink()
        link(pack / draw.choice([*found, *others]), pack / one)

    return fault


def _put_folder(put: Callable[[Path], object], *names: str) -> PackFault:
    """Return the fault that replaces one of these folders."""

    def fault(pack: Path, draw: random.Random) -> None:
        name = draw.choice(names)
        shutil.rmtree(pack / name)
        put(pack / name)

    return fault


def _permute(array_name: str) -> PackFault:
    """Return the fault that swaps two numbers of a split, with valid checksums, by zarr."""

    def fault(pack: Path, draw: random.Random) -> None:
        array = zarr.open_array(str(pack / array_name), mode="r+")
        numbers = np.asarray(array[:])
        one = draw.randrange(len(numbers))
        other = draw.choice(np.flatnonzero(numbers != numbers[one]).tolist())
        numbers[[one, other]] = numbers[[other, one]]
        array[:] = numbers

    return fault


def _set_place(pack: Path, draw: random.Random) -> None:
    """Give a picture another place, with a valid checksum: none, one beyond the canvas, or one of other bits."""
    array = zarr.open_array(str(pack / "train/extents"), mode="r+")
    at = draw.randrange(array.shape[0])
    array[at] = draw.choice([0, 32 << 15, 48, 33 << 15 | 48, 32 << 15 | 49, 2**32 - 1, int(np.asarray(array[at])) ^ 1])


_FOLDERS = ("train/pixels/c", "train/labels/c", "train/pixels", "train/labels", "train")
PACK_FAULTS: dict[str, PackFault] = {
    "shards-swapped": lambda pack, draw: _swap(pack, *draw.sample(_SHARDS, 2)),
    "shards-of-splits-swapped": lambda pack, draw: _swap(pack, draw.choice(_SHARDS), _VAL_SHARD),
    "shard-copied": _link_shard(shutil.copyfile),
    "shard-linked-hard": _link_shard(os.link),
    "shard-linked": _link_shard(lambda other, one: one.symlink_to(other), (_VAL_SHARD,)),
    "splits-swapped": lambda pack, _: _swap(pack, "train", "val"),
    "pixels-swapped": lambda pack, _: _swap(pack, "train/pixels", "val/pixels"),
    "labels-swapped": lambda pack, _: _swap(pack, "train/labels/c/0", "val/labels/c/0"),
    "label-arrays-swapped": lambda pack, _: _swap(pack, "train/labels", "val/labels"),
    "manifests-swapped": lambda pack, _: _swap(pack, "train/manifest.json", "val/manifest.json"),
    "labels-permuted": _permute("train/labels"),
    "names-swapped": lambda pack, _: _swap(pack, "train/names/c/0", "val/names/c/0"),
    "names-permuted": _permute("train/names"),
    "folder-emptied": _put_folder(Path.mkdir, *_FOLDERS, "val"),
    "folder-as-file": _put_folder(lambda path: path.write_bytes(b""), *_FOLDERS),
    "folder-as-loop": _put_folder(lambda path: path.symlink_to(path.parents[1]), "train/labels", "train/pixels"),
}
PLACE_FAULTS: dict[str, PackFault] = {
    "places-permuted": _permute("train/extents"),
    "places-set": _set_place,
    "places-swapped": lambda pack, _: _swap(pack, "train/extents/c/0", "val/extents/c/0"),
    "places-removed": _put_folder(lambda _: None, "train/extents", "train/extents/c"),
}
"""Faults of whole pictures."""
_FOREIGN = {"shard-of-another-pack": (*_SHARDS, _VAL_SHARD), "manifest-of-another-pack": ("train/manifest.json",)}
"""Files that are taken from a pack of the same shape."""
LIVE_FAULTS: dict[str, PackFault] = {
    "all-truncated": lambda pack, _: [(pack / name).write_bytes(b"") for name in _SHARDS],
    "one-truncated": lambda pack, draw: os.truncate(pack / draw.choice(_SHARDS), draw.choice([0, 4096, 70_000])),
    "one-removed": lambda pack, draw: (pack / draw.choice(_SHARDS)).unlink(),
    "one-replaced": _link_shard(shutil.copyfile),
    "pixels-emptied": _put_folder(Path.mkdir, "train/pixels/c"),
    "split-emptied": _put_folder(Path.mkdir, "train", "val"),
    "pipe": lambda pack, draw: replace(pack / draw.choice(_SHARDS), "pipe"),
    "moved-away": lambda pack, _: pack.rename(pack.with_name("moved")),
}


@dataclass
class PackKind:
    """Faults of packs.

    Attributes:
        cache: folder of compiled programs.
        bases: the sound packs, by layout.
        donor: a pack like the raw one with other images.
        logs: the logs of trainings on sound packs, by layout and steps.
    """

    cache: Path
    bases: dict[str, SoundPack] = field(default_factory=dict)
    donor: Path = Path()
    logs: dict[tuple[str, int], dict[str, list[Any]]] = field(default_factory=dict)
    heavy: ClassVar[tuple[str, ...]] = ()
    _sound: Path = Path()
    _locks: dict[tuple[str, int], threading.Lock] = field(default_factory=lambda: defaultdict(threading.Lock))

    def prepare(self, trial: Trial) -> None:
        """Create the sound packs."""
        self._sound = trial.folder
        self.bases = {layout: make_sound_pack(trial, layout) for layout in LAYOUTS}
        self.donor = make_sound_pack(trial, "raw", seed=1).folder

    def names(self, count: int) -> list[str]:
        """Return the named cases, then drawn ones up to ``count`` in all."""
        # One file of each kind: train's without further shards, and two files of val.
        files = [key for key in self.bases["raw"].tree if key.startswith("train/") and key not in _SHARDS[1:]]
        names = [f"raw:{fault}" for fault in (*PACK_FAULTS, *_FOREIGN)]
        names += map(":".join, product(_OTHER_LAYOUTS, _TRIED_ON_OTHER_LAYOUTS))
        names += [f"whole:{fault}" for fault in PLACE_FAULTS]
        names += map(":".join, product(_LIVE_LAYOUTS, ("training", "reader"), LIVE_FAULTS))
        names += map(":".join, product(
            ["raw"], [*files, "val/manifest.json", "val/failures.jsonl"],
            ["pipe", "dangling", "removed", "zero-device", "folder"],
        ))  # fmt: skip
        return names + [f"random-{number}" for number in range(max(0, count - len(names)))]

    def attempt(self, trial: Trial) -> None:
        """Damage a copy of a sound pack, run the commands on it and judge them."""
        draw, is_drawn = trial.case.draw(), trial.case.number is not None
        layout, *words = [draw.choice(list(LAYOUTS))] if is_drawn else trial.case.name.split(":")
        base, pack = self.bases[layout], trial.folder / "pack"
        shutil.copytree(base.folder, pack)
        if is_drawn and layout in _LIVE_LAYOUTS and draw.random() < _LIVE_SHARE:
            words = [draw.choice(["reader", "training"]), draw.choice(list(LIVE_FAULTS))]
        if words[:1] == ["reader"]:
            return self._judge_live_reader(trial, base, pack, words[1], draw)
        if words[:1] == ["training"]:
            return self._judge_training(trial, base, pack, _LONG, words[1], draw)
        trial.fault = f"{layout}: {self._damage(base, pack, words, draw)}"
        is_trained = (
            draw.random() < _TRAINED_SHARE if is_drawn else words[-1] not in ("dangling", "zero-device", "folder")
        )
        dest = trial.folder / "read.json"
        trial.judge(judge_read(trial.run(["read-pack", str(pack), str(dest)], _READER_TIMEOUT_S), dest, base, pack))
        trial.judge(judge_verify(trial.run(["inspect-shards", str(pack), "--verify"], _READER_TIMEOUT_S), base, pack))
        if is_trained and not trial.has_hung:
            self._judge_training(trial, base, pack, _SHORT)
        return None

    def _damage(self, base: SoundPack, pack: Path, words: list[str], draw: random.Random) -> str:
        """Apply a named fault, or a drawn one, to a copy of a pack; say what was done."""
        if not words and draw.random() < 0.12:
            others = {"raw": tuple(_FOREIGN), "whole": tuple(PLACE_FAULTS)}
            words = [draw.choice([*PACK_FAULTS, *others.get(base.layout, ())])]
        if not words:
            return _damage_drawn_file(base, pack, draw)
        if len(words) == 2:
            replace(pack / words[0], words[1])
        elif words[0] in _FOREIGN:
            key = draw.choice(_FOREIGN[words[0]])
            shutil.copyfile(self.donor / key, pack / key)
        else:
            (PACK_FAULTS | PLACE_FAULTS)[words[0]](pack, draw)
        return " ".join([*words, str(changed_keys(read_tree(pack), base.tree)[:3])])

    def _judge_live_reader(self, trial: Trial, base: SoundPack, pack: Path, fault: str, draw: random.Random) -> None:
        """Apply a fault while the reader is in the middle of the pack."""
        dest = trial.folder / "read.json"
        running = trial.start(["read-pack", str(pack), str(dest), str(_PAUSE_S)])
        time.sleep(draw.uniform(1, 6) * _PAUSE_S)
        trial.fault = f"{base.layout}: {fault} while it is read"
        LIVE_FAULTS[fault](pack, draw)
        trial.judge(judge_read(trial.end(running, _LIVE_TIMEOUT_S), dest, base, pack))

    def _judge_training(
        self, trial: Trial, base: SoundPack, pack: Path, size: tuple[int, int], fault: str = "",
        draw: random.Random | None = None,
    ) -> None:  # fmt: skip
        """Train on the pack, with a fault after some steps if one is named; compare with the sound pack."""
        sound, run = self._train_soundly(trial, base, size), trial.folder / "run"
        running = trial.start(train_command(pack, run, self.cache, *size))
        if draw is not None:
            deadline = time.monotonic() + _TRAINING_TIMEOUT_S
            while not running.is_over() and len(read_lines(run / "loss.jsonl")) < _STEPS_BEFORE_FAULT:
                if time.monotonic() > deadline:
                    break
                time.sleep(_POLL_EVERY_S)
            trial.fault = f"{base.layout}: {fault} while it is trained on"
            LIVE_FAULTS[fault](pack, draw)
        trial.judge(judge_losses(trial.end(running, _TRAINING_TIMEOUT_S), read_logs(run), sound, base, pack))

    def _train_soundly(self, trial: Trial, base: SoundPack, size: tuple[int, int]) -> dict[str, list[Any]]:
        """Return the logs of a training on a sound pack; the first call runs it."""
        key = base.layout, size[0]
        with self._locks[key]:
            if key not in self.logs:
                run = self._sound / f"run-{base.layout}-{size[0]}"
                trial.run_soundly(train_command(base.folder, run, self.cache, *size))
                self.logs[key] = read_logs(run)
        return self.logs[key]


def train_command(pack: Path, run: Path, cache: Path, steps: int, batch: int) -> list[str]:
    """Return the command of a short training on a pack."""
    options = f"--model resnet8 --image-size 16 --steps {steps} --batch {batch} --infeed-timeout 5"
    where = ["--data", str(pack), "--run-dir", str(run), "--compilation-cache", str(cache)]
    return ["run-train", *options.split(), *where]


def _damage_drawn_file(base: SoundPack, pack: Path, draw: random.Random) -> str:
    """Damage a file, of small kinds as often as of large ones."""
    sorts: dict[str, list[str]] = {}
    for key in base.tree:
        is_text = key.endswith((".json", ".jsonl"))
        sorts.setdefault(Path(key).name if is_text else key.split("/")[1], []).append(key)
    key = draw.choice(sorts[draw.choice(list(sorts))]) if draw.random() < 0.6 else draw.choice(list(base.tree))
    return f"{key}: {damage(pack / key, draw)}"


def _judge_pack_exit(finished: Finished, pack: Path, refusals: tuple[int, ...] = (2,)) -> Judgement | None:
    return judge_exit(finished, names=(str(pack), *_NAMES), refusals=refusals)


def judge_read(finished: Finished, dest: Path, base: SoundPack, pack: Path) -> Judgement:
    """Judge what the reader wrote: an image or label that differs from the sound pack is wrong in any case."""
    name, ended = "read-pack", _judge_pack_exit(finished, pack)
    if ended is not None and ended.verdict is not Verdict.DETECTED:
        return ended
    found = json.loads(dest.read_text(encoding="utf-8"))
    wrong = {
        f"{what} of {split}": sum(index >= len(sound) or value != sound[index] for index, value in found[split][what])
        for split, contents in base.contents.items()
        for what, sound in contents.items()
    }
    if any(wrong.values()):
        if exemption := find_reading_exemption(read_tree(pack), base):
            return Judgement(name, Verdict.DOCUMENTED, exemption)
        return Judgement(name, Verdict.WRONG, "; ".join(f"{n} wrong {what}" for what, n in wrong.items() if n))
    for split, contents in base.contents.items():
        if ended is None and len(found[split]["images"]) != len(contents["images"]):
            return Judgement(name, Verdict.WRONG, f"{split} read as {len(found[split]['images'])} images")
    return ended or Judgement(name, Verdict.HARMLESS)


def judge_verify(finished: Finished, base: SoundPack, pack: Path) -> Judgement:
    """Judge a verification of every byte; a pack with a changed file must not pass."""
    name, ended = "inspect-shards", _judge_pack_exit(finished, pack)
    # The folder of a pack may contain other files.
    changed = [key for key in changed_keys(read_tree(pack), base.tree) if key.split("/")[0] in SPLITS]
    if ended is not None or not changed:
        return ended or Judgement(name, Verdict.HARMLESS)
    exemption = find_split_exemption(read_tree(pack), base.tree)
    if not exemption and _WEAKER_CLAIM in finished.output and _decodes_to_same_pixels(base, pack, changed):
        exemption = "bits without effect"
    if exemption:
        return Judgement(name, Verdict.DOCUMENTED, exemption)
    return Judgement(
        name, Verdict.WRONG, f"passed a pack in which {changed[0]!a} and {len(changed) - 1} others changed"
    )


def _decodes_to_same_pixels(base: SoundPack, pack: Path, changed: list[str]) -> bool:
    """Return whether only shards of compressed images without checksums changed, and no pixel as read by zarr."""
    if base.layout != "bare-blosc" or not all("/pixels/c/" in key for key in changed):
        return False
    return {split: read_split(pack / split) for split in SPLITS} == base.contents


def judge_losses(
    finished: Finished, logs: dict[str, list[Any]], sound: dict[str, list[Any]], base: SoundPack, pack: Path
) -> Judgement:
    """Judge the losses that a training recorded: as far as they go, they must equal those on the sound pack."""
    name, ended = "run-train", _judge_pack_exit(finished, pack, refusals=(1, 2))
    if ended is not None and ended.verdict is not Verdict.DETECTED:
        return ended
    tree = read_tree(pack)
    if any(logs[log] != sound[log][: len(logs[log])] for log in logs):
        if exemption := find_reading_exemption(tree, base):
            return Judgement(name, Verdict.DOCUMENTED, exemption)
        return Judgement(name, Verdict.WRONG, "losses or evaluations that differ from those on the sound pack")
    counts = [(len(logs[log]), len(sound[log])) for log in ("loss.jsonl", "eval.jsonl")]
    if ended is None and counts[0][0] != counts[0][1]:
        return Judgement(name, Verdict.WRONG, f"succeeded after {counts[0][0]} of {counts[0][1]} steps")
    if ended is None and counts[1][0] != counts[1][1]:
        if exemption := find_split_exemption(tree, base.tree):
            return Judgement(name, Verdict.DOCUMENTED, exemption)
        if not _WITHOUT_EVALUATION.search(finished.output):
            return Judgement(name, Verdict.WRONG, "succeeded, and skipped the evaluation without a message")
    return ended or Judgement(name, Verdict.HARMLESS)


def find_reading_exemption(tree: dict[str, bytes], base: SoundPack) -> str:
    """Return the exemption for a reader that got other pixels or labels than those of the sound pack, or ""."""
    if _has_swapped_splits(tree, base.tree):
        return "a split under another name"
    has_only_pixels = all("/pixels/c/" in key for key in changed_keys(tree, base.tree))
    return "pixels without checksums" if "bare" in base.layout and has_only_pixels else ""


def find_split_exemption(tree: Tree, sound: Tree) -> str:
    """Return the exemption for a changed pack that was found intact, or ""."""
    if _has_swapped_splits(tree, sound):
        return "a split under another name"
    parts = ("manifest", "failures", "pixels", *_ARRAYS)
    gone = [split for split in SPLITS if not any(key.startswith(f"{split}/{part}") for key in tree for part in parts)]
    kept, whole = ({key: content for key, content in each.items() if key.split("/")[0] not in gone
                    and key.split("/")[0] in SPLITS} for each in (tree, sound))  # fmt: skip
    return "a missing split" if gone and kept == whole else ""


def _has_swapped_splits(tree: Tree, sound: Tree) -> bool:
    other = {"train": "val", "val": "train"}
    renamed = {f"{other[key.split('/')[0]]}/{key.partition('/')[2]}": content for key, content in sound.items()}
    return dict(tree) == renamed
