"""A file that may be in an object store, as a path on this machine."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from loopfeed.engine.records.stored.reading import read_stored_file
from loopfeed.preprocess.shards.location import ShardError, open_location

_DOWNLOAD_TIMEOUT_S = 600.0
"""Time limit for the download of one file, in seconds; a server that is down is noticed sooner."""


@contextmanager
def local_file(location: str, storage_options: Mapping[str, str] | None = None) -> Iterator[str]:
    """Yield the path of a file: the location itself or, for a URL, a temporary copy; errors name the URL.

    Args:
        location: a path, or a URL such as ``s3://bucket/model.safetensors``; the folder in a URL may be a stored run.
        storage_options: how to reach the store of a URL.

    Raises:
        ShardError: the store cannot be reached, or it has no such file.
    """
    if "://" not in location:
        yield location
        return
    folder, _, key = location.rpartition("/")
    if not key or folder.endswith(":/"):
        raise ShardError(f"{location} is not the URL of a file; give one such as s3://bucket/folder/model.safetensors")
    store = open_location(folder, storage_options=storage_options)
    content = store.read(key, timeout_s=_DOWNLOAD_TIMEOUT_S)
    if content is None:
        content = read_stored_file(store, key)
    if content is None:
        raise ShardError(f"{location} does not exist; check the URL")
    with tempfile.TemporaryDirectory(prefix="loopfeed-") as temporary:
        copy = Path(temporary) / "weights"
        copy.write_bytes(content)
        try:
            yield str(copy)
        except ValueError as error:
            raise ValueError(str(error).replace(str(copy), location)) from error
