"""A split's arrays: ``pixels/``, and those of numbers and of names, stored as Zarr 3.

One shard file of ``pixels/`` contains ``shard_images`` images and one inner chunk is one image, so any image can be
read separately while a shard is written as one file (codec ``sharding_indexed``). The other arrays have one number per
image, or, in ``targets/``, one row of numbers; ``names/`` has the bytes of all names one after another, and
``name_offsets/`` where each begins. Any Zarr 3 reader can open them. Knows the metadata, not the meaning of numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.pixels import UNUSED_BITS
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import MAX_CLASSES
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.store_errors import reason, write_fault
from loopfeed.preprocess.system_errors import reading_remedy, store_answer, system_reason

Codec = Literal["raw", "blosc"]
CODECS: tuple[Codec, ...] = ("raw", "blosc")

PIXELS = "pixels"
LABELS = "labels"
CHECKSUMS = "checksums"
TARGETS = "targets"
EXTENTS = "extents"
NAMES = "names"
NAME_OFFSETS = "name_offsets"
WEIGHTS = "weights"
GROUPS = "groups"
NUMBER_ARRAYS = (LABELS, TARGETS, CHECKSUMS, EXTENTS, NAMES, NAME_OFFSETS, WEIGHTS, GROUPS)
"""The names of all arrays beside ``pixels/``, of which a split has some."""
METADATA_KEY = "zarr.json"

# The value that a Zarr reader returns for a missing shard file. Its low byte is not 0, so it is not a packed pixel: a
# missing file appears as magenta and fails `inspect-shards --verify`, while 0 would look like a black image. (In the
# dense layout any word is valid; Loopfeed itself treats a missing file as an error in both layouts.)
MISSING_PIXEL = 0xFF00FF00 | UNUSED_BITS
MISSING_LABEL = MAX_CLASSES

# For labels and checksums. A shard file is read and compared with its digest as a whole (2 or 4 MiB); 10^8 images have
# 96 files of each.
NUMBERS_PER_CHUNK = 1 << 10
NUMBERS_PER_SHARD = 1 << 20
MAX_NUMBERS_BYTES = 5 << 20
"""Maximum size of such a shard file: 4 MiB of checksums, plus a thirty-second of that for inner checksums and index."""

MAX_NAME_BYTES = 1 << 14
"""The longest name of an image in bytes; a path has at most 4,096."""

_MAX_METADATA_BYTES = 1 << 20


@dataclass(frozen=True)
class NumberShards:
    """How an array with one number, or one row of numbers, for each image is divided into shard files and chunks.

    Attributes:
        row: the shape of one image's part, ``()`` or ``(words,)``.
        per_shard: images per shard file.
        per_chunk: images per inner chunk.
    """

    row: tuple[int, ...] = ()
    per_shard: int = NUMBERS_PER_SHARD
    per_chunk: int = NUMBERS_PER_CHUNK

    @property
    def rank(self) -> int:
        """The rank of the array."""
        return 1 + len(self.row)

    def num_parts(self, num_images: int) -> int:
        """Return the number of shard files for ``num_images`` images."""
        return -(-num_images // self.per_shard)

    def ranges(self, num_images: int) -> Iterator[tuple[int, int]]:
        """Yield ``start, stop``, the range of image indices of each shard file."""
        for start in range(0, num_images, self.per_shard):
            yield start, min(start + self.per_shard, num_images)


class Column(NamedTuple):
    """How an array with one number for each image, or for each byte of a name, is stored."""

    dtype: str
    fill_value: int | str
    shards: NumberShards = NumberShards()
    axis: str = "image"
    is_compressed: bool = False


# The files of what is compressed have 4 MiB, the chunks 64 KiB.
_NAME_SHARDS = NumberShards(per_shard=1 << 22, per_chunk=1 << 16)
_NAME_OFFSET_SHARDS = NumberShards(per_shard=1 << 19, per_chunk=1 << 13)
COLUMNS = {
    LABELS: Column("uint16", MISSING_LABEL),
    CHECKSUMS: Column("uint32", 0),
    EXTENTS: Column("uint32", 0),
    NAMES: Column("uint8", 0, _NAME_SHARDS, "byte", is_compressed=True),
    NAME_OFFSETS: Column("uint64", 0, _NAME_OFFSET_SHARDS, is_compressed=True),
    WEIGHTS: Column("float32", "NaN"),
    GROUPS: Column("uint32", 0xFFFFFFFF),
}
"""All arrays of numbers but ``targets/``, whose rows and type the manifest says."""


def row_shards(num_words: int) -> NumberShards:
    """Return the shards of ``targets/`` for rows of ``num_words`` words, whose files have at most 4 MiB too."""
    per_shard = 1 << max(0, (NUMBERS_PER_SHARD // num_words).bit_length() - 1)
    return NumberShards((num_words,), per_shard, max(1, per_shard * NUMBERS_PER_CHUNK // NUMBERS_PER_SHARD))


_MISMATCH = re.compile(r'Expected "\w+" of .*|Mismatch in "codecs"')
_SHARD_ENTRY = re.compile(r'Error reading shard entry \{[^}]*\}/\{[^}]*\} in [^"]*"[^"]*": ')
_LITTLE_ENDIAN = {"name": "bytes", "configuration": {"endian": "little"}}
_CHECKSUM = {"name": "crc32c"}


def pixels_metadata(
    num_images: int, height: int, row_words: int, *, shard_images: int, codec: Codec, checksum: bool
) -> dict[str, Any]:
    """Return the Zarr metadata of the ``uint32 [num_images, height, row_words]`` pixel array.

    A shard file contains ``shard_images`` images; an inner chunk contains one.
    """
    codecs: list[dict[str, Any]] = [_LITTLE_ENDIAN]
    if codec == "blosc":
        codecs.append(_blosc("lz4", 4))
    return _metadata(
        [num_images, height, row_words],
        dtype="uint32",
        fill_value=MISSING_PIXEL,
        names=["image", "row", "column"],
        shard=[shard_images, height, row_words],
        chunk=[1, height, row_words],
        codecs=[*codecs, _CHECKSUM] if checksum else codecs,
    )


def column_metadata(name: str, length: int) -> dict[str, Any]:
    """Return the Zarr metadata of the array ``name`` of `COLUMNS`, of ``length`` numbers."""
    column = COLUMNS[name]
    blosc = [_blosc("zstd", np.dtype(column.dtype).itemsize)] if column.is_compressed else []
    return _numbers_metadata(length, column.shards, column.dtype, column.fill_value, [column.axis], blosc)


def targets_metadata(num_images: int, num_words: int, dtype: type[np.generic]) -> dict[str, Any]:
    """Return the Zarr metadata of the ``[num_images, num_words]`` array of targets, uint32 or float32."""
    is_float = np.dtype(dtype).kind == "f"
    names = ["image", "column" if is_float else "word"]
    fill_value = "NaN" if is_float else 0xFFFFFFFF
    return _numbers_metadata(num_images, row_shards(num_words), np.dtype(dtype).name, fill_value, names)


def _blosc(cname: str, typesize: int) -> dict[str, Any]:
    shuffle = "shuffle" if typesize > 1 else "noshuffle"
    values = {"cname": cname, "clevel": 5, "shuffle": shuffle, "typesize": typesize, "blocksize": 0}
    return {"name": "blosc", "configuration": values}


def _numbers_metadata(
    length: int,
    shards: NumberShards,
    dtype: str,
    fill_value: int | str,
    names: list[str],
    compression: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Return the metadata of an array of numbers or rows. Each chunk (about 4 KiB uncompressed) has a checksum."""
    return _metadata(
        [length, *shards.row],
        dtype=dtype,
        fill_value=fill_value,
        names=names,
        shard=[shards.per_shard, *shards.row],
        chunk=[shards.per_chunk, *shards.row],
        codecs=[_LITTLE_ENDIAN, *compression, _CHECKSUM],
    )


