"""Small photographs with a file of labels, and an independent reading of both.

`python -m tests.labelled_photographs SOURCE LABELS DEST WHEN` packs them and dies by SIGKILL, just before a shard file
whose name matches WHEN gets its name, or, if WHEN is "targets", before these are written.
"""

import csv
import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from PIL import Image

from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing import finish
from loopfeed.preprocess.packing.pack import PackResult, pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.arrays import write_array
from loopfeed.preprocess.shards.location import Location, open_location
from loopfeed.preprocess.sources.open_source import open_source

SIZE = 4
COLOURS = ("blue", "green", "red")


def draw_photographs(root: Path, num_images: int, *, seed: int = 0) -> list[str]:
    """Write random images into three folders, and return their paths."""
    random = np.random.default_rng(seed)
    paths = []
    for index in range(num_images):
        path = f"{('', 'a/', 'b/c/')[index % 3]}{index:03d}.png"
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(random.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)).save(root / path)
        paths.append(path)
    return paths


def classes_of(index: int) -> list[str]:
    """Return the classes of image `index`: none, one, two or all three."""
    return [name for bit, name in enumerate(COLOURS) if (index % 8) >> bit & 1]


def numbers_of(index: int) -> list[str]:
    return [str(index / 7), f"{-index}e-3", "1e-45"]


def write_labels(file: Path, paths: list[str], *, kind: str = "classes") -> Path:
    """Write a CSV file or JSON lines in another order than that of the images."""
    indices = list(reversed(range(len(paths))))
    if file.suffix == ".jsonl":
        key = "classes" if kind == "classes" else "targets"
        values = [classes_of(index) if kind == "classes" else list(map(float, numbers_of(index))) for index in indices]
        entries = zip(indices, values, strict=True)
        lines = [json.dumps({"path": paths[index], key: each}) for index, each in entries]
    elif kind == "classes":
        lines = ["path,classes", *(f"{paths[index]},{'|'.join(classes_of(index))}" for index in indices)]
    else:
        lines = ["path,x,y,tiny", *(f"{paths[index]},{','.join(numbers_of(index))}" for index in indices)]
    file.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return file


def read_independently(root: Path, labels: Path) -> dict[bytes, list[float]]:
    """Return the labels of each image by its pixels, with Python's csv and json alone."""
    if labels.suffix == ".jsonl":
        lines = labels.read_bytes().splitlines()
        rows = {each["path"]: each.get("classes", each.get("targets")) for each in map(json.loads, lines)}
    else:
        with labels.open(newline="", encoding="utf-8") as file:
            rows = {row.pop("path"): row for row in csv.DictReader(file)}
        is_classes = next(iter(rows.values())).keys() == {"classes"}
        rows = {
            path: [each for each in row["classes"].split("|") if each] if is_classes else list(map(float, row.values()))
            for path, row in rows.items()
        }
    found = {}
    for path, values in rows.items():
        if not values or isinstance(values[0], str):
            values = [float(colour in values) for colour in COLOURS]
        found[np.asarray(Image.open(root / path).convert("RGB")).tobytes()] = [float(np.float32(v)) for v in values]
    return found


def pack_labelled(source: Path, labels: Path, dest: Path, **values) -> dict[str, PackResult]:
    """Pack every split of a source with 4 images per shard file."""
    options = {name: values.pop(name) for name in ("holdout", "limit", "splits") if name in values}
    overwrite = values.pop("overwrite", False)
    settings = PackSettings(rule=ResizeRule(size=SIZE, resize=SIZE), **({"shard_images": 4} | values))
    location = open_location(str(dest))
    with open_source(source, labels=labels, **options) as opened:
        return {
            name: pack_split(
                split, location.child(name), settings, targets=opened.targets.get(name), overwrite=overwrite
            )
            for name, split in opened.splits.items()
        }


def main() -> None:
    """Pack until the process is killed."""
    source, labels, dest, when = sys.argv[1:]

    def die_at_rename(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "os.rename" and re.search(when, str(arguments[1])):
            os.kill(os.getpid(), signal.SIGKILL)

    def die_at_targets(location: Location, name: str, metadata: dict[str, Any]) -> ts.TensorStore:
        if name == when:
            os.kill(os.getpid(), signal.SIGKILL)
        return write_array(location, name, metadata)

    sys.addaudithook(die_at_rename)
    finish.write_array = die_at_targets  # type: ignore[attr-defined]
    pack_labelled(Path(source), Path(labels), Path(dest))


if __name__ == "__main__":
    main()
