"""The splits of a pack (complete, unfinished or broken) and their manifests.

Knows nothing of the contents of the arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import tensorstore as ts

from loopfeed.preprocess.regular_file import is_regular
from loopfeed.preprocess.shards.arrays import METADATA_KEY, NUMBER_ARRAYS, PIXELS
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from loopfeed.preprocess.shards.manifest import MANIFEST_KEY, NO_MANIFEST_REMEDY, Manifest
from loopfeed.preprocess.shards.split_files import PARTS, PLAN_KEY, is_split_file
from loopfeed.preprocess.system_entries import is_hidden
from loopfeed.preprocess.system_errors import status_of

# Any one of these shows that a folder contains a split or its remains.
_MARKS = (
    MANIFEST_KEY,
    *(f"{array}/{part}" for array in (PIXELS, *NUMBER_ARRAYS) for part in (METADATA_KEY, "c")),
)


def read_manifest(location: Location, split: str) -> Manifest:
    """Return the manifest of ``split`` in the pack at ``location``; raise ShardError as `open_split` does."""
    folder = location.child(split)
    text = folder.read(MANIFEST_KEY)
    if text is not None:
        return Manifest.from_json(text, where=f"{folder.display}{MANIFEST_KEY}")
    if folder.read(PLAN_KEY) is not None:
        raise ShardError(
            f"{folder.display}: the split is not complete and has no {MANIFEST_KEY}; {unfinished_remedy(folder)}"
        )
    if not location.can_list:
        raise ShardError(f"{folder.display}{MANIFEST_KEY} does not exist; check the address, and the name of the split")
    found = _find_splits(location)
    if split in found.broken:
        raise ShardError(lost_manifest(folder))
    if found.complete:
        raise ShardError(f"{location.display}: there is no split {split!r}; choose one of {', '.join(found.complete)}")
    if location.read(MANIFEST_KEY) is not None:
        raise ShardError(f"{location.display} is itself a split; give the folder that contains it")
    path = location.local_path
    if path is not None and not location.exists():
        raise ShardError(
            f"{location.display.rstrip('/')} does not exist; create it with `preprocess-imagenet SOURCE DEST`"
        )
    if path is not None and not path.is_dir():
        raise ShardError(f"{location.display.rstrip('/')} is a file; give the folder of a pack")
    source = location.display.rstrip("/") if path is not None and any(path.iterdir()) else "SOURCE"
    raise ShardError(f"{location.display} contains no pack; make one with `preprocess-imagenet {source} DEST`")


class _State(IntEnum):
    """The state of a split; if its files indicate several states, the state with the lowest value applies."""

    COMPLETE, UNFINISHED, BROKEN = range(3)


@dataclass(frozen=True)
class SplitNames:
    """The names of a pack's splits, grouped by state; in each group ``train`` comes first and the others are sorted.

    Attributes:
        complete: splits with a manifest.
        unfinished: splits whose packing was begun and can be continued.
        broken: folders with files of a split, but with neither a manifest nor a plan to continue.
    """

    complete: tuple[str, ...]
    unfinished: tuple[str, ...]
    broken: tuple[str, ...]


def find_splits(
    data: str, *, context: ts.Context | None = None, storage_options: Mapping[str, str] | None = None
) -> SplitNames:
    """Return the names of all splits of the pack at ``data``, listing the store only once.

    Raises:
        ShardError: the store can't be reached, or a storage option is wrong.
    """
    return _find_splits(open_location(data, context=context, storage_options=storage_options))


def list_splits(
    data: str, *, context: ts.Context | None = None, storage_options: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the names of the complete splits at ``data``, if any; raise ShardError as `find_splits` does.

    Example:
        >>> list_splits("data")
        ('train', 'val')
    """
    return find_splits(data, context=context, storage_options=storage_options).complete


def lost_manifest(split: Location) -> str:
    """Return the error message for a split folder whose manifest is missing."""
    return f"{split.display} contains files of a split, but its {MANIFEST_KEY} is missing; {NO_MANIFEST_REMEDY}"


def unfinished_remedy(split: Location) -> str:
    """Return what to do about a split folder whose packing was begun but is not finished."""
    try:
        num_parts = json.loads(split.read(PLAN_KEY) or b"")[PARTS]
    except (ValueError, TypeError, KeyError, RecursionError):
        num_parts = 1
    # A pack on a Dask cluster is recorded as one part.
    if not isinstance(num_parts, int) or num_parts <= 1:
        return "run the same preprocess-imagenet command again to continue"
    return (
        f"it is being packed in {num_parts} parts; to see which of them are missing, run the preprocess-imagenet "
        "command of any part again with --finish instead of --part"
    )


def _find_splits(location: Location) -> SplitNames:
    states = _states_of_folders(location) if location.local_path is not None else _states_of_keys(location)
    ordered = sorted(states.items(), key=lambda item: (item[0] != "train", item[0]))
    return SplitNames(*(tuple(name for name, found in ordered if found == state) for state in _State))


def _states_of_folders(location: Location) -> dict[str, _State]:
    folder = location.local_path or Path()
    states = {}
    try:
        # Not `glob`, which takes a folder that cannot be listed for an empty one.
        for path in sorted(each for each in folder.iterdir() if not is_hidden(each.name)):
            if is_regular(path / MANIFEST_KEY):
                states[path.name] = _State.COMPLETE
            elif is_regular(path / PLAN_KEY):
                states[path.name] = _State.UNFINISHED
            elif any(status_of(path / key, follow_symlinks=False) is not None for key in _MARKS):
                states[path.name] = _State.BROKEN
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise location.unreadable(Path(error.filename or folder), error) from error
    return states


def _states_of_keys(location: Location) -> dict[str, _State]:
    states: dict[str, _State] = {}
    for name, _, key in (each.partition("/") for each in location.list_keys()):
        if is_split_file(key):
            state = {MANIFEST_KEY: _State.COMPLETE, PLAN_KEY: _State.UNFINISHED}.get(key, _State.BROKEN)
            states[name] = min(state, states.get(name, state))
    return states
