"""HostileImage archives: false statements in tar headers, pax headers, kits and lists."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path

from scripts.torture_campaign.archive_parts import (
    END,
    class_members,
    gnu_sparse,
    header,
    kit,
    mat_bomb,
    member,
    meta_mat,
    pax,
    train_archive,
    val_archive,
    write_gzip_zeros,
)

Images = dict[str, bytes]
SourceMaker = Callable[[Path, Images], Path]
"""A function that creates a source in a folder from sound images by class, and returns the path for the command."""

ESCAPES = b"\x1b[31mred\x07\xc2\x9b2J"
TRAIN, VAL, KIT = "ILSVRC2012_img_train.tar", "ILSVRC2012_img_val.tar", "ILSVRC2012_devkit_t12.tar.gz"


def tar_of(hostile: Callable[[Images], bytes]) -> SourceMaker:
    """Return the maker of an archive of class folders with hostile content at its end."""

    def make(folder: Path, images: Images) -> Path:
        path = folder / "photos.tar"
        path.write_bytes(class_members(images) + hostile(images) + END)
        return path

    return make


def hollow_tar(head: bytes, num_bytes: int) -> SourceMaker:
    """Return the maker of an archive whose first member is a hole of ``num_bytes`` on disk."""

    def make(folder: Path, images: Images) -> Path:
        path = folder / "photos.tar"
        with path.open("wb") as file:
            file.write(head)
            file.seek(num_bytes, os.SEEK_CUR)
            file.write(class_members(images) + END)
        return path

    return make


def image(images: Images) -> bytes:
    """Return the bytes of a sound image."""
    return next(iter(images.values()))


def official(
    *,
    train: Callable[[Images], bytes] = train_archive,
    mat: Callable[[Images], bytes] = lambda images: meta_mat(sorted(images)),
    truth: Callable[[Images], bytes] = lambda images: b"1\n2\n3\n4\n"[: 2 * len(images)],
    damage: Callable[[Path], None] = lambda _: None,
) -> SourceMaker:
    """Return the maker of a folder with ImageNet's three files, parts of which are hostile."""

    def make(folder: Path, images: Images) -> Path:
        source = folder / "imagenet"
        source.mkdir()
        (source / TRAIN).write_bytes(train(images))
        (source / VAL).write_bytes(val_archive(images))
        (source / KIT).write_bytes(gzip.compress(kit(mat(images), truth(images)), 1))
        damage(source)
        return source

    return make


def overlapping(images: Images) -> bytes:
    """Return a training archive whose first inner archive claims to extend into the next."""
    parts = []
    for number, (name, content) in enumerate(images.items()):
        inner = member(f"{name}_1.JPEG".encode(), content)
        if number == 0:
            inner = header(f"{name}_1.JPEG".encode(), 10_000_000) + inner[512:]
        parts.append(member(f"{name}.tar".encode(), inner + END))
    return b"".join(parts) + END


def pax_bomb_kit(num_bytes: int) -> Callable[[Path], None]:
    """Return a function that puts a pax header of ``num_bytes`` into the compressed kit."""

    def damage(source: Path) -> None:
        write_gzip_zeros(source / KIT, header(b"pax", num_bytes, kind=b"x"), num_bytes, END)

    return damage


def member_bomb_kit(source: Path) -> None:
    """Make the kit's list of classes a member of 3 GiB."""
    name = b"ILSVRC2012_devkit_t12/data/meta.mat"
    write_gzip_zeros(source / KIT, header(name, 3 << 30), 3 << 30, END)


