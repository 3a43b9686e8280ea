"""Random initial values of many arrays from one draw, which compiles faster than one draw for each."""

import math
from collections.abc import Iterator, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Key


def normal_arrays(
    key: Key[Array, ""], shapes: Sequence[tuple[int, ...]], deviation: float
) -> Iterator[Float32[Array, "..."]]:
    """Yield arrays of the given shapes, normal with mean 0 and this standard deviation, in order."""
    sizes = [math.prod(shape) for shape in shapes]
    draws = deviation * jax.random.normal(key, (sum(sizes),), jnp.float32)
    start = 0
    for shape, size in zip(shapes, sizes, strict=True):
        yield draws[start : start + size].reshape(shape)
        start += size
