"""A value that is computed once and stored, instead of anew wherever it is read.

XLA takes what is elementwise for free and makes it part of each of its readers, which then read what it was computed
from. Where that is more than the value itself, or where a loop of vectors becomes one of elements by it, storing is
faster. Mostly that is so on a CPU, whose memory is slow; on an NVIDIA card XLA weighs the two, and only what it weighs
wrongly is stored there too.
"""

from typing import Any

from jax import lax


def stored(values: Any, *, on_cards: bool = False) -> Any:
    """`values`, a pytree of arrays; on a CPU behind a barrier that XLA computes nothing across.

    Args:
        values: what is stored.
        on_cards: whether on NVIDIA cards too.
    """
    form = {"cpu": lax.optimization_barrier} | ({"cuda": lax.optimization_barrier} if on_cards else {})
    return lax.platform_dependent(values, default=lambda values: values, **form)
