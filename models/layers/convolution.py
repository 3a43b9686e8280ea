"""2-D convolution that is as fast inside `lax.while_loop` as outside, in both the forward and the backward pass.

XLA:CPU rewrites only the convolutions of a program's *entry* computation into the form that has fast kernels. In a
loop body the gradients of `lax.conv_general_dilated` run as a naive loop nest (30 times slower). So on a CPU each of
the three parts of a convolution uses one of the forms of `convolution_forms.py`, chosen by shape; on any other platform
all use XLA's own convolution, on an NVIDIA GPU with channels padded for its tensor cores.
"""

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from loopfeed.models.kernels.choice import XLA, kernels_in_use
from loopfeed.models.layers import convolution_forms as forms
from loopfeed.models.layers import grouped_forms as grouped
from loopfeed.models.layers import onednn_convolution as onednn
from loopfeed.models.layers.bfloat16_bits import round_by_bits, to_float32
from loopfeed.models.layers.convolution_forms import Geometry, Padding, Pair, image_size, window_size
from loopfeed.models.layers.platform_forms import on_platform, with_derivative_of


def convolution(
    x: Float[Array, "B H W C"],
    kernel: Float[Array, "kh kw C//{groups} K"],
    *,
    stride: int | Pair = 1,
    padding: str | Padding = "SAME",
    bias: Float[Array, "K"] | None = None,
    groups: int = 1,
) -> Float[Array, "B P Q K"]:
    """Cross-correlate images with a kernel, like `lax.conv_general_dilated` with NHWC and HWIO layouts.

    Args:
        x: images.
        kernel: the dtype of `x`.
        stride: step of the window, one number for both axes or (height, width), at least 1.
        padding: "SAME" (XLA's rule: if the total is odd, the high side has one more), "VALID", or
            ((top, bottom), (left, right)) ≥ 0.
        bias: added to the result.
        groups: number of equal parts of the channels, each convolved by itself, a divisor of C and K (XLA's
            `feature_group_count`); C for a depthwise convolution.

    Returns:
        The output in the dtype of `x`. Sums are at least float32.

    The derivative is custom, so under `shard_map` make a replicated kernel varying (`lax.pcast`) before
    differentiation, and average the gradients afterwards.

    Raises:
        ValueError: if shapes, dtypes, stride and padding do not fit together.

    Example:
        >>> y = convolution(jnp.ones((1, 3, 3, 1)), jnp.ones((3, 3, 1, 1)))
        >>> y[0, :, :, 0].tolist()
        [[4.0, 6.0, 4.0], [6.0, 9.0, 6.0], [4.0, 6.0, 4.0]]
    """
    geometry = _geometry(x, kernel, stride, padding, groups)
    y = _convolution(kernels_in_use(), geometry, x, kernel)
    # Added in float32, so that the bias's gradient, a sum over all positions, is float32 too.
    return y if bias is None else (to_float32(y) + bias).astype(y.dtype)


def _check_channels(x: jax.Array, kernel: jax.Array, groups: int) -> None:
    """Raise ValueError if the operands are not `[B,H,W,C]` and `[kh,kw,C/groups,K]` of the same dtype."""
    if groups < 1:
        raise ValueError(f"a convolution's groups must be at least 1, got {groups}")
    if x.ndim != 4 or kernel.ndim != 4 or x.shape[3] != kernel.shape[2] * groups:
        shape, of_groups = ("C", "") if groups == 1 else ("C/groups", f" and {groups} groups")
        if groups > 1 and x.ndim == 4 and x.shape[3] % groups == 0:
            of_groups += f", for which C/groups is {x.shape[3] // groups}"
        raise ValueError(
            f"convolution needs x [B,H,W,C] and a kernel [kh,kw,{shape},K] with the same C, got {x.shape} and "
            f"{kernel.shape}{of_groups}"
        )
    if kernel.shape[3] % groups:
        raise ValueError(
            f"a convolution's output channels must be a multiple of its groups, got {kernel.shape[3]} and {groups}"
        )
    if x.dtype != kernel.dtype:
        raise ValueError(
            f"convolution needs operands of the same dtype, got {x.dtype} and {kernel.dtype}; cast one of them"
        )


def _geometry(x: jax.Array, kernel: jax.Array, stride: int | Pair, padding: str | Padding, groups: int) -> Geometry:
    """Check the operands and return their geometry, with the padding converted to numbers."""
    _check_channels(x, kernel, groups)
    strides = _strides(stride)
    if min(strides) < 1:
        raise ValueError(f"a convolution's stride must be at least 1, got {stride}")
    window = window_size(kernel)
    if isinstance(padding, str) and padding in ("SAME", "VALID"):
        padding = _padding(lax.padtype_to_pads(x.shape[1:3], window, strides, padding))
    else:
        padding = _padding(padding)
    if min(map(min, padding)) < 0:
        raise ValueError(f"a convolution's padding must be at least 0, got {padding}; crop the input instead")
    geometry = Geometry(strides, padding)
    if min(geometry.output_size(image_size(x), window)) < 1:
        raise ValueError(
            f"a {window[0]}×{window[1]} kernel does not fit into an input of {x.shape[1]}×{x.shape[2]} px padded by "
            f"{padding}; use larger images"
        )
    return geometry