def replaced(name: str, how: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return a function that replaces a file by something else."""

    def damage(source: Path) -> None:
        (source / name).unlink()
        how(source / name)

    return damage


def pax_chain(images: Images) -> bytes:
    """Return 50,000 pax headers in a row ahead of an image."""
    return pax(b"comment", b"x") * 50_000 + member(b"n00000000/z.png", image(images))


DEEP_NAME = b"/".join([b"d"] * 1500)

# By name: the maker, and whether the command must refuse.
ARCHIVES: dict[str, tuple[SourceMaker, bool]] = {
    "bad-checksum": (tar_of(lambda i: member(b"n00000000/b.png", image(i), checksum_off=1)), True),
    "negative-size": (tar_of(lambda i: member(b"n00000000/b.png", image(i), size_field=b"\xff" * 11 + b"\0")), True),
    "minus-sign-size": (tar_of(lambda i: member(b"n00000000/b.png", image(i), size_field=b"-0000000100\0")), True),
    "huge-size": (tar_of(lambda _: header(b"n00000000/b.png", size_field=b"77777777777\0")), True),
    "huger-size": (tar_of(lambda _: header(b"n00000000/b.png", size_field=b"\x80" + b"\x7f" * 11)), True),
    "no-number-size": (tar_of(lambda _: header(b"n00000000/b.png", size_field=b"what\0")), True),
    "pax-size-digits": (tar_of(lambda i: pax(b"size", b"9" * 5000) + member(b"n00000000/b.png", image(i))), True),
    "pax-size-negative": (tar_of(lambda i: pax(b"size", b"-512") + member(b"n00000000/b.png", image(i))), False),
    "pax-length-digits": (tar_of(lambda _: member(b"pax", b"9" * 5000 + b" size=1\n", kind=b"x")), True),
    "pax-length-zero": (tar_of(lambda i: member(b"pax", b"0 size=1\n", kind=b"x") + member(b"a/b", image(i))), True),
    "pax-chain": (tar_of(pax_chain), False),
    "pax-hole": (hollow_tar(header(b"pax", 1 << 30, kind=b"x"), 1 << 30), True),
    "long-name-hole": (hollow_tar(header(b"././@LongLink", 1 << 30, kind=b"L"), 1 << 30), True),
    "absolute": (tar_of(lambda i: member(b"/n00000000/b.png", image(i))), True),
    "leads-out": (tar_of(lambda i: member(b"n00000000/../../b.png", image(i))), True),
    "symbolic-link": (tar_of(lambda _: header(b"n00000000/b.png", kind=b"2", link=b"/etc/passwd")), True),
    "hard-link": (tar_of(lambda _: header(b"n00000000/b.png", kind=b"1", link=b"n00000001/a.png")), True),
    "device": (tar_of(lambda _: header(b"n00000000/b.png", kind=b"3")), True),
    "pipe-member": (tar_of(lambda _: header(b"n00000000/b.png", kind=b"6")), True),
    "sparse": (tar_of(lambda i: gnu_sparse("n00000000/b.png", image(i))), True),
    "twice": (tar_of(lambda i: member(b"n00000000/a.png", image(i))), True),
    "truncated": (tar_of(lambda i: member(b"n00000000/b.png", image(i))[:700] + b"!"), True),
    "name-escapes": (tar_of(lambda _: member(b"n00000000/" + ESCAPES + b".png", b"no image")), False),
    "class-escapes": (tar_of(lambda i: member(ESCAPES + b"/b.png", image(i))), False),
    "link-escapes": (tar_of(lambda _: header(b"n00000000/" + ESCAPES, kind=b"2", link=ESCAPES)), True),
    "name-newline": (tar_of(lambda _: member(b"n00000000/a\nb\r.png", b"no image")), False),
    "name-nul": (tar_of(lambda i: pax(b"path", b"n00000000/a\0b.png") + member(b"x", image(i))), False),
    "name-rtl": (tar_of(lambda _: member("n00000000/\u202egnp.a".encode(), b"no image")), False),
    "name-no-utf8": (tar_of(lambda _: member(b"n00000000/\xff\xfe\x9b.png", b"no image")), False),
    "name-deep": (tar_of(lambda i: pax(b"path", b"n00000000/" + DEEP_NAME) + member(b"x", image(i))), False),
    "pax-encoding": (tar_of(lambda i: pax(b"path", b"n00000000/\xff\x9b.png") + member(b"x", image(i))), False),
    "overlapping-inner": (official(train=overlapping), True),
    "inner-escapes": (official(train=lambda i: member(ESCAPES + b".tar", END) + train_archive(i)), False),
    "kit-pax-3-gib": (official(damage=pax_bomb_kit(3 << 30)), True),
    "kit-member-3-gib": (official(damage=member_bomb_kit), True),
    "kit-mat-bomb": (official(mat=lambda _: mat_bomb(2 << 30)), True),
    "kit-mat-short": (official(mat=lambda i: meta_mat(sorted(i))[:200]), True),
    "kit-truth-digits": (official(truth=lambda _: b"9" * 5000 + b"\n2\n3\n4\n"), True),
    "kit-truth-short": (official(truth=lambda _: b"1\n2\n"), True),
    "kit-truth-escapes": (official(truth=lambda _: b"1\n\x1b[31m\x9b\n3\n4\n"), True),
    "kit-pipe": (official(damage=replaced(KIT, os.mkfifo)), True),
    "kit-zero-device": (official(damage=replaced(KIT, lambda path: path.symlink_to("/dev/zero"))), True),
    "train-pipe": (official(damage=replaced(TRAIN, os.mkfifo)), False),
    "val-zero-device": (official(damage=replaced(VAL, lambda path: path.symlink_to("/dev/zero"))), False),
    "val-folder": (official(damage=replaced(VAL, Path.mkdir)), False),
    "pax-hole-3-gib": (hollow_tar(header(b"pax", 3 << 30, kind=b"x"), 3 << 30), True),
}
