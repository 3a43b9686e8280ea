"""Values as a message shows them: in one line that somebody reads. Must not import NumPy: commands load it late."""

from typing import Any

_MOST_BITS = 1024
_MOST_LETTERS = 200


def shown(value: Any) -> Any:
    """Return a value as a message can show it: a long integer, an array or any long object by what it is.

    Python does not convert integers of many digits to text, and the text of an array fills a page. Strings and
    messages of errors stay whole.
    """
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        return _Described(f"an integer of {value.bit_length():,} bits")
    if isinstance(shape := getattr(value, "shape", None), tuple) and shape:
        return _Described(f"<{type(value).__name__} {list(shape)} of {getattr(value, 'dtype', 'unknown type')}>")
    if type(value) in (dict, list, tuple):
        kept = _inside(value)
        return kept if len(repr(kept)) <= _MOST_LETTERS else _shortened(repr(kept))
    if value is None or isinstance(value, str | bool | int | float | BaseException):
        return value
    return value if len(text := repr(value)) <= _MOST_LETTERS and "\n" not in text else _shortened(text)


def _inside(value: Any) -> Any:
    """Return a collection of what is shown for each value in it, up to as many as fill a message."""
    if type(value) is dict:
        return {name: shown(value[name]) for name in list(value)[:_MOST_LETTERS]}
    return type(value)(map(shown, value[:_MOST_LETTERS]))


def _shortened(text: str) -> "_Described":
    line = " ".join(text.split())
    return _Described(line if len(line) <= _MOST_LETTERS else f"{line[: _MOST_LETTERS - 1]}…")


class _Described:
    """Stands in a message for a value that nobody would read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__
