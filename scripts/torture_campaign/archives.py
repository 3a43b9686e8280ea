"""The kind ``archives``: hostile archives and trees as the source of a pack."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from scripts.torture_campaign.archive_files import (
    ARCHIVES,
    ESCAPES,
    KIT,
    TRAIN,
    VAL,
    Images,
    SourceMaker,
    image,
    official,
    tar_of,
)
from scripts.torture_campaign.case import Judgement, Trial, Verdict, judge_exit
from scripts.torture_campaign.damage import PUT, damage_file, replace
from scripts.torture_campaign.image_oracle import read_crops

_MAX_MB = 1_500.0
_TIMEOUT_S = 20.0
_CLASSES = tuple(f"n{number:08}" for number in range(4))
_NAME = os.fsdecode(ESCAPES)
_FOLDERS = threading.Lock()
"""Held while a source is created, because the maker of a deep tree changes the process's working folder."""


def sound_tree(folder: Path, images: Images) -> Path:
    """Write class folders; return their folder."""
    source = folder / "photos"
    for name, content in images.items():
        (source / name).mkdir(parents=True)
        (source / name / "a.png").write_bytes(content)
    return source


def _kaggle_tree(folder: Path, images: Images) -> Path:
    source = folder / "kaggle"
    root = source / "ILSVRC/Data/CLS-LOC"
    (root / "val").mkdir(parents=True)
    for number, (name, content) in enumerate(images.items(), start=1):
        (root / "train" / name).mkdir(parents=True)
        (root / "train" / name / f"{name}_1.JPEG").write_bytes(content)
        (root / "val" / f"ILSVRC2012_val_{number:08}.JPEG").write_bytes(content)
    rows = [f"ILSVRC2012_val_{number:08},{name} 1 1 2 2" for number, name in enumerate(images, start=1)]
    (source / "LOC_val_solution.csv").write_text("\n".join(["ImageId,PredictionString", *rows, ""]))
    (source / "LOC_synset_mapping.txt").write_text("".join(f"{name} {name}\n" for name in images))
    return source


def _changed(change: Callable[[Path, Images], object], make: SourceMaker = sound_tree) -> SourceMaker:
    """Return the maker of a source that is changed once it is made."""

    def maker(folder: Path, images: Images) -> Path:
        source = make(folder, images)
        change(source, images)
        return source

    return maker


def _add(how: str, name: str) -> SourceMaker:
    """Return the maker of class folders beside which is one of `PUT`."""
    return _changed(lambda source, _: PUT[how](source / name))


def _write(name: str, content: Callable[[Images], bytes]) -> SourceMaker:
    return _changed(lambda source, images: (source / name).write_bytes(content(images)))


def _row(content: bytes) -> SourceMaker:
    """Return the maker of Kaggle's tree with one more row in its list of labels."""

    def change(source: Path, _images: Images) -> None:
        with (source / "LOC_val_solution.csv").open("ab") as file:
            file.write(content)

    return _changed(change, _kaggle_tree)


def _nest(source: Path, images: Images) -> None:
    """Write an image 1,500 folders deep."""
    before = os.open(".", os.O_RDONLY)
    try:
        os.chdir(source / "n00000000")
        for _ in range(1500):
            Path("d").mkdir()
            os.chdir("d")
        Path("b.png").write_bytes(image(images))
    finally:
        os.fchdir(before)
        os.close(before)


def _double_links(source: Path, images: Images) -> None:
    """Write levels of folders that hold two links each to the next: 2²⁸ paths."""
    levels = [source.with_name(f"level-{number}") for number in range(28)]
    for level in levels:
        level.mkdir()
    for level, following in pairwise(levels):
        (level / "a").symlink_to(following)
        (level / "b").symlink_to(following)
    (levels[-1] / "b.png").write_bytes(image(images))
    (source / "n00000000/more").symlink_to(levels[0])


def _loop_links(source: Path, _images: Images) -> None:
    (source / "n00000000/again").symlink_to(source / "n00000000")
    (source / "n00000001/all").symlink_to(source)


def _add_no_images(source: Path, _images: Images) -> None:
    """Write a pipe, a socket, a device and a dangling link among the images."""
    for number, how in enumerate(("pipe", "zero-device", "dangling", "socket")):
        PUT[how](source / f"n0000000{number}/b.png")


def _add_escapes(source: Path, images: Images) -> None:
    """Write names with escapes, line ends and bytes of no encoding for files and classes."""
    for name in (_NAME, "a\nb", "c\x85d\u202e", os.fsdecode(b"e\xff\x9b")):
        (source / "n00000000" / name).write_bytes(b"no image")
        (source / name).mkdir()
        (source / name / "b.png").write_bytes(image(images))


def _split_of_escapes(folder: Path, images: Images) -> Path:
    """Write a val split whose classes have escapes in their names and are not train's."""
    source = folder / "photos"
    sound_tree(source, images).rename(source / "train")
    (source / "val" / _NAME).mkdir(parents=True)
    (source / "val" / _NAME / "b.png").write_bytes(image(images))
    return source


def _classes_of_escapes(images: Images) -> bytes:
    return b"\n".join([*(b"n%08d " % number + ESCAPES for number in range(len(images))), ESCAPES + b" what", b""])


