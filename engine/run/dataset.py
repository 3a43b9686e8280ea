"""Which data a run reads: what the user named, else the usual places, else the demo set.

Owns the fallback rule and the making of the demo set on first use; knows nothing of batches.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from engine.locations import user_cache_folder
from preprocess.shards.reader import list_splits

DATA_VARIABLE = "FEEDLOOP_DATA"
USUAL_PLACE = Path("data/shards")

_DEMO_SPLITS = ("train", "val")


class DataChoice(NamedTuple):
    """A packed data set and why it was taken.

    Attributes:
        data: a folder or URL.
        reason: in words, for the first line of the run.
        is_demo: whether it is the demo set, which may still have to be made.
    """

    data: str
    reason: str
    is_demo: bool


def choose_data(data: str | None) -> DataChoice:
    """Gives `data` if named, else $FEEDLOOP_DATA, else data/shards where it exists, else the demo set."""
    if data is not None:
        return DataChoice(data, "as named", is_demo=False)
    if named := os.environ.get(DATA_VARIABLE):
        return DataChoice(named, f"from ${DATA_VARIABLE}", is_demo=False)
    if USUAL_PLACE.is_dir():
        return DataChoice(os.fspath(USUAL_PLACE), "found here", is_demo=False)
    reason = f"no --data, no ${DATA_VARIABLE} and no {USUAL_PLACE}: the demo set"
    return DataChoice(os.fspath(user_cache_folder() / "demo"), reason, is_demo=True)


def make_demo(folder: Path, notify: Callable[[str], None]) -> None:
    """Draws and packs the demo set where it is not there yet; it appears whole, whoever else makes it meanwhile."""
    if _is_complete(folder):
        return
    from preprocess.demo.demo_set import pack_demo  # with the packer, which no other run needs

    notify("drawing and packing the demo set, once")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="demo-") as beside:
        packed = Path(beside) / folder.name
        pack_demo(os.fspath(packed))
        try:
            packed.rename(folder)
        except OSError:
            if _is_complete(folder):
                return
            shutil.rmtree(folder)
            packed.rename(folder)


def _is_complete(folder: Path) -> bool:
    return set(list_splits(os.fspath(folder))) >= set(_DEMO_SPLITS)
