"""Writes, reads, checks and removes snapshots of the training state on disk, in Orbax's format.

`<folder>/<step>/` contains two Orbax items: `state`, the arrays as nested dictionaries under the names that the program
gives them, and `facts`, a small JSON object with a digest of every array and of the run's other files at that time.
Plain Orbax can read both. Works only on NumPy arrays: the device belongs to the training program, and a concurrent jax
call may wait for hours. Must not know: threads.

A snapshot is written in `<folder>/.unfinished/` and moved into place by one rename, so that a crash at any instant
leaves a whole `<step>` or none. All files and folders are synced to the disk here, before the rename.
"""

import errno
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

from loopfeed.engine.keys import is_key, like_leaf, plain_key
from loopfeed.engine.records.control_log import CONTROL_LOG_NAME
from loopfeed.engine.records.digests import describe_array, is_as_sealed, sealed
from loopfeed.engine.records.file_errors import describe_unreadable
from loopfeed.engine.records.folder_lock import UNFINISHED, check_path_is_text, true_path
from loopfeed.engine.records.folder_state import FolderState
from loopfeed.engine.records.machine import RECORDED_NAME, versions_of
from loopfeed.engine.records.orbax_store import (
    find_false_claim,
    first_unreadable,
    restore_arrays,
    restore_facts,
    save_items,
    short_reason,
)
from loopfeed.engine.records.stored_types import as_snapshot, from_snapshot
from loopfeed.preprocess.claimed_size import is_plausible, least_stored_bytes, stored_size
from loopfeed.preprocess.regular_file import check_regular, check_unlinked, raise_error, remove_tree
from loopfeed.preprocess.synced_folders import make_folders, sync_folder, sync_tree
from loopfeed.preprocess.system_errors import Cause, cause_of, remedy_of, system_number, system_reason

_FORMAT = 1
# The key of the facts for the state of the run's other files.
_FOLDER = "folder"
# What files have always called these leaves.
_NAMES_IN_FILES = {
    ("batch_index",): ("pulls",),
    ("update", "gathered", "num_batches"): ("update", "gathered", "num_pulls"),
}
_MOST_FACTS_BYTES = 1 << 26
_NAMED_AT_MOST = 3
# Besides the arrays: the facts and Orbax's own files, a few hundred bytes per array.
_SLACK_BYTES = 1 << 20
# Beside the files of the arrays, which TensorStore finds by their names.
_PADDING = "state/d/padding"
# A file that is missing or no file; an error that is not the system's is one of the content.
_OF_DAMAGE = frozenset({None, Cause.MISSING, Cause.LINKS, Cause.TAKEN})


class SnapshotError(ValueError):
    """Raised if a snapshot cannot be written, is damaged, or does not fit the state of this program."""


class UnreadSnapshotError(SnapshotError):
    """Raised if the disk or its server failed while a snapshot was read, which may be sound."""


@dataclass(frozen=True)
class Snapshot:
    """A training state read from disk and checked against its digests.

    Attributes:
        step: the number of updates done.
        batch_index: the number of batches used.
        leaves: the arrays by name, such as `params.conv1.kernel`; they may be read-only.
        folder: the state of the run's other files when the snapshot was taken; None for older snapshots, which lack it.
    """

    step: int
    batch_index: int
    leaves: dict[str, NDArray[Any]]
    folder: FolderState | None = None


def snapshot_steps(folder: Path) -> list[int]:
    """Return the steps of the snapshots in a folder in ascending order, or an empty list if there is no folder.

    Raises:
        OSError: if the folder cannot be listed.
    """
    try:
        entries = list(folder.iterdir())
    except FileNotFoundError:
        return []
    names = [entry.name for entry in entries if entry.is_dir()]
    return sorted(int(name) for name in names if name.isascii() and name.isdigit() and name == str(int(name)))


