"""Hostile archives, made byte by byte where tarfile would not write them, and ImageNet's files with hostile parts."""

from __future__ import annotations

import gzip
import io
import os
import struct
import tarfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from scipy import io as scipy_io  # type: ignore[import-untyped]

from scripts.torture_campaign.damage import replace

type Images = Mapping[str, bytes]
type SourceMaker = Callable[[Path, Images], Path]
"""A function that creates a source in a folder from sound images by class, and returns the path for the command."""

ESCAPES = b"\x1b[31mred\x07\xc2\x9b2J"
TRAIN, VAL, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"
_BLOCK = 512
_END = bytes(2 * _BLOCK)
_KIT_DATA = b"ILSVRC2012_devkit_t12/data/"
_B = b"n00000000/b.png"


def header(
    name: bytes, size: int = 0, *, kind: bytes = b"0", link: bytes = b"", size_field: bytes | None = None,
    checksum_off: int = 0,
) -> bytes:  # fmt: skip
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
    """Return a header and its content, padded to whole blocks."""
    return header(name, len(content), **fields) + content + bytes(-len(content) % _BLOCK)


def pax(key: bytes, value: bytes) -> bytes:
    """Return a pax header with one key."""
    body = b" " + key + b"=" + value + b"\n"
    length = len(body) + len(str(len(body)))
    length += len(str(length)) - len(str(len(body)))
    return member(b"pax", str(length).encode() + body, kind=b"x")


def image(images: Images) -> bytes:
    """Return the bytes of a sound image."""
    return next(iter(images.values()))


def _class_members(images: Images) -> bytes:
    return b"".join(member(f"{name}/a.png".encode(), content) for name, content in images.items())


def _train_archive(images: Images, *, overlaps: bool = False) -> bytes:
    """Return ImageNet's training archive, whose first inner archive may claim to extend into the next."""
    parts: list[bytes] = []
    for name, content in images.items():
        inner = member(f"{name}_1.JPEG".encode(), content)
        if overlaps and not parts:
            inner = header(f"{name}_1.JPEG".encode(), 10_000_000) + inner[_BLOCK:]
        parts.append(member(f"{name}.tar".encode(), inner + _END))
    return b"".join(parts) + _END


def _val_archive(images: Images) -> bytes:
    members = enumerate(images.values(), start=1)
    return b"".join(member(b"ILSVRC2012_val_%08d.JPEG" % number, content) for number, content in members) + _END


def _meta_mat(images: Images) -> bytes:
    """Return the development kit's table of classes."""
    keys = ["ILSVRC2012_ID", "WNID", "words", "gloss", "num_children", "children", "wordnet_height", "num_train_images"]
    rows = np.empty((len(images), 1), [(key, object) for key in keys])
    none = np.zeros((1, 0))
    for row, name in enumerate(sorted(images)):
        rows[row, 0] = (np.uint8(row + 1), name, name, "a", np.uint8(0), none, np.uint8(0), np.uint16(1))
    file = io.BytesIO()
    scipy_io.savemat(file, {"synsets": rows}, do_compression=True)
    return file.getvalue()


def _mat_bomb(num_bytes: int) -> bytes:
    """Return a MATLAB file whose one element is ``num_bytes`` of zeros, compressed."""
    compressor, block = zlib.compressobj(9), bytes(1 << 20)
    parts = [compressor.compress(struct.pack("<II", 14, num_bytes))]
    parts += [compressor.compress(block) for _ in range(num_bytes >> 20)]
    data = b"".join([*parts, compressor.flush()])
    head = b"MATLAB 5.0 MAT-file".ljust(124) + struct.pack("<HH", 0x0100, 0x4D49)
    return head + struct.pack("<II", 15, len(data)) + data


