"""The sound packs that faults are applied to, one per layout, and their contents as read independently."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from scripts.torture_campaign.case import Trial
from scripts.torture_campaign.oracle import SplitContents, columns, read_split, read_tree

SPLITS = ("train", "val")
NUM_IMAGES = {"train": 96, "val": 32}
_PACK_TIMEOUT_S = 120.0
_TRAIN_TIMEOUT_S = 300.0

# Side in pixels and packing options of each. The reader lends images of 64 px, and copies smaller ones.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "raw": (32, ()),
    "dense": (32, ("--layout", "dense")),
    "blosc": (32, ("--codec", "blosc")),
    "bare": (32, ("--no-checksum",)),
    "bare-blosc": (32, ("--no-checksum", "--codec", "blosc")),
    "large": (64, ()),
    "bare-large": (64, ("--no-checksum",)),
}
DONOR = "twin"
"""A pack with the shape of ``raw`` and other images."""


@dataclass(frozen=True)
class SoundPack:
    """A sound pack.

    Attributes:
        name: a key of `LAYOUTS`.
        folder: folder of the pack, never changed.
        has_checksums: whether its images have checksums.
        contents: contents of each split, read by zarr.
        tree: the bytes of each file.
        donor: a pack of the same shape with other images; None for most layouts.
    """

    name: str
    folder: Path
    has_checksums: bool
    contents: dict[str, SplitContents]
    tree: dict[str, bytes]
    donor: Path | None


def draw_source(folder: Path, seed: int) -> None:
    """Draw class folders of noise with a colour that depends on the class; one training file is not an image."""
    random = np.random.default_rng(seed)
    for split, count in NUM_IMAGES.items():
        for number in range(count):
            label = number % 4
            pixels = random.integers(0, 160, (66, 70, 3)).astype(np.uint8)
            pixels[:, :, label % 3] += np.uint8(40 + 10 * label)
            path = folder / split / f"class-{label}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, compress_level=1)
    (folder / "train/class-0/no-image.png").write_bytes(b"no image")


def make_sound_packs(trial: Trial, names: tuple[str, ...]) -> dict[str, SoundPack]:
    """Draw and pack the sound packs of some layouts, and read them.

    Raises:
        RuntimeError: packing failed.
    """
    sources = {name: trial.folder / f"source-{name}" for name in ("ours", "others")}
    for seed, source in enumerate(sources.values()):
        draw_source(source, seed)
    donor = _pack(trial, sources["others"], DONOR, "raw")
    bases = {}
    for name in names:
        folder = _pack(trial, sources["ours"], name, name)
        contents = {split: read_split(folder / split) for split in SPLITS}
        has_donor = donor if LAYOUTS[name] == LAYOUTS["raw"] else None
        bases[name] = SoundPack(name, folder, "bare" not in name, contents, read_tree(folder), has_donor)
    return bases


def _pack(trial: Trial, source: Path, name: str, layout: str) -> Path:
    side, options = LAYOUTS[layout]
    folder = trial.folder / f"pack-{name}"
    size = ["--size", str(side), "--shard-images", "32", "--workers", "1"]
    finished = trial.run(["preprocess-imagenet", str(source), str(folder), *size, *options], timeout_s=_PACK_TIMEOUT_S)
    if finished.code != 0:
        raise RuntimeError(f"packing a sound source failed: {finished.output}")
    return folder


@dataclass(frozen=True)
class Training:
    """The settings of trainings on packs, and the losses on the sound pack.

    Attributes:
        steps, batch: settings of the run.
        losses: step, loss and learning rate of each line.
        evaluations: step, counts and loss of each evaluation.
    """

    steps: int
    batch: int
    losses: tuple[tuple[object, ...], ...]
    evaluations: tuple[tuple[object, ...], ...]


LOSS_KEYS = ("step", "loss", "lr")
EVALUATION_KEYS = ("step", "num_images", "top1", "top5", "loss")


def train_command(pack: Path, run: Path, cache: Path, *, steps: int, batch: int) -> list[str]:
    """Return the command of a short training on a pack."""
    options = f"--model resnet8 --image-size 16 --steps {steps} --batch {batch} --infeed-timeout 5"
    where = ["--data", str(pack), "--run-dir", str(run), "--compilation-cache", str(cache)]
    return ["run-train", *options.split(), *where]


def train_on_sound_pack(trial: Trial, base: SoundPack, cache: Path, *, steps: int, batch: int) -> Training:
    """Train on a sound pack; trainings on damaged packs are compared with its losses."""
    run = trial.folder / f"run-{base.name}-{steps}"
    finished = trial.run(train_command(base.folder, run, cache, steps=steps, batch=batch), timeout_s=_TRAIN_TIMEOUT_S)
    if finished.code != 0:
        raise RuntimeError(f"training on a sound pack failed: {finished.output}")
    return Training(
        steps,
        batch,
        tuple(columns(run / "loss.jsonl", *LOSS_KEYS)),
        tuple(columns(run / "eval.jsonl", *EVALUATION_KEYS)),
    )
