"""Which form each part of a convolution takes on a platform, and why, in words. `convolution.py` chooses it."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from loopfeed.models.kernels import ONEDNN, XLA
from loopfeed.models.kernels.onednn.convolutions import Convolution, Part
from loopfeed.models.kernels.onednn.handler import TARGET
from loopfeed.models.kernels.onednn.operations import build, operation_of
from loopfeed.models.layers import convolution_forms as forms
from loopfeed.models.layers import onednn_convolution as onednn
from loopfeed.models.layers.convolution import (
    FEW_CHANNELS,
    SMALL_MAP,
    TILE_IMAGES,
    channels_on_cards,
    filter_gradient_form,
    forward_form,
    input_gradient_form,
)
from loopfeed.models.layers.convolution_forms import Geometry, Pair
from loopfeed.models.layers.grouped_forms import groups_per_block

FORWARD, INPUT_GRADIENT, FILTER_GRADIENT = "forward", "input gradient", "filter gradient"
"""The parts of a convolution."""

_ONEDNN = "oneDNN"
_NAMES = {
    forms.forward_lax: "XLA's own",
    forms.forward_patches: "patches",
    forms.input_gradient_columns: "columns",
    forms.input_gradient_correlation: "correlation",
    forms.input_gradient_phases: "phases",
    forms.filter_gradient_taps: "taps",
    forms.filter_gradient_input_rows: "input rows",
    forms.filter_gradient_output_rows: "output rows",
}


class ChosenForm(NamedTuple):
    """The form of one part of a convolution.

    Attributes:
        part: `FORWARD`, `INPUT_GRADIENT` or `FILTER_GRADIENT`.
        form: the name of the form, as in `docs/concepts/convolutions.md`.
        reason: why this one.
    """

    part: str
    form: str
    reason: str


def chosen_forms(
    x_shape: tuple[int, ...],
    kernel_shape: tuple[int, ...],
    geometry: Geometry,
    dtype: str,
    platform: str,
    kernels: str = XLA,
) -> tuple[ChosenForm, ...]:
    """Return the form of each part of `convolution` for operands of these shapes.

    Args:
        x_shape, kernel_shape: `[B,H,W,C]` and `[kh,kw,C/groups,K]`.
        geometry: strides and padding.
        dtype: the operands' dtype, such as "float32".
        platform: "cpu", "cuda", or any other jax platform.
        kernels: those of a CPU, as `loopfeed.models.kernels.using_kernels` takes them.
    """
    if platform != "cpu":
        return _on_a_device(x_shape, kernel_shape, dtype, platform)
    by_xla = _by_xla(x_shape, kernel_shape, geometry)
    if kernels != ONEDNN:
        return by_xla
    own = _by_onednn(x_shape, kernel_shape, geometry, dtype)
    return tuple(found or other for found, other in zip(own, by_xla, strict=True))


def is_kernel_call(equation: Any) -> bool:
    """Return whether an equation of a traced program calls a kernel of `loopfeed.models.kernels`."""
    return equation.params.get("target_name") == TARGET


def _by_onednn(
    x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], geometry: Geometry, dtype: str
) -> tuple[ChosenForm | None, ...]:
    """Return the forms of the parts that differ from those without oneDNN, None for the others."""
    size = geometry.output_size(_size(x_shape), (kernel_shape[0], kernel_shape[1]))
    x, kernel, y = (
        jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        for shape in (x_shape, kernel_shape, (x_shape[0], *size, kernel_shape[3]))
    )
    parts = (
        (FORWARD, onednn.forward, (x, kernel)),
        (INPUT_GRADIENT, onednn.input_gradient, (x, kernel, y)),
        (FILTER_GRADIENT, onednn.filter_gradient, (x, kernel, y)),
    )
    found = tuple(_traced_kernel(part, partial(layer, geometry), operands) for part, layer, operands in parts)
    if not onednn.is_narrow_product(geometry, x_shape, kernel_shape, dtype):
        return found
    names = (_NAMES[forms.forward_patches], _NAMES[forms.input_gradient_columns])
    why = "few positions: one product of bfloat16 operands"
    narrow = (ChosenForm(part, name, why) for part, name in zip((FORWARD, INPUT_GRADIENT), names, strict=True))
    return (*(own or form for own, form in zip(found, narrow, strict=False)), found[2])


def _traced_kernel(part: str, layer: Callable[..., Any], operands: tuple[Any, ...]) -> ChosenForm | None:
    traced = jax.make_jaxpr(layer)(*operands)
    calls = [equation for equation in traced.eqns if is_kernel_call(equation)]
    # A layer may find only after some calls that there is no kernel for the rest; it then returns nothing.
    if not calls or not traced.out_avals:
        return None
    operations = [operation_of(dict(call.params["attributes"])["operation"]) for call in calls]
    names = dict.fromkeys(name for operation in operations for name in build(operation).names)
    by_product = Part.FILTER_GRADIENT_BY_PRODUCT
    is_product = any(isinstance(each, Convolution) and each.part == by_product for each in operations)
    why = "one product of patches and gradient, " * is_product
    return ChosenForm(part, _ONEDNN, f"{why}its primitives are {', '.join(names)}")


def _by_xla(x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], geometry: Geometry) -> tuple[ChosenForm, ...]:
    groups = x_shape[3] // kernel_shape[2]
    if groups > 1 and kernel_shape[2] == 1:
        why = "one channel a group is too narrow for products"
        return tuple(ChosenForm(part, "depthwise sums", why) for part in (FORWARD, INPUT_GRADIENT, FILTER_GRADIENT))
    if groups > 1:
        per_block = groups_per_block(groups, kernel_shape[2])
        found = _dense(x_shape[0], _size(x_shape), kernel_shape, geometry, kernel_shape[2] * per_block)
        number = groups // per_block
        blocks = f"{number} block{'s' * (number > 1)} of {per_block} group{'s' * (per_block > 1)}"
        return tuple(each._replace(form=f"{each.form}, {blocks}") for each in found)
    return _dense(x_shape[0], _size(x_shape), kernel_shape, geometry, x_shape[3])


def _dense(
    num_images: int, input_size: Pair, kernel_shape: tuple[int, ...], geometry: Geometry, C: int
) -> tuple[ChosenForm, ...]:
    window = kernel_shape[0], kernel_shape[1]
    output_size = geometry.output_size(input_size, window)
    strides = geometry.strides
    forward = forward_form(input_size, window)
    backward = input_gradient_form(output_size, window, strides, C)
    of_filter = filter_gradient_form(num_images, window, strides, C)
    return (
        ChosenForm(FORWARD, _name(forward), _why_forward(forward, input_size, window)),
        ChosenForm(INPUT_GRADIENT, _name(backward), _why_input(backward, output_size, window, strides)),
        ChosenForm(FILTER_GRADIENT, _name(of_filter), _why_filter(of_filter, window, strides)),
    )


def _why_forward(form: Callable[..., Any], input_size: Pair, window: Pair) -> str:
    if form is forms.forward_lax:
        return "a canonical convolution, for which Eigen is fast in a loop too"
    if window == (1, 1):
        return "a 1×1 kernel multiplies the pixels as they are"
    return _why_patches(input_size)


def _why_patches(size: Pair) -> str:
    return f"a map of at most {SMALL_MAP} px" if max(size) <= SMALL_MAP else "the kernel is larger than the map"


def _why_input(form: Callable[..., Any], output_size: Pair, window: Pair, strides: Pair) -> str:
    kind = _unwrapped(form)
    if kind is forms.input_gradient_correlation:
        return "stride 1: a convolution by the turned kernel"
    if kind is forms.input_gradient_phases:
        return f"a stride, and at most {FEW_CHANNELS} input channels"
    if forward_form(output_size, window) is forms.forward_patches:
        return "a 1×1 kernel is one product" if window == (1, 1) else _why_patches(output_size)
    return f"stride {strides[0]}×{strides[1]}, and more than {FEW_CHANNELS} input channels"


def _why_filter(form: Callable[..., Any], window: Pair, strides: Pair) -> str:
    tiled = isinstance(form, partial) and form.func is forms.filter_gradient_tiles
    kind = form.args[0] if isinstance(form, partial) and tiled else form
    if kind is forms.filter_gradient_input_rows:
        why = "at most 4 input channels"
    elif kind is forms.filter_gradient_output_rows:
        why = "stride 1"
    else:
        why = "a 1×1 kernel is one product" if window == (1, 1) else f"stride {strides[0]}×{strides[1]}"
    return f"{why}; at most {2 * FEW_CHANNELS} channels: tiles of {TILE_IMAGES} images" if tiled else why


def _on_a_device(
    x_shape: tuple[int, ...], kernel_shape: tuple[int, ...], dtype: str, platform: str
) -> tuple[ChosenForm, ...]:
    form, why = "XLA's own", "XLA has fast kernels for it in a loop too"
    dense = x_shape[3] == kernel_shape[2]
    if platform == "cuda" and dense and jnp.dtype(dtype).itemsize == 2:
        channels = channels_on_cards(kernel_shape[2], kernel_shape[3])
        if channels != kernel_shape[2]:
            form = f"XLA's own, {kernel_shape[2]} channels padded to {channels}"
            why = "cuDNN's kernels for tensor cores need multiples of 4 or 8"
    return tuple(ChosenForm(part, form, why) for part in (FORWARD, INPUT_GRADIENT, FILTER_GRADIENT))


def _name(form: Callable[..., Any]) -> str:
    if not isinstance(form, partial):
        return _NAMES[form]
    if form.func is forms.filter_gradient_tiles:
        return f"{_NAMES[form.args[0]]} in tiles"
    return _NAMES[form.func]


def _unwrapped(form: Callable[..., Any]) -> Callable[..., Any]:
    return form.func if isinstance(form, partial) else form


def _size(x_shape: tuple[int, ...]) -> Pair:
    return x_shape[1], x_shape[2]