def _bomb_kit(head: bytes, num_bytes: int) -> Callable[[Path], None]:
    """Return a function that makes the compressed kit a header and so many zeros, streamed."""

    def damage(source: Path) -> None:
        block = bytes(1 << 22)
        with gzip.open(source / KIT, "wb", compresslevel=1) as file:
            file.write(head)
            for _ in range(num_bytes >> 22):
                file.write(block)
            file.write(_END)

    return damage


def _gnu_sparse(images: Images) -> bytes:
    """Return a member that says it is sparse, in the form of GNU's tar."""
    info = tarfile.TarInfo(_B.decode())
    info.size, info.type = len(image(images)), tarfile.GNUTYPE_SPARSE
    return info.tobuf(tarfile.GNU_FORMAT) + member(b"", image(images))[_BLOCK:]


def tar_of(hostile: Callable[[Images], bytes]) -> SourceMaker:
    """Return the maker of an archive of class folders with hostile content at its end."""

    def make(folder: Path, images: Images) -> Path:
        path = folder / "photos.tar"
        path.write_bytes(_class_members(images) + hostile(images) + _END)
        return path

    return make


def _b_of(**fields: Any) -> SourceMaker:
    """Return the maker of an archive with one more image, whose header is hostile."""
    return tar_of(lambda images: member(_B, image(images), **fields))


def _header_of(name: bytes = _B, **fields: Any) -> SourceMaker:
    """Return the maker of an archive with a hostile header and nothing behind it."""
    return tar_of(lambda _: header(name, **fields))


def _hollow(name: bytes, kind: bytes, num_bytes: int) -> SourceMaker:
    """Return the maker of an archive whose first member is a hole of ``num_bytes`` on disk."""

    def make(folder: Path, images: Images) -> Path:
        path = folder / "photos.tar"
        with path.open("wb") as file:
            file.write(header(name, num_bytes, kind=kind))
            file.seek(num_bytes, os.SEEK_CUR)
            file.write(_class_members(images) + _END)
        return path

    return make


def official(
    *,
    train: Callable[[Images], bytes] = _train_archive,
    mat: Callable[[Images], bytes] = _meta_mat,
    truth: bytes = b"1\n2\n3\n4\n",
    damage: Callable[[Path], None] = lambda _: None,
) -> SourceMaker:
    """Return the maker of a folder with ImageNet's three files, parts of which are hostile."""

    def make(folder: Path, images: Images) -> Path:
        source = folder / "imagenet"
        source.mkdir()
        (source / TRAIN).write_bytes(train(images))
        (source / VAL).write_bytes(_val_archive(images))
        kit = member(_KIT_DATA + b"meta.mat", mat(images))
        kit += member(_KIT_DATA + b"ILSVRC2012_validation_ground_truth.txt", truth) + _END
        (source / KIT).write_bytes(gzip.compress(kit, 1))
        damage(source)
        return source

    return make


def _replaced(name: str, how: str) -> SourceMaker:
    return official(damage=lambda source: replace(source / name, how))


