"""HostileImage trees: endless links, deep folders, pipes and control characters in names."""

from __future__ import annotations

import os
from itertools import pairwise
from pathlib import Path

from scripts.torture_campaign.archive_faults import ESCAPES, Images, SourceMaker, image
from scripts.torture_campaign.file_faults import put_socket

_LINK_LEVELS = 28
_NAME = os.fsdecode(ESCAPES)


def sound_tree(folder: Path, images: Images) -> Path:
    """Write class folders; return their folder."""
    source = folder / "photos"
    for name, content in images.items():
        (source / name).mkdir(parents=True)
        (source / name / "a.png").write_bytes(content)
    return source


def nested_folders(folder: Path, images: Images) -> Path:
    """Write an image 1,500 folders deep."""
    source = sound_tree(folder, images)
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
    return source


def doubling_links(folder: Path, images: Images) -> Path:
    """Write levels of folders that hold two links each to the next: 2²⁸ paths."""
    source = sound_tree(folder, images)
    levels = [folder / f"level-{number}" for number in range(_LINK_LEVELS)]
    for level in levels:
        level.mkdir()
    for level, following in pairwise(levels):
        (level / "a").symlink_to(following)
        (level / "b").symlink_to(following)
    (levels[-1] / "b.png").write_bytes(image(images))
    (source / "n00000000/more").symlink_to(levels[0])
    return source


def link_loop(folder: Path, images: Images) -> Path:
    """Write a link to its own folder, and one to the whole tree."""
    source = sound_tree(folder, images)
    (source / "n00000000/again").symlink_to(source / "n00000000")
    (source / "n00000001/all").symlink_to(source)
    return source


def pipe_image(folder: Path, images: Images) -> Path:
    """Write a pipe, a socket, devices and a dangling link among the images."""
    source = sound_tree(folder, images)
    os.mkfifo(source / "n00000000/b.png")
    (source / "n00000001/zero.png").symlink_to("/dev/zero")
    (source / "n00000001/gone.png").symlink_to("gone")
    put_socket(source / "n00000002/b.png")
    return source


def pipe_beside(folder: Path, images: Images) -> Path:
    """Write a pipe beside the class folders."""
    source = sound_tree(folder, images)
    os.mkfifo(source / "b.png")
    return source


def image_beside(folder: Path, images: Images) -> Path:
    """Write an image beside the class folders whose name has escapes."""
    source = sound_tree(folder, images)
    (source / f"{_NAME}.png").write_bytes(image(images))
    return source


def escapes_in_names(folder: Path, images: Images) -> Path:
    """Write names with escapes, line ends and bytes of no encoding for files and classes."""
    source = sound_tree(folder, images)
    names = (_NAME, "a\nb", "c\x85d\u202e", os.fsdecode(b"e\xff\x9b"))
    for name in names:
        (source / "n00000000" / name).write_bytes(b"no image")
        (source / name).mkdir()
        (source / name / "b.png").write_bytes(image(images))
    return source


def split_of_escapes(folder: Path, images: Images) -> Path:
    """Write a val split whose classes have escapes in their names and are not train's."""
    source = folder / "photos"
    sound_tree(source, images).rename(source / "train")
    (source / "val" / _NAME).mkdir(parents=True)
    (source / "val" / _NAME / "b.png").write_bytes(image(images))
    return source


def pipe_of_names(folder: Path, images: Images) -> Path:
    """Write a pipe named classes.txt."""
    source = sound_tree(folder, images)
    os.mkfifo(source / "classes.txt")
    return source


def device_of_names(folder: Path, images: Images) -> Path:
    """Write a link to /dev/zero named classes.txt."""
    source = sound_tree(folder, images)
    (source / "classes.txt").symlink_to("/dev/zero")
    return source


def escapes_of_names(folder: Path, images: Images) -> Path:
    """Write a classes.txt whose names have escapes, and a line of 100 MB."""
    source = sound_tree(folder, images)
    lines = [b"n%08d " % number + ESCAPES for number in range(len(images))]
    (source / "classes.txt").write_bytes(b"\n".join([*lines, ESCAPES + b" what", b""]))
    return source


def giant_names(folder: Path, images: Images) -> Path:
    """Write a classes.txt of one line of 300 MB."""
    source = sound_tree(folder, images)
    (source / "classes.txt").write_bytes(b"n00000000 " + b"a" * 300_000_000)
    return source


def kaggle_tree(folder: Path, images: Images) -> Path:
    """Write Kaggle's tree; return its folder."""
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


def kaggle_pipe(name: str) -> SourceMaker:
    """Return the maker of Kaggle's tree in which a list is replaced by a pipe."""

    def make(folder: Path, images: Images) -> Path:
        source = kaggle_tree(folder, images)
        (source / name).unlink()
        os.mkfifo(source / name)
        return source

    return make


def kaggle_rows(row: bytes) -> SourceMaker:
    """Return the maker of Kaggle's tree with one more row in its list of labels."""

    def make(folder: Path, images: Images) -> Path:
        source = kaggle_tree(folder, images)
        with (source / "LOC_val_solution.csv").open("ab") as file:
            file.write(row)
        return source

    return make


# By name: the maker, and whether the command must refuse.
TREES: dict[str, tuple[SourceMaker, bool]] = {
    "nested-1500": (nested_folders, False),
    "doubling-links": (doubling_links, False),
    "link-loop": (link_loop, False),
    "pipe-image": (pipe_image, False),
    "pipe-beside": (pipe_beside, False),
    "image-beside": (image_beside, True),
    "escapes-in-names": (escapes_in_names, False),
    "split-of-escapes": (split_of_escapes, True),
    "names-pipe": (pipe_of_names, False),
    "names-zero-device": (device_of_names, False),
    "names-escapes": (escapes_of_names, False),
    "names-giant": (giant_names, False),
    "kaggle-labels-pipe": (kaggle_pipe("LOC_val_solution.csv"), True),
    "kaggle-names-pipe": (kaggle_pipe("LOC_synset_mapping.txt"), False),
    "kaggle-giant-field": (kaggle_rows(b"ILSVRC2012_val_00000009," + b"n" * 200_000_000), True),
    "kaggle-open-quote": (kaggle_rows(b'"ILSVRC2012_val_00000009,' + b"n\n" * 20_000_000), True),
    "kaggle-escapes": (kaggle_rows(ESCAPES + b"," + ESCAPES + b"\n"), True),
    "kaggle-nul": (kaggle_rows(b"a\0b,c\0d\n"), True),
    "kaggle-unknown-class": (kaggle_rows(b"ILSVRC2012_val_00000001,n99999999 1 1 2 2\n"), True),
}
