"""A barrier that makes XLA compute a value once and store it, instead of recomputing it wherever it is read.

XLA treats elementwise operations as free and fuses them into each of their readers, which then read the operands.
Storing is faster if the operands are larger than the value, or if the fusion turns a vectorised loop into a scalar one.
That is mostly so on a CPU, whose memory is slow; for an NVIDIA GPU XLA has a cost model, and values are stored there
only if it decides wrongly.
"""

from typing import Any

from jax import lax

from loopfeed.models.layers.platform_forms import on_platform


def materialize(values: Any, *, on_cards: bool = False) -> Any:
    """Return a pytree of arrays unchanged. On a CPU, an optimization barrier makes XLA store the arrays in memory.

    Args:
        values: the values to store.
        on_cards: whether to store them on NVIDIA GPUs too.
    """
    form = {"cpu": lax.optimization_barrier} | ({"cuda": lax.optimization_barrier} if on_cards else {})
    return on_platform(values, default=lambda values: values, **form)
