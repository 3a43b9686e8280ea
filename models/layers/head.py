"""The head of a network: global average pooling and a dense layer, as pure functions of arrays."""

import jax

from models.layers.widening import wide_dtype, widen


def global_average_pool(x: jax.Array) -> jax.Array:
    """Return the mean `[B,C]` of `x [B,H,W,C]` over height and width, in the dtype of `x` but summed in float32."""
    return widen(x).mean(axis=(1, 2)).astype(x.dtype)


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Return `x [B,C] @ kernel [C,K] + bias [K]` as float32 `[B,K]`, whatever the dtypes of the operands.

    The operands of all three products, forward and backward, are rounded to the dtype of `x`; sums are float32, and so
    are the gradients of a float32 `kernel` and `bias`. Like `convolution` it has a custom derivative.
    """
    return _product(x, kernel) + bias


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return `x [B,C] @ kernel [C,K]` in float32.

    It has a custom derivative, because an automatic derivative would multiply float32 operands.
    """
    return _contract(x, kernel.astype(x.dtype), 1, 0)


def _contract(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=wide_dtype(x))


def _product_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    gradient = gradient.astype(x.dtype)
    x_gradient = _contract(gradient, kernel.astype(x.dtype), 1, 1)
    return x_gradient.astype(x.dtype), _contract(x, gradient, 0, 0).astype(kernel.dtype)


_product.defvjp(_product_forward, _product_backward)
