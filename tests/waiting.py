"""One wait for what another thread or process does."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 60.0) -> None:
    """Return once a condition holds; fail after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"it has not come to that within {limit_s:g} s"
        time.sleep(0.002)
