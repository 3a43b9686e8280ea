"""The folder of what is kept between starts and can be made again: compiled programs, libraries, the demo set."""

import os
from pathlib import Path

CACHE_REMEDY = "set XDG_CACHE_HOME to a folder that this user can write"


def user_cache_folder() -> Path | None:
    """Return the user's cache folder, $XDG_CACHE_HOME/loopfeed, else ~/.cache/loopfeed; None if there can be none.

    It need not exist yet. There is none without a home folder, as a container with an unknown user ID has it, or where
    this process could not create it. What is in a folder that exists can be used even if it cannot be written.
    """
    cache_home = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG specification ignores relative paths: they would point to a different folder in each working directory.
    if not cache_home.is_absolute():
        try:
            home = Path.home()
        except RuntimeError:  # neither $HOME nor an entry for the user ID
            return None
        if not home.is_absolute():
            return None
        cache_home = home / ".cache"
    folder = cache_home / "loopfeed"
    return folder if _can_be(folder) else None


def _can_be(folder: Path) -> bool:
    """Return whether a folder exists, or its nearest ancestor that does can be written."""
    for path in (folder, *folder.parents):
        if os.path.lexists(path):
            return path == folder or (path.is_dir() and os.access(path, os.W_OK | os.X_OK))
    return False
