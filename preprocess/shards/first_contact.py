"""The first contact with a remote store: whether anything answers at its address.

TensorStore retries each request for minutes, which suits a long transfer but not a wrong address. Only this first
request has fewer retries and a shorter time limit than later requests, to a store that has answered once.
"""

import re
import time
from typing import Any

import tensorstore as ts

CONTACT_TIMEOUT_S = 15.0
"""Time limit for the first answer of a remote store, in seconds."""

_RETRIES = {"max_retries": 2, "initial_delay": "200ms", "max_delay": "1s"}
_RETRIES_OF_DRIVER = {"s3": "s3_request_retries", "gcs": "gcs_request_retries", "http": "http_request_retries"}
_CONNECTION = re.compile(r"CURL error [^:]*: (?P<reason>.*?) \[.*curl_code=", re.DOTALL)


def contact_fault(spec: dict[str, Any], context: ts.Context, *, timeout_s: float | None = None) -> str | None:
    """Return why a store does not answer, or None if it answers (even with an error) or is not remote.

    Args:
        spec: TensorStore's JSON specification of the store.
        context: the store's shared resources, such as its credentials.
        timeout_s: how long to wait, by default `CONTACT_TIMEOUT_S`.
    """
    retries = _RETRIES_OF_DRIVER.get(spec["driver"])
    if retries is None:
        return None
    timeout_s = CONTACT_TIMEOUT_S if timeout_s is None else timeout_s
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
