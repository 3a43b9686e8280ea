"""The matrix products of dense layers and of attention by oneDNN's kernels, where these are faster than XLA's."""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32

from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.kernels.onednn.operations import BatchedProduct, Product, call_operation

# Measured in a loop on two cores with AVX-512 and bfloat16 but without AMX, beside other work: GFLOP per second of
# processor time, XLA / oneDNN, medians of interleaved runs (jaxlib 0.12.0.1). Forward products and gradients by input
# stay XLA's: in bfloat16 either library reaches 340 to 490 if XLA fuses products one by one, as a run compiles them,
# and in float32 either reaches 150 to 240.
#
#   by weights: rows, C → K   1,576, 384→1,152  6,272, 384→96  520, 192→192  128, 2,048→1,000  128, 256→100  128, 64→10
#     float32                     178 / 203        96 / 190     109 / 190       171 / 186         65 / 73       29 / 4
#     bfloat16                    184 / 322        92 / 290     117 / 232       173 / 386         74 / 191      37 / 3
#
# With AMX (two cores of an otherwise idle Xeon), in bfloat16, oneDNN's speed divided by XLA's:
#
#   rows, C → K          1,576, 192→768  1,576, 384→1,152  6,272, 96→384  520, 192→768  128, 2,048→1,000  128, 256→100
#     forward                 1.3              1.0             1.1            0.9              0.9              0.5
#     by input                1.2              1.2             1.0            1.2              0.9              0.5
#     by weights              4.1              4.0             3.9            3.2              1.7              1.5
_FEWEST_MULTIPLICATIONS = 2**21
# Attention: the speed of oneDNN's products divided by that of XLA's, by processor time, other work beside. Products are
# Q·Kᵀ, P·V and dSᵀ·Q of M matrices; N tokens, d channels.
#
#   M, N, d                 48, 197, 64       384, 197, 64      24, 65, 64        48, 17, 64        192, 17, 32
#     float32             1.0  1.5  1.0     0.9  0.8  0.9     1.4  1.4  1.4     2.2  4.9  2.8     1.9  1.9  3.5
#     bfloat16            1.1  1.2  2.2     0.8  1.2  1.9     1.3  2.0  3.0     1.9  2.6  2.9     1.5  2.1  3.7
_MOST_TOKENS = 100


def has_faster_kernel(x: jax.Array | jax.ShapeDtypeStruct, gradient: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Return whether `kernel_gradient` is faster here than XLA's product."""
    is_large = math.prod(x.shape) * gradient.shape[1] >= _FEWEST_MULTIPLICATIONS
    return is_large and load_library().supports(str(x.dtype))


def kernel_gradient(x: Float[Array, "B C"], gradient: Float[Array, "B K"]) -> Float32[Array, "C K"]:
    """Return the product of `x` and `gradient`, of the same dtype, summed over B."""
    operation = Product(str(x.dtype), x.shape, gradient.shape, 0, 0)
    return call_operation(operation, [jax.ShapeDtypeStruct((x.shape[1], gradient.shape[1]), jnp.float32)], x, gradient)[
        0
    ]


def has_faster_batch(x: jax.Array | jax.ShapeDtypeStruct, x_axis: int) -> bool:
    """Return whether `batch` is faster here than XLA's products of matrices with as many rows or columns as tokens."""
    is_short = max(x.shape[1:]) <= _MOST_TOKENS
    sums_tokens = x.dtype == jnp.bfloat16 and x_axis == 1
    return (is_short or sums_tokens) and load_library().supports(str(x.dtype))


def batch(
    x: Float[Array, "M _ _"], y: Float[Array, "M _ _"], x_axis: int, y_axis: int, dtype: DTypeLike
) -> Float[Array, "M _ _"]:
    """Return the products of the matrices of `x` and `y`, summed over an axis of both, as `dtype`."""
    operation = BatchedProduct(str(x.dtype), x.shape, y.shape, x_axis, y_axis, jnp.dtype(dtype).name)
    shape = x.shape[0], x.shape[3 - x_axis], y.shape[3 - y_axis]
    return call_operation(operation, [jax.ShapeDtypeStruct(shape, dtype)], x, y)[0]
