"""The choice of a run's data set: a data set given by the user or found in a default location, or else the demo set.

Also creates the demo set on first use. Does not depend on batches.

And the cache of a remote data set on this machine, as the settings describe it.
"""

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

from loopfeed.engine.compilation.cache_place import check_cache_place, local_folder
from loopfeed.engine.config import OFF, TrainConfig
from loopfeed.engine.owners import DATA_VARIABLE, storage_options_of
from loopfeed.engine.settings import SettingError
from loopfeed.models.trusted_folder import CACHE_REMEDY, user_cache_folder
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.reader import ShardSplit, list_splits, open_split
from loopfeed.preprocess.shards.shard_cache import ShardCache
from loopfeed.preprocess.storage_options import expand_home, is_url
from loopfeed.preprocess.system_errors import status_of, system_reason

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


_GB = 1e9


def open_cache(config: TrainConfig, data: str, notify: Callable[[str], None]) -> ShardCache | None:
    """Return the cache for the data set at `data`; None if the settings name none, or the data are on this machine.

    Args:
        config: the settings.
        data: a folder or a URL.
        notify: called with a message if a cache is of no use, or can no longer be written; also from other threads.

    Raises:
        SettingError: the folder cannot be used, or as `check_cache_place`.
    """
    if config.cache is None or config.cache == OFF:
        return None
    if "://" not in data or data.startswith("file://"):
        notify(f"cache: not used, because {data} is on this machine")
        return None
    check_cache_place("cache", config.cache)
    folder = expand_home(local_folder(config.cache)).absolute()
    try:
        return ShardCache(folder, round(config.cache_gb * _GB), notify)
    except OSError as error:
        raise SettingError(
            "cache",
            "{setting} must be a folder that can be written, but {folder} is not ({fault}): choose another, or give "
            "{setting} off",
            folder=folder,
            fault=system_reason(error) or error,
        ) from error


def open_cached_split(
    config: TrainConfig,
    data: str,
    name: str,
    cache: ShardCache | None,
    stack: ExitStack,
    notify: Callable[[str], None],
) -> ShardSplit:
    """Open a split of the data set at `data`, which `stack` closes, and say how much of it is cached.

    Raises:
        ShardError: as `loopfeed.preprocess.shards.reader.open_split`.
        SettingError: the cache is smaller than one shard.
    """
    options = storage_options_of(config)
    split = stack.enter_context(open_split(data, name, storage_options=options, cache=cache, notify=notify))
    copies, where = split.copies, f"{data}/{name}"
    if cache is None or copies is None:
        return split
    if cache.limit_bytes < copies.shard_bytes:
        raise SettingError(
            "cache_gb",
            "{setting} must be at least {least:g}, the size of one shard of {where}, got {found:g}",
            least=_rounded_up(copies.shard_bytes),
            where=where,
            found=config.cache_gb,
        )
    num_shards, size = split.manifest.num_shards, _rounded_up(copies.num_bytes)
    kept = f"{copies.num_cached:,} of {quantity(num_shards, 'shard')}"
    notify(f"cache: {config.cache} has room for {kept} of {where} ({size:g} GB)")
    return split


def _rounded_up(num_bytes: int) -> float:
    """Return a number of bytes in GB, rounded up to a kilobyte."""
    return -(-num_bytes // 1000) / 1e6
