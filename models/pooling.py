"""Max-pooling whose gradient is fast inside a loop: XLA:CPU runs select-and-scatter as a scalar loop nest."""

from functools import partial, reduce

import jax
import jax.numpy as jnp

from models.convolution_forms import Geometry, taps


def max_pool(x: jax.Array, *, window: int = 3, stride: int = 2, padding: int = 1) -> jax.Array:
    """Largest value under each window: `x [B,H,W,C]` to `[B,P,Q,C]`, P = (H + 2·padding - window) // stride + 1.

    Padding counts as minus infinity. The gradient goes to the first maximum in row-major order, as in XLA and PyTorch.

    Raises:
        ValueError: the window does not fit the padded input, or the padding could hold a whole window.
    """
    if not 0 <= padding <= (window - 1) // 2 or stride < 1:
        raise ValueError(
            f"max_pool takes a stride of at least 1 and a padding below half the window: "
            f"found window {window}, stride {stride}, padding {padding}"
        )
    if min(x.shape[1:3]) + 2 * padding < window:
        raise ValueError(f"a {window}×{window} window does not fit {x.shape[1]}×{x.shape[2]}; give larger images")
    return _max_pool(window, stride, padding, x)


def _shifted(window: int, stride: int, padding: int, x: jax.Array) -> list[jax.Array]:
    lowest = jnp.array(-jnp.inf, x.dtype)
    padded = jax.lax.pad(x, lowest, [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)])
    return taps(padded, (window, window), Geometry((stride, stride), ((0, 0), (0, 0))))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _max_pool(window: int, stride: int, padding: int, x: jax.Array) -> jax.Array:
    return reduce(jnp.maximum, _shifted(window, stride, padding, x))


def _max_pool_forward(
    window: int, stride: int, padding: int, x: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    first, *others = _shifted(window, stride, padding, x)
    best, winner = first, jnp.zeros(first.shape, jnp.uint8)
    for tap, value in enumerate(others, start=1):
        winner = jnp.where(value > best, jnp.uint8(tap), winner)
        best = jnp.maximum(best, value)
    # Only the shape of x is wanted: its own size is recovered from an array without elements.
    return best, (winner, jnp.zeros((0, *x.shape[1:3]), x.dtype))


def _max_pool_backward(
    window: int, stride: int, padding: int, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array]:
    """Each of the stride² phases of the input gathers from the few taps that reach it; the phases are interleaved."""
    winner, (_, H, W) = residuals[0], residuals[1].shape
    B, P, Q, C = gradient.shape
    height, width = (
        max(-(-(H + padding) // stride), P + (window - 1) // stride),
        max(-(-(W + padding) // stride), Q + (window - 1) // stride),
    )
    wide = jnp.promote_types(gradient.dtype, jnp.float32)  # overlapping windows are added up before they are rounded
    zero = jnp.zeros((), wide)

    def phase(row: int, column: int) -> jax.Array:
        total = jnp.zeros((B, height, width, C), wide)
        for i in range(row, window, stride):
            for j in range(column, window, stride):
                won = jnp.where(winner == i * window + j, gradient.astype(wide), zero)
                down, right = i // stride, j // stride
                total += jax.lax.pad(
                    won, zero, [(0, 0, 0), (down, height - P - down, 0), (right, width - Q - right, 0), (0, 0, 0)]
                )
        return total.astype(gradient.dtype)

    phases = [jnp.stack([phase(row, column) for column in range(stride)], axis=3) for row in range(stride)]
    whole = jnp.stack(phases, axis=2).reshape(B, height * stride, width * stride, C)
    return (whole[:, padding : padding + H, padding : padding + W],)


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
