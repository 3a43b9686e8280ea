"""PyTorch's files of state dictionaries, `.pt` and `.pth`, read as NumPy arrays by PyTorch itself, which runs no code.

PyTorch loads them (`torch.load(weights_only=True)`); it is imported here alone, and only for such a file. What it does
not bound is checked before: the sizes in the archive, and the length, the names and the depth of its pickle.
"""

import errno
import importlib
import math
import os
import pickletools
import zipfile
from collections.abc import Mapping
from typing import Any, BinaryIO, NamedTuple

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import open_regular

STATE_DICT_KEYS = ("state_dict", "model", "model_state_dict", "ema")
"""The keys under which checkpoints keep their state dictionary; the first one present is read."""

# Before it, weights_only could be made to corrupt memory: CVE-2026-24747.
_OLDEST_TORCH = "2.10.0"
_ARCHIVE = b"PK\x03\x04"
_PICKLE = "/data.pkl"
_MAX_ENTRIES = 100_000
_MAX_PICKLE_BYTES = 1 << 23
_MAX_INSTRUCTIONS = 1_000_000
# A tensor takes four. PyTorch hashes keys of dictionaries, and Python crashes on a hash of some 100,000 nested tuples.
_MAX_TUPLES = 50_000
_STORAGES = ("Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
_NAMES = {
    "collections OrderedDict",
    "torch._utils _rebuild_tensor_v2",
    "torch._utils _rebuild_parameter",
    *(f"torch {kind}Storage" for kind in _STORAGES),
}
"""The classes and functions that pickles of state dictionaries name; PyTorch would call more."""
_MAX_NAMED = 10
_MAX_NAME_CHARACTERS = 500
# Tensors may share storages, so that their sizes add up to more than the file has.
_MAX_BYTES_PER_FILE_BYTE = 4
# NumPy multiplies the sizes of an empty array, too, those of zero left out.
_MAX_EMPTY_SIZES = 1 << 48
_CONVERSION = (
    """python -c 'import torch, safetensors.torch as s; s.save_file(torch.load("weights.pt", map_location="cpu", """
    """weights_only=True), "weights.safetensors")'"""
)
_REMEDY = (
    'copy it again, or save only the state dictionary, with torch.save(model.state_dict(), "weights.pt") or '
    "safetensors.torch.save_file"
)
_REMEDY_OF_OBJECTS = (
    'save only the state dictionary in PyTorch, with torch.save(checkpoint["state_dict"], "weights.pt") for a '
    'checkpoint or torch.save(model.state_dict(), "weights.pt") for a whole module'
)


class _UnusableError(ValueError):
    """Raised if a file is not read; says why, but does not name the file, and then what to do."""

    def __init__(self, reason: str, remedy: str = _REMEDY) -> None:
        super().__init__(f"{reason}; {remedy}")


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
    """Read the state dictionary of a PyTorch file, with the PyTorch that is installed.

    Returns:
        Arrays of the file's dtypes, bfloat16 included, which cannot be written to; tensors that share a storage share
        memory.

    Raises:
        ValueError: if PyTorch ≥ 2.10 is not installed, or the file is damaged, contains anything but tensors,
            dictionaries, lists, numbers and text, or has no state dictionary.
        OSError: if it cannot be read, or is not a regular file.
    """
    with os.fdopen(open_regular(path), "rb") as file:
        torch = _import_torch(path)
        try:
            num_bytes = _check_archive(file)
            key, ignored, tensors = _state_dict_of(torch, _load(torch, file))
            _check_sizes(tensors, num_bytes)
            return TorchStateDict({name: _array_of(torch, each) for name, each in tensors.items()}, key, ignored)
        except _UnusableError as error:
            raise ValueError(
                f"weights must be the tensors of a complete PyTorch file, but {os.fspath(path)} cannot be used: {error}"
            ) from None


def _import_torch(path: str | os.PathLike[str]) -> Any:
    """Return the module `torch`; raise ValueError if there is none that is recent enough."""
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        found = printable(str(error))
    else:
        if np.lib.NumpyVersion(torch.__version__.partition("+")[0]) >= _OLDEST_TORCH:
            return torch
        found = f"found {printable(torch.__version__)}"
    raise ValueError(
        f"weights in a PyTorch file need PyTorch ≥ {_OLDEST_TORCH} ({found}), those in safetensors do not: install it, "
        f"or convert {os.fspath(path)} where PyTorch is: {_CONVERSION}"
    )


def _check_archive(file: BinaryIO) -> int:
    """Return the size of the file in bytes; raise _UnusableError unless its entries fit into it and name tensors."""
    num_bytes = file.seek(0, os.SEEK_END)
    file.seek(0)
    if file.read(len(_ARCHIVE)) != _ARCHIVE:  # PyTorch would read another format than the archive at its end
        raise _UnusableError("it is no archive, as PyTorch ≥ 1.6 writes")
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            # PyTorch looks entries up whatever their case.
            pickles = [entry for entry in entries if entry.filename.lower().endswith(_PICKLE)]
            if len(entries) > _MAX_ENTRIES or len({entry.filename.lower() for entry in entries}) < len(entries):
                raise _UnusableError(f"it has more than {_MAX_ENTRIES:,} entries, or two of the same name")
            if any(entry.compress_type or entry.flag_bits & 1 for entry in entries):
                raise _UnusableError("its entries are compressed or encrypted, which PyTorch's files are not")
            if sum(entry.file_size for entry in entries) > num_bytes:
                raise _UnusableError("its entries overlap")
            if len(pickles) != 1 or pickles[0].file_size > _MAX_PICKLE_BYTES:
                raise _UnusableError(f"it must have one entry data.pkl, of at most {_MAX_PICKLE_BYTES:,} bytes")
            if archive.testzip() is not None:  # PyTorch does not compare checksums
                raise _UnusableError("the checksum of an entry differs")
            _check_pickle(archive.read(pickles[0]))
    except _UnusableError:
        raise
    except Exception as error:  # of many kinds, as what is read may be any bytes
        # An offset before the beginning of the file is an invalid argument of `seek`.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise
        raise _UnusableError("it is truncated or damaged") from None
    return num_bytes


def _check_pickle(content: bytes) -> None:
    """Raise _UnusableError if a pickle has a name that no state dictionary needs, or is too long or deep to load."""
    num_tuples = 0
    for number, (instruction, argument, _) in enumerate(pickletools.genops(content)):
        if instruction.name in ("GLOBAL", "INST") and argument not in _NAMES:
            raise _UnusableError(
                f"it names {printable(str(argument).replace(' ', '.'))}, but only tensors are read, and no code is run",
                _REMEDY_OF_OBJECTS,
            )
        if instruction.proto > 2 or (instruction.name == "PROTO" and argument != 2):
            raise _UnusableError("its pickle has another protocol than 2, which PyTorch does not load")
        num_tuples += instruction.name.startswith("TUPLE")
        if number >= _MAX_INSTRUCTIONS or num_tuples > _MAX_TUPLES:
            raise _UnusableError(
                f"its data.pkl has more than {_MAX_INSTRUCTIONS:,} instructions or {_MAX_TUPLES:,} tuples"
            )


def _load(torch: Any, file: BinaryIO) -> Any:
    file.seek(0)
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception:  # noqa: BLE001 - of many kinds; its advice would be to load the file without a check
        raise _UnusableError("PyTorch does not load it") from None


def _state_dict_of(torch: Any, value: Any) -> tuple[str | None, tuple[str, ...], dict[str, Any]]:
    """Return the key of the state dictionary in the value of a file, the keys of others, and its tensors."""

    def others(values: Mapping[Any, Any]) -> list[Any]:
        return [name for name, each in values.items() if type(name) is not str or not isinstance(each, torch.Tensor)]

    key: str | None = None
    ignored: tuple[str, ...] = ()
    if isinstance(value, dict) and (others(value) or not value):
        keys = [each for each in STATE_DICT_KEYS if each in value]
        key = next((each for each in keys if isinstance(value[each], dict)), None)
        if key is None:
            raise _UnusableError(
                f"it has neither tensors alone nor a dictionary {', '.join(STATE_DICT_KEYS[:-1])} or "
                f"{STATE_DICT_KEYS[-1]}, but {_shown(value)}"
            )
        ignored, value = tuple(each for each in keys if each != key), value[key]
    if not isinstance(value, dict):
        raise _UnusableError("it is not a dictionary")
    if not value or others(value):
        raise _UnusableError(
            f"its state dictionary has {_shown(others(value)) if value else 'nothing'}, not a named tensor"
        )
    if any(len(name) > _MAX_NAME_CHARACTERS for name in value):
        raise _UnusableError(f"its tensors have names of more than {_MAX_NAME_CHARACTERS} characters")
    return key, ignored, value


def _shown(names: Any) -> str:
    names = list(names)
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    # A key that is not text may be a deep tuple, whose text would recurse.
    shown = (name if type(name) is str else type(name).__name__ for name in names[:_MAX_NAMED])
    return ", ".join(map(printable, shown)) + more


def _check_sizes(tensors: Mapping[str, Any], num_bytes: int) -> None:
    """Raise _UnusableError if tensors would take much more memory than the file."""
    if sum(each.numel() * each.element_size() for each in tensors.values()) > _MAX_BYTES_PER_FILE_BYTE * num_bytes:
        raise _UnusableError(f"its tensors are more than {_MAX_BYTES_PER_FILE_BYTE} times as large as the file")
    for name, each in tensors.items():
        if math.prod(size or 1 for size in each.shape) >= _MAX_EMPTY_SIZES:
            raise _UnusableError(
                f"its empty tensor {printable(name)} has the shape {list(each.shape)}, whose other sizes are too large"
            )


def _array_of(torch: Any, tensor: Any) -> NDArray[Any]:
    tensor = tensor.detach()
    # NumPy has no bfloat16 that PyTorch knows.
    is_bfloat16 = tensor.dtype == torch.bfloat16
    array: NDArray[Any] = tensor.view(torch.int16).numpy().view(jnp.bfloat16) if is_bfloat16 else tensor.numpy()
    array.flags.writeable = False
    return array
