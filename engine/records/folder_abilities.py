"""Finds out at the start of a run whether its folder can ever hold a snapshot.

TensorStore, which writes the arrays, needs paths in UTF-8, `fcntl` locks, and syncs of files and folders; a snapshot
then gets its name by the rename of a folder. Not every network or FUSE file system offers these, and no setting of
Orbax does without them. Instead of a list of such needs, this module does once what a snapshot does, with small files.
"""

import secrets
from pathlib import Path

from loopfeed.preprocess.links import remove_tree
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.synced_folders import sync_folder
from loopfeed.preprocess.system_errors import Cause, cause_of, remedy_of, system_reason

UNFINISHED = ".unfinished"
"""The folder in which a snapshot, and this trial, is written before it gets its name."""
_FILE = "manifest"
# As in a snapshot: `state.orbax-checkpoint-tmp/ocdbt.process_0/d/` and the name of a file of 32 digits.
_LONGEST_INNER = ("state.orbax-checkpoint-tmp", "ocdbt.process_0", "d", 32 * "0")
_ELSEWHERE = "choose a folder on another file system (--run-dir)"


def true_path(folder: Path) -> Path:
    """Return the absolute path of a folder without "..".

    Orbax takes ".." away together with the name before it, which leads elsewhere if that folder is a link.
    """
    return folder.resolve() if ".." in folder.parts else folder.absolute()


def check_path_is_text(folder: Path) -> None:
    """Raise ValueError if the absolute path of a folder is not UTF-8, because TensorStore takes no other paths."""
    path = str(true_path(folder))
    try:
        path.encode()
    except UnicodeEncodeError:
        raise ValueError(
            f"the path of a run folder must be UTF-8, as snapshots need it, but {printable(path)} is not: choose "
            "another path (--run-dir), or rename that folder"
        ) from None


def check_can_hold_snapshots(folder: Path) -> None:
    """Write, lock, sync and rename what a snapshot does, and remove it again.

    Args:
        folder: an existing folder, in which no other process writes snapshots.

    Raises:
        ValueError: if one of these is impossible; the message names it.
    """
    check_path_is_text(folder)
    trial = true_path(folder) / UNFINISHED
    doing = "a folder cannot be created"
    try:
        remove_tree(trial)
        place = trial / secrets.token_hex(4)
        written, renamed = place / "0", place / "1"
        (inner := written.joinpath(*_LONGEST_INNER)).parent.mkdir(parents=True)
        doing = "a file cannot be written, locked and synced"
        _write(inner.parent)
        _write(written)
        doing = "a folder cannot be synced"
        sync_folder(written)
        doing = "a folder cannot be renamed"
        written.rename(renamed)
        sync_folder(place)
    except Exception as error:  # TensorStore raises exceptions of many types
        raise ValueError(
            f"a run folder must be able to hold snapshots, but in {folder} {doing} "
            f"({system_reason(error) or _first_words(error)}): {_remedy(error)}"
        ) from error
    finally:
        remove_tree(trial)


def _write(folder: Path) -> None:
    import tensorstore as ts

    store = ts.KvStore.open({"driver": "file", "path": f"{folder}/"}).result()
    store.write(_FILE, b"{}").result()


def _first_words(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _remedy(error: BaseException) -> str:
    cause = cause_of(error)
    if cause is None:
        return f"check that folder, or {_ELSEWHERE}"
    if cause in (Cause.OTHER, Cause.ABILITY, Cause.TAKEN, Cause.MISSING):
        return _ELSEWHERE
    return remedy_of(error) if cause != Cause.PASSING else f"{remedy_of(error)}, or {_ELSEWHERE}"
