"""The head of a network and its dense layers, over the last axis or patches, and the initial values of many arrays."""

import math
from collections.abc import Iterator, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Key

from loopfeed.models.kernels.choice import XLA, kernels_in_use, using_kernels
from loopfeed.models.layers import onednn_product
from loopfeed.models.layers.bfloat16_bits import round_by_bits, wide_dtype, widen_by_bits
from loopfeed.models.layers.platform_forms import on_platform, with_derivative_of


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


def global_average_pool(x: Float[Array, "B H W C"]) -> Float[Array, "B C"]:
    """Return the mean over height and width, in the dtype of `x` but summed in float32.

    Example:
        >>> global_average_pool(jnp.arange(16.0).reshape(1, 4, 4, 1)).tolist()
        [[7.5]]
    """
    return round_by_bits(widen_by_bits(x).mean(axis=(1, 2)), x.dtype)


def dense(x: Float[Array, "B C"], kernel: Float[Array, "C K"], bias: Float[Array, "K"]) -> Float[Array, "B K"]:
    """Return `x @ kernel + bias` in float32, whatever the dtypes of the operands.

    The operands of all three products, forward and backward, are rounded to the dtype of `x`; sums are float32, and so
    are the gradients of a float32 `kernel` and `bias`. Like `convolution` it has a custom derivative.

    Example:
        >>> dense(jnp.array([[1.0, 2.0]]), jnp.array([[3.0], [4.0]]), jnp.array([5.0])).tolist()
        [[16.0]]
    """
    return _product(kernels_in_use(), x, kernel) + bias


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(kernels: str, x: Float[Array, "B C"], kernel: Float[Array, "C K"]) -> Float[Array, "B K"]:
    """Return `x @ kernel` in float32.

    It has a custom derivative, because an automatic derivative would multiply float32 operands. The first argument
    names the kernels of the derivative.
    """
    with using_kernels(kernels):
        return _contract(x, round_by_bits(kernel, x.dtype), 1, 0)


def _contract(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=wide_dtype(x))


def _product_forward(kernels: str, x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(kernels, x, kernel), (x, kernel)


def _product_backward(
    kernels: str, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    with using_kernels(kernels):
        gradient = round_by_bits(gradient, x.dtype)
        x_gradient = _contract(gradient, round_by_bits(kernel, x.dtype), 1, 1)
        return round_by_bits(x_gradient, x.dtype), _kernel_gradient(kernels, x, gradient).astype(kernel.dtype)


def _kernel_gradient(kernels: str, x: jax.Array, gradient: jax.Array) -> jax.Array:
    product = partial(_contract, x_axis=0, y_axis=0)
    if kernels == XLA or not onednn_product.has_faster_kernel(x, gradient):
        return product(x, gradient)
    own = partial(with_derivative_of, product, onednn_product.kernel_gradient)
    return on_platform(x, gradient, cpu=own, default=product)


_product.defvjp(_product_forward, _product_backward)


def linear(
    x: Float[Array, "*batch C"], kernel: Float[Array, "C K"], bias: Float[Array, "K"]
) -> Float[Array, "*batch K"]:
    """Return `x @ kernel + bias` in the dtype of `x`; products and sums are those of `dense`."""
    rows = x.reshape(-1, x.shape[-1])
    return round_by_bits(dense(rows, kernel, bias), x.dtype).reshape(*x.shape[:-1], kernel.shape[1])


def patch_linear(
    x: Float[Array, "B H W C"], kernel: Float[Array, "p p C K"], bias: Float[Array, "K"]
) -> Float[Array, "B H//p W//p K"]:
    """Convolve `x` with a kernel with stride p, without padding, as one matrix product, in the dtype of `x`.

    Patches do not overlap, so a reshape brings them into rows, and its gradient is another reshape. Pixels beyond the
    last whole patch are left out, as in a convolution without padding.
    """
    (B, H, W, C), (p, _, _, K) = x.shape, kernel.shape
    P, Q = H // p, W // p
    patches = x[:, : P * p, : Q * p].reshape(B, P, p, Q, p, C).transpose(0, 1, 3, 2, 4, 5)
    return linear(patches.reshape(B, P, Q, p * p * C), kernel.reshape(p * p * C, K), bias)
