"""The ends of a network: the average over places and a dense layer. Pure functions of arrays."""

import jax
import jax.numpy as jnp


def global_average_pool(x: jax.Array) -> jax.Array:
    """Mean over places: `x [B,H,W,C]` to `[B,C]`, added up in float32, in the dtype of `x`."""
    return x.astype(jnp.float32).mean(axis=(1, 2)).astype(x.dtype)


def dense(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """Affine map of `x [B,C]` by `kernel [C,K]` and `bias [K]`: float32 `[B,K]`, whatever the operands' dtypes.

    The operands of all three products, forward and backward, are rounded to the dtype of `x`; sums are float32, and so
    are the gradients by `kernel` and `bias` where these are. It has its own derivative, as `convolution` has.
    """
    return _product(x, kernel) + bias


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    """`x [B,C] @ kernel [C,K]` in float32. Derived automatically, the backward products have float32 operands."""
    return _contract(x, kernel.astype(x.dtype), 1, 0)


def _contract(x: jax.Array, y: jax.Array, x_axis: int, y_axis: int) -> jax.Array:
    return jax.lax.dot_general(x, y, (((x_axis,), (y_axis,)), ((), ())), preferred_element_type=jnp.float32)


def _product_forward(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _product(x, kernel), (x, kernel)


def _product_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    gradient = gradient.astype(x.dtype)
    of_x = _contract(gradient, kernel.astype(x.dtype), 1, 1)
    return of_x.astype(x.dtype), _contract(x, gradient, 0, 0).astype(kernel.dtype)


_product.defvjp(_product_forward, _product_backward)
