"""Reads with Orbax, but imports it late, keeps its log records off the terminal and itself off the devices of jax.

Writes what Orbax would, with TensorStore alone.

Knows how Orbax stores a snapshot in files, but nothing about its content.

Compares what the arrays of a snapshot claim to be with its facts and its files before memory is taken for them: a few
bytes can claim any shape, and stand for numbers that fill the memory.
"""

import json
import logging
import math
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.engine.processes import this_process
from loopfeed.preprocess.claimed_size import is_plausible

_LONGEST_REASON = 200
# How long errors of a failed operation can still arrive from TensorStore's threads; they are not printed.
_LATE_S = 0.5


def load_orbax() -> None:
    """Import Orbax, which a resume reads with, so that fresh and resumed runs look up programs by the same keys."""
    with _quiet():
        import orbax.checkpoint  # noqa: F401


_HANDLERS = "orbax.checkpoint._src.handlers"
_ITEM_HANDLERS = {
    "facts": f"{_HANDLERS}.json_checkpoint_handler.JsonCheckpointHandler",
    "state": f"{_HANDLERS}.pytree_checkpoint_handler.PyTreeCheckpointHandler",
}
_KEY_OF_A_DICTIONARY = 2  # Orbax's number for it


def save_items(path: Path, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
    """Write a folder with the Orbax items `state` and `facts`; the caller must sync it, and ensure atomicity.

    The files are those of Orbax 0.12 for one process, but TensorStore alone writes them. Orbax starts seventeen threads
    for a snapshot, to each of which glibc gives another of its heaps, so that they all grow; it takes 45 instead of
    18 ms of the processor for the state of a ResNet-8; and it leaves four strings behind for each array.

    Args:
        path: an absolute path that does not exist yet.
        arrays: nested dictionaries of non-empty NumPy arrays; if it is empty, the item `state` is not written.
        facts: JSON values.

    Raises:
        Exception: of any type, if it cannot be written.
    """
    items = ["facts", "state"] if arrays else ["facts"]
    now = time.time_ns()
    about = {
        "item_handlers": {name: _ITEM_HANDLERS[name] for name in items},
        "metrics": {},
        "performance_metrics": {},
        "init_timestamp_nsecs": now,
        "commit_timestamp_nsecs": now,
        "custom_metadata": {},
    }
    (path / "facts").mkdir(parents=True)
    (path / "facts/metadata").write_text(json.dumps(facts), encoding="utf-8")
    if arrays:
        _save_arrays(path, arrays)
    (path / "_CHECKPOINT_METADATA").write_text(json.dumps(about), encoding="utf-8")
    # Orbax looks for these in buckets, where nothing is renamed.
    for folder in (path, *(path / name for name in items)):
        (folder / "commit_success.txt").write_text(f"Checkpoint commit was successful to {folder}", encoding="utf-8")


def _save_arrays(path: Path, arrays: dict[str, Any]) -> None:
    """Write the item `state`: each array as one chunk of a zarr array, all in one OCDBT store."""
    named = {tuple(key.key for key in keys): array for keys, array in jax.tree_util.tree_leaves_with_path(arrays)}
    context = ts.Context({"file_io_sync": False})
    with ts.Transaction(atomic=True) as transaction:
        writes = [_write(path, ".".join(parts), array, context, transaction) for parts, array in named.items()]
        for each in writes:
            each.result()
    tree = {
        str(parts): {
            "key_metadata": [{"key": part, "key_type": _KEY_OF_A_DICTIONARY} for part in parts],
            "value_metadata": {"value_type": "np.ndarray", "skip_deserialize": False},
        }
        for parts in named
    }
    about = {
        "tree_metadata": tree,
        "use_ocdbt": True,
        "use_zarr3": False,
        "store_array_data_equal_to_fill_value": True,
        "custom_metadata": None,
    }
    (path / "state/_METADATA").write_text(json.dumps(about), encoding="utf-8")


def _write(path: Path, name: str, array: NDArray[Any], context: Any, transaction: Any) -> Any:
    """Start to write an array, which must not change before the transaction ends; return the future."""
    # As Orbax: metadata inside of the nodes, and one node for all arrays. But without its zstd, which makes floats 8 %
    # smaller, takes two thirds of the time for 100 MB, and fills the heap of each thread that compresses.
    store = arrays_store(path) | {
        "config": {"max_inline_value_bytes": 1024, "max_decoded_node_bytes": 100_000_000, "compression": None}
    }
    stored = ts.open(
        {
            "driver": "zarr",
            "kvstore": store | {"path": f"{name}/"},
            "dtype": array.dtype.name,
            "metadata": {
                "shape": array.shape,
                "chunks": array.shape,
                "compressor": None,
                "dimension_separator": ".",
            },
            "store_data_equal_to_fill_value": True,
        },
        create=True,
        context=context,
        transaction=transaction,
    ).result()
    return stored.write(array, can_reference_source_data_indefinitely=True)


def _checkpointer() -> Any:
    """Return a checkpointer of this process alone: Orbax would otherwise wait for all processes that train together."""
    import orbax.checkpoint as ocp

    process = this_process()
    here = process.index
    if process.count == 1:
        return ocp.Checkpointer(ocp.CompositeCheckpointHandler())
    alone = ocp.options.MultiprocessingOptions(
        primary_host=here, active_processes={here}, barrier_sync_key_prefix=f"process-{here}"
    )
    options = ocp.CompositeOptions(multiprocessing_options=alone)
    return ocp.Checkpointer(ocp.CompositeCheckpointHandler(composite_options=options), multiprocessing_options=alone)


def restore_facts(path: Path) -> Any:
    """Read the item `facts`; raise an exception of any type if it cannot be read."""
    with _quiet():
        import orbax.checkpoint as ocp

        with _checkpointer() as checkpointer:
            return checkpointer.restore(path, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]


def restore_arrays(path: Path) -> Any:
    """Read the item `state` as nested dictionaries of NumPy arrays; raise an exception of any type on failure."""
    with _quiet(), _no_late_errors():
        import orbax.checkpoint as ocp

        # Without a target, Orbax restores every array as the type that it was saved from.
        with _checkpointer() as checkpointer:
            return checkpointer.restore(path, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))["state"]