def write_snapshot(folder: Path, step: int, batch_index: int, tree: Any, state: FolderState | None = None) -> None:
    """Write a snapshot to `<folder>/<step>/` durably and atomically; only one writer may use a folder at a time.

    Unfinished snapshots left by a crash are removed first. An existing snapshot of the step is kept if it has the same
    content, and replaced if it is damaged or differs.

    Args:
        folder: created if missing.
        step: the number of updates done, from 0.
        batch_index: the number of batches used, from 0.
        tree: the training state, a pytree of numeric NumPy arrays of any shape; PRNG keys as their key data.
        state: the state of the run's other files.

    Raises:
        SnapshotError: if the tree contains anything else, or the snapshot cannot be written; other snapshots are kept.
    """
    given, folder = folder, true_path(folder)
    named = _named_arrays(tree)
    facts = _make_facts(step, batch_index, {name: array for name, (_, array) in named.items()}, state)
    if _is_written(folder, facts):
        return
    unfinished = folder / UNFINISHED
    # A unique name: TensorStore may still complete part of an earlier write that failed.
    source = unfinished / secrets.token_hex(4) / str(step)
    try:
        check_unlinked(given.parent, given)
        make_folders(folder)
        remove_tree(unfinished)
        source.parent.mkdir(parents=True)
        num_bytes = sum(array.nbytes for _, array in named.values())
        _check_room(folder, num_bytes)
        save_items(source, _nest(named), facts)
        if not is_plausible(num_bytes, _check_files(source)):
            _add_padding(source, least_stored_bytes(num_bytes))
        sync_tree(source)
        _put_in_place(source, folder / str(step))
    except SnapshotError:
        raise
    except Exception as error:  # Orbax and TensorStore raise exceptions of many types
        is_unknown = system_number(error) is None
        raise SnapshotError(
            f"{folder} cannot be written ({system_reason(error) or short_reason(error)}): "
            f"{'make room there, or grant write permission' if is_unknown else remedy_of(error)}"
        ) from error
    finally:
        remove_tree(unfinished)


def read_snapshot(folder: Path, step: int) -> Snapshot:
    """Read a snapshot and check every array against its digest.

    Raises:
        SnapshotError: if there is none, or a part of it is missing or changed; the message names the part.
    """
    path = true_path(folder) / str(step)
    if not path.is_dir():
        found = ", ".join(map(str, snapshot_steps(folder))) or "none"
        raise SnapshotError(f"there is no snapshot {path}: choose another step (available: {found})")
    stored_bytes = _check_files(path)
    facts = _read_facts(path, step)
    described: dict[str, Any] = facts["leaves"]
    _check_claims(path, described, stored_bytes)
    filled = {name: like for name, like in described.items() if 0 not in like["shape"]}
    restored = _restore_arrays(path, filled) if filled else {}
    leaves = {}
    for name, like in described.items():
        array = restored.get(name, np.zeros(like["shape"], like["dtype"]) if name not in filled else None)
        array = None if array is None else from_snapshot(array, like["dtype"])
        if array is None or describe_array(name, array) != like:
            raise _damaged(path, f"{name} has changed since it was written")
        leaves[name] = array
    return Snapshot(step, facts["pulls"], leaves, _folder_state(path, facts))


def read_folder_state(folder: Path, step: int) -> FolderState | None:
    """Read only the state of the run's other files from a snapshot; return None if that state was not recorded.

    Raises:
        SnapshotError: if it cannot be read.
    """
    path = true_path(folder) / str(step)
    _check_files(path)
    return _folder_state(path, _read_facts(path, step))


def match_state(leaves: Mapping[str, NDArray[Any]], like: Any) -> Any:
    """Arrange named arrays as the pytree that the running program needs.

    Args:
        leaves: the arrays of a snapshot.
        like: a pytree of `jax.ShapeDtypeStruct` or arrays.

    Returns:
        A pytree with the structure of `like`, of NumPy arrays and of PRNG keys, which are wrapped again using jax.

    Raises:
        SnapshotError: if an array is missing, unexpected, or of another shape or dtype; the message names it.
    """
    wanted, structure = jax.tree_util.tree_flatten_with_path(like)
    named = {".".join(_parts(path)): leaf for path, leaf in wanted}
    if missing := [name for name in named if name not in leaves]:
        raise _not_ours(f"lacks {_list(missing)}")
    if unexpected := [name for name in leaves if name not in named]:
        raise _not_ours(f"also contains {_list(unexpected)}")
    return jax.tree_util.tree_unflatten(structure, [_match(name, leaves[name], leaf) for name, leaf in named.items()])


def remove_snapshot(folder: Path, step: int) -> None:
    """Atomically remove a snapshot if it exists: after a crash, readers find either all of it or nothing.

    Raises:
        OSError: if it cannot be removed.
    """
    if not (folder / str(step)).exists():
        return
    unfinished = folder / UNFINISHED
    check_unlinked(folder.parent, unfinished)
    unfinished.mkdir(exist_ok=True)
    (folder / str(step)).rename(unfinished / f"removed-{step}")
    sync_folder(folder)  # a power failure must not bring back a part of it
    shutil.rmtree(unfinished)


def keep_newest(folder: Path, count: int, *, up_to: int | None = None, best: int | None = None) -> None:
    """Remove all snapshots except the `count` newest and the one of step `best`.

    Args:
        folder: the folder of the snapshots.
        count: how many to keep; 0 keeps all.
        up_to: ignore snapshots of later steps, which are neither removed nor counted: if a run went back to an earlier
            step, they are leftovers, and must not displace the snapshots that it writes now.

    Raises:
        OSError: if one cannot be removed.
    """
    steps = [step for step in snapshot_steps(folder) if up_to is None or step <= up_to]
    for step in steps[: max(len(steps) - count, 0)] if count > 0 else []:
        if step != best:
            remove_snapshot(folder, step)


