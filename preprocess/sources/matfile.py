"""Reads MATLAB's level-5 MAT files.

Only the types used in ImageNet's `meta.mat` are supported: numbers, text, cell arrays and struct arrays.

The format is described in "MAT-File Format", The MathWorks, chapter 1. Every data element is an 8-byte tag (type,
number of bytes) and its bytes, padded to a multiple of 8; up to four bytes may be inside the tag instead. Arrays are
stored column by column.

There are limits on the decompressed size, the number of elements, the nesting depth of arrays, the dimensions of an
array and the fields of a struct.

`scipy.io.loadmat` is not used, because it trusts the file: in SciPy 1.18, a number of unknown type (a file of 200
bytes) or deeply nested cells (42 kB, compressed) crash the process, and 216 bytes that declare 5·10⁸ structs take 37 s
and 3 GB. Checking every type, depth and shape beforehand would need all of this module except the conversion of values.
"""

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

MAX_BYTES = 64 * 2**20
_MAX_ELEMENTS = 1_000_000  # meta.mat has 60,000
_MAX_DEPTH = 16
_MAX_DIMENSIONS = 32
_MAX_FIELDS = 1_000

_HEADER_BYTES = 128
_COMPRESSED, _MATRIX = 15, 14
_NUMBER_TYPES: Mapping[int, str] = {
    1: "i1", 2: "u1", 3: "i2", 4: "u2", 5: "i4", 6: "u4", 7: "f4", 9: "f8", 12: "i8", 13: "u8",
}  # fmt: skip
_TEXT_ENCODINGS = {16: "utf-8", 17: "utf-16", 18: "utf-32"}
_CELL, _STRUCT, _CHAR = 1, 2, 4
_NUMERIC_CLASSES: Mapping[int, str] = {
    6: "f8", 7: "f4", 8: "i1", 9: "u1", 10: "i2", 11: "u2", 12: "i4", 13: "u4", 14: "i8", 15: "u8",
}  # fmt: skip


class MatFileError(ValueError):
    """Error raised if the MAT file is damaged or uses a feature that is not supported."""


@dataclass(frozen=True)
class _Element:
    kind: int
    data: memoryview


class _Limits:
    """Counters that limit the number of bytes, the number of elements and the nesting depth when a file is read."""

    def __init__(self) -> None:
        self._bytes, self._elements, self._depth = MAX_BYTES, _MAX_ELEMENTS, 0

    def take_bytes(self, data: bytes) -> None:
        self._bytes -= len(data)
        if self._bytes < 0:
            raise MatFileError(
                f"the variables of the MAT file have more than {MAX_BYTES} bytes; download the file again"
            )

    @property
    def bytes_left(self) -> int:
        return self._bytes

    def take_element(self) -> None:
        self._elements -= 1
        if self._elements < 0:
            raise MatFileError(f"the MAT file has more than {_MAX_ELEMENTS} elements; download it again")

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise MatFileError(
                f"the arrays of the MAT file are nested more than {_MAX_DEPTH} deep; download the file again"
            )

    def __exit__(self, *_: object) -> None:
        self._depth -= 1


def read_matfile(content: bytes) -> dict[str, Any]:
    """Read the variables of a level-5 MAT file.

    Args:
        content: the whole file.

    Returns:
        Values by name. Numbers are arrays with their MATLAB shape and type, text is `str` (rows joined by line feeds),
        a cell array is a list and a struct array a list of dicts, both in MATLAB's column order.

    Raises:
        MatFileError: the file is not level 5, is damaged, exceeds a limit, or has objects, sparse or complex arrays.
    """
    if len(content) < _HEADER_BYTES:
        raise MatFileError(
            f"a MAT file begins with a header of {_HEADER_BYTES} bytes, but this file has {len(content)} bytes; "
            "download it again"
        )
    order = {b"IM": "<", b"MI": ">"}.get(content[126:128])
    if order is None or struct.unpack_from(order + "H", content, 124)[0] != 0x0100:
        raise MatFileError(
            f"not a level-5 MAT file: its version and byte order are {content[124:128]!r}. Versions 4 and 7.3 are not "
            "supported; save it with -v7"
        )
    variables: dict[str, Any] = {}
    try:
        limits = _Limits()
        for element in _elements(memoryview(content)[_HEADER_BYTES:], order, limits):
            for inner in _inflated(element, order, limits):
                if inner.kind == _MATRIX:
                    name, value = _read_matrix(inner.data, order, limits)
                    variables[name] = value
    except MatFileError:
        raise
    except (struct.error, zlib.error, ValueError, OverflowError, TypeError) as error:
        raise MatFileError(f"the MAT file is damaged: {error or type(error).__name__}; download it again") from error
    return variables


def _elements(data: memoryview, order: str, limits: _Limits) -> Iterator[_Element]:
    position = 0
    while position < len(data):
        limits.take_element()
        (first,) = struct.unpack_from(order + "I", data, position)
        small_bytes = first >> 16
        if small_bytes:
            start, num_bytes, kind = position + 4, small_bytes, first & 0xFFFF
            position += 8
            if num_bytes > 4:
                raise MatFileError(
                    f"the MAT file is damaged: a tag with room for 4 bytes contains {num_bytes}; download it again"
                )
        else:
            (num_bytes,) = struct.unpack_from(order + "I", data, position + 4)
            start, kind = position + 8, first
            # Compressed elements are not padded: the next tag follows immediately.
            position = start + num_bytes + (0 if kind == _COMPRESSED else -num_bytes % 8)
        if start + num_bytes > len(data):
            raise MatFileError(
                f"the MAT file is truncated: an element has only {len(data) - start} of its {num_bytes} bytes; "
                "download it again"
            )
        yield _Element(kind, data[start : start + num_bytes])


