"""The format of a stored run: objects named by their digests, and a marker that lists the objects of each file.

`state.json` is the marker. It is written last and replaced by one write, and readers believe nothing else, so that the
store always holds one whole state of the run. Owns names and checks. Must not know: threads, local files.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from loopfeed.engine.records.digests import is_as_sealed, sealed
from loopfeed.engine.records.file_errors import describe_unreadable
from loopfeed.preprocess.shards.location import Location, ShardError

MARKER = "state.json"
OBJECTS = "objects/"
PART_BYTES = 8 << 20
"""The largest object. A request has a time limit, so an object must not be too large for a slow network."""
_FORMAT = 1
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
        """Return the content of the marker."""
        values = {"format": _FORMAT, "launch": self.launch, "time": self.time, "files": self.files}
        # Through JSON, because the digest must be that of the values as they are read back.
        return json.dumps(sealed(json.loads(json.dumps(values))), separators=(",", ":")).encode() + b"\n"

    @classmethod
    def from_bytes(cls, content: bytes, where: str) -> "StoredState":
        """Read the content of a marker; raise StoredRunError, which says `where` it is, for any other content."""
        try:
            values = json.loads(content)
            if not is_as_sealed(values):
                raise ValueError("it has changed since it was written")
            if values["format"] != _FORMAT:
                raise ValueError(f"its format is {values['format']}, and this version reads format {_FORMAT}")
            files = {
                _checked_name(name): tuple(_checked_part(part) for part in parts)
                for name, parts in values["files"].items()
            }
            return cls(files, str(values["launch"]), float(values["time"]))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoredRunError(
                f"{where}{MARKER} cannot be read ({describe_unreadable(error)}): restore that object, read the run "
                "with the version of loopfeed that wrote it, or choose another URL"
            ) from error


def read_state(location: Location) -> StoredState | None:
    """Return the state of a stored run, None if there is none; raise ShardError if it cannot be read."""
    content = location.read(MARKER)
    return None if content is None else StoredState.from_bytes(content, location.display)


def is_object(key: str) -> bool:
    """Return whether a key can be that of an object of a stored run."""
    return key.startswith(OBJECTS) and _SHA256.fullmatch(key.removeprefix(OBJECTS)) is not None


def _checked_name(name: str) -> str:
    """Return the name of a file unless it could lead out of the run folder, or differs from the path that it means."""
    path = PurePosixPath(name)
    is_safe = name and not path.is_absolute() and ".." not in path.parts and "\\" not in name and "\0" not in name
    if not is_safe or str(path) != name:
        raise ValueError(f"{name!r} is not the name of a file of a run")
    if path.parts[0] == "snapshots" and not (len(path.parts) > 2 and re.fullmatch(r"[0-9]{1,18}", path.parts[1])):
        raise ValueError(f"{name!r} is not the name of a file of a snapshot")
    return name


def _checked_part(values: Any) -> Part:
    sha256, size = values
    if not isinstance(sha256, str) or not _SHA256.fullmatch(sha256) or type(size) is not int or size < 1:
        raise ValueError(f"{values!r} is not the digest and the size of an object")
    return Part(sha256, size)
