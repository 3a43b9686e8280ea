"""The files that belong to a split, and how to delete them without touching other files in its folder.

Some file systems cannot sync folders: there TensorStore fails unless it is told not to sync anything.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from loopfeed.preprocess.shards.arrays import NUMBER_ARRAYS, PIXELS, TARGETS
from loopfeed.preprocess.shards.location import LOCK_SUFFIX, Location
from loopfeed.preprocess.synced_folders import can_sync_folders, sync_tree

_ONE_PER_IMAGE = "|".join(name for name in NUMBER_ARRAYS if name != TARGETS)
_FILE = re.compile(
    rf"manifest\.json|failures\.jsonl|(pixels|targets|{_ONE_PER_IMAGE})/zarr\.json|pixels/c/\d+/0/0"
    rf"|({_ONE_PER_IMAGE})/c/\d+|targets/c/\d+/0"
    r"|journal/(plan\.json|owner|lock|(shards|blocks)/\d+\.json|parts/\d+-of-\d+\.(owner|lock))"
)
_FOLDER = re.compile(
    rf"pixels(/c(/\d+(/0)?)?)?|({_ONE_PER_IMAGE})(/c)?|targets(/c(/\d+)?)?|journal(/(shards|blocks|parts))?"
)
_FOLDERS = (PIXELS, *NUMBER_ARRAYS, "journal")
# Exists while a split is being packed.
JOURNAL = "journal/"
PLAN_KEY = f"{JOURNAL}plan.json"
PARTS = "parts"
"""Only in the plan of an unfinished pack in parts: their number, which does not change a byte."""


def is_split_file(key: str) -> bool:
    """Return whether ``key``, relative to the split's folder, is the path of a file that packing writes."""
    return _FILE.fullmatch(key) is not None


def split_files(location: Location, prefix: str = "") -> list[str]:
    """Return, in sorted order, the keys starting with ``prefix`` among the split's own files at ``location``."""
    return [key for key in location.list_keys(prefix) if is_split_file(key)]


def delete_split_files(location: Location, keys: Iterable[str]) -> None:
    """Delete all of ``keys`` that exist and belong to a split, and then any of the split's folders that are empty."""
    location.delete_keys([key for key in keys if is_split_file(key)])
    for path, below in _own_folders(location):
        # A link to a folder was made by a user, and a folder that is not empty contains other files: both are kept.
        if _FOLDER.fullmatch(below) and not path.is_symlink():
            with suppress(OSError):
                path.rmdir()


def check_has_no_links(location: Location) -> None:
    """Raise ShardError if a link is in the place of one of a split's own files or folders, or leads to the split."""
    if location.local_path is None:
        return
    root = _root(location)
    location.check_unlinked()
    for name in ("", *_FOLDERS):
        for folder, folders, files in os.walk(root / name):
            below = [Path(folder, each).relative_to(root).as_posix() for each in (*folders, *files)]
            location.check_unlinked(
                each for each in below if _FOLDER.fullmatch(each) or is_split_file(each.removesuffix(LOCK_SUFFIX))
            )
            if not name:
                break


def delete_lock_files(location: Location) -> None:
    """Delete ``.__lock`` files left beside a split's files by a killed process; no other process may be writing."""
    for path, _ in _own_folders(location):
        for found in path.glob(f"*{LOCK_SUFFIX}"):
            key = found.relative_to(_root(location)).as_posix().removesuffix(LOCK_SUFFIX)
            if is_split_file(key):
                found.unlink(missing_ok=True)


def _own_folders(location: Location) -> Iterator[tuple[Path, str]]:
    """Yield each of the split's own folders and its path relative to the root, deepest first and the root last."""
    if location.local_path is None:
        return
    root = _root(location)
    for name in _FOLDERS:
        # Links to folders are not followed.
        for folder, _, _ in os.walk(root / name, topdown=False):
            path = Path(folder)
            below = path.relative_to(root).as_posix()
            if _FOLDER.fullmatch(below):
                yield path, below
    yield root, "."


def _root(location: Location) -> Path:
    return location.local_path or Path()


_SYNC = "file_io_sync"


def prepare_for_writing(location: Location) -> Location:
    """Return the same folder, such that TensorStore can write into it where folders can't be synced, too."""
    if location.local_path is None or can_sync_folders(location.local_path):
        return location
    return replace(location, spec=location.spec | {_SYNC: False})


def is_unsynced(location: Location) -> bool:
    """Return whether TensorStore does not sync the files that it writes into a folder, so that the caller must."""
    return not location.spec.get(_SYNC, True)


def sync_written(location: Location) -> None:
    """Sync a folder and the files in it unless TensorStore did so.

    Raises:
        OSError: the disk fails.
    """
    if is_unsynced(location):
        sync_tree(Path(location.spec["path"]))
