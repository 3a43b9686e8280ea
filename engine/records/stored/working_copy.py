"""The working copy of a stored run: the run folder on this machine in which the run trains.

There is one place for each URL, so that a copy that could not be uploaded is found by the resume, and copies cannot
pile up for one run. Owns its place, and whether it continues the state in the store. Must not know: uploads.
"""

import hashlib
import json
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from loopfeed.engine.records.folder_lock import is_locked
from loopfeed.engine.records.limits import MOST_JSON_BYTES
from loopfeed.engine.records.run_folder import CONFIG
from loopfeed.engine.records.whole_file import write_whole
from loopfeed.models.trusted_folder import CACHE_REMEDY, user_cache_folder
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shards.location import Location
from loopfeed.preprocess.synced_folders import make_folders, sync_tree

_NOTE = "stored.json"
_NO_MARKER = "none"


class WorkingCopy:
    """The folder of the working copy of a stored run, which may not exist yet.

    Attributes:
        folder: contains everything below.
        run: the run folder.
    """

    def __init__(self, location: Location) -> None:
        # The same URL on another server is another run.
        self._place = {"url": location.display, "endpoint": location.spec.get("endpoint", "")}
        digest = hashlib.sha256(json.dumps(self._place, sort_keys=True).encode()).hexdigest()
        name = re.sub(r"[^A-Za-z0-9._-]", "-", location.display.rstrip("/").rpartition("/")[2])[:40]
        self.folder = working_copies() / f"{name}-{digest[:12]}"
        self.run = self.folder / "run"

    def continues(self, marker: bytes | None) -> bool:
        """Return whether it contains a run that goes on from the state in the store.

        Args:
            marker: the content of the marker in the store, None if there is none.
        """
        return (self.run / CONFIG).is_file() and _digest(marker) in self._markers()

    def prepare(self) -> None:
        """Create the folders that are missing."""
        make_folders(self.run)

    def note_markers(self, contents: Sequence[bytes | None]) -> None:
        """Note that the run folder continues the state in the store if its marker has one of these contents.

        Args:
            contents: the contents of markers; None stands for a store without a marker.
        """
        if not (self.folder / _NOTE).exists():
            # What the note says of the run folder must not outlast a power failure that the folder does not.
            sync_tree(self.run)
        note = {"place": self._place, "markers": [_digest(content) for content in contents]}
        write_whole(self.folder / _NOTE, json.dumps(note, indent=2).encode() + b"\n")

    def remove(self) -> None:
        """Remove the working copy, whose run is in the store."""
        # First what makes it a run to resume, so that a part of it is never taken for one.
        (self.folder / _NOTE).unlink(missing_ok=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # it contains others
            self.folder.parent.rmdir()

    def _markers(self) -> list[str]:
        try:
            note = json.loads(read_regular(self.folder / _NOTE, max_bytes=MOST_JSON_BYTES))
            return [str(each) for each in note["markers"]] if note["place"] == self._place else []
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return []


def working_copies() -> Path:
    """Return the folder of all working copies.

    Raises:
        ValueError: the user has no cache folder.
    """
    if (cache := user_cache_folder()) is None:
        raise ValueError(
            "the working copy of a run in a store is kept in the user's cache folder, and there is none that can be "
            f"written: {CACHE_REMEDY}"
        )
    return cache / "runs"


def kept_copies(own: WorkingCopy) -> tuple[int, int]:
    """Return how many other working copies there are that no run is using, and how many bytes they occupy."""
    count = num_bytes = 0
    with suppress(OSError):
        for folder in working_copies().iterdir():
            if folder == own.folder or is_locked(folder / "run"):
                continue
            count += 1
            for path in folder.rglob("*"):
                with suppress(OSError):
                    num_bytes += path.lstat().st_size if not path.is_dir() else 0
    return count, num_bytes


def _digest(marker: bytes | None) -> str:
    return _NO_MARKER if marker is None else hashlib.sha256(marker).hexdigest()
