"""The contents of packs and runs, read without the project's own readers: by zarr, safetensors and plain bytes."""

from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import zarr
from safetensors import safe_open

NOT_A_FILE = b"\0no regular file\0"
LOGS = {"loss.jsonl": ("step", "loss", "lr"), "eval.jsonl": ("step", "num_images", "top1", "top5", "loss")}
"""The logs of a run, and the fields of a line that are not measurements."""
_MAX_BYTES = 64 << 20


def read_split(folder: Path) -> dict[str, list[Any]]:
    """Read a split by zarr: the SHA-256 of the little-endian words of each image, and the labels.

    The labels of whole pictures are what a reader gives: the word of the place, and the class.
    """
    pixels, labels = (read_zarr(folder / name) for name in ("pixels", "labels"))
    if (folder / "extents").is_dir():
        labels = np.stack([read_zarr(folder / "extents").astype(np.int64), labels], axis=1)
    return {"images": [digest_of(image) for image in pixels], "labels": labels.tolist()}


def digest_of(image: Any) -> str:
    """Return the SHA-256 of the little-endian words of an image."""
    return hashlib.sha256(image.astype("<u4").tobytes()).hexdigest()


def read_zarr(folder: Path) -> Any:
    """Read an array by zarr."""
    return np.asarray(zarr.open_array(str(folder), mode="r")[:])


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
    found = []
    for line in path.read_bytes().split(b"\n")[:-1] if path.is_file() else []:
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):
            document = None
        found.append(document if isinstance(document, dict) else {})
    return found


def read_log(path: Path) -> list[tuple[Any, ...]]:
    """Return the compared fields of each line of one of `LOGS`; None for a field that a line does not have."""
    return [tuple(line.get(key) for key in LOGS[path.name]) for line in read_lines(path)]


def read_logs(run: Path) -> dict[str, list[tuple[Any, ...]]]:
    """Return the compared fields of the logs of a run."""
    return {name: read_log(run / name) for name in LOGS}


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
            with path.open("rb") as file:
                found[key] = file.read(_MAX_BYTES)
        elif not stat.S_ISDIR(mode) or path.is_symlink():
            found[key] = NOT_A_FILE
    return found


def changed_keys(tree: dict[str, bytes], sound: dict[str, bytes]) -> list[str]:
    """Return the paths of the files that differ, including missing and added ones."""
    return sorted(key for key in {*tree, *sound} if tree.get(key) != sound.get(key))
