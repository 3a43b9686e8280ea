"""Makes names and texts of unknown origin safe to show: nothing in them controls a terminal or hides other text.

File names, class names, archive members and what a pack or run folder says of itself come from strangers. They are made
safe twice: `printable` where a name enters a message, and `preprocess.commands.guarded_output` where a command writes
    what it
has to say, so that a message which forgets the first is still harmless.
"""

import os
import re

MAX_NAME_CHARACTERS = 1_000
"""How much of one name a message shows."""

# C0 but tab and line feed, DEL, C1, what turns or breaks lines unseen (bidirectional marks, U+2028, U+2029), and lone
# surrogates, which no stream can encode.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def printable(name: str | os.PathLike[str]) -> str:
    """Return a name or path as it is, or quoted with escapes where a terminal could not show it or would obey it.

    Of a name longer than `MAX_NAME_CHARACTERS` the middle is left out.
    """
    name = os.fspath(name)
    if len(name) > MAX_NAME_CHARACTERS:
        half = MAX_NAME_CHARACTERS // 2
        name = f"{name[:half]}…{name[-half:]}"
    return name if name.isprintable() else ascii(name)


def printable_line(text: str) -> str:
    """Return a text as one line of the same length, with a question mark for each character that is not printable."""
    return "".join(character if character.isprintable() else "?" for character in text)


def printable_text(text: str) -> str:
    """Return a text of several lines, control characters but tab and line feed as their escapes."""
    return _UNSAFE.sub(lambda found: ascii(found[0])[1:-1], text)
