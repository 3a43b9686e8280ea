"""Packing on file systems that cannot sync folders, where TensorStore fails unless it is told not to sync anything."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loopfeed.preprocess.shards.location import Location
from loopfeed.preprocess.synced_folders import can_sync_folders, sync_tree

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
