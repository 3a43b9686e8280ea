"""Where the project keeps what it makes for itself, outside of any run folder."""

import os
from pathlib import Path


def user_cache_folder() -> Path:
    """Gives the folder for compiled programs and the demo set: $XDG_CACHE_HOME/feedloop, else ~/.cache/feedloop."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification has relative paths ignored: they would mean another folder in each working directory.
    return (named if named.is_absolute() else Path.home() / ".cache") / "feedloop"
