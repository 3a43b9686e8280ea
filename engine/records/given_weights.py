"""Weights from another program: a safetensors file or a PyTorch file, with the names that a model of this project has.

The file may be at a URL. Owns how the two formats are told apart, and which names of other programs are understood.
Must not know models.
"""

import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from loopfeed.engine.records.stored.reading import read_stored_file
from loopfeed.engine.records.torch_file import read_torch_file
from loopfeed.engine.records.weights import StoredWeights, Tensors, check_is_stored, name_read_errors, read_weights
from loopfeed.preprocess.file_kinds import HEAD_BYTES, UNPACK, kind_of
from loopfeed.preprocess.regular_file import open_regular
from loopfeed.preprocess.shards.location import ShardError, open_location

_DOWNLOAD_TIMEOUT_S = 600.0
"""Time limit for the download of one file, in seconds; a server that is down is noticed sooner."""

_WRAPPERS = ("module.", "_orig_mod.", "model.")
"""What DataParallel, `torch.compile` and training frameworks put before every name of a state dictionary."""
_TIMM_HEAD, _HEAD = "head.fc", "fc"
_ZIP = b"PK\x03\x04"
# Protocol 2 to 5. PyTorch < 1.6 wrote several pickles in a row; a file saved by `pickle` itself begins likewise.
_PICKLES = tuple(bytes((0x80, protocol)) for protocol in range(2, 6))
# A safetensors file begins with the length of its header in eight bytes, and the header with a brace.
_BRACE_OFFSET = 8


class GivenWeights(NamedTuple):
    """The content of a weights file, and one-line messages about what was changed or chosen while reading it."""

    stored: StoredWeights
    notes: tuple[str, ...]


def read_given_weights(path: str | os.PathLike[str]) -> GivenWeights:
    """Read weights in either format; the content of the file decides, not its name.

    Returns:
        The tensors with the file's dtypes. A prefix (`module.`, `_orig_mod.`, `model.`) that every name has is left
        out.

    Raises:
        ValueError: as `loopfeed.engine.records.weights.read_weights` and
            `loopfeed.engine.records.torch_file.read_torch_file`.
    """
    with name_read_errors(path), os.fdopen(open_regular(path), "rb") as file:
        head = file.read(HEAD_BYTES)
    start = head[: _BRACE_OFFSET + 1]
    # The length at the beginning of a safetensors file may be any bytes.
    kind = None if start[_BRACE_OFFSET:] == b"{" else kind_of(head)
    if kind is not None and (kind.is_lost or (kind.remedy == UNPACK and not start.startswith(_ZIP))):
        raise ValueError(
            f"weights must be a safetensors file or a file of PyTorch 1.6 or newer, but {os.fspath(path)} is "
            f"{kind.name}: {kind.remedy}"
        )
    notes = []
    if start[_BRACE_OFFSET:] == b"{" or not start.startswith((_ZIP, *_PICKLES)):
        stored = read_weights(path)
    elif start.startswith(_ZIP):
        with name_read_errors(path):
            check_is_stored(path)
            tensors, key, ignored = read_torch_file(path)
        stored = StoredWeights(tensors, {})
        if key is not None:
            rest = f", not those under {' or '.join(map(repr, ignored))}" if ignored else ""
            notes.append(f"the tensors are those under {key!r} in the file{rest}")
    else:
        raise ValueError(
            f"weights must be a safetensors file or a file of PyTorch 1.6 or newer, but {os.fspath(path)} is an older "
            "PyTorch file or another pickle: load it in PyTorch, and save its state dictionary again with torch.save "
            "or safetensors.torch.save_file"
        )
    tensors, renamed = _without_wrappers(stored.tensors)
    return GivenWeights(stored._replace(tensors=tensors), (*notes, *renamed))


def rename_head(given: GivenWeights, head: str | None) -> GivenWeights:
    """Return weights with timm's classifier `head.fc` called `fc` if that is the path of the model's classifier."""
    stored, notes = given
    if head != _HEAD or not _has(stored.tensors, _TIMM_HEAD) or _has(stored.tensors, _HEAD):
        return given
    tensors = {
        _HEAD + name.removeprefix(_TIMM_HEAD) if name.startswith(f"{_TIMM_HEAD}.") else name: tensor
        for name, tensor in stored.tensors.items()
    }
    return GivenWeights(stored._replace(tensors=tensors), (*notes, f"timm's classifier {_TIMM_HEAD!r} is called 'fc'"))


def _has(tensors: Tensors, path: str) -> bool:
    return any(name.startswith(f"{path}.") for name in tensors)


def _without_wrappers(tensors: Tensors) -> tuple[Tensors, list[str]]:
    """Return tensors without prefixes of wrappers that every name has, at most three, and a message for each."""
    notes = []
    for _ in _WRAPPERS:
        if wrapper := _wrapper_of(tensors):
            tensors = {name.removeprefix(wrapper): tensor for name, tensor in tensors.items()}
            notes.append(f"the prefix {wrapper!r} of the tensors' names is left out")
    return tensors, notes


def _wrapper_of(tensors: Tensors) -> str | None:
    """Return the prefix that all names have, if it is that of a wrapper."""
    return next(
        (
            wrapper
            for wrapper in _WRAPPERS
            if tensors and all(name.startswith(wrapper) and name != wrapper for name in tensors)
        ),
        None,
    )


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