def arrays_store(path: Path) -> dict[str, Any]:
    """Return TensorStore's specification of where the arrays of a snapshot are.

    A path is not written as a URL, in which `#`, `%`, `?` and `|` have a meaning.
    """
    return {"driver": "ocdbt", "base": {"driver": "file", "path": f"{path}/state/"}}


def first_unreadable(path: Path, names: Iterable[str]) -> str | None:
    """Read arrays one at a time, and return the name of the first unreadable array, or None if all can be read."""
    store = arrays_store(path)
    for name in names:
        try:
            # Orbax stores each array as zarr under its path, joined by dots.
            np.asarray(ts.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}).result().read().result())
        except Exception:  # noqa: BLE001 - any error makes this array unreadable
            return name
    return None


def short_reason(error: BaseException) -> str:
    """Return an error's message on one line, without TensorStore's specification and source locations."""
    reason = re.sub(r" \[(tensorstore_spec|source locations|os_error_code)=.*", "", str(error), flags=re.DOTALL)
    reason = " ".join(reason.split())
    # The middle only repeats the path.
    if not reason:
        return type(error).__name__
    return reason if len(reason) <= _LONGEST_REASON else f"{reason[:60]} … {reason[-120:]}"


class _LastResortHandler(logging.Handler):
    """A handler of the root logger that acts like `logging.lastResort` while the root logger has no other handler."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [handler for handler in logging.root.handlers if not isinstance(handler, _LastResortHandler)]
        if not others and logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Orbax's log records, which do not concern the user, off the terminal; errors are raised regardless.

    Orbax logs through absl, whose first record in a process adds a permanent handler to the root logger, unless one is
    present: hence the temporary one.
    """
    from absl import logging as absl_logging  # creates absl's logger, which must not be requested before

    absl, last_resort = absl_logging.get_absl_logger(), _LastResortHandler()

    def keep(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    logging.root.addHandler(last_resort)
    absl.addFilter(keep)
    try:
        yield
    finally:
        absl.removeFilter(keep)
        logging.root.removeHandler(last_resort)


@contextmanager
def _no_late_errors() -> Iterator[None]:
    """Keep errors of TensorStore's threads off the terminal after a write or a read has failed.

    Orbax waits only until the first array fails. The others then find its event loop closed, each with a traceback, or
    are reported as tasks whose exception was never retrieved.
    """
    # Stays after the block: a task is only reported once it is collected, with the exception that refers to it.
    logging.getLogger("asyncio").addFilter(_is_not_of_tensorstore)
    before = sys.unraisablehook
    last = time.monotonic()

    def on_unraisable(unraisable: Any) -> None:
        nonlocal last
        if isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value):
            last = time.monotonic()
        else:
            before(unraisable)

    sys.unraisablehook = on_unraisable
    try:
        yield
    except BaseException:
        last = time.monotonic()
        while time.monotonic() < last + _LATE_S:
            time.sleep(_LATE_S / 10)
        raise
    finally:
        sys.unraisablehook = before


