"""Pooling with gradients that are fast inside a loop; XLA:CPU's own for max-pooling, select-and-scatter, is scalar."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32

from loopfeed.models.kernels.choice import kernels_in_use, using_kernels
from loopfeed.models.layers.bfloat16_bits import converts_by_bits, round_by_bits, to_float32, wide_dtype, widen_by_bits
from loopfeed.models.layers.convolution_forms import Geometry, taps
from loopfeed.models.layers.platform_forms import materialize, on_platform

NO_TAP = 255


def max_pool(
    x: Float[Array, "B H W C"], *, window: int = 3, stride: int = 2, padding: int = 1
) -> Float[Array, "B P Q C"]:
    """Return the largest value in each window.

    P = (H + 2·padding - window) // stride + 1. Padding counts as minus infinity. The gradient goes to the first maximum
    in row-major order, as in XLA and PyTorch.

    Raises:
        ValueError: if the window is larger than 15 or than the padded input, or the padding at least half the window.

    Example:
        >>> x = jnp.arange(16.0).reshape(1, 4, 4, 1)
        >>> max_pool(x, window=2, stride=2, padding=0)[0, :, :, 0].tolist()
        [[5.0, 7.0], [13.0, 15.0]]
    """
    if not 0 <= padding <= (window - 1) // 2 or stride < 1 or window**2 > NO_TAP:
        raise ValueError(
            f"max_pool needs a window of at most 15, a stride of at least 1 and padding below half the window, "
            f"got window {window}, stride {stride}, padding {padding}"
        )
    if min(x.shape[1:3]) + 2 * padding < window:
        raise ValueError(
            f"a {window}×{window} window does not fit into an input of {x.shape[1]}×{x.shape[2]} px; use larger images"
        )
    return _max_pool(kernels_in_use(), window, stride, padding, x)


def average_pool(x: Float[Array, "B H W C"], window: int) -> Float[Array, "B -(-H//{window}) -(-W//{window}) C"]:
    """Return the mean of each window, with stride `window`.

    A window that reaches over the edge is averaged over the pixels inside (PyTorch's `ceil_mode` without
    `count_include_pad`). Sums are at least float32.
    """
    if window == 1:
        return x
    (B, H, W, C), wide = x.shape, to_float32(x)
    P, Q = -(-H // window), -(-W // window)
    padded = jnp.pad(wide, ((0, 0), (0, P * window - H), (0, Q * window - W), (0, 0)))
    total = padded.reshape(B, P, window, Q, window, C).sum((2, 4))
    down, across = (np.minimum(window, size - window * np.arange(-(-size // window))) for size in (H, W))
    return (total / np.multiply.outer(down, across)[:, :, None].astype(wide.dtype)).astype(x.dtype)


def global_max_pool(x: Float[Array, "B H W C"]) -> Float[Array, "B C"]:
    """Return the largest value of each channel, in the dtype of `x`.

    The derivative is that of the value at the first maximum in row-major order, as of PyTorch's max-pooling. It goes by
    that position: one that looks for the positions that equal the maximum finds none if XLA computes `x` again for it
    with another rounding.
    """
    return _global_max_pool(kernels_in_use(), x)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _global_max_pool(kernels: str, x: jax.Array) -> jax.Array:
    with using_kernels(kernels):
        return _find_global_maxima(x)[0]


@_global_max_pool.defjvp
def _global_max_pool_derivative(
    kernels: str, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (x,), (tangent,) = primals, tangents
    (_, H, W, _) = x.shape
    with using_kernels(kernels):
        best, row, column = _find_global_maxima(x)
        is_winner = jnp.equal(jnp.arange(H)[:, None, None], row[:, None, None])
        is_winner &= jnp.equal(jnp.arange(W)[:, None], column[:, None, None])
        return best, jnp.where(is_winner, tangent, 0).sum((1, 2)).astype(x.dtype)


def _find_global_maxima(
    x: Float[Array, "B H W C"],
) -> tuple[Float[Array, "B C"], Int32[Array, "B C"], Int32[Array, "B C"]]:
    """Return the maximum of each channel, in the dtype of `x`, and its row and column."""
    wide = widen_by_bits(x) if converts_by_bits(x.dtype) else x
    of_rows, columns = _first_maximum([wide[:, :, column] for column in range(x.shape[2])], jnp.int32)
    best, row = _first_maximum([of_rows[:, row] for row in range(x.shape[1])], jnp.int32)
    column = jnp.take_along_axis(columns, row[:, None], axis=1)[:, 0]
    return round_by_bits(best, x.dtype), *materialize((row, column))


def _first_maximum(values: list[jax.Array], dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """Return the elementwise maximum of some arrays, and the number of the first that has it, in an integer dtype."""
    best, winner = values[0], jnp.zeros(values[0].shape, dtype)
    for number, value in enumerate(values[1:], start=1):
        winner = jnp.where(value > best, jnp.asarray(number, dtype), winner)
        best = jnp.maximum(best, value)
    return best, winner


def _shifted(window: int, stride: int, padding: int, x: jax.Array) -> list[jax.Array]:
    # XLA:CPU converts each operand of each comparison.
    x = widen_by_bits(x) if converts_by_bits(x.dtype) else x
    lowest = jnp.array(-jnp.inf, x.dtype)
    padded = jax.lax.pad(x, lowest, [(0, 0, 0), (padding, padding, 0), (padding, padding, 0), (0, 0, 0)])
    return taps(padded, (window, window), Geometry((stride, stride), ((0, 0), (0, 0))))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _max_pool(kernels: str, window: int, stride: int, padding: int, x: jax.Array) -> jax.Array:
    # XLA:CPU computes the slices faster: the StableHLO of a ResNet-18 in 0.92 to 0.96 of the time.
    with using_kernels(kernels):
        return on_platform(
            x,
            default=partial(_largest_of_slices, window, stride, padding),
            onnx=partial(_largest_in_windows, window, stride, padding),
        )


def _largest_of_slices(window: int, stride: int, padding: int, x: jax.Array) -> jax.Array:
    return round_by_bits(reduce(jnp.maximum, _shifted(window, stride, padding, x)), x.dtype)


def _largest_in_windows(window: int, stride: int, padding: int, x: jax.Array) -> jax.Array:
    around = ((0, 0), (padding, padding), (padding, padding), (0, 0))
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, window, window, 1), (1, stride, stride, 1), around)


def _max_pool_forward(
    kernels: str, window: int, stride: int, padding: int, x: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    with using_kernels(kernels):
        best, winner = _first_maximum(_shifted(window, stride, padding, x), jnp.uint8)
        # The backward pass needs only the shape of x, so an array without elements is kept.
        return round_by_bits(best, x.dtype), (winner, jnp.zeros((0, *x.shape[1:3]), x.dtype))


def _max_pool_backward(
    kernels: str,
    window: int,
    stride: int,
    padding: int,
    residuals: tuple[jax.Array, jax.Array],
    gradient: jax.Array,
) -> tuple[jax.Array]:
    winner, (_, H, W) = residuals[0], residuals[1].shape
    with using_kernels(kernels):
        return (_input_gradient(window, stride, padding, (H, W), winner, gradient),)


def _input_gradient(
    window: int, stride: int, padding: int, size: tuple[int, int], winner: jax.Array, gradient: jax.Array
) -> jax.Array:
    """Return, for every input position, the sum of the gradients of the windows that have their maximum there.

    Along each axis, position r + stride·p is element r of window p, element r + stride of window p - 1, and so on.
    """
    (H, W), (B, P, Q, C) = size, gradient.shape
    reach = -(-window // stride)  # windows over a position, along each axis
    height, width = max(-(-(H + padding) // stride), P + reach - 1), max(-(-(W + padding) // stride), Q + reach - 1)
    around = [(0, 0, 0), (reach - 1, height - P, 0), (reach - 1, width - Q, 0), (0, 0, 0)]
    # Padded beforehand: a bounds check for every element would prevent vectorisation of the loop below.
    winner, gradient = materialize(
        (
            jax.lax.pad(winner, jnp.uint8(0), around),
            jax.lax.pad(gradient, jnp.zeros((), gradient.dtype), around),
        )
    )
    wide = wide_dtype(gradient)  # overlapping windows are summed before rounding
    total = jnp.zeros((B, height, stride, width, stride, C), wide)
    for down in range(reach):
        for right in range(reach):
            rows, columns = np.arange(stride) + stride * down, np.arange(stride) + stride * right
            inside = np.logical_and.outer(rows < window, columns < window)
            tap = np.where(inside, np.add.outer(rows * window, columns), NO_TAP).astype(np.uint8)[:, None, :, None]
            start = (0, reach - 1 - down, reach - 1 - right, 0)
            stop = (B, start[1] + height, start[2] + width, C)
            won, value = (jax.lax.slice(operand, start, stop)[:, :, None, :, None] for operand in (winner, gradient))
            total += jnp.where(won == tap, widen_by_bits(value), 0)
    whole = round_by_bits(total, gradient.dtype).reshape(B, height * stride, width * stride, C)
    # Without the barrier each reader fuses this loop into its own and computes it element by element.
    cropped: jax.Array = materialize(whole[:, padding : padding + H, padding : padding + W])
    return cropped


_max_pool.defvjp(_max_pool_forward, _max_pool_backward)
