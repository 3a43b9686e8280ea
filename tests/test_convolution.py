"""Every form of a convolution against XLA's own and its derivatives, the choice among them, what a loop body keeps."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from loopfeed.models.kernels import ONEDNN, XLA, using_kernels
from loopfeed.models.kernels.onednn.handler import TARGET
from loopfeed.models.layers import convolution_forms as forms
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.convolution_forms import Geometry
from tests.kernels import needs_onednn

pytestmark = [pytest.mark.kernels, pytest.mark.usefixtures("llvms_optimiser")]

# Sums of at most a few thousand float32 products, in another order.
RTOL = 1e-5


FORWARD: dict[str, Callable[..., Any]] = {"lax": forms.forward_lax, "patches": forms.forward_patches}
INPUT_GRADIENT: dict[str, Callable[..., Any]] = {
    "correlation lax": partial(forms.input_gradient_correlation, forms.forward_lax),
    "correlation patches": partial(forms.input_gradient_correlation, forms.forward_patches),
    "columns": forms.input_gradient_columns,
    "phases lax": partial(forms.input_gradient_phases, forms.forward_lax),
    "phases patches": partial(forms.input_gradient_phases, forms.forward_patches),
}
FILTER_GRADIENT: dict[str, Callable[..., Any]] = {
    "taps": forms.filter_gradient_taps,
    "input rows": forms.filter_gradient_input_rows,
    "output rows": forms.filter_gradient_output_rows,
    "taps in tiles": partial(forms.filter_gradient_tiles, forms.filter_gradient_taps, 2),
    "output rows in tiles": partial(forms.filter_gradient_tiles, forms.filter_gradient_output_rows, 1),
}
ONLY_STRIDE_1 = {"correlation lax", "correlation patches", "output rows", "output rows in tiles"}


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def assert_close(found, wanted, rtol=RTOL, name=""):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=rtol * max(np.abs(wanted).max(), 1e-30), err_msg=name)


def every_form(x, kernel, gradient, geometry):
    """By name, what each form that fits gives."""
    found = {f"forward {name}": form(x, kernel, geometry) for name, form in FORWARD.items()}
    fits = {*INPUT_GRADIENT, *FILTER_GRADIENT} - (ONLY_STRIDE_1 if geometry.strides != (1, 1) else set())
    found |= {
        f"input {name}": form(gradient, kernel, geometry, forms.image_size(x))
        for name, form in INPUT_GRADIENT.items()
        if name in fits
    }
    return found | {
        f"filter {name}": form(x, gradient, geometry, forms.window_size(kernel))
        for name, form in FILTER_GRADIENT.items()
        if name in fits
    }


def textbook(x, kernel, gradient, geometry):
    """The convolution and its gradients a tap at a time, in float64.

    Not XLA's: in jax 0.11.2 on a CPU, `lax`'s own input gradient is wrong where padding is wider than the kernel
    reaches, e.g. one image row of 1 pixel, a 1×3 kernel and padding (3, 1).
    """
    x, kernel, gradient = (np.asarray(operand, np.float64) for operand in (x, kernel, gradient))
    padded = np.pad(x, ((0, 0), *geometry.padding, (0, 0)))
    y, of_padded, of_kernel = np.zeros_like(gradient), np.zeros_like(padded), np.zeros_like(kernel)
    (P, Q), (sh, sw) = gradient.shape[1:3], geometry.strides
    for i, j in np.ndindex(*kernel.shape[:2]):
        met = np.s_[:, i : i + (P - 1) * sh + 1 : sh, j : j + (Q - 1) * sw + 1 : sw]
        y += padded[met] @ kernel[i, j]
        of_padded[met] += gradient @ kernel[i, j].T
        of_kernel[i, j] = np.einsum("bpqc,bpqk->ck", padded[met], gradient)
    (top, _), (left, _) = geometry.padding
    return {"forward": y, "input": of_padded[:, top:, left:][:, : x.shape[1], : x.shape[2]], "filter": of_kernel}


@st.composite
def problems(draw):
    """Two images of any shape with a kernel that fits, strides and padding of each axis by themselves."""
    window = draw(st.tuples(*[st.sampled_from((1, 2, 3, 5, 7))] * 2))
    strides = draw(st.tuples(*[st.integers(1, 3)] * 2))
    sides = st.tuples(st.integers(0, 4), st.integers(0, 4))
    padding = (draw(sides), draw(sides))
    size = tuple(
        draw(st.integers(max(1, extent - sum(margin)), 9)) for extent, margin in zip(window, padding, strict=True)
    )
    C, K = draw(st.integers(1, 5)), draw(st.integers(1, 5))
    return (2, *size, C), (*window, C, K), Geometry(strides, padding)


@settings(max_examples=10, derandomize=True)
@given(problems())
def test_every_form_is_the_textbooks_convolution(problem):
    x_shape, kernel_shape, geometry = problem
    x, kernel = normal(0, x_shape), normal(1, kernel_shape)
    size = geometry.output_size(forms.image_size(x), forms.window_size(kernel))
    gradient = normal(2, (x_shape[0], *size, kernel_shape[3]))
    # The sums of the forms are tested here, not LLVM's optimiser, which would take half of the time; what it makes of
    # the chosen forms is tested below.
    lowered = jax.jit(partial(every_form, geometry=geometry)).lower(x, kernel, gradient)
    found = lowered.compile(compiler_options={"xla_backend_optimization_level": 0})(x, kernel, gradient)
    wanted = textbook(x, kernel, gradient, geometry)
    for name in found:
        assert_close(found[name], wanted[name.split()[0]], name=f"{name} {problem}")


def value_and_gradients(convolve, x, kernel, gradient):
    y, pullback = jax.vjp(convolve, x, kernel)
    return y, *pullback(gradient.astype(y.dtype))


@pytest.mark.parametrize(
    ("shape", "window", "stride", "K", "padding"),
    [
        ((32, 9, 8, 3), (3, 3), 1, 16, "SAME"),  # a stem: tiles, patches of the input
        ((32, 9, 8, 3), (3, 3), 1, 16, ((0, 2), (1, 0))),
        ((32, 9, 8, 5), (3, 3), 1, 6, "VALID"),  # tiles, patches of the gradient
        ((2, 9, 10, 40), (3, 3), 2, 7, "SAME"),  # columns
        ((2, 9, 10, 40), (3, 3), 2, 7, ((3, 3), (3, 3))),
        ((2, 9, 10, 6), (3, 3), 2, 7, "VALID"),  # phases
        ((2, 9, 10, 6), (3, 3), 2, 7, ((0, 2), (1, 0))),
        ((2, 11, 8, 3), (7, 7), 2, 8, ((3, 3), (3, 3))),
        ((2, 7, 8, 6), (1, 1), 2, 5, "SAME"),
        ((2, 3, 3, 6), (3, 3), 1, 5, ((3, 3), (3, 3))),  # a small map
        ((2, 8, 7, 4), (2, 5), (3, 1), 1, ((0, 2), (1, 0))),
    ],
)
def test_the_chosen_forms_are_xlas_convolution(shape, window, stride, K, padding):
    x, kernel = normal(0, shape), normal(1, (*window, shape[3], K))
    strides = (stride, stride) if isinstance(stride, int) else stride

    def plain(x, kernel):
        return lax.conv_general_dilated(x, kernel, strides, padding, dimension_numbers=forms.NHWC)

    gradient = normal(2, jax.eval_shape(plain, x, kernel).shape)
    ours = jax.jit(partial(value_and_gradients, partial(convolution, stride=stride, padding=padding)))
    wanted = jax.jit(partial(value_and_gradients, plain))(x, kernel, gradient)
    for found, reference in zip(ours(x, kernel, gradient), wanted, strict=True):
        assert_close(found, reference)


@pytest.mark.parametrize(
    ("C", "K", "stride", "platform"),
    [(7, 5, 1, "cpu"), (3, 32, 2, "cpu"), (3, 32, 2, "cuda"), (3, 16, 1, "cpu"), (8, 8, 2, "cuda")],
    indirect=["platform"],
)
def test_bfloat16_is_rounded_once(stride, C, K, platform):
    """Sums are float32, so each result is within half a unit in its last of eight bits: 2⁻⁸ of the exact value."""
    x, kernel = normal(0, (2, 8, 9, C), jnp.bfloat16), normal(1, (3, 3, C, K), jnp.bfloat16)
    gradient = normal(2, (2, -(-8 // stride), -(-9 // stride), K), jnp.bfloat16)
    ours = jax.jit(partial(value_and_gradients, partial(convolution, stride=stride)))
    wide = [operand.astype(jnp.float32) for operand in (x, kernel, gradient)]
    for found, wanted in zip(ours(x, kernel, gradient), ours(*wide), strict=True):
        assert found.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(found, np.float32), wanted, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ("C", "K", "dtype", "padded"),
    [
        (3, 64, "bfloat16", 4),
        (3, 16, "bfloat16", 8),
        (4, 64, "float16", 8),
        (12, 32, "bfloat16", 16),
        (16, 8, "bfloat16", 16),
        (3, 10, "bfloat16", 3),
        (3, 64, "float32", 3),
    ],
)
def test_a_card_gets_channels_that_its_tensor_cores_take(C, K, dtype, padded):
    x, kernel = jnp.zeros((2, 8, 8, C), dtype), jnp.zeros((3, 3, C, K), dtype)

    def step(x, kernel):
        y, pullback = jax.vjp(convolution, x, kernel)
        return y, pullback(y)

    lowered = jax.export.export(jax.jit(step), platforms=["cuda"])(x, kernel).mlir_module()
    lines = [line for line in lowered.splitlines() if "stablehlo.convolution" in line]
    assert len(lines) == 3  # forward and both gradients
    of_images = {int(channels) for line in lines for channels in re.findall(r"tensor<2x8x8x(\d+)x", line)}
    assert of_images == {padded, K}


@pytest.mark.parametrize(
    ("C", "K", "groups", "stride", "platform"),
    [
        (6, 6, 6, 1, "cpu"),  # depthwise
        (6, 12, 6, 2, "cuda"),  # two output channels a channel
        *((48, 24, 12, 1, platform) for platform in ("cpu", "cuda")),  # two blocks of six groups
        (80, 4, 2, 2, "cpu"),  # a group wider than a block
    ],
    indirect=["platform"],
)
def test_groups_are_xlas(C, K, groups, stride, platform):
    x, kernel = normal(0, (2, 9, 8, C), jnp.bfloat16), normal(1, (3, 3, C // groups, K), jnp.bfloat16)
    wide = [operand.astype(jnp.float32) for operand in (x, kernel)]

    def plain(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (stride, stride), "SAME", dimension_numbers=forms.NHWC, feature_group_count=groups
        )

    gradient = normal(2, jax.eval_shape(plain, *wide).shape, jnp.bfloat16)
    ours = partial(convolution, stride=stride, groups=groups)
    wanted = jax.jit(partial(value_and_gradients, plain))(*wide, gradient.astype(jnp.float32))
    for found, reference in zip(jax.jit(partial(value_and_gradients, ours))(*wide, gradient), wanted, strict=True):
        assert_close(found, reference)
    for found, reference in zip(jax.jit(partial(value_and_gradients, ours))(x, kernel, gradient), wanted, strict=True):
        assert found.dtype == jnp.bfloat16
        # Sums are float32, rounded once: half a unit in the last of eight bits.
        np.testing.assert_allclose(np.asarray(found, np.float32), reference, rtol=2**-8, atol=1e-4)


@pytest.mark.parametrize("kernels", [XLA, pytest.param(ONEDNN, marks=needs_onednn)])
def test_stride_and_padding_may_be_numbers_of_numpy(kernels):
    x, kernel = normal(0, (64, 8, 8, 16)), normal(1, (3, 3, 16, 16))
    one: Any = np.int64(1)
    two: Any = np.int32(2)
    with using_kernels(kernels):
        strides: list[Any] = [2, two, (two, two), np.array([2, 2])]
        paddings: list[Any] = [((1, 2), (2, 1)), ((one, two), (two, one)), np.array([[1, 2], [2, 1]])]
        programs = {
            jax.jit(partial(convolution, stride=stride, padding=padding)).lower(x, kernel).as_text()
            for stride in strides
            for padding in paddings
        }
    (program,) = programs
    assert (TARGET in program) == (kernels == ONEDNN)


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"stride": (1, 2, 3)}, "stride must be an integer or (height, width), got (1, 2, 3)"),
        ({"stride": 1.5}, "stride must be an integer or (height, width), got 1.5"),
        ({"stride": "SAME"}, "stride must be an integer or (height, width), got 'SAME'"),
        ({"stride": (2, 0)}, "stride must be at least 1, got (2, 0)"),
        ({"padding": 1}, "((top, bottom), (left, right)) in whole pixels, got 1"),
        ({"padding": (1, 2)}, "((top, bottom), (left, right)) in whole pixels, got (1, 2)"),
        ({"padding": ((1, 1), (1, 1), (5, 5))}, "got ((1, 1), (1, 1), (5, 5))"),
        ({"padding": ((1, 1), (1, 0.5))}, "got ((1, 1), (1, 0.5))"),
        ({"padding": "same"}, "in whole pixels, got 'same'"),
        ({"padding": ((0, 0), (0, -1))}, "padding must be at least 0, got ((0, 0), (0, -1)); crop the input instead"),
    ],
)
def test_another_stride_or_padding_is_refused(given, rule):
    with pytest.raises(ValueError, match=re.escape(rule)):
        convolution(normal(0, (2, 8, 8, 4)), normal(1, (3, 3, 4, 4)), **given)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": (2, 5, 5, 3), "kernel": (3, 3, 4, 2)}, r"with the same C, got \(2, 5, 5, 3\) and \(3, 3, 4, 2\)"),
        ({"x": (5, 5, 3), "kernel": (3, 3, 3, 2)}, r"x \[B,H,W,C\]"),
        ({"x": (2, 5, 5, 6), "kernel": (3, 3, 6, 2), "groups": 2}, r"C/groups,K\] .* \(3, 3, 6, 2\) and 2 groups"),
        ({"x": (2, 5, 5, 6), "kernel": (3, 3, 3, 3), "groups": 2}, "a multiple of its groups, got 3 and 2"),
        ({"x": (2, 5, 5, 6), "kernel": (3, 3, 6, 2), "groups": 0}, "groups must be at least 1, got 0"),
        ({"x": (2, 5, 5, 3), "kernel": (3, 3, 3, 2), "stride": 0}, "stride must be at least 1, got 0"),
        ({"x": (2, 5, 5, 3), "kernel": (3, 3, 3, 2), "padding": "FULL"}, "padding must be \"SAME\", .*, got 'FULL'"),
        ({"x": (2, 5, 5, 3), "kernel": (3, 3, 3, 2), "padding": ((-1, 0), (0, 0))}, "at least 0, got"),
        (
            {"x": (2, 5, 2, 3), "kernel": (3, 3, 3, 2), "padding": "VALID"},
            "3×3 kernel does not fit into an input of 5×2",
        ),
    ],
)
def test_operands_of_unsuitable_shapes_are_refused(arguments, message):
    arguments = dict(arguments)
    x, kernel = jnp.zeros(arguments.pop("x")), jnp.zeros(arguments.pop("kernel"))
    with pytest.raises(ValueError, match=message):
        convolution(x, kernel, **arguments)
    with pytest.raises(ValueError, match="the same dtype, got float32 and bfloat16; cast one"):
        convolution(jnp.zeros((1, 5, 5, 3)), jnp.zeros((3, 3, 3, 2), jnp.bfloat16))
