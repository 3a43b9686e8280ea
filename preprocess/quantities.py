"""Numbers and lists of things in words, for messages, and numbers that are given as text."""

import math
import re
from collections.abc import Sequence

_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]*,[0-9]+([eE][+-]?[0-9]+)?")


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


def number_remedy(text: str, otherwise: str) -> str:
    """Return what to do about a text that is not a number: to write a decimal point, if it has a decimal comma."""
    text = text.strip()
    return f"write {text.replace(',', '.')}" if _DECIMAL_COMMA.fullmatch(text) else otherwise


def listed(words: Sequence[str]) -> str:
    """Return words with commas and one "and", such as "a", "a and b" or "a, b and c"; "" if there are none."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def duration_text(seconds: float) -> str:
    """Format a duration in at most two units: '45 s', '3 min 20 s', '2 h 05 min', '4 d 03 h'; '0 s' if negative."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    if whole < 86400:
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
    return f"{whole // 86400} d {whole % 86400 // 3600:02d} h"


def round_numbers(low: float, high: float, most: int) -> list[float]:
    """Return up to `most` + 1 multiples of 1, 2 or 5 · 10^k from `low` to `high`, or both bounds if none exist."""
    span = high - low
    if not 0 < span < math.inf:
        return [low] if low == high else [low, high]
    exponent = math.floor(math.log10(span / most)) if span / most > 0 else -300
    for factor, power in ((1, 0), (2, 0), (5, 0), (1, 1), (2, 1)):
        between = float(f"{factor}e{exponent + power}")
        if between > 0 and span / between <= most * (1 + 1e-9):
            # Multiples are counted from the first, because k · between for a huge k is not exact.
            first = math.ceil(low / between)
            values = [(first + k) * between for k in range(math.floor(span / between * (1 + 1e-9)) + 1)]
            values = [float(f"{value:.12g}") for value in values]
            values = [value for value in values if low <= value <= high]
            return values or [low, high]
    return [low, high]
