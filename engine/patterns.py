"""Patterns that select parameters by their dotted paths, as written in the settings `freeze` and `groups`.

Owns the notation of these settings. Must not import jax, so that the commands start fast.
"""

import importlib
import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from engine.settings import LARGEST_FLOAT32, SettingError
from preprocess.quantities import parse_float

_FACTORS = ("learning_rate", "weight_decay")
_OPENING, _CLOSING = "([{", ")]}"
# A recipe or a record may be somebody else's. `re` keeps 512 patterns compiled.
_MOST_CHARACTERS, _MOST_PATTERNS, _LONGEST_PATTERN = 1 << 16, 500, 1000
# Python's matcher tries one way after another, some 10⁷ a second. A repetition of one character counts as 2⁵ ways: five
# in a row take 20 ms for a path of 60 characters that they do not match, and those inside others years.
_MOST_WAYS, _WAYS_TO_REPEAT = 1 << 26, 1 << 5
# Type checkers do not know the module of the standard library.
_parser: Any = importlib.import_module("re._parser")


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
        SettingError: if a pattern is empty or not a regular expression, or there are too many ways to match.
    """
    patterns = tuple(_checked_pattern("freeze", pattern) for pattern in _split("freeze", text, ","))
    _check_can_be_matched("freeze", patterns)
    return patterns


def parse_groups(text: str | None) -> tuple[Group, ...]:
    """Return the groups of the setting `groups`: "REGEX=learning_rate:10x,weight_decay:0", separated by semicolons.

    Raises:
        SettingError: if a group lacks a pattern or factors, a factor is unknown, repeated or out of range, or there are
            too many ways to match.
    """
    groups = tuple(_parse_group(each) for each in _split("groups", text, ";"))
    _check_can_be_matched("groups", [group.pattern for group in groups])
    return groups


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
    if len(pattern) > _LONGEST_PATTERN:
        raise SettingError(
            setting,
            "{setting} must consist of regular expressions of at most {most} characters, but one has {length}: divide "
            "it into several",
            most=_LONGEST_PATTERN,
            length=len(pattern),
        )
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise SettingError(
            setting,
            "{setting} must consist of regular expressions, but {pattern!r} is not one ({error}): correct it",
            pattern=pattern,
            error=str(error),
        ) from None
    return pattern


def _check_can_be_matched(setting: str, patterns: Sequence[str]) -> None:
    """Raise SettingError if matching could take for ever, as with a repetition inside a repetition."""
    num_ways = 0
    for pattern in patterns:
        try:
            num_ways += _num_ways(_parser.parse(pattern))
        except RecursionError:
            num_ways = _MOST_WAYS + 1
        if num_ways > _MOST_WAYS:
            raise SettingError(
                setting,
                "{setting} leaves too many ways to match {pattern!r}, which could take for ever: write at most five "
                "repetitions (* or +) in a row, and none inside another, such as .* in place of (\\w+\\.)*",
                pattern=pattern,
            )


def _num_ways(parsed: Iterable[tuple[Any, Any]]) -> int:
    """Return a bound on the number of ways in which a parsed regular expression can match a beginning of a path."""
    return min(math.prod(_num_ways_of(str(operation), argument) for operation, argument in parsed), _MOST_WAYS + 1)


def _num_ways_of(operation: str, argument: Any) -> int:
    if operation == "BRANCH":
        ways = [_num_ways(each) for each in argument[1]]
        firsts = {chr(each[0][1]).casefold() for each in argument[1] if each and str(each[0][0]) == "LITERAL"}
        # The next character leaves one alternative.
        return max(ways) if len(firsts) == len(ways) else sum(ways)
    if operation.endswith("_REPEAT"):
        least, most, repeated = argument
        each = _num_ways(repeated)
        num_counts = min(int(most) - int(least) + 1, _WAYS_TO_REPEAT)
        if each == 1:
            return num_counts
        first = min(int(least), _WAYS_TO_REPEAT)
        return sum(each**count for count in range(first, first + num_counts))
    if operation == "GROUPREF_EXISTS":
        return sum(_num_ways(each) for each in argument[1:] if each)
    if operation in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
        return _num_ways(argument[-1])
    return _num_ways(argument) if operation == "ATOMIC_GROUP" else 1


def _split(setting: str, text: str | None, separator: str) -> list[str]:
    """Split a text at each separator that is neither escaped nor inside brackets; None has no parts."""
    if text is None:
        return []
    starts, depth, is_escaped = [0], 0, False
    for index, character in enumerate(text[:_MOST_CHARACTERS]):
        if character == separator and depth == 0 and not is_escaped:
            starts.append(index + 1)
            continue
        if not is_escaped:
            depth = max(depth + (character in _OPENING) - (character in _CLOSING), 0)
        is_escaped = character == "\\" and not is_escaped
    if len(text) > _MOST_CHARACTERS or len(starts) > _MOST_PATTERNS:
        raise SettingError(
            setting,
            "{setting} must have at most {most} characters in {patterns} patterns, got {length} in {found} or more: "
            "write fewer patterns that match more",
            most=_MOST_CHARACTERS,
            patterns=_MOST_PATTERNS,
            length=len(text),
            found=len(starts),
        )
    stops = (*(start - 1 for start in starts[1:]), len(text))
    return [text[start:stop].strip() for start, stop in zip(starts, stops, strict=True)]
