"""Where a cache must not be: in a folder that may have come with what is in it.

The programs in a compilation cache are loaded and run. A run folder or a pack may be somebody else's, so a cache in one
is refused, also if the user names it.
"""

import json
import os
from pathlib import Path
from urllib.parse import unquote

from loopfeed.engine.config import OFF, TrainConfig
from loopfeed.engine.records.limits import MOST_JSON_BYTES
from loopfeed.engine.records.run_folder import CONFIG, LOSS_LOG, SNAPSHOTS, WEIGHTS
from loopfeed.engine.settings import SettingError
from loopfeed.models.trusted_folder import folders_above
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shards.arrays import PIXELS
from loopfeed.preprocess.shards.manifest import MANIFEST_KEY
from loopfeed.preprocess.storage_options import is_url

_FILE_SCHEME = "file://"


def local_folder(folder: str) -> str:
    """Return the path of a cache that is given as a URL of this machine; anything else as it is."""
    return unquote(folder.removeprefix(_FILE_SCHEME)) if folder.startswith(_FILE_SCHEME) else folder


def check_cache_places(config: TrainConfig) -> None:
    """Raise SettingError if a cache that the settings name is in a run folder, such as that of this run, or a pack."""
    for name in ("compilation_cache", "cache"):
        check_cache_place(name, getattr(config, name), config.run_dir)


def check_cache_place(name: str, folder: str | None, run_dir: str | None = None) -> None:
    """Raise SettingError if a cache is in the folder of a run or of packed data.

    Args:
        name: the setting.
        folder: the folder, which may not exist; None and "off" name none.
        run_dir: the folder of a run that is about to begin, which may not exist.
    """
    if folder is None or folder == OFF or is_url(folder := local_folder(folder)):
        return
    own = None if run_dir is None or is_url(run_dir) else Path(os.path.realpath(run_dir))
    for each in folders_above(Path(os.path.normpath(Path(folder).expanduser().absolute()))):
        if each == own or _is_run(each) or _is_pack(each):
            raise SettingError(
                name,
                "{setting} must not be in the folder of a run or of packed data, whose content may be somebody else's, "
                "got {folder}, which is in {found}: choose a folder elsewhere, or off",
                folder=printable(folder),
                found=printable(each),
            )


def _is_run(folder: Path) -> bool:
    if not (folder / CONFIG).is_file():
        return False
    return any((folder / name).exists() for name in (LOSS_LOG, WEIGHTS, SNAPSHOTS)) or _is_record(folder / CONFIG)


def _is_record(path: Path) -> bool:
    """Return whether a file of this common name describes a run."""
    try:
        values = json.loads(read_regular(path, max_bytes=MOST_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(values, dict) and {"config", "resolved"} <= values.keys()


def _is_pack(folder: Path) -> bool:
    """Return whether a folder is a packed split, or the folder of some."""
    if _is_split(folder):
        return True
    try:
        with os.scandir(folder) as found:
            return any(each.is_dir() and _is_split(Path(each.path)) for each in found)
    except OSError:
        return False


def _is_split(folder: Path) -> bool:
    return (folder / MANIFEST_KEY).is_file() and (folder / PIXELS).is_dir()
