"""Forms of 2-D convolution and of its two gradients, built from operations that XLA:CPU runs fast inside a loop.

These are matrix products, and convolutions in canonical form (NHWC input, HWIO kernel, no dilation). Every form is
exact up to rounding for every stride, padding and size. `convolution.py` chooses the fastest for each shape.

Letters: B images, H W height and width of the input, P Q of the output, C input channels, C_group those of a
group (all without groups), K output channels, N = B·P·Q.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from loopfeed.models.layers.bfloat16_bits import wide_dtype

type Pair = tuple[int, int]
type Padding = tuple[Pair, Pair]
type Images = Float[Array, "B H W C"]
type Kernel = Float[Array, "kh kw C_group K"]
type Outputs = Float[Array, "B P Q K"]


NHWC = ("NHWC", "HWIO", "NHWC")


class Geometry(NamedTuple):
    """The strides and the (low, high) zero padding of a convolution, each for height and width."""

    strides: Pair
    padding: Padding

    def output_size(self, input_size: Pair, window: Pair) -> Pair:
        """Return the output's height and width; if a kernel of size `window` does not fit, a value is 0 or less."""
        height, width = (
            (input_size[axis] + sum(self.padding[axis]) - window[axis]) // self.strides[axis] + 1 for axis in (0, 1)
        )
        return height, width


def image_size(x: Images) -> Pair:
    """Return the height and width of images."""
    return x.shape[1], x.shape[2]


def window_size(kernel: Kernel) -> Pair:
    """Return the height and width of a kernel."""
    return kernel.shape[0], kernel.shape[1]


