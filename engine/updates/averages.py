"""The exponential moving average of the weights."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, Shaped

from loopfeed.models.layers.bfloat16_bits import to_float32, wide_dtype


def init_average(tree: Any) -> Any:
    """Return an average that starts at `tree`; its leaves are copies, which can be donated separately.

    Floating-point leaves become float32; others, such as counts, booleans and PRNG keys, have no average and keep their
    dtype.
    """
    return jax.tree.map(lambda leaf: jnp.array(leaf, wide_dtype(leaf) if _is_averaged(leaf) else None, copy=True), tree)


def update_average(
    average: Any, new: Any, decay: Float32[Array, ""], step: Int32[Array, ""], *, ramp: bool = True
) -> Any:
    """Move an average towards new values with the decay d: average ← average + (1 - d) · (new - average).

    Kept in float32, because 1 - d is below the precision of bfloat16. An average that starts at the first weights
    remembers them for about 1 / (1 - decay) updates; `ramp` shortens that memory early on, d = min(decay, (1 + t) /
    (10 + t)), as TensorFlow's `ExponentialMovingAverage` does with its number of updates.

    Args:
        average: pytree from `init_average`.
        new: pytree of the same structure and shapes; its floating-point leaves are averaged, others copied.
        decay: in 0 … 1, a runtime value; 0 copies `new`, 1 without a ramp never changes.
        step: the t of the ramp: number of updates before this one, skipped ones too.
        ramp: whether to use the ramp, static.

    Returns:
        The new average, of the dtypes of `average`.
    """
    taken = step.astype(jnp.float32)
    kept = jnp.minimum(decay, (1 + taken) / (10 + taken)) if ramp else decay

    def move(average: Shaped[Array, "*shape"], new: Shaped[Array, "*shape"]) -> Shaped[Array, "*shape"]:
        return average + (1 - kept) * (to_float32(new) - average) if _is_averaged(new) else new

    return jax.tree.map(move, average, new)


def _is_averaged(leaf: Any) -> bool:
    return jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
