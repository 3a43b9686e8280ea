"""What an error of TensorStore says about a store, in a line of text, and what to do about it.

TensorStore retries each request for minutes, which suits a long transfer but not a wrong address. Only the first
request to a store that has not answered yet has fewer retries and a shorter time limit than later ones.
"""

from __future__ import annotations

import re
import time
from typing import Any

import tensorstore as ts

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


CONTACT_TIMEOUT_S = 15.0
"""Time limit for the first answer of a remote store, in seconds."""

_RETRIES = {"max_retries": 2, "initial_delay": "200ms", "max_delay": "1s"}
_RETRIES_OF_DRIVER = {"s3": "s3_request_retries", "gcs": "gcs_request_retries", "http": "http_request_retries"}
_CONNECTION = re.compile(r"CURL error [^:]*: (?P<reason>.*?) \[.*curl_code=", re.DOTALL)


def contact_fault(spec: dict[str, Any], context: ts.Context) -> str | None:
    """Return why a store does not answer, or None if it answers (even with an error) or is not remote.

    Args:
        spec: TensorStore's JSON specification of the store.
        context: the store's shared resources, such as its credentials.
    """
    retries = _RETRIES_OF_DRIVER.get(spec["driver"])
    if retries is None:
        return None
    timeout_s = CONTACT_TIMEOUT_S
    deadline = time.monotonic() + timeout_s
    try:
        store = ts.KvStore.open({retries: _RETRIES, **spec}, context=context).result(timeout=timeout_s)
        # Any key will do; one byte, in case it exists.
        store.read("manifest.json", byte_range=slice(0, 1)).result(timeout=max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        return f"no response within {timeout_s:g} s"
    except (ValueError, OSError, RuntimeError) as error:
        return connection_fault(error)
    return None


def connection_fault(error: BaseException) -> str | None:
    """Return why there is no connection, from an error of TensorStore; None if the error has another cause."""
    found = _CONNECTION.search(str(error))
    return None if found is None else " ".join(found["reason"].split())
