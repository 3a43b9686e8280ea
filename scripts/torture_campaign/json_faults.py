"""Faults of a JSON file that leave it valid, or almost valid, JSON."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Place = tuple[str | int, ...]
_STRANGE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**63,
    10**30,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    {},
)


def leaves(document: Any, at: Place = ()) -> Iterator[tuple[Place, Any]]:
    """Yield each value of a document that contains no others, with its path."""
    if isinstance(document, dict):
        for key, value in document.items():
            yield from leaves(value, (*at, key))
    elif isinstance(document, list):
        for index, value in enumerate(document):
            yield from leaves(value, (*at, index))
    else:
        yield at, document


def set_value(document: Any, at: Place, value: Any) -> Any:
    """Return the document with the value at a path replaced."""
    if not at:
        return value
    holder = document
    for step in at[:-1]:
        holder = holder[step]
    holder[at[-1]] = value
    return document


def change_value(path: Path, draw: random.Random) -> str:
    """Replace one value by another, of the same type or not."""
    text = path.read_text()
    document = json.loads(text)
    at, old = draw.choice(list(leaves(document)))
    new = _other(old, draw)
    _rewrite(path, text, set_value(document, at, new))
    return f"{'.'.join(map(str, at))} changed from {str(old)[:40]!r} to {str(new)[:40]!r}"


def delete_value(path: Path, draw: random.Random) -> str:
    """Delete one value with its key."""
    text = path.read_text()
    document = json.loads(text)
    at, _ = draw.choice([leaf for leaf in leaves(document) if leaf[0]])
    holder = document
    for step in at[:-1]:
        holder = holder[step]
    del holder[at[-1]]
    _rewrite(path, text, document)
    return f"{'.'.join(map(str, at))} deleted"


def duplicate_key(path: Path, draw: random.Random) -> str:
    """Add a duplicate of a key of the outermost object, with another value."""
    text = path.read_text()
    document = json.loads(text)
    key = draw.choice(list(document))
    other = json.dumps(_other(document[key], draw))
    end = text.rindex("}")
    path.write_text(f"{text[:end].rstrip()}, {json.dumps(key)}: {other}}}\n")
    return f"{key} named twice, the second time {other[:40]}"


def nest_deeply(path: Path, draw: random.Random) -> str:
    """Add a value that is an array nested 100,000 deep, or replace the whole file by one."""
    deep = "[" * 100_000 + "]" * 100_000
    if draw.random() < 0.5:
        path.write_text(deep)
        return "an array 100,000 deep"
    end = (text := path.read_text()).rindex("}")
    path.write_text(f'{text[:end].rstrip()}, "more": {deep}}}\n')
    return "a key with an array 100,000 deep added"


def huge_number(path: Path, draw: random.Random) -> str:
    """Replace a number by one with very many digits."""
    text = path.read_text()
    document = json.loads(text)
    numbers = [at for at, value in leaves(document) if type(value) in (int, float)]
    at = draw.choice(numbers or [place for place, _ in leaves(document)])
    _rewrite(path, text, set_value(document, at, "@"))
    path.write_text(path.read_text().replace('"@"', draw.choice(["9" * 5000, "1e" + "9" * 300, "-" + "8" * 400]), 1))
    return f"{'.'.join(map(str, at))} made a number of very many digits"


def huge_string(path: Path, draw: random.Random) -> str:
    """Replace a value by a string of 10 MB."""
    text = path.read_text()
    document = json.loads(text)
    at, _ = draw.choice(list(leaves(document)))
    _rewrite(path, text, set_value(document, at, draw.choice("a\x1b\u202e") * 10_000_000))
    return f"{'.'.join(map(str, at))} made a string of 10 MB"


def escape_string(path: Path, draw: random.Random) -> str:
    """Replace a string by one with terminal escape sequences."""
    text = path.read_text()
    document = json.loads(text)
    strings = [at for at, value in leaves(document) if isinstance(value, str)]
    at = draw.choice(strings or [place for place, _ in leaves(document)])
    _rewrite(path, text, set_value(document, at, "\x1b[31mred\x07\x9b2J\nnew line"))
    return f"{'.'.join(map(str, at))} made a string of escapes"


def other_encoding(path: Path, draw: random.Random) -> str:
    """Write the same text in another encoding, or with an invalid byte."""
    text = path.read_text()
    how, content = draw.choice(
        [
            ("UTF-16", text.encode("utf-16")),
            ("a byte order mark", b"\xef\xbb\xbf" + text.encode()),
            ("a byte of no UTF-8", text.encode().replace(b'"', b'"\xff', 1)),
            ("Latin-1 NEL at the end", text.encode() + b"\x85"),
        ]
    )
    path.write_bytes(content)
    return f"with {how}"


def no_object(path: Path, draw: random.Random) -> str:
    """Replace the whole document, mostly by something other than an object."""
    text = draw.choice(["null", "[]", "{}", "0", '"text"', "true", "NaN", "", " ", "[{}]"])
    path.write_text(text)
    return f"replaced by {text!r}"


JSON_FAULTS: tuple[Callable[[Path, random.Random], str], ...] = (
    change_value,
    change_value,
    change_value,
    delete_value,
    duplicate_key,
    nest_deeply,
    huge_number,
    huge_string,
    escape_string,
    other_encoding,
    no_object,
)


def _other(old: Any, draw: random.Random) -> Any:
    if draw.random() < 0.3:
        strange = [value for value in _STRANGE if value != old or type(value) is not type(old)]
        return draw.choice(strange)
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return draw.choice([old + 1, old - 1, old * 2 + 1, -old - 1, old * 1000 + 1])
    if isinstance(old, float):
        return draw.choice([old + 0.125, -old - 1, old * 1.5 + 0.25, int(old) + 2])
    if isinstance(old, str) and old:
        place = draw.randrange(len(old))
        return old[:place] + chr(ord(old[place]) ^ 1) + old[place + 1 :]
    return draw.choice([1, "changed", [1], {"a": 1}])


def _rewrite(path: Path, text: str, document: Any) -> None:
    """Write a document with the same formatting as the text from which it was read."""
    is_compact = "\n" not in text.strip()
    separators = (",", ":") if is_compact and ": " not in text else None
    indent = None if is_compact else (1 if "\n  " not in text else 2)
    path.write_text(json.dumps(document, indent=indent, separators=separators) + ("\n" if text.endswith("\n") else ""))