def _parts(path: tuple[Any, ...]) -> tuple[str, ...]:
    parts = tuple(jax.tree_util.keystr((entry,), simple=True) for entry in path)
    if parts[:2] == ("update", "accumulated"):
        parts = (parts[0], "gathered", *parts[2:])
    return _NAMES_IN_FILES.get(parts, parts)


def _named_arrays(tree: Any) -> dict[str, tuple[tuple[str, ...], NDArray[Any]]]:
    """Return a mapping from each leaf's name to its path and its array in native byte order."""
    named: dict[str, tuple[tuple[str, ...], NDArray[Any]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        parts = _parts(path)
        name = ".".join(parts)
        if name in named:
            raise SnapshotError(f"every array must have a unique name, but two are called {name!r}: rename one of them")
        # Orbax before 0.12 writes an array under an empty name and cannot read it again.
        if not all(parts or ("",)):
            raise SnapshotError(
                f"the keys of an array's path must not be empty, but one of {parts} is empty: rename it"
            )
        # A jax array would be fetched from the device here; the caller must do that at a suitable time.
        if not isinstance(leaf, np.ndarray | np.generic) or leaf.dtype.hasobject or leaf.dtype.kind in "USMm":
            raise SnapshotError(
                f"a snapshot must contain numeric NumPy arrays, but {name} is a {type(leaf).__name__}: convert it first"
            )
        array = np.asarray(leaf)
        named[name] = parts, array.astype(array.dtype.newbyteorder("="), copy=False)
    return named


def _nest(named: Mapping[str, tuple[tuple[str, ...], NDArray[Any]]]) -> dict[str, Any]:
    """Nest the non-empty arrays in dictionaries; empty arrays, which Orbax rejects, are recorded only in `facts`."""
    nested: dict[str, Any] = {}
    for parts, array in named.values():
        if array.size:
            inner = nested
            for part in parts[:-1]:
                inner = inner.setdefault(part, {})
            inner[parts[-1]] = as_snapshot(array)
    return nested


def _flatten(nested: Any) -> dict[str, NDArray[Any]]:
    return {".".join(_parts(path)): np.asarray(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(nested)}


def _make_facts(
    step: int, batch_index: int, arrays: Mapping[str, NDArray[Any]], state: FolderState | None
) -> dict[str, Any]:
    facts = {
        "format": _FORMAT,
        "step": step,
        "pulls": batch_index,
        "versions": versions_of("jax", "orbax-checkpoint"),
        "leaves": {name: describe_array(name, array) for name, array in arrays.items()},
    }
    return sealed(facts if state is None else {**facts, _FOLDER: state.to_json()})


def _folder_state(path: Path, facts: Mapping[str, Any]) -> FolderState | None:
    if _FOLDER not in facts:
        return None
    try:
        return FolderState.from_json(facts[_FOLDER])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, f"its metadata cannot be read ({describe_unreadable(error)})") from error


def _check_files(path: Path) -> int:
    """Return how many bytes a snapshot's files have stored.

    Raises:
        SnapshotError: it contains a pipe or a device, which could block a reader forever, or a file that is read whole
            and too large for that.
        ValueError: its path is not UTF-8.
    """
    check_path_is_text(path)
    num_bytes = 0
    try:
        for inner, _, names in os.walk(path, onerror=raise_error):
            for name in names:
                file = Path(inner, name)
                status = file.stat()
                check_regular(status, file)
                # Of the others, which hold the arrays, a reader takes parts.
                if file.parent.name != "d" and status.st_size > _MOST_FACTS_BYTES:
                    raise _damaged(path, f"{file.relative_to(path)} is too large ({status.st_size:,} bytes)")
                num_bytes += stored_size(status)
    except OSError as error:
        where = Path(error.filename or path).relative_to(path)
        raise _damaged(path, f"{where} cannot be read ({error.strerror})", error) from error
    return num_bytes


def _is_written(folder: Path, facts: Mapping[str, Any]) -> bool:
    """Return whether the same snapshot is already on disk and undamaged, as when a run stops right after resuming."""
    path = folder / str(facts["step"])
    try:
        if not path.exists():
            return False
        _check_files(path)
        before = _read_facts(path, facts["step"])
        if any(before[key] != facts[key] for key in ("pulls", "leaves")) or not _has_same_logs(before, facts):
            return False
        read_snapshot(folder, facts["step"])
    except (SnapshotError, OSError):
        return False
    return True


def _has_same_logs(before: Mapping[str, Any], facts: Mapping[str, Any]) -> bool:
    """Return whether two snapshots record the same logs, ignoring the control log, which may have grown in between."""
    if _FOLDER not in before or _FOLDER not in facts:
        return True
    logs, logs_now = (dict(each[_FOLDER]["logs"]) for each in (before, facts))
    return all(logs.get(name) == logs_now.get(name) for name in logs_now if name != CONTROL_LOG_NAME)


def _check_room(folder: Path, num_bytes: int) -> None:
    """Raise SnapshotError if the disk has too little space for the arrays, before any array is written."""
    usage = shutil.disk_usage(folder)
    # Some file systems report no sizes.
    if usage.total and usage.free < num_bytes + _SLACK_BYTES:
        raise SnapshotError(
            f"a snapshot needs {(num_bytes + _SLACK_BYTES) / 1e6:.1f} MB of free disk space in {folder}, but only "
            f"{usage.free / 1e6:.1f} MB are free: make room there"
        ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _read_facts(path: Path, step: int) -> dict[str, Any]:
    try:
        facts = restore_facts(path)
        is_whole = is_as_sealed(facts) and facts["step"] == step
        form, written_by, leaves, batch_index = (
            facts["format"],
            facts["versions"][RECORDED_NAME],
            facts["leaves"],
            facts["pulls"],
        )
        if form == _FORMAT and not (
            isinstance(leaves, dict) and type(batch_index) is int and 0 <= batch_index < 1 << 63
        ):
            raise TypeError("they have another form")
    except Exception as error:  # Orbax and TensorStore raise exceptions of many types
        raise _damaged(path, f"its metadata cannot be read ({short_reason(error)})", error) from error
    if not is_whole:
        raise _damaged(path, "its metadata has changed since it was written")
    if form != _FORMAT:
        raise SnapshotError(
            f"a snapshot must have format {_FORMAT}, but {path} has format {form}: read it with loopfeed {written_by}"
        )
    return facts


def _check_claims(path: Path, described: Mapping[str, Any], stored_bytes: int) -> None:
    try:
        fault = find_false_claim(path, described, stored_bytes)
    except Exception as error:  # TensorStore raises exceptions of many types
        raise _damaged(path, f"its arrays cannot be read ({short_reason(error)})", error) from error
    if fault is not None:
        raise _damaged(path, fault)


def _restore_arrays(path: Path, described: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Read all arrays at once; if that fails, find the first damaged array by reading them one at a time."""
    try:
        return _flatten(restore_arrays(path))
    except Exception as error:  # Orbax and TensorStore raise exceptions of many types
        name = first_unreadable(path, described) or "an array"
        raise _damaged(path, f"{name} cannot be read ({short_reason(error)})", error) from error


def _match(name: str, array: NDArray[Any], like: Any) -> Any:
    plain = jax.eval_shape(plain_key, like) if is_key(like) else like
    if array.shape != tuple(plain.shape) or array.dtype != plain.dtype:
        found, expected = (f"{each.dtype.name} {list(each.shape)}" for each in (array, plain))
        raise _not_ours(f"contains {name} as {found} instead of {expected}")
    return like_leaf(array, like)


def _add_padding(path: Path, num_bytes: int) -> None:
    """Add bytes that no disk compresses, because readers refuse a state that is stored in far fewer than it has."""
    with (path / _PADDING).open("xb") as file:
        for start in range(0, num_bytes, _SLACK_BYTES):
            file.write(os.urandom(min(_SLACK_BYTES, num_bytes - start)))


def _put_in_place(source: Path, target: Path) -> None:
    if target.exists():
        # Two renames: a crash between them loses only the replaced snapshot, which is damaged or another run's.
        target.rename(source.with_name("replaced"))
    source.rename(target)
    sync_folder(target.parent)


def _list(names: list[str]) -> str:
    more = len(names) - _NAMED_AT_MOST
    return ", ".join(names[:_NAMED_AT_MOST]) + (f" and {more} more" if more > 0 else "")


def _damaged(path: Path, what: str, error: BaseException | None = None) -> SnapshotError:
    """Return the error of a snapshot; `error` is that of the system or of TensorStore, if one was raised."""
    if error is not None and _may_pass(error):
        return UnreadSnapshotError(f"the snapshot {path} cannot be read: {what}")
    return SnapshotError(f"the snapshot {path} is damaged and cannot be used: {what}")


def _may_pass(error: BaseException) -> bool:
    """Return whether an error is one of the disk or the machine, and so says nothing about the files."""
    if isinstance(error, MemoryError) or "can't start new thread" in str(error):
        return True
    return cause_of(error) not in _OF_DAMAGE and system_number(error) != errno.EINVAL


def _not_ours(what: str) -> SnapshotError:
    return SnapshotError(
        f"the snapshot does not fit this program: it {what}; "
        "resume with the model, optimiser and options that it was written with"
    )
