"""The kind ``images``: hostile images among sound ones, packed in groups."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from scripts.torture_campaign.case import Case, Outcome, Trial
from scripts.torture_campaign.image_faults import DEEP, HEAVY, MAKERS, draw_image_fault
from scripts.torture_campaign.oracle import open_zarr
from scripts.torture_campaign.verdict import Judgement, Verdict, judge_exit

SIZE = 32
GROUP_SIZE = 25
NUM_SOUND_IMAGES = 6
MAX_MB = 1_500.0
DEEP_MB = 1_200.0
"""Memory limit for the 16-bit images of 9,400 px with one worker: 350 MB as 8-bit RGBA, with files of up to 530 MB."""
DEEP_GREY_MB = 600.0
"""Memory limit for the grey one: 16 and 8 bits together take 270 MB, its file is small; a float64 copy takes 710 MB."""
MAX_LEVELS = 2
"""Maximum difference between the pack and Pillow: only the crop is resized, which rounds differently."""
_TIMEOUT_S = 15.0
_GROUP_TIMEOUT_S = 45.0
_REFERENCE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class HostileImage:
    """A hostile file: its own class, its case, and a description."""

    class_id: str
    case: Case
    fault: str


@dataclass
class ImageKind:
    """HostileImage images.

    Attributes:
        sound: the crops uint8 ``[32, 32, 3]`` of the sound images, by class.
    """

    sound: dict[str, Any] = field(default_factory=dict)
    name: str = "images"
    _folder: Path = Path()

    def prepare(self, trial: Trial) -> None:
        """Pack only the sound images."""
        self._folder = trial.folder / "sound"
        random = np.random.default_rng(0)
        for number in range(NUM_SOUND_IMAGES):
            folder = self._folder / f"sound-{number}"
            folder.mkdir(parents=True)
            image = Image.fromarray(random.integers(0, 256, (50, 60, 3)).astype(np.uint8))
            image.save(folder / ("a.png" if number % 2 else "a.jpg"))
        dest = trial.folder / "pack"
        finished = trial.run(_command(self._folder, dest), timeout_s=_TIMEOUT_S)
        if finished.code != 0:
            raise RuntimeError(f"packing sound images failed: {finished.output}")
        self.sound = read_crops(dest)

    def cases(self, seed: int, count: int) -> list[Case]:
        """Return a case for each named file, and groups of drawn ones up to ``count`` in all."""
        named = [Case(self.name, name, seed, is_heavy=name in HEAVY) for name in MAKERS]
        groups = [Case(self.name, f"group-{number}", seed) for number in range(-(-(count - len(named)) // GROUP_SIZE))]
        return [*named, *groups]

    def attempt(self, trial: Trial) -> None:
        """Pack a named file or a group of drawn ones; if a group fails as a whole, pack each file separately."""
        name, seed = trial.case.name, trial.case.seed
        if not name.startswith("group-"):
            self._judge(trial, [trial.case])
            return
        first = int(name.removeprefix("group-")) * GROUP_SIZE
        cases = [Case(self.name, f"random-{first + number}", seed) for number in range(GROUP_SIZE)]
        if self._judge(trial, cases):
            return
        trial.parts.clear()
        for case in cases:
            self._judge(trial, [case])

    def _write(self, source: Path, case: Case) -> HostileImage:
        """Write the file of a case into its own class folder."""
        class_id = f"hostile-{case.number if case.number is not None else 0:05}"
        folder = source / class_id
        folder.mkdir(parents=True)
        if case.number is None:
            MAKERS[case.name](folder / case.name)
            return HostileImage(class_id, case, (MAKERS[case.name].__doc__ or "").split(".")[0].removeprefix("Write "))
        suffix, content, fault = draw_image_fault(case.draw())
        (folder / f"image.{suffix}").write_bytes(content)
        return HostileImage(class_id, case, fault)

    def _judge(self, trial: Trial, cases: Sequence[Case]) -> bool:
        """Pack and judge the files of some cases; return False if there are several and packing failed as a whole."""
        number = len(trial.log)
        source, dest = trial.folder / f"source-{number}", trial.folder / f"pack-{number}"
        shutil.copytree(self._folder, source)
        hostiles = [self._write(source, case) for case in cases]
        limit_s = _TIMEOUT_S if len(cases) == 1 else _GROUP_TIMEOUT_S
        name = cases[0].name
        is_deep = name in DEEP
        finished = trial.run(_command(source, dest, workers=1 if is_deep else 2), timeout_s=limit_s)
        max_mb = DEEP_GREY_MB if name == "deep-grey.png" else DEEP_MB if is_deep else MAX_MB
        ended = judge_exit(finished, names=[str(source), str(dest), "hostile-", "sound-"], max_mb=max_mb)
        if ended is not None and ended.verdict is Verdict.DETECTED:
            ended = Judgement(ended.command, Verdict.WRONG, f"one image stopped the whole pack: {ended.why}")
        if ended is not None and len(cases) > 1:
            return False
        judgements = [ended] if ended is not None else self._compare(trial, source, dest, hostiles)
        for hostile, judgement in zip(hostiles, judgements, strict=True):
            trial.parts.append(Outcome(hostile.case, hostile.fault, judgement, (judgement,)))
        shutil.rmtree(source)
        return True

    def _compare(self, trial: Trial, source: Path, dest: Path, hostiles: Sequence[HostileImage]) -> list[Judgement]:
        crops = read_crops(dest)
        failures = _read_failures(dest)
        reference = self._reference(trial, source, [each for each in hostiles if each.class_id in crops])
        others = [
            name for name, crop in self.sound.items() if not (name in crops and np.array_equal(crops[name], crop))
        ]
        judgements = []
        for hostile in hostiles:
            if others:
                judgement = Judgement(
                    "preprocess-imagenet", Verdict.WRONG, f"wrong pixels of the sound image {others[0]}"
                )
            elif hostile.class_id in crops:
                judgement = _judge_crop(crops[hostile.class_id], reference.get(hostile.class_id, ""))
            elif failures.get(hostile.class_id):
                judgement = Judgement("preprocess-imagenet", Verdict.DETECTED, failures[hostile.class_id])
            else:
                judgement = Judgement("preprocess-imagenet", Verdict.WRONG, "neither packed nor in failures.jsonl")
            judgements.append(judgement)
        return judgements

    def _reference(self, trial: Trial, source: Path, packed: list[HostileImage]) -> dict[str, str | None]:
        """Return Pillow's result for the files that were packed, by class; empty if it fails or hangs."""
        if not packed:
            return {}
        folder, dest = trial.folder / f"packed-{len(trial.log)}", trial.folder / f"reference-{len(trial.log)}.json"
        folder.mkdir()
        for hostile in packed:
            (path,) = (source / hostile.class_id).iterdir()
            path.rename(folder / hostile.class_id)
        finished = trial.run(["decode-images", str(folder), str(dest), str(SIZE)], timeout_s=_REFERENCE_TIMEOUT_S)
        return dict(json.loads(dest.read_text())) if finished.code == 0 else {}


