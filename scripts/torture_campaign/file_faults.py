"""Faults of one file: changed bits, changed lengths, and replacement by something else."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

FileFault = Callable[[Path, random.Random], str]


def flip_bit(path: Path, draw: random.Random) -> str:
    """Flip one bit, half of the time near an end of the file, where headers, indices and checksums are."""
    content = bytearray(path.read_bytes())
    if not content:
        path.write_bytes(b"\0")
        return "a zero byte in an empty file"
    size = len(content)
    near = draw.choice(["anywhere", "anywhere", "its head", "its end"])
    place = {
        "anywhere": lambda: draw.randrange(size),
        "its head": lambda: draw.randrange(min(size, 64)),
        "its end": lambda: size - 1 - draw.randrange(min(size, 560)),
    }[near]()
    bit = draw.randrange(8)
    content[place] ^= 1 << bit
    path.write_bytes(content)
    return f"bit {bit} of byte {place} of {size} flipped"


def truncate(path: Path, draw: random.Random) -> str:
    """Cut the file at any byte, or empty it."""
    size = path.stat().st_size
    kept = draw.choice([0, size - 1, size // 2, draw.randrange(max(1, size))])
    kept = max(0, kept)
    os.truncate(path, kept)
    return f"truncated from {size} to {kept} bytes"


def extend(path: Path, draw: random.Random) -> str:
    """Append bytes."""
    count = draw.choice([1, 4, 4096, 100_000])
    with path.open("ab") as file:
        file.write(draw.choice([b"\0" * count, draw.randbytes(count), b"\n" * count]))
    return f"extended by {count} bytes"


def zero_range(path: Path, draw: random.Random) -> str:
    """Overwrite a range with zeros, like a lost page of a disk."""
    size = path.stat().st_size
    start = draw.randrange(max(1, size))
    count = min(size - start, draw.choice([1, 64, 4096]))
    with path.open("r+b") as file:
        file.seek(start)
        file.write(b"\0" * count)
    return f"bytes {start} to {start + count} zeroed"


def garble_range(path: Path, draw: random.Random) -> str:
    """Overwrite a range with noise."""
    size = path.stat().st_size
    start = draw.randrange(max(1, size))
    count = min(size - start, draw.choice([4, 64, 4096]))
    with path.open("r+b") as file:
        file.seek(start)
        file.write(draw.randbytes(count))
    return f"bytes {start} to {start + count} overwritten with noise"


def shift_bytes(path: Path, draw: random.Random) -> str:
    """Insert or remove a byte, so that everything after it moves."""
    content = path.read_bytes()
    place = draw.randrange(len(content) + 1)
    if content and draw.random() < 0.5:
        path.write_bytes(content[:place] + content[place + 1 :] if place < len(content) else content[:-1])
        return f"byte {place} removed"
    path.write_bytes(content[:place] + draw.randbytes(1) + content[place:])
    return f"a byte inserted at {place}"


def remove(path: Path, _draw: random.Random) -> str:
    """Remove the file."""
    path.unlink()
    return "removed"


def put_socket(path: Path) -> None:
    """Create a socket at an unused path."""
    # The address of a socket has at most 108 bytes; a path through the folder's descriptor is short.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def replaced(what: str, put: Callable[[Path], None]) -> FileFault:
    """Return the fault that replaces the file by ``what``, which ``put`` creates."""

    def replace(path: Path, _draw: random.Random) -> str:
        path.unlink()
        put(path)
        return f"replaced by {what}"

    return replace


def extend_with_hole(path: Path, _draw: random.Random) -> str:
    """Extend the file with a hole to 1 TiB, or to 4 GiB if that fails."""
    with suppress(OSError):
        os.truncate(path, 1 << 40)
        return "extended to 1 TiB by a hole"
    os.truncate(path, 1 << 32)
    return "extended to 4 GiB by a hole"


def add_file_with_control_characters(path: Path, draw: random.Random) -> str:
    """Create a file beside it whose name has control characters."""
    name = draw.choice(["a\x1b[31mred\x07", "b\x9b2J", "c\nd", "e\x85f", "g\u202eh"])
    (path.parent / name).write_bytes(b"?")
    return f"the file {name!r} added beside it"


BYTE_FAULTS: tuple[FileFault, ...] = (flip_bit, truncate, extend, zero_range, garble_range, shift_bytes)
PLACE_FAULTS: dict[str, FileFault] = {
    "removed": remove,
    "pipe": replaced("a pipe", os.mkfifo),
    "socket": replaced("a socket", put_socket),
    "zero-device": replaced("a link to /dev/zero", lambda path: path.symlink_to("/dev/zero")),
    "null-device": replaced("a link to /dev/null", lambda path: path.symlink_to("/dev/null")),
    "folder": replaced("a folder", Path.mkdir),
    "dangling": replaced("a dangling link", lambda path: path.symlink_to("gone")),
    "loop": replaced("a link to itself", lambda path: path.symlink_to(path.name)),
}


def draw_file_fault(draw: random.Random) -> FileFault:
    """Draw a fault of a file: often a single bit, less often other damage, least often a replacement."""
    chance = draw.random()
    if chance < 0.4:
        return flip_bit
    if chance < 0.75:
        return draw.choice(BYTE_FAULTS)
    if chance < 0.95:
        return draw.choice(list(PLACE_FAULTS.values()))
    return draw.choice([extend_with_hole, add_file_with_control_characters])