# By name: the maker, and whether the command must refuse.
TREES: dict[str, tuple[SourceMaker, bool]] = {
    "nested-1500": (_changed(_nest), False),
    "doubling-links": (_changed(_double_links), False),
    "link-loop": (_changed(_loop_links), False),
    "no-images": (_changed(_add_no_images), False),
    "pipe-beside": (_add("pipe", "b.png"), False),
    "image-beside": (_write(f"{_NAME}.png", image), True),
    "escapes-in-names": (_changed(_add_escapes), False),
    "split-of-escapes": (_split_of_escapes, True),
    "names-pipe": (_add("pipe", "classes.txt"), False),
    "names-zero-device": (_add("zero-device", "classes.txt"), False),
    "names-escapes": (_write("classes.txt", _classes_of_escapes), False),
    "names-giant": (_write("classes.txt", lambda _: b"n00000000 " + b"a" * 300_000_000), False),
    "kaggle-labels-pipe": (_changed(lambda source, _: replace(source / "LOC_val_solution.csv", "pipe"), _kaggle_tree),
                           True),
    "kaggle-names-pipe": (_changed(lambda source, _: replace(source / "LOC_synset_mapping.txt", "pipe"), _kaggle_tree),
                          False),
    "kaggle-giant-field": (_row(b"ILSVRC2012_val_00000009," + b"n" * 200_000_000), True),
    "kaggle-open-quote": (_row(b'"ILSVRC2012_val_00000009,' + b"n\n" * 20_000_000), True),
    "kaggle-escapes": (_row(ESCAPES + b"," + ESCAPES + b"\n"), True),
    "kaggle-nul": (_row(b"a\0b,c\0d\n"), True),
    "kaggle-unknown-class": (_row(b"ILSVRC2012_val_00000001,n99999999 1 1 2 2\n"), True),
}  # fmt: skip
# The sources for drawn faults: the file that is damaged, and the maker of its source.
_DRAWN: dict[str, SourceMaker] = {
    "photos.tar": tar_of(lambda _: b""),
    **dict.fromkeys((f"imagenet/{name}" for name in (TRAIN, VAL, KIT)), official()),
    **dict.fromkeys(("kaggle/LOC_val_solution.csv", "kaggle/LOC_synset_mapping.txt"), _kaggle_tree),
}


@dataclass
class ArchiveKind:
    """Hostile archives and trees.

    Attributes:
        images: sound images by class, as the bytes of files.
        crops: their crops in a pack.
    """

    images: dict[str, bytes] = field(default_factory=dict)
    crops: dict[str, list[Any]] = field(default_factory=dict)
    heavy: ClassVar[tuple[str, ...]] = (
        "hole", "gib", "bomb", "giant", "pax-length", "zero-device", "open-quote",
    )  # fmt: skip

    def prepare(self, trial: Trial) -> None:
        """Draw sound images, and pack them from a tree."""
        random = np.random.default_rng(1)
        for name in _CLASSES:
            file = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (40, 44, 3)).astype(np.uint8)).save(file, "PNG")
            self.images[name] = file.getvalue()
        trial.run_soundly(_command(sound_tree(trial.folder, self.images), trial.folder / "pack"))
        self.crops = read_crops(trial.folder / "pack")

    def names(self, count: int) -> list[str]:
        """Return the named cases, then drawn ones up to ``count`` in all."""
        names = [*ARCHIVES, *TREES]
        return names + [f"random-{number}" for number in range(max(0, count - len(names)))]

    def attempt(self, trial: Trial) -> None:
        """Create a source, pack it and judge the result."""
        name, draw, must_refuse = trial.case.name, trial.case.draw(), False
        if trial.case.number is None:
            maker, must_refuse = (ARCHIVES | TREES)[name]
            with _FOLDERS:
                source = maker(trial.folder, self.images)
            trial.fault = name
        else:
            damaged = draw.choice(list(_DRAWN))
            source = _DRAWN[damaged](trial.folder, self.images)
            trial.fault = f"{damaged}: {damage_file(trial.folder / damaged, draw)}"
        dest = trial.folder / "pack"
        finished = trial.run(_command(source, dest), _TIMEOUT_S)
        names = [os.fspath(source), source.name, os.fspath(dest), "the split train", "the split val"]
        ended = judge_exit(finished, names=names, max_mb=_MAX_MB)
        if ended is None and must_refuse:
            ended = Judgement(finished.command[0], Verdict.WRONG, "packed, but must be refused")
        trial.judge(ended or self._judge_pack(dest))
        if ended is None:
            shown = trial.run(["inspect-shards", str(dest), "--verify"], _TIMEOUT_S)
            trial.judge(judge_exit(shown, names=[str(dest)]) or Judgement("inspect-shards", Verdict.HARMLESS))

    def _judge_pack(self, dest: Path) -> Judgement:
        judgement = partial(Judgement, "preprocess-imagenet")
        if not (dest / "train").is_dir():
            return judgement(Verdict.HARMLESS, "only its val split")
        crops, failures = read_crops(dest), (dest / "train/failures.jsonl").read_text()
        for name, (crop,) in self.crops.items():
            if not all(np.array_equal(found, crop) for found in crops.get(name, [])):
                return judgement(Verdict.WRONG, f"wrong pixels of {name}")
            if name not in crops and name not in failures:
                return judgement(Verdict.WRONG, f"{name} neither packed nor in failures.jsonl")
        return judgement(Verdict.HARMLESS)


def _command(source: Path, dest: Path) -> list[str]:
    return ["preprocess-imagenet", str(source), str(dest), "--size", "32", "--workers", "2"]
