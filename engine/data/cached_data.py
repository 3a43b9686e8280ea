"""The cache of a remote data set on this machine, as the settings describe it."""

from collections.abc import Callable
from contextlib import ExitStack

from loopfeed.engine.compilation.cache_place import check_cache_place, local_folder
from loopfeed.engine.config import OFF, TrainConfig
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.reader import ShardSplit, open_split
from loopfeed.preprocess.shards.shard_cache import ShardCache
from loopfeed.preprocess.storage_options import expand_home
from loopfeed.preprocess.system_errors import system_reason

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
