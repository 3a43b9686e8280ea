"""The choice of a run's data set: a data set given by the user or found in a default location, or else the demo set.

Also creates the demo set on first use. Does not depend on batches.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from loopfeed.engine.owners import DATA_VARIABLE
from loopfeed.models.trusted_folder import CACHE_REMEDY, user_cache_folder
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.reader import list_splits
from loopfeed.preprocess.storage_options import expand_home, is_url
from loopfeed.preprocess.system_errors import status_of

USUAL_PLACE = Path("data/shards")
DATA_LOCATION = "data_location"
"""The key of where a run found its data in the resolved part of `config.json`."""

_DEMO = "demo"
_DEMO_SPLITS = ("train", "val")


class DataChoice(NamedTuple):
    """The chosen data set, and the reason for the choice.

    Attributes:
        data: a folder or URL.
        reason: why it was chosen, for the first line that a run prints.
        is_demo: whether it is the demo set, which may not exist yet.
    """

    data: str
    reason: str
    is_demo: bool


def choose_data(data: str | None) -> DataChoice:
    """Choose `data` if given, else $LOOPFEED_DATA if set, else data/shards if it exists, else the demo set.

    Raises:
        ValueError: it would be the demo set, and there is no folder to keep it in.
    """
    cache = user_cache_folder()
    demo = None if cache is None else os.fspath(cache / _DEMO)
    if data is not None:
        return DataChoice(data, "as given", is_demo=data == demo)
    if named := os.environ.get(DATA_VARIABLE):
        return DataChoice(named, f"from ${DATA_VARIABLE}", is_demo=False)
    if USUAL_PLACE.is_dir():
        return DataChoice(os.fspath(USUAL_PLACE), "found here", is_demo=False)
    if demo is None:
        raise ValueError(
            f"without --data, ${DATA_VARIABLE} and {USUAL_PLACE}, the demo set is used, which is kept in the user's "
            f"cache folder, and there is none that can be written: {CACHE_REMEDY}, or name other data"
        )
    reason = f"no --data, no ${DATA_VARIABLE} and no {USUAL_PLACE}: the demo set"
    return DataChoice(demo, reason, is_demo=True)


def data_of_record(given: str | None, found_at: str | None) -> str | None:
    """Return where the data of a recorded run are, None if `choose_data` has to choose them.

    Args:
        given: the setting `data`, of the record or given now.
        found_at: where the run found its data, in the record; None if they have no place, or in oldest records.

    Raises:
        ValueError: the data are not there any more.
        OSError: the system cannot tell.
    """
    place = found_at if given is None else given
    if place is None or is_url(place) or _is_there(expand_home(place)):
        return place
    cache = user_cache_folder()
    demo = None if cache is None else cache / _DEMO
    if demo is not None and place == found_at and Path(place).parts[-2:] == demo.parts[-2:]:
        return os.fspath(demo)  # which is drawn again
    if given is None and os.environ.get(DATA_VARIABLE):
        return None
    raise ValueError(
        f"the data of the run must be in {printable(place)}, which does not exist: give the folder where they are now "
        "(--data)"
    )


def _is_there(place: Path) -> bool:
    try:
        return status_of(place, follow_symlinks=False) is not None
    except PermissionError:
        return False  # in the home of the person who made the run: for whoever has a copy of it, the data are not there


def make_demo(folder: Path, notify: Callable[[str], None]) -> None:
    """Draw and pack the demo set unless it exists; its folder appears atomically, even if two processes race."""
    if _is_complete(folder):
        return
    from loopfeed.preprocess.demo.demo_set import pack_demo  # imports the packer, which no other run needs

    notify("drawing and packing the demo set, which later runs reuse")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix="demo-") as temporary:
        packed = Path(temporary) / folder.name
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
