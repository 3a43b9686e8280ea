"""A drop-in replacement of `lax.conv_general_dilated` for libraries that take the convolution as an argument.

Owns which calls the loop-safe convolution can compute, and the warning about those that it cannot.
"""

import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.convolution_forms import NHWC, Padding, Pair


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Convolve as `lax.conv_general_dilated` does, with `loopfeed.convolution` where it can compute the call.

    It can if the images are NHWC and the kernel is HWIO, as Flax passes them, without dilation, groups of images and
    negative padding, and with the default precision, result type and sharding. Any other call goes to `lax`; on a CPU,
    where that is many times slower inside a loop, a RuntimeWarning says why, once for each reason (Python's default
    filter).

    Args:
        lhs, rhs: images `[B,H,W,C]` and kernel `[kh,kw,C,K]` of one floating dtype, or operands of another layout.
        window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers: as in `lax.conv_general_dilated`.
        feature_group_count, batch_group_count, precision, preferred_element_type, out_sharding: likewise.

    Returns:
        The result of `lax.conv_general_dilated`, up to rounding.

    Example:
        >>> layout = ("NHWC", "HWIO", "NHWC")
        >>> x, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((2, 2, 1, 1))
        >>> conv_general_dilated(x, kernel, (2, 2), "VALID", dimension_numbers=layout).ravel().tolist()
        [4.0, 4.0, 4.0, 4.0]
    """
    given = (lhs_dilation, rhs_dilation, batch_group_count)
    reason = _layout_reason(lhs, rhs, dimension_numbers) or _form_reason(lhs, padding, *given)
    # A precision or a result type is a request to XLA's own kernels.
    if precision not in (None, lax.Precision.DEFAULT):
        reason = reason or f"the precision {precision}"
    if preferred_element_type not in (None, lhs.dtype) or out_sharding is not None:
        reason = reason or "a preferred element type or sharding"
    if reason is None:
        height, width = (int(stride) for stride in window_strides)
        return convolution(lhs, rhs, stride=(height, width), padding=_pairs(padding), groups=feature_group_count)
    if jax.default_backend() == "cpu":
        warnings.warn(
            f"a convolution with {reason} runs as XLA's own, which is many times slower inside a loop on a CPU",
            RuntimeWarning,
            stacklevel=2,
        )
    return lax.conv_general_dilated(
        lhs,
        rhs,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dimension_numbers,
        feature_group_count,
        batch_group_count,
        precision,
        preferred_element_type,
        **({} if out_sharding is None else {"out_sharding": out_sharding}),
    )


def _layout_reason(lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any) -> str | None:
    """Return what about the operands' axes and dtypes the loop-safe convolution cannot take, None if nothing."""
    if lhs.ndim != 4:
        return "1 spatial dimension" if lhs.ndim == 3 else f"{lhs.ndim - 2} spatial dimensions"
    numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    if numbers != lax.conv_dimension_numbers(lhs.shape, rhs.shape, NHWC):
        return f"the dimension numbers {dimension_numbers}"
    return None if lhs.dtype == rhs.dtype else f"operands of {lhs.dtype} and {rhs.dtype}"


def _form_reason(
    lhs: jax.Array,
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None,
    rhs_dilation: Sequence[int] | None,
    batch_group_count: int,
) -> str | None:
    """Return what about a convolution's form the loop-safe one cannot compute, None if nothing."""
    if any(each != 1 for dilation in (lhs_dilation, rhs_dilation) for each in dilation or ()):
        return "dilation"
    if batch_group_count != 1:
        return f"{batch_group_count} groups of images"
    if isinstance(padding, str):
        return None if padding.upper() in ("SAME", "VALID") else f"the padding {padding}"
    if any(edge < 0 for pair in padding for edge in pair):
        return "negative padding"
    return None if lhs.size else "no images"


def _pairs(padding: str | Sequence[tuple[int, int]]) -> str | Padding:
    if isinstance(padding, str):
        return padding.upper()
    rows, columns = (_pair(each) for each in padding)
    return rows, columns


def _pair(pair: Sequence[int]) -> Pair:
    low, high = pair
    return int(low), int(high)
