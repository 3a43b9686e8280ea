"""Snapshots of the training state on disk, in Orbax's format: write, read, check, remove.

`<folder>/<step>/` holds two Orbax items: `state`, the arrays as nested dictionaries under the names that the program
gives them, and `facts`, a small JSON with a digest of every array and of what the run's other files held by then. Plain
Orbax reads both. Works on NumPy arrays alone:
the device belongs to the training program, and a jax call beside it may wait for hours. Knows nothing of threads.

A snapshot is written in `<folder>/.unfinished/` and moved into place by one rename, so that a crash at any instant
leaves a whole `<step>` or none. TensorStore syncs the arrays' files to the disk by itself; Orbax syncs neither its JSON
files nor the folders that it makes and renames, so that all of these are synced here, before the rename.
"""

import os
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from engine.keys import is_key, like_leaf, plain_key
from engine.records.control_log import CONTROL_LOG_NAME
from engine.records.digests import describe_array, is_as_sealed, sealed
from engine.records.file_errors import unreadable_words
from engine.records.folder_state import FolderState
from engine.records.orbax_store import first_unreadable, restore_arrays, restore_facts, save_items, short_reason
from engine.records.versions import version_of
from preprocess.regular_file import check_regular

_FORMAT = 1
# Of the facts: what the run's other files hold.
_FOLDER = "folder"
_MOST_FACTS_BYTES = 1 << 26
_UNFINISHED = ".unfinished"
_NAMED_AT_MOST = 3
# Beside the arrays: the facts and Orbax's own files, some hundred bytes an array.
_SLACK_BYTES = 1 << 20


class SnapshotError(ValueError):
    """A snapshot cannot be written, is damaged, or is not of this program's state."""


@dataclass(frozen=True)
class Snapshot:
    """A state as it was read, every byte checked.

    Attributes:
        step: updates done.
        pulls: batches taken.
        leaves: the arrays by name, such as `params.conv1.kernel`; they may be read-only.
        folder: what the run's other files held when it was taken; None in snapshots of before that was recorded.
    """

    step: int
    pulls: int
    leaves: dict[str, NDArray[Any]]
    folder: FolderState | None = None


def snapshot_steps(folder: Path) -> list[int]:
    """Gives the steps of the whole snapshots in a folder, ascending; none where there is no folder.

    Raises:
        OSError: where the folder cannot be listed.
    """
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return []
    names = [entry.name for entry in entries if entry.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name)))


def write_snapshot(folder: Path, step: int, pulls: int, tree: Any, state: FolderState | None = None) -> None:
    """Writes `<folder>/<step>/` whole or not at all, for good once it returns; one writer a folder at a time.

    What a crash left unfinished is removed first. A snapshot of the step that holds the same is left as it is; one that
    is damaged or holds something else is replaced.

    Args:
        folder: made where it is missing.
        step: updates done, from 0.
        pulls: batches taken, from 0.
        tree: the state, a pytree of NumPy arrays of numbers of any shape; the keys of a generator as their data.
        state: what the run's other files hold by then.

    Raises:
        SnapshotError: where the tree holds something else, or the disk does not take it; other snapshots stay.
    """
    folder = folder.absolute()
    named = _named_arrays(tree)
    facts = _make_facts(step, pulls, {name: array for name, (_, array) in named.items()}, state)
    if _is_written(folder, facts):
        return
    unfinished = folder / _UNFINISHED
    # A name of its own: what TensorStore still holds of a write that failed may yet land where that one went.
    source = unfinished / secrets.token_hex(4) / str(step)
    try:
        shutil.rmtree(unfinished, ignore_errors=True)
        source.parent.mkdir(parents=True)
        _need_room(folder, sum(array.nbytes for _, array in named.values()))
        save_items(source, _nest(named), facts)
        _sync(source)
        _put_in_place(source, folder / str(step))
    except SnapshotError:
        raise
    except Exception as error:  # of whatever type Orbax and TensorStore please
        raise SnapshotError(
            f"the disk must take the snapshot of step {step} in {folder}, and did not ({short_reason(error)}): "
            "make room there, or lend the right to write"
        ) from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def read_snapshot(folder: Path, step: int) -> Snapshot:
    """Reads a snapshot and checks every array against its digest.

    Raises:
        SnapshotError: where there is none, or a part of it is missing or changed, which is named.
    """
    path = folder.absolute() / str(step)
    if not path.is_dir():
        found = ", ".join(map(str, snapshot_steps(folder))) or "none"
        raise SnapshotError(f"a snapshot must exist to be read, and {path} does not: take a step of these: {found}")
    _check_files(path)
    facts = _read_facts(path, step)
    described: dict[str, Any] = facts["leaves"]
    filled = {name: like for name, like in described.items() if 0 not in like["shape"]}
    restored = _restore_arrays(path, filled) if filled else {}
    leaves = {}
    for name, like in described.items():
        array = restored.get(name, np.zeros(like["shape"], like["dtype"]) if name not in filled else None)
        if array is None or describe_array(name, array) != like:
            raise _damaged(path, f"{name} is not what was written")
        leaves[name] = array
    return Snapshot(step, facts["pulls"], leaves, _folder_state(path, facts))


