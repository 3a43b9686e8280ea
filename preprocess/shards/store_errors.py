"""What an error of TensorStore says about a store, in a line of text, and what to do about it."""

from __future__ import annotations

import re

from preprocess.printable import printable_text
from preprocess.system_errors import remedy_of, system_number, system_reason

# In some paths each "/" appears as "\\x00".
_TRAILING_DETAILS = re.compile(r" \[[a-z_ -]+='")


def reason(error: BaseException) -> str:
    """Return the first line of a TensorStore error without the bracketed details that follow it (positions, spec…)."""
    text = _TRAILING_DETAILS.split(str(error).replace("\\x00", "/"))[0]
    # TensorStore quotes the contents of files, which may include control characters.
    return printable_text(text.splitlines()[0]) if text else type(error).__name__


def write_fault(error: BaseException) -> str:
    """Return why a write failed, and what to do, such as "File too large; raise the limit …"."""
    remedy = "check free space and permissions" if system_number(error) is None else remedy_of(error)
    return f"{system_reason(error) or reason(error)}; {remedy}"


def remedy_for(error: BaseException) -> str:
    """Return what to do after an operation on a store failed."""
    if system_number(error) is not None:
        return f"{remedy_of(error)}, and run the same command again"
    if "credentials" in str(error).lower():
        return (
            "set $AWS_ACCESS_KEY_ID and $AWS_SECRET_ACCESS_KEY, or give --storage-option profile=NAME or "
            "credentials=anonymous"
        )
    if "PERMISSION_DENIED" in str(error):
        return "check the address, the keys and their permissions"
    return "check the address and its permissions"
