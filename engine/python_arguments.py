"""Whether the arguments of a call from Python have the types that the function declares.

Checked are those declared by switches, numbers, strings, paths, mappings and functions alone; the others the functions
check themselves. Must not import jax or NumPy, whose scalars are numbers too.
"""

import inspect
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Final, Literal, NamedTuple, TypeAliasType, Union, get_args, get_origin

from loopfeed.engine.named_parts import OWN_PARTS
from loopfeed.preprocess.shown_values import shown


class _Kind(NamedTuple):
    """What a value may be: in a message, and the test of it."""

    text: str
    accepts: Callable[[Any], bool]


class Checks(NamedTuple):
    """The kinds of each parameter, none if it is not checked, and the names of those that have a position."""

    kinds: Mapping[str, tuple[_Kind, ...]]
    positions: tuple[str, ...]


def _is_switch(value: Any) -> bool:
    return (isinstance(value, int) and value in (0, 1)) or str(getattr(value, "dtype", "")) == "bool"


_PATH = _Kind("a path", lambda value: isinstance(value, os.PathLike))
_KINDS: Final[Mapping[Any, _Kind]] = {
    bool: _Kind("True or False", _is_switch),
    int: _Kind("a whole number", lambda value: hasattr(type(value), "__index__")),
    float: _Kind("a number", lambda value: hasattr(type(value), "__float__") or hasattr(type(value), "__index__")),
    str: _Kind("a string", lambda value: isinstance(value, str)),
    os.PathLike: _PATH,
    Path: _PATH,
    Mapping: _Kind("a mapping", lambda value: isinstance(value, Mapping)),
    Callable: _Kind("a function", callable),
    NoneType: _Kind("None", lambda value: value is None),
}


def checks_of(signature: inspect.Signature) -> Checks:
    """Return the kinds of each parameter of a function.

    A parameter that cannot be checked has none, nor has a part of the user's own, which `loopfeed.engine.parts` checks.
    """
    declared = signature.parameters.values()
    kinds = {each.name: _kinds_of(each.annotation) or () for each in declared if each.name not in OWN_PARTS}
    by_position = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return Checks(kinds, tuple(each.name for each in declared if each.kind in by_position))


def check_arguments(checks: Checks, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise TypeError for the first argument that is of none of the kinds of its parameter."""
    for name, value in (*zip(checks.positions, args, strict=False), *kwargs.items()):
        kinds = checks.kinds.get(name, ())
        if kinds and not any(each.accepts(value) for each in kinds):
            texts = dict.fromkeys(each.text for each in kinds)
            if "a path" in texts:
                texts.pop("a string", None)  # which is one
            found = "None" if value is None else f"{shown(value)!r} of type {type(value).__name__}"
            raise TypeError(f"{name} must be {' or '.join(texts)}, got {found}")


def _kinds_of(annotation: Any) -> tuple[_Kind, ...] | None:
    """Return the kinds of an annotation, None if it has a part that is not one of them."""
    if isinstance(annotation, TypeAliasType):
        return _kinds_of(annotation.__value__)
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        parts = [_kinds_of(each) or _of_class(each) for each in get_args(annotation)]
        return None if None in parts else tuple(kind for part in parts if part is not None for kind in part)
    if origin is Literal:
        words = get_args(annotation)
        # What is near to another string the function knows itself, but not that "3" is no number.
        return (_Kind(" or ".join(map(repr, words)), lambda value: isinstance(value, str) and not value.isdecimal()),)
    kind = _KINDS.get(NoneType if annotation is None else origin or annotation)
    return None if kind is None else (kind,)


def _of_class(annotation: Any) -> tuple[_Kind, ...] | None:
    """Return the kind of a class of Loopfeed beside strings and the like."""
    is_ours = inspect.isclass(annotation) and annotation.__module__.startswith("loopfeed.")
    if not is_ours or getattr(annotation, "_is_protocol", False):
        return None
    return (_Kind(f"a {annotation.__name__}", lambda value: isinstance(value, annotation)),)
