"""The format of a stored run: objects named by their digests, and a marker that lists the objects of each file.

`state.json` is the marker. It is written last and replaced by one write, and readers believe nothing else, so that the
store always holds one whole state of the run. Owns names and checks. Must not know: threads, local files.
"""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from loopfeed.engine.records.digests import is_as_sealed, sealed
from loopfeed.engine.records.file_errors import describe_unreadable
from loopfeed.engine.records.limits import MOST_JSON_BYTES
from loopfeed.engine.records.run_folder import CONFIG, RESULT, RUNTIME
from loopfeed.preprocess.claimed_size import FREE_BYTES
from loopfeed.preprocess.shards.location import Location, ShardError

MARKER = "state.json"
OBJECTS = "objects/"
PART_BYTES = 8 << 20
"""The largest object. A request has a time limit, so an object must not be too large for a slow network."""
MOST_MARKER_BYTES = 1 << 26
"""The largest marker: that of some terabytes."""
_FORMAT = 1
_MOST_FILES = 1 << 17
# Objects that are listed several times: snapshots of a model that is mostly frozen, and tables of zeros. A marker of a
# few bytes could otherwise fill any disk.
_MOST_RATIO = 1024
_LONGEST_NAME_BYTES = 255
_LAST_TIME_S = 253_402_300_799  # the year 9999
_SHA256 = re.compile(r"[0-9a-f]{64}")


class StoredRunError(ShardError):
    """A stored run cannot be read or written; the message names the store and the remedy."""


class Part(NamedTuple):
    """The digest (SHA-256) and the size in bytes of one piece of a file, which is one object."""

    sha256: str
    size: int

    @classmethod
    def of(cls, content: bytes) -> "Part":
        """Return the part with this content."""
        return cls(hashlib.sha256(content).hexdigest(), len(content))

    @property
    def key(self) -> str:
        """The name of the object, relative to the stored run."""
        return f"{OBJECTS}{self.sha256}"


@dataclass(frozen=True)
class StoredState:
    """The files of a stored run.

    Attributes:
        files: by name relative to the run folder, the parts whose contents in order are the file.
        launch: the identifier of the launch that wrote the state.
        time: when, in seconds since the Unix epoch.
    """

    files: Mapping[str, tuple[Part, ...]]
    launch: str
    time: float

    @property
    def keys(self) -> frozenset[str]:
        """The names of all objects of the state."""
        return frozenset(part.key for parts in self.files.values() for part in parts)

    @property
    def snapshot_steps(self) -> list[int]:
        """The steps of its snapshots, in ascending order."""
        return sorted({int(name.split("/")[1]) for name in self.files if name.startswith("snapshots/")})

    def to_bytes(self) -> bytes:
        """Return the content of the marker; raise StoredRunError if no reader would accept it."""
        try:
            _check_bounded(self.files)
        except ValueError as error:
            raise StoredRunError(f"the run cannot be stored ({error}): keep fewer snapshots (--keep)") from error
        values = {"format": _FORMAT, "launch": self.launch, "time": self.time, "files": self.files}
        # Through JSON, because the digest must be that of the values as they are read back.
        content = json.dumps(sealed(json.loads(json.dumps(values))), separators=(",", ":")).encode() + b"\n"
        if len(content) > MOST_MARKER_BYTES:
            raise StoredRunError(
                f"the run cannot be stored (its list of files has more than {MOST_MARKER_BYTES:,} bytes): keep fewer "
                "snapshots (--keep)"
            )
        return content

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "StoredState":
        """Read the content of a marker; raise StoredRunError, which says `where` it is, for any other content."""
        try:
            if len(content) > MOST_MARKER_BYTES:
                raise ValueError(f"it has more than {MOST_MARKER_BYTES:,} bytes")
            values = json.loads(content)
            if not is_as_sealed(values):
                raise ValueError("it has changed since it was written")
            if values["format"] != _FORMAT:
                raise ValueError(f"its format is {values['format']}, and this version reads format {_FORMAT}")
            files = {
                _checked_name(name): tuple(_checked_part(part) for part in parts)
                for name, parts in values["files"].items()
            }
            _check_bounded(files)
            if not 0 <= values["time"] <= _LAST_TIME_S:
                raise ValueError("its time is not one")
            return cls(files, str(values["launch"]), float(values["time"]))
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise StoredRunError(
                f"{where}{MARKER} cannot be read ({describe_unreadable(error)}): restore that object, read the run "
                "with the version of loopfeed that wrote it, or choose another URL"
            ) from error


def read_state(location: Location) -> StoredState | None:
    """Return the state of a stored run, None if there is none; raise ShardError if it cannot be read."""
    content = location.read(MARKER, max_bytes=MOST_MARKER_BYTES)
    return None if content is None else StoredState.from_bytes(content, location.display)


def is_object(key: str) -> bool:
    """Return whether a key can be that of an object of a stored run."""
    return key.startswith(OBJECTS) and _SHA256.fullmatch(key.removeprefix(OBJECTS)) is not None


def _checked_name(name: str) -> str:
    """Return the name of a file unless it could lead out of the run folder, or differs from the path that it means."""
    path = PurePosixPath(name)
    is_safe = path.parts and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
    # What has no bytes raises UnicodeEncodeError, a ValueError.
    if not is_safe or str(path) != name or any(len(os.fsencode(each)) > _LONGEST_NAME_BYTES for each in path.parts):
        raise ValueError(f"{name[:_LONGEST_NAME_BYTES]!r} is not the name of a file of a run")
    if path.parts[0] == "snapshots" and not (len(path.parts) > 2 and re.fullmatch(r"[0-9]{1,18}", path.parts[1])):
        raise ValueError(f"{name!r} is not the name of a file of a snapshot")
    return name


def _checked_part(values: Any) -> Part:
    sha256, size = values
    is_digest = isinstance(sha256, str) and _SHA256.fullmatch(sha256)
    if not is_digest or type(size) is not int or not 1 <= size <= PART_BYTES:
        raise ValueError(f"{str(values)[:200]!r} is not the digest and the size of an object")
    return Part(sha256, size)


def _check_bounded(files: Mapping[str, tuple[Part, ...]]) -> None:
    """Raise ValueError for files that no reader would accept, because a copy of them is far larger than the store."""
    if len(files) > _MOST_FILES:
        raise ValueError(f"it has {len(files):,} files, more than {_MOST_FILES:,}")
    for name in (CONFIG, RESULT, RUNTIME):
        if (size := sum(part.size for part in files.get(name, ()))) > MOST_JSON_BYTES:
            raise ValueError(f"{name} has {size:,} bytes, more than {MOST_JSON_BYTES:,}")
    if below := {str(parent) for name in files for parent in PurePosixPath(name).parents} & files.keys():
        raise ValueError(f"{min(below)!r} is a file and a folder")
    parts = [part for each in files.values() for part in each]
    num_bytes, stored_bytes = (sum(part.size for part in each) for each in (parts, set(parts)))
    check_ratio(num_bytes, stored_bytes)


def check_ratio(num_bytes: int, stored_bytes: int) -> None:
    """Raise ValueError if files of `num_bytes` are made of far fewer bytes in objects, each listed many times."""
    if num_bytes > FREE_BYTES + _MOST_RATIO * stored_bytes:
        raise ValueError(f"it makes {num_bytes:,} bytes of objects of only {stored_bytes:,} bytes")
