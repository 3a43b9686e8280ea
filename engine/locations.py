"""Where the project keeps what it makes for itself, and where a run finds what it was given, from any folder."""

import os
from dataclasses import replace
from pathlib import Path

from engine.config import TrainConfig


def user_cache_folder() -> Path:
    """Gives the folder for compiled programs and the demo set: $XDG_CACHE_HOME/feedloop, else ~/.cache/feedloop."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored: they would mean another folder in each working directory.
    return (named if named.is_absolute() else Path.home() / ".cache") / "feedloop"


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Gives the settings with `data` and `init_from` as they are to be found from any working directory."""
    return replace(config, data=_absolute(config.data), init_from=_absolute(config.init_from))


def _absolute(location: str | None) -> str | None:
    """Gives a path in full; a URL stays."""
    if location is None or "://" in location:
        return location
    return str(Path(location).expanduser().absolute())
