"""Label smoothing."""

import jax


def smooth_targets(targets: jax.Array, smoothing: jax.Array) -> jax.Array:
    """Spread a fraction of each target evenly over all classes (Szegedy et al., 2015, arXiv:1512.00567, section 7).

    Args:
        targets: float32 [B, K], rows that sum to 1: one-hot labels or mixtures of them.
        smoothing: float32 [] in 0 … 1, a runtime value; 0 leaves every bit unchanged.

    Returns:
        float32 [B, K], targets · (1 - smoothing) + smoothing / K.
    """
    return targets * (1 - smoothing) + smoothing / targets.shape[-1]
