"""Sums over many batches with their rounding error, which would otherwise grow with every batch (Kahan, 1965)."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def add_compensated(
    total: Float[Array, ""], lost: Float[Array, ""], value: Float[Array, ""]
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Return the sum with a value added, and its rounding error: the sum was too large by the error.

    A sum that is infinite or NaN has no rounding error, so that an infinite value makes the sum infinite, not NaN.
    """
    added = value - lost
    summed = total + added
    return summed, jnp.where(jnp.isfinite(summed), (summed - total) - added, 0)
