"""Describes what a user's function returned, in a few words, for messages. Does not need jax."""

from collections.abc import Iterator, Mapping
from typing import Any

_MOST_KEYS = 5


def describe_given(value: Any) -> str:
    """Return "float32 [4, 3]" for an array, "a tuple of 3", "a dict with the keys image, label", or the type's name."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype} {list(value.shape)}"
    if value is None:
        return "None"
    if isinstance(value, tuple | list):
        return f"a {'tuple' if isinstance(value, tuple) else 'list'} of {len(value)}"
    if isinstance(value, Mapping):
        keys = [str(key) for key in value][:_MOST_KEYS]
        return f"a dict with the keys {', '.join(keys)}{'…' * (len(value) > _MOST_KEYS)}" if keys else "an empty dict"
    return (
        f"a {type(value).__name__}, which gives its values once"
        if isinstance(value, Iterator)
        else type(value).__name__
    )
