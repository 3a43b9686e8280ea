"""The matrix products of a dense layer by oneDNN's kernels, where these are faster than XLA's."""

import math

import jax
import jax.numpy as jnp

from models.kernels.onednn.library import load_library
from models.kernels.onednn.operations import call_operation
from models.kernels.onednn.products import Product

# Measured in a loop on two cores with AVX-512 and bfloat16 but without AMX, beside other work: GFLOP per second of
# processor time, XLA / oneDNN, medians of interleaved runs (jaxlib 0.12.0.1). Forward products and gradients by input
# stay XLA's: in bfloat16 either library reaches 340 to 490 if XLA fuses products one by one, as a run compiles them,
# and in float32 either reaches 150 to 240.
#
#   by weights: rows, C → K   1,576, 384→1,152  6,272, 384→96  520, 192→192  128, 2,048→1,000  128, 256→100  128, 64→10
#     float32                     178 / 203        96 / 190     109 / 190       171 / 186         65 / 73       29 / 4
#     bfloat16                    184 / 322        92 / 290     117 / 232       173 / 386         74 / 191      37 / 3
_FEWEST_MULTIPLICATIONS = 2**21


def has_faster_kernel(x: jax.Array, gradient: jax.Array) -> bool:
    """Return whether `kernel_gradient` is faster here than XLA's product."""
    is_large = math.prod(x.shape) * gradient.shape[1] >= _FEWEST_MULTIPLICATIONS
    return is_large and load_library().supports(str(x.dtype))


def kernel_gradient(x: jax.Array, gradient: jax.Array) -> jax.Array:
    """Return the float32 product `[C,K]` of `x [B,C]` and `gradient [B,K]` of the same dtype, summed over B."""
    operation = Product(str(x.dtype), x.shape, gradient.shape, 0, 0)
    return call_operation(operation, [jax.ShapeDtypeStruct((x.shape[1], gradient.shape[1]), jnp.float32)], x, gradient)[
        0
    ]