def _strides(stride: Any) -> Pair:
    """Return the stride of both axes as Python's own integers, which the text of a kernel's call can hold."""
    try:
        down, across = (stride, stride) if np.ndim(stride) == 0 else stride
        return operator.index(down), operator.index(across)
    except (TypeError, ValueError):
        raise ValueError(f"a convolution's stride must be an integer or (height, width), got {stride!r}") from None


def _padding(padding: Any) -> Padding:
    """Return padding as Python's own integers."""
    try:
        (top, bottom), (left, right) = padding
        return (operator.index(top), operator.index(bottom)), (operator.index(left), operator.index(right))
    except (TypeError, ValueError):
        rule = 'padding must be "SAME", "VALID" or ((top, bottom), (left, right)) in whole pixels'
        raise ValueError(f"{rule}, got {padding!r}") from None


# The choice of forms, measured inside `while_loop` on two AVX-512 cores in float32, with the forms interleaved.
# GFLOP/s of a 3×3 kernel by B×size C→K ("in tiles": of 16 images, whose patches stay in the cache):
#
#   stride 1           128×32 16→16  128×16 32→32  128×8 64→64  16×16 64→64  16×8 128→128  16×4 256→256  16×2 512→512
#     forward: lax          104           152          171          204           222           140             1
#              patches       20            44           68          201           257           152           185
#     input:   lax           95           222          256          359           298           160             2
#              patches       31            70          126          242           285           243            73
#     filter:  taps          38            72          129          169           213           192
#              patches       29            44          140          115           107           257
#              output rows   59           146          228          231           274           169
#              " in tiles   168           231          229          (234)         (253)         (246)
#
#   stride 2           128×32 16→32  128×16 32→64  16×16 64→128  16×8 128→256  16×4 256→512
#     forward: lax           86           153          293                         132
#              patches       36           159          285                         288
#     input:   phases        75           166          163           116            44
#              columns       31           150          237           284           227
#     filter:  taps         123           181          172                         207
#              patches       65           127          180                         199
#
# On small maps with stride 1, columns made ResNet-18 and -50 at 64 px 5 to 10 % faster than patches.
# On small maps a canonical convolution is slow (at 7 px the two are close: patches made ResNet-50 at 224 px 1 %
# faster). If the kernel is larger than the map, XLA swaps the operands, which is slow in a loop body.

SMALL_MAP = 7
FEW_CHANNELS = 32
TILE_IMAGES = 16


def forward_form(input_size: Pair, window: Pair) -> forms.Forward:
    """Choose the form of the forward pass on a CPU from the heights and widths of the input and the kernel."""
    small = max(input_size) <= SMALL_MAP or any(map(int.__gt__, window, input_size))
    return forms.forward_patches if small or window == (1, 1) else forms.forward_lax


def input_gradient_form(output_size: Pair, window: Pair, strides: Pair, C: int) -> forms.InputGradient:
    """Choose the form of the input gradient on a CPU from output size, kernel size, strides and input channels."""
    forward = forward_form(output_size, window)
    if forward is forms.forward_patches or (strides != (1, 1) and C > FEW_CHANNELS):
        return forms.input_gradient_columns
    form = forms.input_gradient_correlation if strides == (1, 1) else forms.input_gradient_phases
    return partial(form, forward)


def filter_gradient_form(num_images: int, window: Pair, strides: Pair, C: int) -> forms.FilterGradient:
    """Choose the form of the filter gradient on a CPU from batch size, kernel size, strides and input channels."""
    if window == (1, 1):
        return forms.filter_gradient_taps
    form: forms.FilterGradient = forms.filter_gradient_output_rows
    if C <= 4:
        form = forms.filter_gradient_input_rows
    elif strides != (1, 1):
        form = forms.filter_gradient_taps
    tiled = C <= 2 * FEW_CHANNELS and num_images > TILE_IMAGES and num_images % TILE_IMAGES == 0
    return partial(forms.filter_gradient_tiles, form, TILE_IMAGES) if tiled else form


