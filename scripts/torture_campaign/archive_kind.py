"""The kind ``archives``: hostile archives and trees as the source of a pack."""

from __future__ import annotations

import io
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scripts.torture_campaign.archive_faults import ARCHIVES, official, tar_of
from scripts.torture_campaign.case import Case, Trial
from scripts.torture_campaign.file_faults import draw_file_fault
from scripts.torture_campaign.image_kind import read_all_crops, read_crops
from scripts.torture_campaign.tree_faults import TREES, kaggle_tree, sound_tree
from scripts.torture_campaign.verdict import Judgement, Verdict, judge_exit

MAX_MB = 1_500.0
_TIMEOUT_S = 20.0
_CLASSES = tuple(f"n{number:08}" for number in range(4))
_HEAVY = ("hole", "gib", "bomb", "giant", "pax-length", "zero-device", "open-quote")
# The sources for drawn faults: the file that is damaged, and the maker of its source.
_DRAWN = {
    "photos.tar": tar_of(lambda _: b""),
    "imagenet/ILSVRC2012_img_train.tar": official(),
    "imagenet/ILSVRC2012_img_val.tar": official(),
    "imagenet/ILSVRC2012_devkit_t12.tar.gz": official(),
    "kaggle/LOC_val_solution.csv": kaggle_tree,
    "kaggle/LOC_synset_mapping.txt": kaggle_tree,
}
_FOLDERS = threading.Lock()
"""Held while a source is created, because the makers of deep trees change the process's working folder."""


@dataclass
class ArchiveKind:
    """HostileImage archives and trees.

    Attributes:
        images: sound images by class, as the bytes of files.
        crops: their crops in a pack.
    """

    images: dict[str, bytes] = field(default_factory=dict)
    crops: dict[str, Any] = field(default_factory=dict)
    name: str = "archives"

    def prepare(self, trial: Trial) -> None:
        """Draw sound images, and pack them from a tree."""
        random = np.random.default_rng(1)
        for name in _CLASSES:
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (40, 44, 3)).astype(np.uint8)).save(file, "PNG")
            self.images[name] = file.getvalue()
        finished = trial.run(_command(sound_tree(trial.folder, self.images), trial.folder / "pack"), timeout_s=60)
        if finished.code != 0:
            raise RuntimeError(f"packing sound images failed: {finished.output}")
        self.crops = read_crops(trial.folder / "pack")

    def cases(self, seed: int, count: int) -> list[Case]:
        """Return the named cases, then drawn ones up to ``count`` in all."""
        names = [*ARCHIVES, *TREES]
        names += [f"random-{number}" for number in range(max(0, count - len(names)))]
        return [Case(self.name, name, seed, is_heavy=any(word in name for word in _HEAVY)) for name in names]

    def attempt(self, trial: Trial) -> None:
        """Create a source, pack it and judge the result."""
        name, draw = trial.case.name, trial.case.draw()
        must_refuse = False
        if trial.case.number is None:
            maker, must_refuse = (ARCHIVES | TREES)[name]
            with _FOLDERS:
                source = maker(trial.folder, self.images)
            words = getattr(maker, "__doc__", None) or name if name in TREES else name
            trial.fault = words.split("\n")[0].rstrip(".")
        else:
            damaged = draw.choice(list(_DRAWN))
            source = _DRAWN[damaged](trial.folder, self.images)
            trial.fault = f"{damaged}: {draw_file_fault(draw)(trial.folder / damaged, draw)}"
        dest = trial.folder / "pack"
        finished = trial.run(_command(source, dest), timeout_s=_TIMEOUT_S)
        names = [os.fspath(source), source.name, os.fspath(dest), "the split train", "the split val"]
        ended = judge_exit(finished, names=names, max_mb=MAX_MB)
        if ended is None and must_refuse:
            ended = Judgement(finished.command[0], Verdict.WRONG, "packed, but must be refused")
        trial.judge(ended or self._judge_pack(dest))
        if ended is None:
            shown = trial.run(["inspect-shards", str(dest), "--verify"], timeout_s=_TIMEOUT_S)
            judged = judge_exit(shown, names=[str(dest)])
            trial.judge(judged or Judgement("inspect-shards", Verdict.HARMLESS))

    def _judge_pack(self, dest: Path) -> Judgement:
        if not (dest / "train").is_dir():
            return Judgement("preprocess-imagenet", Verdict.HARMLESS, "only its val split")
        crops = read_all_crops(dest)
        failures = (dest / "train/failures.jsonl").read_text()
        for name, crop in self.crops.items():
            if not all(np.array_equal(found, crop) for found in crops.get(name, [])):
                return Judgement("preprocess-imagenet", Verdict.WRONG, f"wrong pixels of {name}")
            if name not in crops and name not in failures:
                return Judgement("preprocess-imagenet", Verdict.WRONG, f"{name} neither packed nor in failures.jsonl")
        return Judgement("preprocess-imagenet", Verdict.HARMLESS)


def _command(source: Path, dest: Path) -> list[str]:
    return ["preprocess-imagenet", str(source), str(dest), "--size", "32", "--workers", "2"]