def _is_not_of_tensorstore(record: logging.LogRecord) -> bool:
    """Return False for an asyncio record about an array's exception that was never retrieved, else True."""
    text = record.getMessage()
    return "exception was never retrieved" not in text or not re.search(r"tensorstore|[/\\]orbax[/\\]", text)


_MOST_ARRAYS = 100_000
# NumPy multiplies the sizes of an empty array, too, those of zero left out.
_MOST_SIZES = 1 << 48
# Orbax stores each array as zarr under its path, joined by dots.
_ARRAY_KEY = "/.zarray"
_MOST_ARRAY_BYTES = 1 << 16


def find_false_claim(path: Path, described: Mapping[str, Any], stored_bytes: int) -> str | None:
    """Return what is wrong with the claims of a snapshot, None if nothing is.

    Args:
        path: the folder of the snapshot.
        described: the dtype and the shape of each array by name, as the facts have them.
        stored_bytes: the size of its files.

    Raises:
        Exception: of any type, if the files cannot be read.
    """
    if len(described) > _MOST_ARRAYS:
        return f"it lists {len(described):,} arrays, of at most {_MOST_ARRAYS:,}"
    claimed_bytes, shapes = 0, {}
    for name, like in described.items():
        try:
            shape, itemsize = like["shape"], jnp.dtype(like["dtype"]).itemsize
        except (KeyError, TypeError, AttributeError):
            return f"its metadata do not describe {name}"
        is_shape = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
        if not is_shape or math.prod(size or 1 for size in shape) >= _MOST_SIZES:
            return f"{name} cannot have the shape {str(shape)[:80]}"
        claimed_bytes += math.prod(shape) * itemsize
        if 0 not in shape:
            shapes[name] = shape
    if not is_plausible(claimed_bytes, stored_bytes):
        return f"its arrays would take {claimed_bytes:,} bytes, but its files have {stored_bytes:,}"
    return _find_misfit(path, shapes) if shapes else None


def _find_misfit(path: Path, shapes: Mapping[str, list[int]]) -> str | None:
    """Return how the stored arrays differ from these shapes; None if they do not."""
    store = ts.KvStore.open(arrays_store(path)).result()
    for name, shape in shapes.items():
        found = store.read(name + _ARRAY_KEY).result()
        if found.state != "value" or not _claims_shape(bytes(found.value), shape):
            return f"{name} does not have the shape {shape} that it was written with"
    keys = {key.decode("utf-8", "replace") for key in store.list().result() if key.endswith(_ARRAY_KEY.encode())}
    others = keys - {each + _ARRAY_KEY for each in shapes}
    return f"{min(others).removesuffix(_ARRAY_KEY)} is not one of its arrays" if others else None


def _claims_shape(text: bytes, shape: list[int]) -> bool:
    """Return whether the metadata of an array have a shape, and parts that are no larger."""
    try:
        # TensorStore crashes for JSON that is nested deeply, which this refuses.
        claimed = json.loads(text) if len(text) <= _MOST_ARRAY_BYTES else {}
        parts = claimed["chunks"]
        return bool(claimed["shape"] == shape and len(parts) == len(shape)) and all(
            type(part) is int and 1 <= part <= max(size, 1) for part, size in zip(parts, shape, strict=True)
        )
    except (ValueError, KeyError, TypeError, RecursionError):
        return False