_DEEP_NAME = b"/".join([b"n00000000", *[b"d"] * 1500])
_GIB = 1 << 30
# By name: the maker, and whether the command must refuse.
ARCHIVES: dict[str, tuple[SourceMaker, bool]] = {
    "bad-checksum": (_b_of(checksum_off=1), True),
    "negative-size": (_b_of(size_field=b"\xff" * 11 + b"\0"), True),
    "minus-sign-size": (_b_of(size_field=b"-0000000100\0"), True),
    "huge-size": (_header_of(size_field=b"77777777777\0"), True),
    "huger-size": (_header_of(size_field=b"\x80" + b"\x7f" * 11), True),
    "no-number-size": (_header_of(size_field=b"what\0"), True),
    "pax-size-digits": (tar_of(lambda i: pax(b"size", b"9" * 5000) + member(_B, image(i))), True),
    "pax-size-negative": (tar_of(lambda i: pax(b"size", b"-512") + member(_B, image(i))), False),
    "pax-length-digits": (tar_of(lambda _: member(b"pax", b"9" * 5000 + b" size=1\n", kind=b"x")), True),
    "pax-length-zero": (tar_of(lambda i: member(b"pax", b"0 size=1\n", kind=b"x") + member(b"a/b", image(i))), True),
    "pax-chain": (tar_of(lambda i: pax(b"comment", b"x") * 50_000 + member(b"n00000000/z.png", image(i))), False),
    "pax-hole": (_hollow(b"pax", b"x", _GIB), True),
    "long-name-hole": (_hollow(b"././@LongLink", b"L", _GIB), True),
    "absolute": (tar_of(lambda i: member(b"/n00000000/b.png", image(i))), True),
    "leads-out": (tar_of(lambda i: member(b"n00000000/../../b.png", image(i))), True),
    "symbolic-link": (_header_of(kind=b"2", link=b"/etc/passwd"), True),
    "hard-link": (_header_of(kind=b"1", link=b"n00000001/a.png"), True),
    "device": (_header_of(kind=b"3"), True),
    "pipe-member": (_header_of(kind=b"6"), True),
    "sparse": (tar_of(_gnu_sparse), True),
    "twice": (tar_of(lambda i: member(b"n00000000/a.png", image(i))), True),
    "truncated": (tar_of(lambda i: member(_B, image(i))[:700] + b"!"), True),
    "name-escapes": (tar_of(lambda _: member(b"n00000000/" + ESCAPES + b".png", b"no image")), False),
    "class-escapes": (tar_of(lambda i: member(ESCAPES + b"/b.png", image(i))), False),
    "link-escapes": (_header_of(b"n00000000/" + ESCAPES, kind=b"2", link=ESCAPES), True),
    "name-newline": (tar_of(lambda _: member(b"n00000000/a\nb\r.png", b"no image")), False),
    "name-nul": (tar_of(lambda i: pax(b"path", b"n00000000/a\0b.png") + member(b"x", image(i))), False),
    "name-rtl": (tar_of(lambda _: member("n00000000/\u202egnp.a".encode(), b"no image")), False),
    "name-no-utf8": (tar_of(lambda _: member(b"n00000000/\xff\xfe\x9b.png", b"no image")), False),
    "name-deep": (tar_of(lambda i: pax(b"path", _DEEP_NAME) + member(b"x", image(i))), False),
    "pax-encoding": (tar_of(lambda i: pax(b"path", b"n00000000/\xff\x9b.png") + member(b"x", image(i))), False),
    "overlapping-inner": (official(train=lambda i: _train_archive(i, overlaps=True)), True),
    "inner-escapes": (official(train=lambda i: member(ESCAPES + b".tar", _END) + _train_archive(i)), False),
    "kit-pax-3-gib": (official(damage=_bomb_kit(header(b"pax", 3 * _GIB, kind=b"x"), 3 * _GIB)), True),
    "kit-member-3-gib": (official(damage=_bomb_kit(header(_KIT_DATA + b"meta.mat", 3 * _GIB), 3 * _GIB)), True),
    "kit-mat-bomb": (official(mat=lambda _: _mat_bomb(2 * _GIB)), True),
    "kit-mat-short": (official(mat=lambda i: _meta_mat(i)[:200]), True),
    "kit-truth-digits": (official(truth=b"9" * 5000 + b"\n2\n3\n4\n"), True),
    "kit-truth-short": (official(truth=b"1\n2\n"), True),
    "kit-truth-escapes": (official(truth=b"1\n\x1b[31m\x9b\n3\n4\n"), True),
    "kit-pipe": (_replaced(KIT, "pipe"), True),
    "kit-zero-device": (_replaced(KIT, "zero-device"), True),
    "train-pipe": (_replaced(TRAIN, "pipe"), False),
    "val-zero-device": (_replaced(VAL, "zero-device"), False),
    "val-folder": (_replaced(VAL, "folder"), False),
    "pax-hole-3-gib": (_hollow(b"pax", b"x", 3 * _GIB), True),
}
