"""The kind ``images``: hostile images among sound ones, packed in groups."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from scripts.torture_campaign.case import Case, Judgement, Trial, Verdict, judge_exit
from scripts.torture_campaign.image_files import HEAVY, MAKERS, draw_image_fault
from scripts.torture_campaign.image_oracle import read_crops

_SIZE = 32
CANVASES = ("square", "3:2")
_GROUP_SIZE = 25
_NUM_SOUND_IMAGES = 6
_MAX_MB = 1_500.0
_DEEP_MB = {"deep-grey.png": 650.0}, 1_250.0
"""Memory limits for the 16-bit images of 9,400 px with one worker: 350 MB as 8-bit RGBA, with files of up to 530 MB.

For the grey one, 16 and 8 bits together take 270 MB, its file is small, and a float64 copy takes 710 MB. The one with
grey and alpha was measured at 1,216 MB, 60 of them memory of the process that commands are forked from.
"""
_MAX_LEVELS = 2
"""Maximum difference between the pack and Pillow: only the crop is resized, which rounds differently."""
_TIMEOUT_S, _GROUP_TIMEOUT_S, _REFERENCE_TIMEOUT_S = 15.0, 45.0, 60.0
_judgement = partial(Judgement, "preprocess-imagenet")


@dataclass
class ImageKind:
    """Hostile images.

    Attributes:
        sound: the crops uint8 ``[32, 32, 3]`` of the sound images, or all of them, by canvas and class.
    """

    sound: dict[str, dict[str, list[Any]]] = field(default_factory=dict)
    heavy: ClassVar[tuple[str, ...]] = HEAVY
    _folder: Path = Path()

    def prepare(self, trial: Trial) -> None:
        """Pack only the sound images."""
        self._folder = trial.folder / "sound"
        random = np.random.default_rng(0)
        for number in range(_NUM_SOUND_IMAGES):
            folder = self._folder / f"sound-{number}"
            folder.mkdir(parents=True)
            shape = (50, 60) if number % 3 else (90, 50)
            image = Image.fromarray(random.integers(0, 256, (*shape, 3)).astype(np.uint8))
            image.save(folder / ("a.png" if number % 2 else "a.jpg"))
        for number, canvas in enumerate(CANVASES):
            trial.run_soundly(_command(self._folder, trial.folder / f"pack-{number}", canvas))
            self.sound[canvas] = read_crops(trial.folder / f"pack-{number}")

    def names(self, count: int) -> list[str]:
        """Return a case for each named file, and groups of drawn ones up to ``count`` in all."""
        num_groups = max(0, -(-(count - len(MAKERS)) // _GROUP_SIZE))
        return [*MAKERS, *(f"group-{number}" for number in range(num_groups))]

    def attempt(self, trial: Trial) -> None:
        """Pack a named file or a group of drawn ones; if a group fails as a whole, pack each file separately."""
        trial.fault, cases = trial.case.name, [trial.case]
        if trial.fault.startswith("group-"):
            first = int(trial.fault.removeprefix("group-")) * _GROUP_SIZE
            cases = [Case("images", f"random-{first + number}", trial.case.seed) for number in range(_GROUP_SIZE)]
        if (ended := self._pack(trial, cases)) is not None:
            trial.judge(ended)
            for case in cases if len(cases) > 1 else ():
                if (alone := self._pack(trial, [case])) is not None:
                    trial.judge(alone)

    def _pack(self, trial: Trial, cases: Sequence[Case]) -> Judgement | None:
        """Pack the files of some cases with sound ones; judge each, or return the judgement on a pack that failed."""
        source, dest = (trial.folder / f"{what}-{len(trial.log)}" for what in ("source", "pack"))
        shutil.copytree(self._folder, source)
        faults = {f"hostile-{number}": _write(source / f"hostile-{number}", case) for number, case in enumerate(cases)}
        name, limit_s = cases[0].name, _TIMEOUT_S if len(cases) == 1 else _GROUP_TIMEOUT_S
        # Each file is packed as a square with one seed, and whole with another.
        is_deep, canvas = name.startswith("deep-"), trial.case.draw().choice(CANVASES)
        finished = trial.run(_command(source, dest, canvas, workers=1 if is_deep else 2), limit_s)
        max_mb = _DEEP_MB[0].get(name, _DEEP_MB[1]) if is_deep else _MAX_MB
        ended = judge_exit(finished, names=[str(source), str(dest), "hostile-", "sound-"], max_mb=max_mb)
        if ended is not None:
            is_refused = ended.verdict is Verdict.DETECTED
            who = faults["hostile-0"] if len(cases) == 1 else f"one of {len(cases)} images"
            return _judgement(
                Verdict.WRONG if is_refused else ended.verdict, f"{who} stopped the whole pack: {ended.why}"
            )
        self._compare(trial, source, dest, faults, canvas)
        shutil.rmtree(source)
        return None

    def _compare(self, trial: Trial, source: Path, dest: Path, faults: dict[str, str], canvas: str) -> None:
        crops, failures = read_crops(dest), _read_failures(dest)
        reference = self._decode(trial, source, [name for name in faults if name in crops], canvas)
        for name, (crop,) in self.sound[canvas].items():
            if not np.array_equal(crops.get(name, [None])[0], crop):
                trial.judge(_judgement(Verdict.WRONG, f"wrong pixels of the sound image {name}"))
        for name, fault in faults.items():
            if name in crops:
                judged = judge_crop(crops[name][0], reference.get(name, ""))
            elif failures.get(name):
                judged = _judgement(Verdict.DETECTED, failures[name])
            else:
                judged = _judgement(Verdict.WRONG, "neither packed nor in failures.jsonl")
            trial.judge(_judgement(judged.verdict, f"{fault}: {judged.why}"))

    def _decode(self, trial: Trial, source: Path, packed: list[str], canvas: str) -> dict[str, str | None]:
        """Return Pillow's result for the files that were packed, by class; empty if it fails or hangs."""
        if not packed:
            return {}
        folder, dest = trial.folder / f"packed-{len(trial.log)}", trial.folder / f"reference-{len(trial.log)}.json"
        folder.mkdir()
        for name in packed:
            (path,) = (source / name).iterdir()
            path.rename(folder / name)
        finished = trial.run(["decode-images", str(folder), str(dest), str(_SIZE), canvas], _REFERENCE_TIMEOUT_S)
        return dict(json.loads(dest.read_text())) if finished.code == 0 else {}