def _inflated(element: _Element, order: str, limits: _Limits) -> Iterator[_Element]:
    if element.kind != _COMPRESSED:
        yield element
        return
    inflater = zlib.decompressobj()
    data = inflater.decompress(element.data, limits.bytes_left + 1)
    limits.take_bytes(data)
    if not inflater.eof:
        raise MatFileError("the MAT file is truncated: a compressed variable is incomplete; download it again")
    yield from _elements(memoryview(data), order, limits)


def _read_matrix(data: memoryview, order: str, limits: _Limits) -> tuple[str, Any]:
    """Return the name and the value of an array, which is stored as flags, dimensions, name and class-specific data."""
    if not data:
        return "", np.zeros((0, 0))  # how MATLAB writes an empty cell or field
    parts = _elements(data, order, limits)
    (flags,) = struct.unpack_from(order + "I", _next(parts).data)
    array_class = flags & 0xFF
    if flags & 0x0800:
        raise MatFileError("complex arrays are not supported; save the MAT file without them")
    lengths = _numbers(_next(parts), order)
    if lengths.size > _MAX_DIMENSIONS:
        raise MatFileError(f"the MAT file is damaged: an array has {lengths.size} dimensions; download it again")
    shape = tuple(int(length) for length in lengths)
    name = bytes(_next(parts).data).decode("latin-1")
    if array_class == _STRUCT:
        return name, _read_struct(parts, order, shape, limits)
    if array_class == _CELL:
        with limits:
            return name, [_read_matrix(_next(parts).data, order, limits)[1] for _ in range(_num_items(shape, data))]
    if array_class == _CHAR:
        return name, _read_text(_next(parts), order, shape)
    if array_class in _NUMERIC_CLASSES:
        values = _numbers(_next(parts), order)
        if values.size != _num_items(shape, data):
            raise MatFileError(
                f"the MAT file is damaged: an array of shape {shape} has {values.size} numbers; download it again"
            )
        return name, values.astype(_NUMERIC_CLASSES[array_class]).reshape(shape, order="F")
    raise MatFileError(
        f"arrays of class {array_class} (sparse, object, function) are not supported; save the MAT file without them"
    )


def _read_struct(
    parts: Iterator[_Element], order: str, shape: tuple[int, ...], limits: _Limits
) -> list[dict[str, Any]]:
    (name_bytes,) = struct.unpack_from(order + "I", _next(parts).data)
    packed = bytes(_next(parts).data)
    if not name_bytes:
        raise MatFileError("the MAT file is damaged: the field names of a struct have 0 bytes; download it again")
    if len(packed) > _MAX_FIELDS * name_bytes:
        raise MatFileError(f"a struct of the MAT file has more than {_MAX_FIELDS} fields; download the file again")
    starts = range(0, len(packed), name_bytes)
    names = [packed[start : start + name_bytes].split(b"\0", 1)[0].decode("latin-1") for start in starts]
    if not names:
        return []
    values = (_read_matrix(part.data, order, limits)[1] for part in parts)
    with limits:
        rows = [dict(zip(names, row, strict=False)) for row in zip(*[values] * len(names), strict=False)]
    if len(rows) != int(np.prod(shape, dtype=object)):
        raise MatFileError(
            f"the MAT file is damaged: an array of shape {shape} has {len(rows)} structs; download it again"
        )
    return rows


def _read_text(element: _Element, order: str, shape: tuple[int, ...]) -> str:
    encoding = _TEXT_ENCODINGS.get(element.kind)
    if encoding is None:
        text = "".join(map(chr, _numbers(element, order).tolist()))
    else:
        text = bytes(element.data).decode(encoding + ("" if element.kind == 16 else "-le" if order == "<" else "-be"))
    if len(shape) != 2 or shape[0] <= 1 or not text:
        return text
    if shape[0] > len(text):
        raise MatFileError(
            f"the MAT file is damaged: text of shape {shape} has {len(text)} characters; download it again"
        )
    return "\n".join(text[row :: shape[0]] for row in range(shape[0]))


def _numbers(element: _Element, order: str) -> np.ndarray:
    kind = _NUMBER_TYPES.get(element.kind)
    if kind is None:
        raise MatFileError(f"the MAT file is damaged: numbers of unknown type {element.kind}; download it again")
    size = np.dtype(kind).itemsize
    return np.frombuffer(element.data[: len(element.data) // size * size], order + kind)


def _next(parts: Iterator[_Element]) -> _Element:
    part = next(parts, None)
    if part is None:
        raise MatFileError("the MAT file is truncated: an array ends early; download it again")
    return part


def _num_items(shape: tuple[int, ...], data: memoryview) -> int:
    """Return the number of items in an array; raise MatFileError if `data` has fewer bytes than items."""
    num_items = int(np.prod(shape, dtype=object))
    if not 0 <= num_items <= len(data):
        raise MatFileError(
            f"the MAT file is damaged: an array of shape {shape} needs more than its {len(data)} bytes; "
            "download it again"
        )
    return num_items