def read_folder_state(folder: Path, step: int) -> FolderState | None:
    """Return what a snapshot says of the run's other files, without its arrays; None where it says nothing.

    Raises:
        SnapshotError: where it cannot be read.
    """
    path = folder.absolute() / str(step)
    _check_files(path)
    return _folder_state(path, _read_facts(path, step))


def match_state(leaves: Mapping[str, NDArray[Any]], like: Any) -> Any:
    """Puts named arrays into the pytree that the running program wants.

    Args:
        leaves: of a snapshot.
        like: a pytree of `jax.ShapeDtypeStruct` or arrays.

    Returns:
        A pytree of the structure of `like`; NumPy arrays, and keys of a generator wrapped again, for which jax is used.

    Raises:
        SnapshotError: where an array is missing, left over, or of another shape or type; by name.
    """
    wanted, structure = jax.tree_util.tree_flatten_with_path(like)
    named = {".".join(_parts(path)): leaf for path, leaf in wanted}
    if missing := [name for name in named if name not in leaves]:
        raise _not_ours(f"lacks {_list(missing)}")
    if left_over := [name for name in leaves if name not in named]:
        raise _not_ours(f"holds {_list(left_over)} besides")
    return jax.tree_util.tree_unflatten(structure, [_match(name, leaves[name], leaf) for name, leaf in named.items()])


def remove_snapshot(folder: Path, step: int) -> None:
    """Removes a snapshot, which is gone at once for readers, even if a crash comes between; no matter if there is none.

    Raises:
        OSError: where it cannot be removed.
    """
    if not (folder / str(step)).exists():
        return
    unfinished = folder / _UNFINISHED
    unfinished.mkdir(exist_ok=True)
    (folder / str(step)).rename(unfinished / f"removed-{step}")
    shutil.rmtree(unfinished)


def keep_newest(folder: Path, count: int, *, up_to: int | None = None) -> None:
    """Removes all snapshots but the newest.

    Args:
        folder: of the snapshots.
        count: how many stay; 0 keeps all.
        up_to: leaves those of later steps alone and uncounted: where a run went back to an earlier step, they are what
            it left behind, and must not outlive what it writes now.

    Raises:
        OSError: where one cannot be removed.
    """
    steps = [step for step in snapshot_steps(folder) if up_to is None or step <= up_to]
    for step in steps[: max(len(steps) - count, 0)] if count > 0 else []:
        remove_snapshot(folder, step)


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)


