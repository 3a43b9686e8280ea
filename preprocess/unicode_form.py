"""One Unicode form of a text, so that names which look alike compare equal."""

import unicodedata

# Composing takes time with the square of the length where a stranger wrote thousands of marks onto one letter, and no
# signal ends it. Names of files have at most 255 bytes.
_MOST_CHARACTERS = 1024


def composed(text: str) -> str:
    """Return a text with letters and their marks composed (NFC); one of more than 1,024 characters unchanged."""
    return text if len(text) > _MOST_CHARACTERS else unicodedata.normalize("NFC", text)