def _command(source: Path, dest: Path, *, workers: int = 2) -> list[str]:
    return ["preprocess-imagenet", str(source), str(dest), "--size", str(SIZE), "--workers", str(workers)]


def read_crops(dest: Path) -> dict[str, Any]:
    """Return the crop, uint8 ``[H, W, 3]``, of each class of a pack with one image per class, read by zarr."""
    return {name: crops[0] for name, crops in read_all_crops(dest).items()}


def read_all_crops(dest: Path) -> dict[str, list[Any]]:
    """Return the crops, uint8 ``[H, W, 3]``, of each class of a pack, read by zarr."""
    pixels, labels = (np.asarray(open_zarr(dest / "train" / name)[:]) for name in ("pixels", "labels"))
    manifest = json.loads((dest / "train/manifest.json").read_bytes())
    names = [each["id"] for each in manifest["classes"]]
    rgb = np.stack([pixels >> shift & 0xFF for shift in (24, 16, 8)], axis=-1).astype(np.uint8)
    found: dict[str, list[Any]] = {}
    for label, crop in zip(labels.tolist(), rgb, strict=True):
        found.setdefault(names[label], []).append(crop)
    return found


def _read_failures(dest: Path) -> dict[str, str]:
    """Return the reason of each failure by the class in its path."""
    found = {}
    for line in (dest / "train/failures.jsonl").read_text().splitlines():
        failure = json.loads(line)
        for part in Path(failure["path"]).parts:
            found[part] = failure["reason"]
    return found


def _judge_crop(crop: Any, reference: str | None) -> Judgement:
    name = "preprocess-imagenet"
    if reference is None:
        return Judgement(name, Verdict.WRONG, "packed, although Pillow cannot decode it")
    if not reference:
        return Judgement(name, Verdict.HARMLESS)
    theirs = np.frombuffer(bytes.fromhex(reference), np.uint8).reshape(crop.shape)
    levels = int(np.abs(crop.astype(int) - theirs.astype(int)).max())
    if levels > MAX_LEVELS:
        return Judgement(name, Verdict.WRONG, f"differs from Pillow by {levels} levels")
    return Judgement(name, Verdict.HARMLESS)
