"""Values as a message shows them: in one line that somebody reads. Must not import NumPy: commands load it late."""

import reprlib
from typing import Any

_MOST_BITS = 1024
_MOST_LETTERS = 200


def shown(value: Any) -> Any:
    """Return a value as a message can show it: a long integer, an array or any long object by what it is.

    Python does not convert integers of many digits to text, and the text of an array fills a page. Strings stay whole,
    and errors, whose text is a message itself.
    """
    is_long = isinstance(value, int) and value.bit_length() > _MOST_BITS
    if value is None or (isinstance(value, str | bool | int | float | BaseException) and not is_long):
        return value
    text = _SHOWN.repr(value)
    text = text if len(text) <= _MOST_LETTERS else f"{text[: _MOST_LETTERS - 1]}…"
    return value if not is_long and _SHOWN.is_plain(value, text) else _Described(text)


class _Shown(reprlib.Repr):
    """Values by what they are, in one line: none takes long, and none fails."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlist = self.maxtuple = self.maxdict = self.maxset = self.maxfrozenset = _MOST_LETTERS // 2
        self.maxstring = self.maxlong = self.maxother = _MOST_LETTERS

    def repr_int(self, number: int, level: int) -> str:
        bits = number.bit_length()
        return f"an integer of {bits:,} bits" if bits > _MOST_BITS else super().repr_int(number, level)

    def repr_instance(self, value: Any, level: int) -> str:
        try:
            if isinstance(shape := getattr(value, "shape", None), tuple) and shape:
                return f"<{type(value).__name__} {list(shape)} of {getattr(value, 'dtype', 'unknown type')}>"
        except Exception:  # noqa: BLE001 - an attribute of anybody's object, in a message about it
            return f"<{type(value).__name__}>"
        return " ".join(super().repr_instance(value, level).split())

    def is_plain(self, value: Any, text: str) -> bool:
        """Return whether a value has that text itself."""
        try:
            return repr(value) == text
        except Exception:  # noqa: BLE001 - as above
            return False


_SHOWN = _Shown()


class _Described:
    """Stands in a message for a value that nobody would read."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __str__(self) -> str:
        return self._text

    __repr__ = __str__
