"""Archives and kits made by hand, byte by byte where tarfile would not write them."""

from __future__ import annotations

import gzip
import io
import struct
import tarfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from scipy import io as scipy_io  # type: ignore[import-untyped]

BLOCK = 512
END = bytes(2 * BLOCK)
KIT_ROOT = "ILSVRC2012_devkit_t12"


def header(
    name: bytes,
    size: int = 0,
    *,
    kind: bytes = b"0",
    link: bytes = b"",
    size_field: bytes | None = None,
    checksum_off: int = 0,
) -> bytes:
    """Return a header of a tar archive with a right checksum, unless ``checksum_off`` is added to it."""
    size_text = b"%011o\0" % size if size_field is None else size_field
    fields = [
        name[:100].ljust(100, b"\0"), b"0000644\0", b"0000000\0", b"0000000\0", size_text[:12].ljust(12, b"\0"),
        b"00000000000\0", b" " * 8, kind, link[:100].ljust(100, b"\0"), b"ustar\x0000", bytes(64), b"0000000\0",
        b"0000000\0", bytes(155), bytes(12),
    ]  # fmt: skip
    content = bytearray(b"".join(fields))
    content[148:156] = b"%06o\0 " % (sum(content) + checksum_off)
    return bytes(content)


def member(name: bytes, content: bytes = b"", **fields: Any) -> bytes:
    """Return a header and its content, padded."""
    return header(name, len(content), **fields) + padded(content)


def padded(content: bytes) -> bytes:
    """Return the content with zeros up to whole blocks."""
    return content + bytes(-len(content) % BLOCK)


def pax(key: bytes, value: bytes) -> bytes:
    """Return a pax header with one key."""
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    length += len(str(length)) - len(str(len(body)))
    return member(b"pax", str(length).encode() + body, kind=b"x")


def class_members(images: dict[str, bytes]) -> bytes:
    """Return members ``<class>/a.png``."""
    return b"".join(member(f"{name}/a.png".encode(), content) for name, content in images.items())


def train_archive(images: dict[str, bytes]) -> bytes:
    """Return an archive in the form of ImageNet's: of each class an archive of its images."""
    return b"".join(
        member(f"{name}.tar".encode(), member(f"{name}_1.JPEG".encode(), content) + END)
        for name, content in images.items()
    ) + END  # fmt: skip


def val_archive(images: dict[str, bytes]) -> bytes:
    """Return an archive in the form of ImageNet's validation archive."""
    members = enumerate(images.values(), start=1)
    return b"".join(member(b"ILSVRC2012_val_%08d.JPEG" % number, content) for number, content in members) + END


def meta_mat(names: list[str]) -> bytes:
    """Return the development kit's table of classes."""
    keys = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height", "num_train_images"]
    rows = np.empty((len(names), 1), [(each, object) for each in keys])
    for row, name in enumerate(names):
        none = np.zeros((1, 0))
        rows[row, 0] = (np.uint8(row + 1), name, name, "a", np.uint8(0), none, np.uint8(0), np.uint16(1))
    file = io.BytesIO()
    scipy_io.savemat(file, {"synsets": rows}, do_compression=True)
    return file.getvalue()


def kit(mat: bytes, truth: bytes) -> bytes:
    """Return a development kit, not yet compressed."""
    return (
        member(f"{KIT_ROOT}/data/meta.mat".encode(), mat)
        + member(f"{KIT_ROOT}/data/ILSVRC2012_validation_ground_truth.txt".encode(), truth)
        + END
    )


def mat_bomb(num_bytes: int) -> bytes:
    """Return a MATLAB file whose one element is ``num_bytes`` of zeros, compressed."""
    compressor, block = zlib.compressobj(9), bytes(1 << 20)
    tag = struct.pack("<II", 14, num_bytes)
    parts = [compressor.compress(tag), *(compressor.compress(block) for _ in range(num_bytes >> 20))]
    data = b"".join([*parts, compressor.flush()])
    return (
        b"MATLAB 5.0 MAT-file".ljust(124)
        + struct.pack("<HH", 0x0100, 0x4D49)
        + struct.pack("<II", 15, len(data))
        + data
    )


def write_gzip_zeros(path: Path, head: bytes, num_bytes: int, tail: bytes = b"") -> None:
    """Write head, zeros and tail through gzip, streamed."""
    block = bytes(1 << 22)
    with gzip.open(path, "wb", compresslevel=1) as file:
        file.write(head)
        for _ in range(num_bytes >> 22):
            file.write(block)
        file.write(tail)


def gnu_sparse(name: str, content: bytes) -> bytes:
    """Return a member that says it is sparse, in the form of GNU's tar."""
    info = tarfile.TarInfo(name)
    info.size, info.type = len(content), tarfile.GNUTYPE_SPARSE
    return info.tobuf(tarfile.GNU_FORMAT) + padded(content)