def pad(x: Images, padding: Padding, dilation: Pair = (1, 1)) -> Float[Array, "B P Q C"]:
    """Zero-pad images and insert `dilation - 1` zeros between neighbouring pixels; negative padding crops."""
    if padding == ((0, 0), (0, 0)) and dilation == (1, 1):
        return x
    (top, bottom), (left, right) = padding
    config = [(0, 0, 0), (top, bottom, dilation[0] - 1), (left, right, dilation[1] - 1), (0, 0, 0)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def taps(x: Images, window: Pair, geometry: Geometry) -> list[Float[Array, "B P Q C"]]:
    """Return, for each kernel element in row-major order, the slice of `x` that it multiplies."""
    (P, Q), (sh, sw) = geometry.output_size(image_size(x), window), geometry.strides
    x = pad(x, geometry.padding)
    return [
        lax.slice(x, (0, i, j, 0), (x.shape[0], i + (P - 1) * sh + 1, j + (Q - 1) * sw + 1, x.shape[3]), (1, sh, sw, 1))
        for i in range(window[0])
        for j in range(window[1])
    ]


def rows(x: Float[Array, "... C"]) -> Float[Array, "N C"]:
    """Reshape an array to a matrix."""
    return x.reshape(-1, x.shape[-1])


def patches(x: Images, window: Pair, geometry: Geometry) -> Float[Array, "N {window[0]}*{window[1]}*C"]:
    """Return a matrix with every receptive field of `x` as a row (im2col)."""
    return rows(jnp.concatenate(taps(x, window, geometry), axis=-1))


def _product(x: jax.Array, y: jax.Array, y_axis: int = 0) -> jax.Array:
    """Return the product of two matrices, summed over an axis of `y`, in at least float32."""
    return lax.dot_general(x, y, (((1,), (y_axis,)), ((), ())), preferred_element_type=wide_dtype(x))


def _turned_padding(window: Pair, geometry: Geometry, input_size: Pair, output_size: Pair) -> Padding:
    """Return the padding for which the output, convolved with the rotated kernel, has the input's size (stride 1)."""
    vertical, horizontal = (
        (window[axis] - 1 - low, input_size[axis] + low - output_size[axis])
        for axis, (low, _) in enumerate(geometry.padding)
    )
    return vertical, horizontal


type Forward = Callable[[Images, Kernel, Geometry], Outputs]


def forward_lax(x: Images, kernel: Kernel, geometry: Geometry) -> Outputs:
    """Compute the convolution in the canonical form, which XLA:CPU passes to Eigen even inside loops.

    With fewer input channels in the kernel than in `x` it has groups, which are slow on a CPU.
    """
    return lax.conv_general_dilated(
        x,
        kernel,
        geometry.strides,
        geometry.padding,
        dimension_numbers=NHWC,
        feature_group_count=x.shape[3] // kernel.shape[2],
    )


def forward_patches(x: Images, kernel: Kernel, geometry: Geometry) -> Outputs:
    """Multiply the patches by the kernel. For a 1×1 kernel, the patches are the (strided) input itself, not a copy.

    Sums and the result are at least float32.
    """
    window, K = window_size(kernel), kernel.shape[3]
    P, Q = geometry.output_size(image_size(x), window)
    return _product(patches(x, window, geometry), kernel.reshape(-1, K)).reshape(x.shape[0], P, Q, K)


type InputGradient = Callable[[Outputs, Kernel, Geometry, Pair], Images]


def input_gradient_correlation(
    forward: Forward,
    gradient: Outputs,
    kernel: Kernel,
    geometry: Geometry,
    input_size: Pair,
) -> Images:
    """Convolve the gradient with the kernel rotated by 180°, using the given `forward` form. Requires stride 1."""
    (top, bottom), (left, right) = _turned_padding(window_size(kernel), geometry, input_size, image_size(gradient))
    # Negative padding is applied separately, as a crop, because a canonical convolution does not allow it.
    gradient = pad(gradient, ((min(top, 0), min(bottom, 0)), (min(left, 0), min(right, 0))))
    turned = kernel[::-1, ::-1].swapaxes(2, 3)
    return forward(gradient, turned, Geometry((1, 1), ((max(top, 0), max(bottom, 0)), (max(left, 0), max(right, 0)))))


def input_gradient_columns(gradient: Outputs, kernel: Kernel, geometry: Geometry, input_size: Pair) -> Images:
    """Compute the patch gradients as one product, then add each kernel element's part at its position (col2im).

    Sums and the result are at least float32.
    """
    (kh, kw, C, K), (B, P, Q, _), (sh, sw) = kernel.shape, gradient.shape, geometry.strides
    (top, _), (left, _) = geometry.padding
    columns = _product(rows(gradient), kernel.reshape(-1, K), 1).reshape(B, P, Q, kh * kw, C)
    total = None
    for tap in range(kh * kw):
        above, before = tap // kw - top, tap % kw - left
        below, after = input_size[0] - above - (P - 1) * sh - 1, input_size[1] - before - (Q - 1) * sw - 1
        placed = pad(columns[:, :, :, tap], ((above, below), (before, after)), (sh, sw))
        total = placed if total is None else total + placed
    assert total is not None
    return total


def input_gradient_phases(
    forward: Forward,
    gradient: Outputs,
    kernel: Kernel,
    geometry: Geometry,
    input_size: Pair,
) -> Images:
    """Compute all s·s phases of the input gradient (stride s) as channels of one stride-1 convolution of `gradient`.

    The kernel is padded with zeros to a multiple of the stride; the phases are then interleaved (depth to space).
    """
    (kh, kw, C, K), (B, P, Q, _), (sh, sw) = kernel.shape, gradient.shape, geometry.strides
    (top, _), (left, _) = geometry.padding
    th, tw = -(-kh // sh), -(-kw // sw)
    filled = jnp.pad(kernel, ((0, th * sh - kh), (0, tw * sw - kw), (0, 0), (0, 0))).reshape(th, sh, tw, sw, C, K)
    turned = filled[::-1, :, ::-1].transpose(0, 2, 5, 1, 3, 4).reshape(th, tw, K, sh * sw * C)
    height, width = max(-(-(input_size[0] + top) // sh), P), max(-(-(input_size[1] + left) // sw), Q)
    padding = ((th - 1, height - P), (tw - 1, width - Q))
    phases = forward(gradient, turned, Geometry((1, 1), padding)).reshape(B, height, width, sh, sw, C)
    whole = phases.transpose(0, 1, 3, 2, 4, 5).reshape(B, height * sh, width * sw, C)
    crop = ((-top, input_size[0] + top - height * sh), (-left, input_size[1] + left - width * sw))
    return pad(whole, crop)


type FilterGradient = Callable[[Images, Outputs, Geometry, Pair], Kernel]


def filter_gradient_taps(x: Images, gradient: Outputs, geometry: Geometry, window: Pair) -> Kernel:
    """Compute one product `[C,N] @ [N,K]` for each kernel element."""
    columns = rows(gradient)
    products = [rows(tap).T @ columns for tap in taps(x, window, geometry)]
    return jnp.stack(products).reshape(*window, x.shape[3], gradient.shape[3])


def filter_gradient_input_rows(x: Images, gradient: Outputs, geometry: Geometry, window: Pair) -> Kernel:
    """Compute one product `[kw·C,N] @ [N,K]` for each kernel row, with one-dimensional patches of the input."""
    (kh, kw), C, K = window, x.shape[3], gradient.shape[3]
    (sh, sw), (vertical, horizontal) = geometry
    wide = jnp.concatenate(taps(x, (1, kw), Geometry((1, sw), (vertical, horizontal))), axis=-1)
    columns = rows(gradient)
    products = [rows(row).T @ columns for row in taps(wide, (kh, 1), Geometry((sh, 1), ((0, 0), (0, 0))))]
    return jnp.stack(products).reshape(kh, kw, C, K)


def filter_gradient_output_rows(x: Images, gradient: Outputs, geometry: Geometry, window: Pair) -> Kernel:
    """Compute one product `[C,N] @ [N,kw·K]` for each kernel row, with patches of the gradient's rows (stride 1)."""
    (kh, kw), C, K = window, x.shape[3], gradient.shape[3]
    _, horizontal = _turned_padding(window, geometry, image_size(x), image_size(gradient))
    columns = patches(gradient, (1, kw), Geometry((1, 1), ((0, 0), horizontal)))
    products = [rows(row).T @ columns for row in taps(x, (kh, 1), Geometry((1, 1), (geometry.padding[0], (0, 0))))]
    return jnp.stack(products).reshape(kh, C, kw, K).transpose(0, 2, 1, 3)[:, ::-1]


def filter_gradient_tiles(
    form: FilterGradient,
    tile: int,
    x: Images,
    gradient: Outputs,
    geometry: Geometry,
    window: Pair,
) -> Kernel:
    """Sum the results of `form` for tiles of `tile` images, whose patches stay in the cache. `tile` must divide B."""
    x_tiles, gradient_tiles = (operand.reshape(-1, tile, *operand.shape[1:]) for operand in (x, gradient))
    return lax.map(lambda pair: form(pair[0], pair[1], geometry, window), (x_tiles, gradient_tiles)).sum(axis=0)
