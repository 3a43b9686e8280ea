"""Escapes untrusted names and text so that they cannot control a terminal or hide other output.

File names, class names, archive members and the contents of pack and run folders are untrusted. They are escaped twice:
by `printable` when a name is inserted into a message, and by `loopfeed.preprocess.commands.guarded_output` when a
command writes its output. A message that omits the first step is therefore still harmless.
"""

import os
import re
import unicodedata
from collections.abc import Collection
from itertools import islice

# Composing takes time with the square of the length where a stranger wrote thousands of marks onto one letter, and no
# signal ends it. Names of files have at most 255 bytes.
_MOST_CHARACTERS = 1024

_FORMULAS, _BEFORE_FORMULAS = "=+-@＝＋－＠", "\t\r\n"
_NUMBER = re.compile(r"[+-]?[0-9]+(\.[0-9]+)?")

MAX_NAME_CHARACTERS = 1_000
"""The maximum number of characters of a name that are shown in a message."""

# C0 except tab and line feed, DEL, C1, invisible characters that reverse or break lines (bidirectional marks, U+2028,
# U+2029), and lone surrogates, which no stream can encode.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(name: str | os.PathLike[str]) -> str:
    """Return a name or path unchanged if it is printable, otherwise quoted and escaped.

    The middle of a name longer than `MAX_NAME_CHARACTERS` is left out.
    """
    name = os.fspath(name)
    if len(name) > MAX_NAME_CHARACTERS:
        half = MAX_NAME_CHARACTERS // 2
        name = f"{name[:half]}…{name[-half:]}"
    return name if name.isprintable() else ascii(name)


def first_names(names: Collection[str], most: int = 5) -> str:
    """Return the first of some names for a message, and how many more there are: "a, b and 3 more"."""
    shown = ", ".join(printable(each) for each in islice(names, most))
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def is_unicode(text: str) -> bool:
    """Return whether no half of a surrogate pair is in a text, which no file can contain as UTF-8."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def printable_name(text: str) -> str:
    """Return text with all its control characters escaped, tabs and line feeds too."""
    return printable_text(text).replace("\n", "\\n").replace("\t", "\\t")


def spreadsheet_cell(text: str) -> str:
    """Return text for a cell of a CSV file, after an apostrophe if a spreadsheet would take it for a formula.

    Formulas begin with one of `= + - @`, and run programs or send cells away (OWASP, "CSV injection"). Numbers stay.
    """
    begin = text.lstrip()[:1]
    is_formula = begin in _FORMULAS or text[:1] in _BEFORE_FORMULAS
    return f"'{text}" if begin and is_formula and not _NUMBER.fullmatch(text) else text


def printable_line(text: str) -> str:
    """Return text as a single line of the same length, with each unprintable character replaced by a question mark."""
    return "".join(character if character.isprintable() else "?" for character in text)


def printable_text(text: str) -> str:
    """Return text with its control characters escaped, except tabs and line feeds."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)


def composed(text: str) -> str:
    """Return a text with letters and their marks composed (NFC); one of more than 1,024 characters unchanged."""
    return text if len(text) > _MOST_CHARACTERS else unicodedata.normalize("NFC", text)
