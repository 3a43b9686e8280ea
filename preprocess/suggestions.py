"""Suggestions for unknown words ("did you mean …?").

Does not import click, so that `loopfeed.engine.settings`, which imports this module, does not either.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Iterable

from loopfeed.preprocess.printable import composed

# How many words may be tried: the first in difflib's order need not be near.
_MOST_TRIED = 20
# One letter of so many may differ in a misspelling; in a short word, one.
_LETTERS_FOR_A_SLIP = 4
_SEPARATORS = re.compile("[-_ ]+")
_NUMBERS = re.compile("[0-9]+")

_OTHER_NAMES = {
    "bfloat16": "bf16 b16 bf16mixed bf16true half fp16 float16 f16 16 16mixed mixed amp",
    "float32": "fp32 f32 32 32true single float full",
    "cross-entropy": "ce softmax nll categoricalcrossentropy sparsecategoricalcrossentropy crossentropylossflat",
    "binary-cross-entropy": "bce bceloss bcewithlogits bcewithlogitsloss sigmoid binarycrossentropy",
    "mean-squared-error": "mse mseloss l2 regression",
    "sgd": "momentum",
    "constant": "fixed none",
    "step": "multistep multisteplr",
    "cosine": "cosineannealing cosineannealinglr cosinedecay cosinelrscheduler",
    "cosine-restarts": "sgdr warmrestarts cosineannealingwarmrestarts cosinedecayrestarts",
    "one-cycle": "1cycle fitonecycle",
    "polynomial": "poly polynomiallr",
    "exponential": "exp exponentiallr exponentialdecay",
    "resized": "rrc randomresizedcrop",
    "random": "randomcrop",
    "centre": "centercrop",
    "zeros": "constant zero",
    "size": "imagesize imgsize resolution maxresolution",
    "holdout": "valsplit valpct validpct valfraction validationsplit testsize",
    "workers": "numworkers nproc numproc jobs",
}
"""What other programs call our choices and the options of packing, in lower case and without separators."""

WEIGHTS_BY_NAME = (
    "Weights are taken by name from the Hugging Face hub, with the extra hub: `run-train --init-from "
    "hf-hub:timm/resnet18.a1_in1k --model resnet18` (in Python init_from=…), or from a file or a run in the same way."
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
    """Return the known word that is most similar to ``word``, ignoring case; None if none is near.

    Near are misspellings, in which one letter of four may differ, and words that contain all of the other; before them,
    what other programs call it.
    """
    known = list(known)
    plain = _SEPARATORS.sub("", _folded(str(word)))
    for ours, others in _OTHER_NAMES.items():
        if plain in others.split() and ours in known and str(word) not in known:
            return ours
    near = _near(word, known, similarity)
    return near[0] if near else None


def describe_nearest(word: object, known: Iterable[str], where: str) -> str:
    """Return ``: did you mean …?``, or where all words are listed, if none is near.

    Args:
        word: the unknown word.
        known: many known words, too many for a message.
        where: what lists them all, such as "run-train --help".
    """
    names = list(known)
    return did_you_mean(word, names) or f": none of the {len(names)} is near to it; {where} lists them"


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


def _near(word: object, known: Iterable[str], similarity: float) -> list[str]:
    """Return the known words that are near to a word, the most similar first."""
    by_folded = {_folded(each): each for each in known}
    given = _folded(str(word))
    found = difflib.get_close_matches(given, by_folded, n=_MOST_TRIED, cutoff=similarity)
    return [by_folded[each] for each in found if _is_near(given, each)]


def _is_near(one: str, other: str) -> bool:
    parts = [set(filter(None, _SEPARATORS.split(each))) for each in (one, other)]
    if parts[0] <= parts[1] or parts[1] <= parts[0]:
        return True
    plain = [_SEPARATORS.sub("", each) for each in (one, other)]
    short, long = sorted(plain, key=len)
    if len(short) >= _LETTERS_FOR_A_SLIP and (long.startswith(short) or long.endswith(short)):
        return True
    return _slips(*plain) <= max(1, (max(map(len, plain)) + 2) // _LETTERS_FOR_A_SLIP)


def _slips(one: str, other: str) -> int:
    """Return the number of letters to insert, remove, replace or swap with the next (Damerau, restricted)."""
    before, last = [0] * (len(other) + 1), list(range(len(other) + 1))
    for i, letter in enumerate(one, start=1):
        row = [i]
        for j, wanted in enumerate(other, start=1):
            row.append(min(last[j] + 1, row[-1] + 1, last[j - 1] + (letter != wanted)))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                row[-1] = min(row[-1], before[j - 2] + 1)
        before, last = last, row
    return last[-1]


def _folded(word: str) -> str:
    return composed(word).lower()
