"""Damage of one file: changed bits and lengths, replacement by something else, and other values in its JSON."""

from __future__ import annotations

import json
import os
import random
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

type Damage = Callable[[bytearray, random.Random], None]
type Place = tuple[str | int, ...]

_STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf"), "", "x", [], {},
)  # fmt: skip


def flip_bit(data: bytearray, draw: random.Random) -> None:
    """Flip one bit, half of the time near an end, where headers, indices and checksums are."""
    data[:] = data or b"\0"
    size = len(data)
    near_end = size - 1 - draw.randrange(min(size, 560))
    at = draw.choice([draw.randrange(size), draw.randrange(size), draw.randrange(min(size, 64)), near_end])
    data[at] ^= 1 << draw.randrange(8)


def _flip_bits(data: bytearray, draw: random.Random) -> None:
    for _ in range(draw.choice([3, 20])):
        flip_bit(data, draw)


def _truncate(data: bytearray, draw: random.Random) -> None:
    size = len(data)
    del data[draw.choice([0, max(0, size - 1), size // 2, draw.randrange(max(1, size))]) :]


def _extend(data: bytearray, draw: random.Random) -> None:
    count = draw.choice([1, 4, 4096, 100_000])
    data += draw.choice([b"\0" * count, draw.randbytes(count), b"\n" * count, bytes(data)])


def _overwrite(data: bytearray, draw: random.Random) -> None:
    """Overwrite a range with zeros, like a lost page of a disk, or with noise."""
    start = draw.randrange(max(1, len(data)))
    count = min(len(data) - start, draw.choice([1, 4, 64, 4096]))
    data[start : start + count] = draw.choice([bytes(count), draw.randbytes(count)])


def _shift(data: bytearray, draw: random.Random) -> None:
    """Insert or remove a byte, so that everything after it moves."""
    at = draw.randrange(max(1, len(data)))
    data[at : at + draw.randrange(2)] = b"" if draw.random() < 0.5 else draw.randbytes(2)


def _set_number(data: bytearray, draw: random.Random) -> None:
    """Set a number, half of the time in the head, to one at a limit of its type."""
    form = draw.choice(["B", "<H", ">H", "<I", ">I"])
    value = draw.choice([0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 65500]) % (1 << 8 * struct.calcsize(form))
    at = draw.randrange(min(max(1, len(data)), draw.choice([64, len(data) + 1])))
    data[at : at + struct.calcsize(form)] = struct.pack(form, value)


def _splice(data: bytearray, draw: random.Random) -> None:
    """Let a part of the beginning follow the first half."""
    data[len(data) // 2 :] = data[: draw.randrange(max(1, len(data)))]


_OF_BYTES: tuple[Damage, ...] = (_flip_bits, _truncate, _extend, _overwrite, _shift, _set_number, _splice)


def change_bytes(data: bytearray, draw: random.Random) -> str:
    """Change the bytes of a file, as often in a single bit as in other ways; say how."""
    change = draw.choice([flip_bit, draw.choice(_OF_BYTES)])
    change(data, draw)
    return change.__name__.strip("_").replace("_", " ")


def _put_socket(path: Path) -> None:
    # The address of a socket has at most 108 bytes; a path through the folder's descriptor is short.
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


PUT: dict[str, Callable[[Path], object]] = {
    "removed": lambda _: None,
    "pipe": os.mkfifo,
    "socket": _put_socket,
    "zero-device": lambda path: path.symlink_to("/dev/zero"),
    "null-device": lambda path: path.symlink_to("/dev/null"),
    "folder": Path.mkdir,
    "dangling": lambda path: path.symlink_to("gone"),
    "loop": lambda path: path.symlink_to(path.name),
}
"""What a file may be replaced by."""


def replace(path: Path, how: str) -> None:
    """Replace a file by one of `PUT`."""
    path.unlink()
    PUT[how](path)


def _extend_with_hole(path: Path, _draw: random.Random) -> None:
    with suppress(OSError):
        return os.truncate(path, 1 << 40)
    return os.truncate(path, 1 << 32)


def _add_control_characters(path: Path, draw: random.Random) -> None:
    """Create a file beside it whose name has control characters."""
    name = draw.choice(["a\x1b[31mred\x07", "b\x9b2J", "c\nd", "e\x85f", "g\u202eh"])
    (path.parent / name).write_bytes(b"?")


def damage_file(path: Path, draw: random.Random) -> str:
    """Damage a file: most often its bytes, less often by a replacement or a neighbour; say how."""
    part = draw.random()
    if part < 0.75:
        data = bytearray(path.read_bytes())
        how = change_bytes(data, draw)
        path.write_bytes(data)
        return how
    if part < 0.95:
        replace(path, how := draw.choice(list(PUT)))
        return f"replaced: {how}"
    change = draw.choice([_extend_with_hole, _add_control_characters])
    change(path, draw)
    return change.__name__.strip("_").replace("_", " ")


def damage(path: Path, draw: random.Random) -> str:
    """Damage a file, one of JSON often so that it is still JSON; say how."""
    if path.suffix != ".json" or draw.random() < 0.4:
        return damage_file(path, draw)
    name = draw.choice(["changed", "changed", *JSON_CHANGES])
    text = path.read_text()
    path.write_bytes(JSON_CHANGES[name](text, draw))
    return f"JSON {name}"


def leaves(document: Any, at: Place = ()) -> Iterator[Place]:
    """Yield the path of each value of a document that contains no others."""
    if not isinstance(document, dict | list):
        yield at
        return
    for key, value in document.items() if isinstance(document, dict) else enumerate(document):
        yield from leaves(value, (*at, key))


def _change(text: str, draw: random.Random, change: Callable[[Any], Any], *types: type) -> bytes:
    """Return the text with the change of one value, of these types if there is one, and the same layout."""
    document = json.loads(text)
    found = {at: _holder(document, at)[at[-1]] for at in leaves(document) if at}
    at = draw.choice([at for at, value in found.items() if isinstance(value, types or object)] or list(found))
    holder, new = _holder(document, at), change(found[at])
    if new is ...:
        del holder[at[-1]]
    else:
        holder[at[-1]] = new
    is_compact = "\n" not in text.strip()
    separators = (",", ":") if is_compact and ": " not in text else None
    indent = None if is_compact else (1 if "\n  " not in text else 2)
    changed = json.dumps(document, indent=indent, separators=separators)
    return (changed + "\n" * text.endswith("\n")).encode()


def _holder(document: Any, at: Place) -> Any:
    for step in at[:-1]:
        document = document[step]
    return document


def _other(old: Any, draw: random.Random) -> Any:
    """Return another value, mostly one of the same type."""
    found: list[Any] = ["changed", [1], {"a": 1}]
    if draw.random() < 0.3:
        found = [value for value in _STRANGE if value != old or type(value) is not type(old)]
    elif isinstance(old, bool):
        found = [not old]
    elif isinstance(old, int):
        found = [old + 1, old - 1, old * 2 + 1, -old - 1, old * 1000 + 1]
    elif isinstance(old, float):
        found = [old + 0.125, -old - 1, old * 1.5 + 0.25, int(old) + 2]
    elif isinstance(old, str) and old:
        at = draw.randrange(len(old))
        found = [old[:at] + chr(ord(old[at]) ^ 1) + old[at + 1 :]]
    return draw.choice(found)


def _append(text: str, key: str, value: str) -> bytes:
    """Return the text of an object with another key at its end."""
    return f"{text[: text.rindex('}')].rstrip()}, {json.dumps(key)}: {value}}}\n".encode()


def _double_key(text: str, draw: random.Random) -> bytes:
    document = json.loads(text)
    key = draw.choice(list(document))
    return _append(text, key, json.dumps(_other(document[key], draw)))


def _nest(text: str, draw: random.Random) -> bytes:
    deep = "[" * 100_000 + "]" * 100_000
    return deep.encode() if draw.random() < 0.5 else _append(text, "more", deep)


def _huge_number(text: str, draw: random.Random) -> bytes:
    digits = draw.choice(["9" * 5000, "1e" + "9" * 300, "-" + "8" * 400])
    return _change(text, draw, lambda _: "@", int, float).replace(b'"@"', digits.encode(), 1)


def _encode(text: str, draw: random.Random) -> bytes:
    content = text.encode()
    return draw.choice([
        text.encode("utf-16"), b"\xef\xbb\xbf" + content, content.replace(b'"', b'"\xff', 1), content + b"\x85"
    ])  # fmt: skip


JSON_CHANGES: dict[str, Callable[[str, random.Random], bytes]] = {
    "changed": lambda text, draw: _change(text, draw, lambda old: _other(old, draw)),
    "deleted": lambda text, draw: _change(text, draw, lambda _: ...),
    "key twice": _double_key,
    "nested 100,000 deep": _nest,
    "huge number": _huge_number,
    "string of 10 MB": lambda text, draw: _change(text, draw, lambda _: draw.choice("a\x1b\u202e") * 10_000_000),
    "escapes": lambda text, draw: _change(text, draw, lambda _: "\x1b[31mred\x07\x9b2J\nnew line", str),
    "other encoding": _encode,
    "other document": lambda _, draw: draw.choice(
        [b"null", b"[]", b"{}", b"0", b'"text"', b"true", b"NaN", b"", b" ", b"[{}]"]
    ),
}
