"""Suggestions for unknown words ("did you mean …?").

Does not import click, so that `engine.settings`, which imports this module, does not either.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(word: object, known: Iterable[str]) -> str | None:
    """Return the known word that is most similar to ``word``, ignoring case; None if none is similar."""
    by_folded = {each.lower(): each for each in known}
    near = difflib.get_close_matches(str(word).lower(), by_folded, n=1)
    return by_folded[near[0]] if near else None


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return ``: did you mean …?`` to append to a message about an unknown word, or "" if no known word is similar."""
    near = nearest(word, known)
    return "" if near is None else f": did you mean {near}?"