def create_array(location: Location, name: str, metadata: dict[str, Any]) -> ts.TensorStore:
    """Write the metadata of the array ``name``, replacing any existing metadata, and open the array."""
    path = location.child(name)
    path.make_folder(METADATA_KEY)
    path.delete(METADATA_KEY)
    return _open(location, name, {"metadata": metadata}, ts.OpenMode(create=True, open=True))


def write_array(location: Location, name: str, metadata: dict[str, Any]) -> ts.TensorStore:
    """Open the array ``name`` for writing chunks, without reading or writing its metadata."""
    return _open(location, name, {"metadata": metadata}, ts.OpenMode(open=True, assume_metadata=True))


def read_array(location: Location, name: str, metadata: dict[str, Any] | None = None) -> ts.TensorStore:
    """Open the array ``name`` for reading; reading a missing chunk raises an error instead of returning a fill value.

    Args:
        location: the split's folder.
        name: ``pixels``, or one of `NUMBER_ARRAYS`.
        metadata: the required metadata (shape, type, shards, codecs, fill value), as returned by `pixels_metadata`.

    Raises:
        ShardError: the array does not exist, or its metadata can't be read or differs from ``metadata``.
    """
    _check_metadata(location, name)
    spec: dict[str, Any] = {} if metadata is None else {"metadata": metadata}
    spec |= {
        "fill_missing_data_reads": False,
        "recheck_cached_data": "open",
        "cache_pool": {"total_bytes_limit": 0},
    }
    return _open(location, name, spec, ts.OpenMode(open=True))


