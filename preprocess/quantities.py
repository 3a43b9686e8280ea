"""Numbers and lists of things in words, for messages."""

from collections.abc import Sequence


def quantity(count: int, noun: str) -> str:
    """Return a number with its noun, such as "1 image" or "1,200 images"; `noun` is singular."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}{'es' if noun.endswith(('s', 'tch', 'nch')) else 's'}"


def listed(words: Sequence[str]) -> str:
    """Return words with commas and one "and", such as "a", "a and b" or "a, b and c"; "" if there are none."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))
