"""Which splits a pack has: complete, unfinished or broken, and the manifest of each.

Knows nothing of what is in the arrays.
"""

from __future__ import annotations

from pathlib import Path

import tensorstore as ts

from preprocess.arrays import CHECKSUMS, LABELS, METADATA_KEY, PIXELS
from preprocess.journal import PLAN_KEY
from preprocess.location import Location, ShardError, open_location
from preprocess.manifest import MANIFEST_KEY, Manifest
from preprocess.regular_file import is_regular
from preprocess.split_files import is_split_file

# By each of these alone, or by what is left of it, a folder is known to have held a split.
_MARKS = (
    MANIFEST_KEY,
    *(f"{array}/{part}" for array in (PIXELS, LABELS, CHECKSUMS) for part in (METADATA_KEY, "c")),
)


def read_manifest(location: Location, split: str) -> Manifest:
    """The manifest of ``split`` in the pack at ``location``; raises as `open_split`."""
    folder = location.child(split)
    text = folder.read(MANIFEST_KEY)
    if text is not None:
        return Manifest.from_json(text, where=f"{folder.display}{MANIFEST_KEY}")
    if folder.read(PLAN_KEY) is not None:
        raise ShardError(
            f"{folder.display}: the split is not complete, it has no {MANIFEST_KEY}; "
            "run the same preprocess-imagenet command again, it continues where it stopped"
        )
    complete = _complete_splits(location)
    if complete:
        raise ShardError(f"{location.display}: there is no split {split!r}; choose one of {', '.join(complete)}")
    if location.read(MANIFEST_KEY) is not None:
        raise ShardError(f"{location.display} is a split itself; name the folder that holds it")
    path = location.local_path
    if path is not None and not path.exists():
        raise ShardError(
            f"{location.display.rstrip('/')} does not exist; pack it with `preprocess-imagenet SOURCE DEST`"
        )
    if path is not None and not path.is_dir():
        raise ShardError(f"{location.display.rstrip('/')} must be the folder of a pack, and is a file")
    source = location.display.rstrip("/") if path is not None and any(path.iterdir()) else "SOURCE"
    raise ShardError(f"{location.display} holds no pack; make one: preprocess-imagenet {source} DEST")


def list_splits(data: str, *, context: ts.Context | None = None) -> tuple[str, ...]:
    """Names of the complete splits of the pack at ``data``, ``train`` first, then by name; empty if there is none.

    Raises:
        ShardError: the store can't be reached.
    """
    return _complete_splits(open_location(data, context=context))


def list_unfinished_splits(data: str, *, context: ts.Context | None = None) -> tuple[str, ...]:
    """Names of the splits at ``data`` whose packing was begun and not finished; raises as `list_splits`."""
    location = open_location(data, context=context)
    complete = _complete_splits(location)
    return tuple(name for name in _folders_with(location, PLAN_KEY) if name not in complete)


def list_broken_splits(data: str, *, context: ts.Context | None = None) -> tuple[str, ...]:
    """Return the names of folders at ``data`` with files of a split, but neither a manifest nor a plan to continue.

    Raises:
        ShardError: the store can't be reached.
    """
    location = open_location(data, context=context)
    known = {*_complete_splits(location), *_folders_with(location, PLAN_KEY)}
    folder = location.local_path
    if folder is not None:
        found = {path.name for path in folder.glob("*/") if any(_holds(path, key) for key in _MARKS)}
    else:
        keys = (key.partition("/") for key in location.list_keys())
        found = {name for name, _, below in keys if is_split_file(below)}
    return tuple(sorted(found - known))


def _holds(folder: Path, key: str) -> bool:
    path = folder / key
    return path.exists() or path.is_symlink()


def _complete_splits(location: Location) -> tuple[str, ...]:
    return _folders_with(location, MANIFEST_KEY)


def _folders_with(location: Location, key: str) -> tuple[str, ...]:
    folder = location.local_path
    if folder is not None:
        names = [path.name for path in folder.glob("*/") if is_regular(path / key)]
    else:
        paths = [path.split("/", 1) for path in location.list_keys()]
        names = [path[0] for path in paths if path[1:] == [key]]
    return tuple(sorted(names, key=lambda name: (name != "train", name)))
