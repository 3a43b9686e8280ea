"""A value that is computed once and stored, instead of anew wherever it is read.

XLA:CPU takes what is elementwise for free and makes it part of each of its readers, which then read what it was
computed from. Where that is more than the value itself, or where a loop of vectors becomes one of elements by it,
storing is faster. Other platforms have fast memory and decide for themselves.
"""

from typing import Any

from jax import lax


def stored(values: Any) -> Any:
    """`values`, a pytree of arrays; on a CPU behind a barrier that XLA computes nothing across."""
    return lax.platform_dependent(values, cpu=lax.optimization_barrier, default=lambda values: values)
