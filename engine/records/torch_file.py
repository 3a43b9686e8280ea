"""PyTorch's files of state dictionaries, `.pt` and `.pth`, read as NumPy arrays without PyTorch and without code.

Reads the zip format of PyTorch ≥ 1.6: `data.pkl`, interpreted by `loopfeed.engine.records.tensor_pickle`, and one entry
of numbers for each storage. Storages that no chosen tensor needs, such as those of an optimiser, are not read.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.records.stored_zip import StoredZip, ZipError
from loopfeed.engine.records.tensor_pickle import (
    MAX_PICKLE_BYTES,
    ForeignObjectError,
    StorageEntry,
    TensorPickleError,
    TensorView,
    read_tensor_pickle,
)
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import open_regular

STATE_DICT_KEYS = ("state_dict", "model", "model_state_dict", "ema")
"""The keys under which checkpoints keep their state dictionary; the first one present is read."""

_PICKLE = "data.pkl"
_MAX_NAMED = 10
_MAX_NAME_CHARACTERS = 500
# Tensors may share storages, so that their sizes add up to more than the file has.
_MAX_BYTES_PER_FILE_BYTE = 4
# NumPy multiplies the sizes of an empty array, too, those of zero left out.
_MAX_EMPTY_SIZES = 1 << 48
_REMEDY = (
    'save only the state dictionary, with torch.save(model.state_dict(), "weights.pt") or safetensors.torch.save_file'
)
_REMEDY_OF_OBJECTS = (
    'save only the state dictionary in PyTorch, with torch.save(checkpoint["state_dict"], "weights.pt") for a '
    'checkpoint or torch.save(model.state_dict(), "weights.pt") for a whole module'
)


class TorchStateDict(NamedTuple):
    """The content of a file.

    Attributes:
        tensors: the tensors by name.
        key: the key of the state dictionary, None if the file has nothing else.
        ignored: other keys that may be those of state dictionaries.
    """

    tensors: dict[str, NDArray[Any]]
    key: str | None
    ignored: tuple[str, ...]


def read_torch_file(path: str | os.PathLike[str]) -> TorchStateDict:
    """Read the state dictionary of a PyTorch file.

    Returns:
        Arrays of the file's dtypes, bfloat16 included, which cannot be written to; tensors that share a storage share
        memory.

    Raises:
        ValueError: if the file is damaged, contains anything but tensors, dictionaries, lists, numbers and text, or has
            no state dictionary.
        OSError: if it cannot be read, or is not a regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        try:
            archive = StoredZip(file)
            folder = _folder_of(archive)
            value = read_tensor_pickle(archive.read(folder + _PICKLE))
            key, views = _state_dict_of(value)
            ignored = tuple(each for each in STATE_DICT_KEYS if each in value and each != key) if key else ()
            return TorchStateDict(_Storages(archive, folder).load(views), key, ignored)
        except (ZipError, TensorPickleError) as error:
            remedy = _REMEDY_OF_OBJECTS if isinstance(error, ForeignObjectError) else f"copy it again, or {_REMEDY}"
            raise ValueError(
                f"weights must be the tensors of a complete PyTorch file, but {os.fspath(path)} cannot be used: "
                f"{error}; {remedy}"
            ) from None


def _folder_of(archive: StoredZip) -> str:
    """Return the folder of the archive's `data.pkl`, with its slash."""
    found = [name for name in archive.entries if name.endswith(f"/{_PICKLE}")]
    if len(found) != 1:
        raise ZipError(f"it has {len(found) or 'no'} entries {_PICKLE}")
    folder = found[0].removesuffix(_PICKLE)
    if archive.entries[found[0]].num_bytes > MAX_PICKLE_BYTES:
        raise ZipError(f"its {_PICKLE} is larger than {MAX_PICKLE_BYTES:,} bytes")
    order = folder + "byteorder"
    if order in archive.entries and (archive.entries[order].num_bytes > 8 or archive.read(order) != b"little"):
        raise ZipError("its numbers are not little-endian")
    return folder


