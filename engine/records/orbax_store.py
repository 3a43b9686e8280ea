"""Orbax, called so that only what is asked for happens: no record on the terminal, no jax on the way, no early import.

Knows how a snapshot lies in Orbax's files, and nothing of what is in it.
"""

import logging
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

_LONGEST_REASON = 200
# For how long what has failed may go on failing in TensorStore's threads, unheard.
_LATE_S = 0.5


def load_orbax() -> None:
    """Imports Orbax, which takes from 0.2 to 3 s, ahead of the first snapshot."""
    with _quiet():
        import orbax.checkpoint  # noqa: F401


def save_items(path: Path, arrays: dict[str, Any], facts: dict[str, Any]) -> None:
    """Writes a folder of two items, `state` and `facts`; not atomic enough to be taken for a snapshot as it stands.

    Args:
        path: absolute, new.
        arrays: nested dictionaries of NumPy arrays with elements; where there are none, there is no item for them.
        facts: JSON.

    Raises:
        Exception: of whatever type, where the disk does not take it.
    """
    with _quiet(), _no_late_words():
        import orbax.checkpoint as ocp

        items: dict[str, Any] = {"facts": ocp.args.JsonSave(facts)}
        if arrays:
            items["state"] = ocp.args.PyTreeSave(arrays)
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.Composite(**items))


def restore_facts(path: Path) -> Any:
    """Reads the JSON; raises an exception of whatever type where it cannot be."""
    with _quiet():
        import orbax.checkpoint as ocp

        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=ocp.args.Composite(facts=ocp.args.JsonRestore()))["facts"]


def restore_arrays(path: Path) -> Any:
    """Reads the nested dictionaries, as NumPy arrays; raises an exception of whatever type where they cannot be."""
    with _quiet(), _no_late_words():
        import orbax.checkpoint as ocp

        # Without a target, Orbax gives every array back as what it was saved from.
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(path, args=ocp.args.Composite(state=ocp.args.PyTreeRestore()))["state"]


def first_unreadable(path: Path, names: Iterable[str]) -> str | None:
    """Reads arrays one at a time, and gives the name of the first that cannot be; None where all can."""
    store = {"driver": "ocdbt", "base": f"file://{path}/state"}
    for name in names:
        try:
            # Orbax keeps each array as zarr under its path, joined by dots.
            np.asarray(ts.open({"driver": "zarr", "kvstore": {**store, "path": f"{name}/"}}).result().read().result())
        except Exception:  # noqa: BLE001 - whatever is wrong, this is the one that was asked for
            return name
    return None


def short_reason(error: BaseException) -> str:
    """What went wrong, without the pages of specification and source lines that TensorStore adds, and in one line."""
    told = re.sub(r" \[(tensorstore_spec|source locations|os_error_code)=.*", "", str(error), flags=re.DOTALL)
    told = " ".join(told.split())
    # The middle is the path, said three times over.
    if not told:
        return type(error).__name__
    return told if len(told) <= _LONGEST_REASON else f"{told[:60]} … {told[-120:]}"


class _Standby(logging.Handler):
    """Stands on the root logger, and does there what Python does while no handler does."""

    def emit(self, record: logging.LogRecord) -> None:
        others = [handler for handler in logging.root.handlers if not isinstance(handler, _Standby)]
        if not others and logging.lastResort is not None and record.levelno >= logging.lastResort.level:
            logging.lastResort.handle(record)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps Orbax's log off the terminal: what fails is raised anyway, what does not is for Orbax's makers.

    Orbax logs through absl, whose first record of a process gives the root logger a handler for good, unless one is
    there: hence the one on standby.
    """
    from absl import logging as absl_logging  # makes its logger, which must not be asked for before

    absl, standby = absl_logging.get_absl_logger(), _Standby()

    def keep(record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname

    logging.root.addHandler(standby)
    absl.addFilter(keep)
    try:
        yield
    finally:
        absl.removeFilter(keep)
        logging.root.removeHandler(standby)


@contextmanager
def _no_late_words() -> Iterator[None]:
    """Keeps off the terminal what TensorStore's threads say of a write or a read that is given up already.

    Orbax waits for the first array that fails; the others then find its event loop closed, each with a traceback.
    """
    before = sys.unraisablehook
    last = time.monotonic()

    def hear(unraisable: Any) -> None:
        nonlocal last
        if isinstance(unraisable.exc_value, RuntimeError) and "Event loop is closed" in str(unraisable.exc_value):
            last = time.monotonic()
        else:
            before(unraisable)

    sys.unraisablehook = hear
    try:
        yield
    except BaseException:
        last = time.monotonic()
        while time.monotonic() < last + _LATE_S:
            time.sleep(_LATE_S / 10)
        raise
    finally:
        sys.unraisablehook = before
