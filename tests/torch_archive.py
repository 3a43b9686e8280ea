"""Writes PyTorch's file format by hand, from its description: a pickle assembled here, in a zip of stored entries."""

import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

STORAGES = {"float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
            "int32": "Int", "bool": "Bool"}  # fmt: skip
START, STOP = b"\x80\x02", b"."
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def text(value: str) -> bytes:
    content = value.encode()
    return b"X" + struct.pack("<I", len(content)) + content


def integer(value: int) -> bytes:
    content = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes((len(content),)) + content


def integers(values: tuple[int, ...]) -> bytes:
    return b"(" + b"".join(map(integer, values)) + b"t"


def storage(dtype: str, key: str, num_elements: int) -> bytes:
    kind = f"ctorch\n{STORAGES[dtype]}Storage\n".encode()
    return b"(" + text("storage") + kind + text(key) + text("cpu") + integer(num_elements) + b"tQ"


def tensor(stored: bytes, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    rest = integer(offset) + integers(shape) + integers(strides) + b"\x89" + ORDERED_DICT
    return b"ctorch._utils\n_rebuild_tensor_v2\n(" + stored + rest + b"tR"


def dictionary(items: Mapping[str, bytes]) -> bytes:
    return ORDERED_DICT + b"(" + b"".join(text(name) + value for name, value in items.items()) + b"u"


def state_dict(arrays: Mapping[str, np.ndarray]) -> tuple[bytes, dict[str, bytes]]:
    """Return the pickled dictionary, without start and stop, and the content of the storages."""
    items, storages = {}, {}
    for number, (name, array) in enumerate(arrays.items()):
        strides = tuple(stride // array.itemsize for stride in np.ascontiguousarray(array).strides[: array.ndim])
        stored = storage(array.dtype.name, str(number), array.size)
        items[name] = tensor(stored, 0, array.shape, strides)
        storages[str(number)] = array.tobytes()
    return dictionary(items), storages


def write_archive(path: Path, pickled: bytes, storages: Mapping[str, bytes]) -> Path:
    """Write an archive with `pickled` between the start and the end of a pickle."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", START + pickled + STOP)
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
        for key, content in storages.items():
            archive.writestr(f"archive/data/{key}", content)
    return path


def write_state_dict(path: Path, arrays: Mapping[str, Any], *, key: str | None = None) -> Path:
    """Write arrays as `torch.save` does, in a checkpoint under `key` if there is one."""
    pickled, storages = state_dict(arrays)
    return write_archive(path, pickled if key is None else dictionary({"epoch": b"K\x05", key: pickled}), storages)