def _state_dict_of(value: Any) -> tuple[str | None, dict[str, TensorView]]:
    """Return the state dictionary in the value of a file, and its key."""
    key = None
    if type(value) is dict and not _are_tensors(value):
        key = next((each for each in STATE_DICT_KEYS if type(value.get(each)) is dict), None)
        if key is None:
            raise TensorPickleError(
                f"it has neither tensors alone nor a dictionary {', '.join(STATE_DICT_KEYS[:-1])} or "
                f"{STATE_DICT_KEYS[-1]}, but {_shown(value)}"
            )
        value = value[key]
    if type(value) is not dict:
        raise TensorPickleError("it is not a dictionary")
    if any(len(str(name)) > _MAX_NAME_CHARACTERS for name in value):
        raise TensorPickleError(f"its tensors have names of more than {_MAX_NAME_CHARACTERS} characters")
    if not value or not _are_tensors(value):
        others = [name for name, each in value.items() if type(each) is not TensorView or type(name) is not str]
        raise TensorPickleError(
            f"its state dictionary has {_shown(others) if value else 'nothing'}, not a named tensor"
        )
    return key, value


def _are_tensors(values: Mapping[Any, Any]) -> bool:
    return bool(values) and all(type(name) is str and type(each) is TensorView for name, each in values.items())


def _shown(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return ", ".join(printable(str(name)) for name in names[:_MAX_NAMED]) + more


class _Storages:
    """The storages of an archive, each read and converted once; its entries do not overlap."""

    def __init__(self, archive: StoredZip, folder: str) -> None:
        self._archive, self._folder = archive, folder
        self._read: dict[str, bytes] = {}
        self._bools: dict[str, NDArray[np.bool_]] = {}
        self._left = _MAX_BYTES_PER_FILE_BYTE * archive.num_bytes

    def load(self, views: Mapping[str, TensorView]) -> dict[str, NDArray[Any]]:
        """Return the tensors."""
        for view in views.values():
            self._left -= math.prod(view.shape) * jnp.dtype(view.storage.dtype).itemsize
        if self._left < 0:
            raise TensorPickleError(f"its tensors are more than {_MAX_BYTES_PER_FILE_BYTE} times as large as the file")
        return {name: self._tensor(name, view) for name, view in views.items()}

    def _tensor(self, name: str, view: TensorView) -> NDArray[Any]:
        numbers = self._numbers(view.storage)
        is_empty = 0 in view.shape
        last = view.offset + sum((size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True))
        if not is_empty and last >= len(numbers):
            raise TensorPickleError(f"its tensor {printable(name)} reaches beyond its numbers")
        if is_empty:
            if math.prod(size or 1 for size in view.shape) >= _MAX_EMPTY_SIZES:
                raise TensorPickleError(
                    f"its empty tensor {printable(name)} has the shape {list(view.shape)}, whose other sizes are too "
                    "large"
                )
            return np.zeros(view.shape, numbers.dtype)
        strides = [stride * numbers.itemsize for stride in view.strides]
        return np.lib.stride_tricks.as_strided(numbers[view.offset :], view.shape, strides, writeable=False)

    def _numbers(self, storage: StorageEntry) -> NDArray[Any]:
        name, dtype = f"{self._folder}data/{storage.key}", jnp.dtype(storage.dtype)
        entry = self._archive.entries.get(name)
        if entry is not None and entry.num_bytes != storage.num_elements * dtype.itemsize:
            raise TensorPickleError(
                f"its entry {printable(name)} has {quantity(entry.num_bytes, 'byte')}, not those of its tensors"
            )
        if name not in self._read:
            self._read[name] = self._archive.read(name)
        if dtype != np.bool_:
            return np.frombuffer(self._read[name], dtype)
        if name not in self._bools:
            self._bools[name] = np.frombuffer(self._read[name], np.uint8) != 0
        return self._bools[name]
