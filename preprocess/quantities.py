"""Numbers and lists of things in words, for messages, and numbers that are given as text."""

from collections.abc import Sequence


def quantity(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 image" or "1,200 images"; `noun` is singular."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'tch', 'nch')) else 's'}"


def parse_float(text: str) -> float:
    """Return the number that a text is; raise ValueError for other texts, and for digits of other scripts.

    Python also accepts digits such as ١٢ and underscores, which other programs read otherwise or not at all.
    """
    if not text.isascii() or "_" in text:
        raise ValueError(f"could not convert string to float: {text!r}")
    return float(text)


def listed(words: Sequence[str]) -> str:
    """Return words with commas and one "and", such as "a", "a and b" or "a, b and c"; "" if there are none."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