def _forward_cpu(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array:
    forward = _forward_dense if grouped.num_groups(x, kernel) == 1 else _forward_grouped
    # A CPU without AMX gains nothing from narrower products.
    return forward(geometry, to_float32(x), to_float32(kernel)).astype(x.dtype)


def _forward_dense(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return forward_form(image_size(x), window_size(kernel))(x, kernel, geometry)


def _forward_grouped(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array:
    if kernel.shape[2] == 1:
        return grouped.depthwise_forward(x, kernel, geometry)
    groups = grouped.num_groups(x, kernel)
    per_block = grouped.groups_per_block(groups, kernel.shape[2])
    blocks = grouped.split_channels(x, groups // per_block), grouped.block_kernels(kernel, groups, per_block)
    return grouped.join_channels(lax.map(lambda block: _forward_dense(geometry, *block), blocks))


def _gradients_cpu(
    geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gradients = _gradients_dense if grouped.num_groups(x, kernel) == 1 else _gradients_grouped
    input_gradient, filter_gradient = gradients(geometry, to_float32(x), to_float32(kernel), to_float32(gradient))
    return input_gradient.astype(x.dtype), filter_gradient.astype(kernel.dtype)


def _gradients_dense(
    geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    window, C = window_size(kernel), x.shape[3]
    input_gradient = input_gradient_form(image_size(gradient), window, geometry.strides, C)
    filter_gradient = filter_gradient_form(x.shape[0], window, geometry.strides, C)
    return (
        input_gradient(gradient, kernel, geometry, image_size(x)),
        filter_gradient(x, gradient, geometry, window),
    )


def _gradients_grouped(
    geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    if kernel.shape[2] == 1:
        return (
            grouped.depthwise_input_gradient(gradient, kernel, geometry, image_size(x), x.shape[3]),
            grouped.depthwise_filter_gradient(x, gradient, geometry, window_size(kernel)),
        )
    groups = grouped.num_groups(x, kernel)
    per_block = grouped.groups_per_block(groups, kernel.shape[2])
    of_x, of_kernel = lax.map(
        lambda block: _gradients_dense(geometry, *block),
        (
            grouped.split_channels(x, groups // per_block),
            grouped.block_kernels(kernel, groups, per_block),
            grouped.split_channels(gradient, groups // per_block),
        ),
    )
    return grouped.join_channels(of_x), grouped.kernel_of_blocks(of_kernel, per_block)


def _forward_onednn(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array:
    y = onednn.forward(geometry, x, kernel)
    if y is not None:
        return y
    if _is_narrow_product(geometry, x, kernel):
        return round_by_bits(forms.forward_patches(x, kernel, geometry), x.dtype)
    return _forward_cpu(geometry, x, kernel)


def _is_narrow_product(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> bool:
    return onednn.is_narrow_product(geometry, x.shape, kernel.shape, str(x.dtype))


def _gradients_onednn(
    geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    by_forms, by_onednn = (partial(each, geometry) for each in (_gradients_cpu, _gradients_where_faster))
    of_x, of_kernel = with_derivative_of(by_forms, by_onednn, x, kernel, gradient)
    return of_x, of_kernel


def _gradients_where_faster(
    geometry: Geometry, x: jax.Array, kernel: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    of_x = onednn.input_gradient(geometry, x, kernel, gradient)
    if of_x is None and _is_narrow_product(geometry, x, kernel):
        of_x = forms.input_gradient_columns(gradient, kernel, geometry, image_size(x)).astype(x.dtype)
    of_kernel = onednn.filter_gradient(geometry, x, kernel, gradient)
    # XLA removes the form of a part that is not used.
    form_of_x, form_of_kernel = _gradients_cpu(geometry, x, kernel, gradient)
    return form_of_x if of_x is None else of_x, form_of_kernel if of_kernel is None else of_kernel


def channels_on_cards(C: int, K: int) -> int:
    """Return the number of channels to which the C input channels of a 16-bit convolution are padded on an NVIDIA GPU.

    cuDNN's tensor-core kernels need multiples of 8, or 4 for images. XLA itself pads only float16, and only slightly.
    If the output channels do not fit such a kernel, padding has no benefit.
    """
    if K % 8:
        return C
    return 4 if C < 4 and K in (32, 64) else -(-C // 8) * 8


def _forward_cuda(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array:
    is_wide = x.dtype.itemsize > 2 or grouped.num_groups(x, kernel) > 1
    missing = 0 if is_wide else channels_on_cards(*kernel.shape[2:]) - x.shape[3]
    if missing:
        x = jnp.pad(x, ((0, 0),) * 3 + ((0, missing),))
        kernel = jnp.pad(kernel, ((0, 0),) * 2 + ((0, missing), (0, 0)))
    return _forward_lax(geometry, x, kernel)


def _forward_lax(geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return forms.forward_lax(x, kernel, geometry)


def _gradients_of(
    forward: Callable[[Geometry, jax.Array, jax.Array], jax.Array],
    geometry: Geometry,
    x: jax.Array,
    kernel: jax.Array,
    gradient: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    _, pullback = jax.vjp(partial(forward, geometry), x, kernel)
    return pullback(gradient)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _convolution(kernels: str, geometry: Geometry, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return on_platform(
        x,
        kernel,
        cpu=partial(_forward_cpu if kernels == XLA else _forward_onednn, geometry),
        cuda=partial(_forward_cuda, geometry),
        default=partial(_forward_lax, geometry),
    )


def _convolution_forward(
    kernels: str, geometry: Geometry, x: jax.Array, kernel: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _convolution(kernels, geometry, x, kernel), (x, kernel)


def _convolution_backward(
    kernels: str, geometry: Geometry, residuals: tuple[jax.Array, jax.Array], gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, kernel = residuals
    return on_platform(
        x,
        kernel,
        gradient,
        cpu=partial(_gradients_cpu if kernels == XLA else _gradients_onednn, geometry),
        cuda=partial(_gradients_of, _forward_cuda, geometry),
        default=partial(_gradients_of, _forward_lax, geometry),
    )


_convolution.defvjp(_convolution_forward, _convolution_backward)
