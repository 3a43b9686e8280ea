"""The folder of what is kept between starts and can be made again: compiled programs, libraries, the demo set."""

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Return the user's cache folder: $XDG_CACHE_HOME/feedloop, else ~/.cache/feedloop.

    Raises:
        RuntimeError: if the user has no home folder.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification ignores relative paths: they would point to a different folder in each working directory.
    return (cache_home if cache_home.is_absolute() else Path.home() / ".cache") / "feedloop"