def _named_arrays(tree: Any) -> dict[str, tuple[tuple[str, ...], NDArray[Any]]]:
    """Gives the path and the array of every leaf, by name, in the machine's byte order."""
    named: dict[str, tuple[tuple[str, ...], NDArray[Any]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = _parts(path)
        name = ".".join(parts)
        if name in named:
            raise SnapshotError(f"every array must have a path of its own, and two are called {name!r}: rename one")
        # Orbax before 0.12 writes an array under an empty name and does not find it again.
        if not all(parts or ("",)):
            raise SnapshotError(f"an array's keys must have characters, and one of {parts} has none: rename it")
        # An array of jax would be fetched from the device here, which is for the caller to do at a time of his own.
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.hasobject or leaf.dtype.kind in "USMm":
            raise SnapshotError(
                f"a snapshot holds NumPy arrays of numbers, and {name} is a {type(leaf).__name__}: convert it before"
            )
        array = np.asarray(leaf)
        named[name] = parts, array.astype(array.dtype.newbyteorder("="), copy=False)
    return named


def _nest(named: Mapping[str, tuple[tuple[str, ...], NDArray[Any]]]) -> dict[str, Any]:
    """Gives nested dictionaries of the arrays, without those of no elements: Orbax refuses them, the facts suffice."""
    nested: dict[str, Any] = {}
    for parts, array in named.values():
        if array.size:
            inner = nested
            for part in parts[:-1]:
                inner = inner.setdefault(part, {})
            inner[parts[-1]] = array
    return nested


def _flatten(nested: Any) -> dict[str, NDArray[Any]]:
    return {".".join(_parts(path)): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(nested)}


def _make_facts(step: int, pulls: int, arrays: Mapping[str, NDArray[Any]], state: FolderState | None) -> dict[str, Any]:
    facts = {
        "format": _FORMAT,
        "step": step,
        "pulls": pulls,
        "versions": {name: version_of(name) for name in ("feedloop", "jax", "orbax-checkpoint")},
        "leaves": {name: describe_array(name, array) for name, array in arrays.items()},
    }
    return sealed(facts if state is None else {**facts, _FOLDER: state.to_json()})


def _folder_state(path: Path, facts: Mapping[str, Any]) -> FolderState | None:
    if _FOLDER not in facts:
        return None
    try:
        return FolderState.from_json(facts[_FOLDER])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its facts cannot be read ({unreadable_words(error)})") from error


def _check_files(path: Path) -> None:
    """Raise SnapshotError where a snapshot holds a pipe or a device, for which a reader would wait without end."""
    for inner, _, names in os.walk(path):
        for name in names:
            file = Path(inner, name)
            try:
                status = file.stat()
                check_regular(status, file)
            except OSError as error:
                raise _damaged(path, f"{file.relative_to(path)} cannot be read ({error.strerror})") from error
            if file.relative_to(path).parts[0] == "facts" and status.st_size > _MOST_FACTS_BYTES:
                raise _damaged(path, f"{file.relative_to(path)} has {status.st_size:,} bytes")


def _is_written(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Whether the same is on disk already, undamaged: a run that is resumed and stopped at once writes nothing."""
    path = folder / str(facts["step"])
    try:
        if not path.exists():
            return False
        _check_files(path)
        before = _read_facts(path, facts["step"])
        if any(before[key] != facts[key] for key in ("pulls", "leaves")) or not _tells_the_same(before, facts):
            return False
        read_snapshot(folder, facts["step"])
    except (SnapshotError, OSError):
        return False
    return True


def _tells_the_same(before: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Whether what is said of the lines up to a snapshot still holds; requests may have come since."""
    if _FOLDER not in before or _FOLDER not in facts:
        return True
    logs, logs_now = (dict(each[_FOLDER]["logs"]) for each in (before, facts))
    return all(logs.get(name) == logs_now.get(name) for name in logs_now if name != CONTROL_LOG_NAME)


def _need_room(folder: Path, num_bytes: int) -> None:
    """Refuses what does not fit: found here, a full disk is told in plain words, and no array is written in vain."""
    usage = shutil.disk_usage(folder)
    # Some file systems tell nothing.
    if usage.total and usage.free < num_bytes + _SLACK_BYTES:
        raise SnapshotError(
            f"a snapshot needs room for {num_bytes / 1e6:.1f} MB in {folder}, and {usage.free / 1e6:.1f} MB are free: "
            "make room there"
        )


def _read_facts(path: Path, step: int) -> dict[str, Any]:
    try:
        facts = restore_facts(path)
        is_whole = is_as_sealed(facts) and facts["step"] == step
    except Exception as error:  # of whatever type Orbax and TensorStore please
        raise _damaged(path, f"its facts cannot be read ({short_reason(error)})") from error
    if not is_whole:
        raise _damaged(path, "its facts are not what was written")
    if facts["format"] != _FORMAT:
        raise SnapshotError(
            f"a snapshot must be of format {_FORMAT}, and {path} is of {facts['format']}: "
            f"read it with feedloop {facts['versions']['feedloop']}"
        )
    return facts


def _restore_arrays(path: Path, described: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Reads all arrays at once; where that fails, one at a time, to name the first that is damaged."""
    try:
        return _flatten(restore_arrays(path))
    except Exception as error:  # of whatever type Orbax and TensorStore please
        raise _damaged(
            path, f"{first_unreadable(path, described) or 'a leaf'} cannot be read ({short_reason(error)})"
        ) from error


def _match(name: str, array: NDArray[Any], like: Any) -> Any:
    plain = jax.eval_shape(plain_key, like) if is_key(like) else like
    if array.shape != tuple(plain.shape) or array.dtype != plain.dtype:
        found, expected = (f"{one.dtype.name} {list(one.shape)}" for one in (array, plain))
        raise _not_ours(f"holds {name} as {found} in place of {expected}")
    return like_leaf(array, like)


def _put_in_place(source: Path, target: Path) -> None:
    if target.exists():
        # Two renames, and a crash between them loses this step, damaged or another run's, not the ones before it.
        target.rename(source.with_name("replaced"))
    source.rename(target)
    _sync_one(target.parent)


def _sync(folder: Path) -> None:
    """Brings every file and folder to the disk, innermost first."""
    for inner, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync_one(Path(inner, name))
        _sync_one(Path(inner))


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        # Some network file systems refuse to sync a folder.
        if not path.is_dir():
            raise
    finally:
        os.close(handle)


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _damaged(path: Path, what: str) -> SnapshotError:
    return SnapshotError(f"a snapshot must be whole, and in {path} {what}: it is of no use")


def _not_ours(what: str) -> SnapshotError:
    return SnapshotError(
        f"a snapshot must hold the state of this program, and it {what}: "
        "resume with the model, optimiser and options that it was written with"
    )