def _check_metadata(location: Location, name: str) -> None:
    """Raise ShardError unless the metadata is a small JSON object without deep nesting.

    Deeply nested JSON crashes TensorStore (SIGSEGV).
    """
    key = f"{name}/{METADATA_KEY}"
    text = location.read(key)
    try:
        if text is not None and (len(text) > _MAX_METADATA_BYTES or not isinstance(json.loads(text), dict)):
            raise ValueError(
                f"found {quantity(len(text), 'byte')}, expected a JSON object of at most "
                f"{quantity(_MAX_METADATA_BYTES, 'byte')}"
            )
    except (ValueError, RecursionError) as error:
        raise ShardError(
            f"{location.display}{key} is not valid array metadata ({reason(error)}); {location.remedy}"
        ) from error


def start_reading(
    stored: ts.TensorStore, indices: NDArray[np.int64], pixels: NDArray[np.uint32], rows: NDArray[np.intp]
) -> ts.WriteFutures:
    """Start reading images into ``pixels[rows]`` and return the pending operation."""
    target = ts.array(pixels)
    if len(rows) < len(pixels):
        target = target[rows]
    # Writing from the store into the buffer avoids the array that read() allocates: 1.3 to 1.7 times the images per
    # second; the order of the indices then makes no difference.
    with ts.Batch() as batch:
        return target.write(stored[indices], batch=batch)


def words_digest(parts: Iterable[NDArray[Any]]) -> str:
    """Return the hexadecimal SHA-256 of the numbers in ``parts``, concatenated in little-endian byte order."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(np.ascontiguousarray(part, part.dtype.newbyteorder("<")).data)
    return digest.hexdigest()


def shard_key(shard: int, rank: int) -> str:
    """Return the key of a shard file relative to its array's folder, e.g. ``c/7/0/0`` for rank 3."""
    return "/".join(["c", str(shard), *["0"] * (rank - 1)])


def image_key(shard: int) -> str:
    """Return the key of a shard file of images relative to the split's folder, e.g. ``pixels/c/7/0/0``."""
    return f"{PIXELS}/{shard_key(shard, 3)}"


def damage(error: BaseException) -> str:
    """Return the reason why a chunk can't be read. The most common reasons are stated in plain words."""
    text = reason(error)
    if "is missing" in text:
        return "the shard file, or the image in it, is missing"
    if "Digest mismatch" in text:
        return "the checksum does not match because the bytes have changed"
    if "Existing shard has size" in text or "is not valid for value of size" in text:
        return "the shard file is truncated"
    if isinstance(error, TimeoutError):
        return "no response from the store"
    if (fault := system_reason(error) or store_answer(error)) is not None:
        return f"it can't be read ({fault})"
    # Without the image's position in the shard, so that the same damage to many images is reported once.
    return _SHARD_ENTRY.sub("", text)


def _open(location: Location, name: str, spec: dict[str, Any], mode: ts.OpenMode) -> ts.TensorStore:
    spec = {"driver": "zarr3", "kvstore": location.array_spec(name)} | spec
    try:
        return ts.open(spec, context=location.context, open_mode=mode).result(timeout=location.timeout_s)
    except (ValueError, OSError, RuntimeError, TimeoutError) as error:
        if (outage := location.outage(error)) is not None:
            raise ShardError(f"{location.display}{name}: {outage}") from error
        raise ShardError(f"{location.display}{name}: {_open_fault(location, error, is_new=mode.create)}") from error


def _open_fault(location: Location, error: BaseException, *, is_new: bool) -> str:
    """Return why an array can't be opened, or created, and what to do."""
    if is_new:
        return f"can't be written: {write_fault(error, 'run the same command again')}"
    text = reason(error)
    if (mismatch := _MISMATCH.search(text)) is not None:
        return f"the array was changed after packing: {mismatch[0]}; {location.remedy}"
    if "does not exist" in text:
        return f"its {METADATA_KEY} is missing; {location.remedy}"
    return f"the array can't be opened: {system_reason(error) or text}; {reading_remedy(error, location.remedy)}"


def _metadata(
    shape: list[int],
    *,
    dtype: str,
    fill_value: int | str,
    names: list[str],
    shard: list[int],
    chunk: list[int],
    codecs: list[dict[str, Any]],
) -> dict[str, Any]:
    sharding = {
        "chunk_shape": chunk,
        "codecs": codecs,
        "index_codecs": [_LITTLE_ENDIAN, _CHECKSUM],
        "index_location": "end",
    }
    return {
        "shape": shape,
        "data_type": dtype,
        "fill_value": fill_value,
        "dimension_names": names,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shard}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "codecs": [{"name": "sharding_indexed", "configuration": sharding}],
    }
