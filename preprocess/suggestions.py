"""*Did you mean* suggestions of the nearest known word. Imports no click, which `engine.settings` does without."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word that is nearest to a word, ignoring case; None if none is near."""
    by_folded = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(word).lower(), by_folded, n=1)
    return by_folded[near[0]] if near else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return the end of a message about an unknown word: ``: did you mean …?``, or nothing if no known word is near."""
    near = nearest(word, known)
    return "" if near is None else f": did you mean {near}?"
