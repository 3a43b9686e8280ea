"""What an error of TensorStore says about a store, in a line of text, and what to do about it."""

from __future__ import annotations

import re

from loopfeed.preprocess.printable import printable_text
from loopfeed.preprocess.system_errors import (
    Cause,
    cause_of,
    reading_remedy,
    remedy_and_repeat,
    system_number,
    system_reason,
)

_AGAIN = "run the same command again"

# In some paths each "/" appears as "\\x00".
_TRAILING_DETAILS = re.compile(r" \[[a-z_ -]+='")


def reason(error: BaseException) -> str:
    """Return the first line of a TensorStore error without the bracketed details that follow it (positions, spec…)."""
    text = _TRAILING_DETAILS.split(str(error).replace("\\x00", "/"))[0]
    # TensorStore quotes the contents of files, which may include control characters.
    return printable_text(text.splitlines()[0]) if text else type(error).__name__


def write_fault(error: BaseException, repeat: str) -> str:
    """Return why a write failed and what to do, such as "File too large; raise the limit …, then run … again".

    Args:
        error: TensorStore's or the system's error.
        repeat: how to go on once that is done, such as "run the same command again".
    """
    fault = system_reason(error) or reason(error)
    if cause_of(error) is None:
        return f"{fault}; check free space and permissions, then {repeat}"
    return f"{fault}; {remedy_and_repeat(error, repeat)}"


def remedy_for(error: BaseException, *, is_reading: bool = False) -> str:
    """Return what to do after an operation on a store failed."""
    if system_number(error) is not None:
        if is_reading and cause_of(error) == Cause.RIGHTS:
            return f"{reading_remedy(error, '')}, then {_AGAIN}"
        return remedy_and_repeat(error, _AGAIN)
    if cause_of(error) == Cause.PASSING:
        return f"{_AGAIN}; if it fails again, check the server and the network"
    if "credentials" in str(error).lower():
        return (
            "set $AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY, or give --storage-option profile=NAME or "
            "credentials=anonymous"
        )
    if "PERMISSION_DENIED" in str(error):
        return "check the address, the keys and their permissions"
    return "check the address and its permissions"