def _write(folder: Path, case: Case) -> str:
    """Write the file of a case into its own class folder; say what it is."""
    folder.mkdir()
    if case.number is None:
        MAKERS[case.name](folder / case.name)
        return case.name
    suffix, content, fault = draw_image_fault(case.draw())
    (folder / f"image.{suffix}").write_bytes(content)
    return f"{case.name} ({fault})"


def _command(source: Path, dest: Path, canvas: str, *, workers: int = 2) -> list[str]:
    options = ["--size", str(_SIZE), "--canvas", canvas, "--workers", str(workers)]
    return ["preprocess-imagenet", str(source), str(dest), *options]


def _read_failures(dest: Path) -> dict[str, str]:
    """Return the reason of each failure by the folders in its path."""
    lines = map(json.loads, (dest / "train/failures.jsonl").read_text().splitlines())
    return {part: failure["reason"] for failure in lines for part in Path(failure["path"]).parts}


def judge_crop(crop: Any, reference: str | None) -> Judgement:
    """Judge a crop uint8 ``[H, W, 3]`` of a pack by Pillow's, as `decode` returns it."""
    if reference is None:
        return _judgement(Verdict.WRONG, "packed, although Pillow cannot decode it")
    theirs = np.frombuffer(bytes.fromhex(reference), np.uint8) if reference else crop
    if theirs.size != crop.size:
        return _judgement(Verdict.WRONG, f"has the shape {crop.shape}, and Pillow's has {theirs.size} values")
    theirs = theirs.reshape(crop.shape)
    levels = int(np.abs(crop.astype(int) - theirs.astype(int)).max())
    if levels > _MAX_LEVELS:
        return _judgement(Verdict.WRONG, f"differs from Pillow by {levels} levels")
    return _judgement(Verdict.HARMLESS)
