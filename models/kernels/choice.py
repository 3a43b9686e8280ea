"""Which kernels the layers use on a CPU: XLA's forms, or oneDNN's operations where these are faster."""

from contextlib import AbstractContextManager
from typing import Final

import jax

from loopfeed.models.kernels.onednn.library import load_library

XLA: Final = "xla"
ONEDNN: Final = "onednn"
"""The names of the kernels. On any platform other than a CPU both mean XLA's."""

_kernels = jax.make_user_context(XLA)


def using_kernels(name: str) -> AbstractContextManager[None]:
    """Return a context in which the layers that are traced use these kernels on a CPU, in both passes.

    What jax has traced and compiled is kept for each choice separately.

    Args:
        name: `XLA` or `ONEDNN`.

    Raises:
        ValueError: if there are no kernels of that name.
        loopfeed.models.kernels.MissingKernelsError: if oneDNN cannot be used here.
    """
    if name not in (XLA, ONEDNN):
        raise ValueError(f'kernels must be "{XLA}" or "{ONEDNN}", got {name!r}')
    if name == ONEDNN:
        load_library()
    context: AbstractContextManager[None] = _kernels(name)
    return context


def kernels_in_use() -> str:
    """Return the name of the kernels that layers use that are traced now."""
    name: str = _kernels.value
    return name
