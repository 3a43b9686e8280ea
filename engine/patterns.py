"""Patterns that select parameters by their dotted paths, as written in the settings `freeze` and `groups`.

Owns the notation of these settings. Must not import jax, so that the commands start fast.
"""

import math
import re
from typing import NamedTuple

from loopfeed.engine.settings import LARGEST_FLOAT32, SettingError
from loopfeed.preprocess.quantities import parse_float

_FACTORS = ("learning_rate", "weight_decay")
_OPENING, _CLOSING = "([{", ")]}"


class Group(NamedTuple):
    """The parameters that a pattern selects, and the factors on their learning rate and weight decay.

    Attributes:
        pattern: a regular expression that matches whole dotted paths.
        learning_rate: factor on the learning rate, at least 0.
        weight_decay: factor on the weight decay, at least 0.
    """

    pattern: str
    learning_rate: float = 1.0
    weight_decay: float = 1.0


def parse_freeze(text: str | None) -> tuple[str, ...]:
    """Return the patterns of the setting `freeze`: regular expressions, separated by commas outside of brackets.

    Raises:
        SettingError: if a pattern is empty or not a regular expression.
    """
    return tuple(_checked_pattern("freeze", pattern) for pattern in _split(text, ","))


def parse_groups(text: str | None) -> tuple[Group, ...]:
    """Return the groups of the setting `groups`: "REGEX=learning_rate:10x,weight_decay:0", separated by semicolons.

    Raises:
        SettingError: if a group lacks a pattern or factors, or a factor is unknown, repeated or out of range.
    """
    return tuple(_parse_group(each) for each in _split(text, ";"))


def _parse_group(text: str) -> Group:
    pattern, equals, factors = text.rpartition("=")
    if not equals or not factors.strip():
        raise SettingError(
            "groups",
            "{setting} must have the form REGEX=learning_rate:10x,weight_decay:0, got {text!r}: add the factors",
            text=text,
        )
    found: dict[str, float] = {}
    for each in factors.split(","):
        name, _, value = (part.strip() for part in each.partition(":"))
        if name not in _FACTORS or name in found:
            raise SettingError(
                "groups",
                "{setting} sets the factors {known}, each at most once in a group, got {each!r} in {text!r}",
                known=" and ".join(_FACTORS),
                each=each,
                text=text,
            )
        found[name] = _parse_factor(name, value)
    return Group(_checked_pattern("groups", pattern.strip()), **found)


def _parse_factor(name: str, value: str) -> float:
    try:
        factor = parse_float(value.removesuffix("x"))
    except ValueError:
        factor = math.nan
    if not 0 <= factor <= LARGEST_FLOAT32:
        raise SettingError(
            "groups",
            "{setting}: the factor of {name} must be a number of at least 0, such as 10x, got {value!r}",
            name=name,
            value=value,
        )
    return factor


def _checked_pattern(setting: str, pattern: str) -> str:
    if not pattern:
        raise SettingError(setting, "{setting} contains an empty pattern: remove it, or write .* to match everything")
    try:
        re.compile(pattern)
    except re.error as error:
        raise SettingError(
            setting,
            "{setting} must consist of regular expressions, but {pattern!r} is not one ({error}): correct it",
            pattern=pattern,
            error=str(error),
        ) from None
    return pattern


def _split(text: str | None, separator: str) -> list[str]:
    """Split a text at each separator that is neither escaped nor inside brackets; None has no parts."""
    if text is None:
        return []
    parts, depth, is_escaped = [""], 0, False
    for character in text:
        if character == separator and depth == 0 and not is_escaped:
            parts.append("")
            continue
        parts[-1] += character
        if not is_escaped:
            depth = max(depth + (character in _OPENING) - (character in _CLOSING), 0)
        is_escaped = character == "\\" and not is_escaped
    return [part.strip() for part in parts]
