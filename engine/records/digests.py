"""Digests of JSON records, growing logs and arrays, to detect changes to the files of a run.

They detect damage, accidents and edits by hand. They are not signatures: anyone can recompute them.
"""

import hashlib
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.json_digest import json_digest as digest_of_json
from loopfeed.preprocess.regular_file import open_regular

SEAL = "sha256"
"""The key of a JSON record under which the digest of all its other keys is stored."""

_CHUNK_BYTES = 1 << 20


class LogState(NamedTuple):
    """The size of a log in bytes, and the SHA-256 of its content in hexadecimal digits."""

    num_bytes: int
    sha256: str

    def to_json(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        return {"bytes": self.num_bytes, "sha256": self.sha256}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "LogState":
        """Create a state from the values of `to_json`; raise ValueError, KeyError or TypeError for any other values."""
        num_bytes, digest = values["bytes"], values["sha256"]
        if type(num_bytes) is not int or num_bytes < 0 or not isinstance(digest, str):
            raise ValueError(
                f"a log's state must be its size in bytes and its sha256, got {num_bytes!r} and {digest!r}"
            )
        return cls(num_bytes, digest)


class RunningDigest:
    """A running SHA-256 and count of the appended bytes. It takes O(1) memory, and any thread can read its state."""

    def __init__(self) -> None:
        self._hash, self._num_bytes, self._lock = hashlib.sha256(), 0, threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Number of bytes appended so far."""
        return self._num_bytes

    def update(self, content: bytes) -> None:
        """Add bytes to the digest."""
        with self._lock:
            self._hash.update(content)
            self._num_bytes += len(content)

    def state(self) -> LogState:
        """Return the state after the last append."""
        with self._lock:
            return LogState(self._num_bytes, self._hash.hexdigest())


def digest_file(path: Path, num_bytes: int, begun: RunningDigest) -> RunningDigest:
    """Return the digest of the first `num_bytes` bytes of a regular file, or of the whole file if it is shorter.

    Args:
        path: the file; it need not exist if `num_bytes` is 0.
        num_bytes: how many bytes.
        begun: the digest of the first of these bytes, which is updated in place.

    Raises:
        OSError: if the file cannot be read, or is a pipe, a device or a folder.
    """
    if num_bytes <= begun.num_bytes:
        return begun
    with os.fdopen(open_regular(path), "rb", buffering=0) as file:
        file.seek(begun.num_bytes)
        while part := file.read(min(_CHUNK_BYTES, num_bytes - begun.num_bytes)):
            begun.update(part)
    return begun


def sealed(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a JSON record with the digest of its content added under the key `SEAL`."""
    return {**values, SEAL: json_digest(values)}


def is_as_sealed(values: Mapping[str, Any]) -> bool:
    """Return whether a record contains the correct digest of the rest of its content."""
    return values.get(SEAL) == json_digest(values)


def json_digest(values: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a JSON record, excluding its digest; the order of the keys does not matter."""
    return digest_of_json({key: value for key, value in values.items() if key != SEAL})


def describe_array(name: str, array: NDArray[Any]) -> dict[str, Any]:
    """Return the dtype and shape of an array, and the SHA-256 of its name, dtype, shape and bytes."""
    about = {"dtype": array.dtype.name, "shape": list(array.shape)}
    digest = hashlib.sha256(json.dumps([name, about], sort_keys=True).encode())
    # As plain bytes, because hashlib does not accept bfloat16 buffers.
    digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return {**about, "sha256": digest.hexdigest()}
