"""A lock that no fork leaves locked."""

import os
import threading


class ForkSafeLock:
    """A lock for `with`, which is free in a forked child: there the thread that held it does not exist.

    The thread that holds it must not fork.
    """

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()
