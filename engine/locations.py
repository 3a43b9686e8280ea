"""Find the user's cache folder, and make the paths in settings absolute."""

import os
from dataclasses import replace
from pathlib import Path

from engine.config import TrainConfig


def user_cache_folder() -> Path:
    """Return the folder for compiled programs and the demo set: $XDG_CACHE_HOME/feedloop, else ~/.cache/feedloop."""
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification ignores relative paths: they would point to a different folder in each working directory.
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "feedloop"


def with_absolute_paths(config: TrainConfig) -> TrainConfig:
    """Return the settings with `data` and `init_from` made absolute, so that the working directory does not matter."""
    return replace(config, data=absolute_location(config.data), init_from=absolute_location(config.init_from))


def absolute_location(location: str | None) -> str | None:
    """Return a path made absolute, or a URL unchanged."""
    if location is None or "://" in location:
        return location
    return str(Path(location).expanduser().absolute())
