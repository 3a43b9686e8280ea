"""Keeps Python's cyclic garbage collector out of the way of a start, without jax.

Imports and tracing create hundreds of thousands of objects that live long. The collector would scan them again and
again: 0.4 s of the 6.6 s of processor time until the first loss of ResNet-50.
"""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collector() -> Iterator[None]:
    """Disable the collector inside the block."""
    was_enabled = gc.isenabled()
    try:
        gc.disable()
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def keeping_imports() -> Iterator[None]:
    """Import jax in the block without the collector, which afterwards never scans what exists then.

    For a command, because modules live as long as its process. Nothing changes if jax is already imported.
    """
    if "jax" in sys.modules:
        yield
        return
    with without_collector():
        yield
        gc.freeze()
