"""Suggestions for unknown words ("did you mean …?").

Does not import click, so that `loopfeed.engine.settings`, which imports this module, does not either.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

from loopfeed.preprocess.printable import composed

_FEW = 3
_NUMBERS = re.compile("[0-9]+")

WEIGHTS_BY_NAME = (
    "Weights are taken by name from the Hugging Face hub, with the extra hub: run-train --init-from "
    "hf-hub:timm/resnet18.a1_in1k --model resnet18 (in Python init_from=…), or from a file or a run in the same way."
)
"""The answer to whoever asks for pretrained weights as other programs have them."""
_ABOUT_WEIGHTS = re.compile(
    "(use_)?pre_?train(ed)?(_weights|_model|_path)?|(init|load|initial|pretrain)_?(weights|checkpoint)|checkpoint(_path)?"
    "|finetune(_from)?|imagenet(1k|_1k)?(_v[12])?|default|from_pretrained",
    re.IGNORECASE,
)


def is_about_weights(word: str) -> bool:
    """Return whether an unknown option, setting or file, such as --pretrained, asks for pretrained weights.

    Example:
        >>> is_about_weights("--pretrained"), is_about_weights("IMAGENET1K_V2"), is_about_weights("--precision")
        (True, True, False)
    """
    return _ABOUT_WEIGHTS.fullmatch(word.lstrip("-").replace("-", "_")) is not None


def nearest(word: object, known: Iterable[str], *, similarity: float = 0.6) -> str | None:
    """Return the known word that is most similar to ``word``, ignoring case; None if none has the similarity."""
    by_folded = {_folded(each): each for each in known}
    near = difflib.get_close_matches(_folded(str(word)), by_folded, n=1, cutoff=similarity)
    return by_folded[near[0]] if near else None


def describe_nearest(word: object, known: Iterable[str], where: str) -> str:
    """Return ``: did you mean …?``, or the few most similar words and where all are listed, if none is similar.

    Args:
        word: the unknown word.
        known: many known words, too many for a message.
        where: what lists them all, such as "run-train --help".
    """
    names = list(known)
    few = difflib.get_close_matches(str(word).lower(), names, n=_FEW, cutoff=0.0)
    return did_you_mean(word, names) or f": {where} lists all {len(names)}, of which the nearest are {', '.join(few)}"


def did_you_mean(word: object, known: Iterable[str]) -> str:
    """Return ``: did you mean …?`` to append to a message about an unknown word, or "" if no known word is similar."""
    near = nearest(word, known)
    if near is not None and (forms := describe_forms(str(word), near)):
        return f": it is {near} in another Unicode form ({forms})"
    return "" if near is None else f": did you mean {near}?"


def did_you_mean_name(name: str, known: Iterable[str]) -> str:
    """Return as `did_you_mean` for the name of an image: numbers in it tell images apart, so they must be the same."""
    near = nearest(name, (each for each in known if _NUMBERS.findall(each) == _NUMBERS.findall(name)), similarity=0.8)
    return "" if near is None else did_you_mean(name, [near])


def describe_forms(word: str, other: str) -> str:
    """Return the Unicode forms of two texts that look alike but differ, such as "NFC, not NFD", else "".

    "ü" may be one character (NFC, as keyboards write it) or two (NFD, as in archives and names from macOS).
    """
    if word == other or not is_same_text(word, other):
        return ""
    return f"{_form(other)}, not {_form(word)}"


def is_same_text(word: str, other: str) -> bool:
    """Return whether two texts are the same but for their Unicode form."""
    return composed(word) == composed(other)


def _form(text: str) -> str:
    return next((form for form in ("NFC", "NFD") if unicodedata.is_normalized(form, text)), "mixed")


def _folded(word: str) -> str:
    return composed(word).lower()
