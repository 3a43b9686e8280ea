"""Label smoothing."""

from jaxtyping import Array, Float, Float32


def smooth_targets(targets: Float[Array, "B K"], smoothing: Float32[Array, ""]) -> Float[Array, "B K"]:
    """Return targets · (1 - smoothing) + smoothing / K (Szegedy et al., 2015, arXiv:1512.00567, section 7).

    Args:
        targets: rows that sum to 1: one-hot labels or mixtures of them.
        smoothing: in 0 … 1, a runtime value; 0 leaves every bit unchanged.
    """
    return targets * (1 - smoothing) + smoothing / targets.shape[-1]
