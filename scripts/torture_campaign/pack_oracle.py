"""The sound packs that faults are applied to, and the program `read-pack`, which reads a pack by the public reader."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from loopfeed.preprocess.shards.reader import ShardError, open_split
from scripts.torture_campaign.case import Trial
from scripts.torture_campaign.oracle import digest_of, read_split, read_tree

SPLITS = {"train": 96, "val": 32}
"""The splits of a sound pack, with their numbers of images."""
# Side in pixels and packing options of each. The reader lends images of 64 px, and copies smaller ones.
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "raw": (32, ()),
    "dense": (32, ("--layout", "dense")),
    "blosc": (32, ("--codec", "blosc")),
    "bare": (32, ("--no-checksum",)),
    "bare-blosc": (32, ("--no-checksum", "--codec", "blosc")),
    "large": (64, ()),
    "bare-large": (64, ("--no-checksum",)),
    "whole": (32, ("--canvas", "3:2")),
}
# (height, width): near the square, a portrait, and one that is longer than its canvas.
_SHAPES = ((66, 70), (90, 66), (40, 100))
_READ_TIMEOUT_S = 3.0
_BATCH = 12


@dataclass(frozen=True)
class SoundPack:
    """A sound pack, which is never changed.

    Attributes:
        layout: a key of `LAYOUTS`.
        folder: folder of the pack.
        contents: contents of each split, read by zarr.
        tree: the bytes of each file.
    """

    layout: str
    folder: Path
    contents: dict[str, dict[str, list[Any]]]
    tree: dict[str, bytes]


def draw_source(folder: Path, seed: int) -> None:
    """Draw class folders of noise with a colour that depends on the class; one training file is not an image."""
    random = np.random.default_rng(seed)
    for split, count in SPLITS.items():
        for number in range(count):
            label = number % 4
            pixels = random.integers(0, 160, (*_SHAPES[number % len(_SHAPES)], 3)).astype(np.uint8)
            pixels[:, :, label % 3] += np.uint8(40 + 10 * label)
            path = folder / split / f"class-{label}" / f"{number:03}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(path, compress_level=1)
    (folder / "train/class-0/no-image.png").write_bytes(b"no image")


def make_sound_pack(trial: Trial, layout: str, *, seed: int = 0) -> SoundPack:
    """Draw images, pack them in a layout and read them."""
    source, folder = trial.folder / f"source-{seed}", trial.folder / f"pack-{layout}-{seed}"
    if not source.exists():
        draw_source(source, seed)
    side, options = LAYOUTS[layout]
    size = ["--size", str(side), "--shard-images", "32", "--workers", "1"]
    trial.run_soundly(["preprocess-imagenet", str(source), str(folder), *size, *options])
    return SoundPack(layout, folder, {split: read_split(folder / split) for split in SPLITS}, read_tree(folder))


def read_pack() -> int:
    """Run `read-pack PACK FILE [PAUSE_S]`: write each split's images by index, their labels, and any error, as JSON.

    Exits with 0 if everything was read, and with 2 if the reader refused; other exceptions are not caught.
    """
    pack, dest, *pause = sys.argv[1:]
    found: dict[str, Any] = {}
    code = 0
    for split in SPLITS:
        found[split] = {"images": [], "labels": []}
        try:
            _read_split(pack, split, found[split], float(pause[0]) if pause else 0.0)
        except ShardError as error:
            print(f"read-pack: {error}", file=sys.stderr)
            code = 2
    Path(dest).write_text(json.dumps(found), encoding="utf-8")
    return code


def _read_split(pack: str, name: str, found: dict[str, Any], pause_s: float) -> None:
    """Read a split in batches of images from all its shards; record each image with its index."""
    with open_split(pack, name) as split:
        order = np.random.default_rng(0).permutation(split.num_images).astype(np.int64)
        for start in range(0, split.num_images, _BATCH):
            indices = order[start : start + _BATCH]
            pixels = np.empty((len(indices), split.height, split.row_words), np.uint32)
            labels = np.empty((len(indices), *split.label_row), np.int32)
            split.read_into(indices, pixels, labels, timeout_s=_READ_TIMEOUT_S)
            found["images"] += zip(indices.tolist(), map(digest_of, pixels), strict=True)
            found["labels"] += zip(indices.tolist(), labels.tolist(), strict=True)
            time.sleep(pause_s)
