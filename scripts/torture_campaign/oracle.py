"""The contents of packs and runs, read without the project's own readers: by zarr, safetensors and plain bytes."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from safetensors import safe_open

NOT_A_FILE = b"\0no regular file\0"
_MAX_BYTES = 64 << 20


@dataclass(frozen=True)
class SplitContents:
    """The contents of a split.

    Attributes:
        images: SHA-256 of the little-endian words of each image.
        labels: label of each image.
    """

    images: tuple[str, ...]
    labels: tuple[int, ...]


def read_split(folder: Path) -> SplitContents:
    """Read a split by zarr."""
    pixels, labels = (np.asarray(open_zarr(folder / name)[:]) for name in ("pixels", "labels"))
    digests = tuple(hashlib.sha256(image.astype("<u4").tobytes()).hexdigest() for image in pixels)
    return SplitContents(digests, tuple(labels.tolist()))


def open_zarr(folder: Path) -> Any:
    """Open an array by zarr, for reading."""
    return zarr.open_array(str(folder), mode="r")


def read_weights(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each array's bytes, with its type and shape."""
    with safe_open(os.fspath(path), "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no mapping
    return {
        name: f"{array.dtype} {array.shape} {hashlib.sha256(array.tobytes()).hexdigest()}"
        for name, array in arrays.items()
    }


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the complete lines of a log as JSON, none if it does not exist; a line that is not an object is ``{}``."""
    if not path.is_file():
        return []
    found = []
    for line in path.read_bytes().split(b"\n")[:-1]:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
        found.append(document if isinstance(document, dict) else {})
    return found


def columns(path: Path, *keys: str) -> list[tuple[Any, ...]]:
    """Return the values of some keys in each line of a log; None for a key that a line does not have."""
    return [tuple(line.get(key) for key in keys) for line in read_lines(path)]


def read_tree(folder: Path) -> dict[str, bytes]:
    """Return the bytes of each file in a folder by its path, following links; other entries are marked."""
    found = {}
    for path in sorted(folder.rglob("*")):
        key = path.relative_to(folder).as_posix()
        try:
            mode = path.stat().st_mode
        except OSError:
            found[key] = NOT_A_FILE
            continue
        if stat.S_ISREG(mode):
            found[key] = _read(path)
        elif not stat.S_ISDIR(mode) or path.is_symlink():
            found[key] = NOT_A_FILE
    return found


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_MAX_BYTES)
