"""oneDNN's convolutions: each part against float64 within the rounding of its sums, for every shape that is in use."""

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from loopfeed.models.families.convnext import ConvNeXt
from loopfeed.models.kernels import ONEDNN, MissingKernelsError, using_kernels
from loopfeed.models.kernels.onednn.convolutions import Part
from loopfeed.models.kernels.onednn.library import Isa, load_library
from loopfeed.models.kernels.onednn.operations import build, has_fast_kernel
from loopfeed.models.kernels.onednn.primitives import Builder
from loopfeed.models.layers.chosen_forms import chosen_forms
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.convolution_forms import Geometry
from loopfeed.models.registry import at_image_size, family_of, networks
from tests.direct_operations import DTYPES, PARTS, Problem, normal, run_part, run_primitives
from tests.kernels import choosing_for
from tests.test_convolution import problems, value_and_gradients

pytestmark = pytest.mark.kernels

try:
    load_library()
except MissingKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)

SAME, NONE = ((1, 1), (1, 1)), ((0, 0), (0, 0))
ODD = [
    # x, kernel, strides, padding
    ((1, 5, 7, 1), (3, 3, 1, 1), (1, 1), SAME),
    ((2, 9, 8, 3), (3, 3, 3, 17), (2, 2), SAME),
    ((1, 9, 8, 17), (3, 3, 17, 3), (1, 1), SAME),
    ((2, 2, 3, 5), (7, 7, 5, 6), (1, 1), ((3, 3), (3, 3))),  # a kernel larger than the map
    ((2, 1, 1, 16), (3, 3, 16, 32), (1, 1), SAME),
    ((1, 10, 11, 8), (3, 3, 8, 16), (3, 3), NONE),
    ((2, 8, 7, 16), (2, 5, 16, 16), (3, 1), ((0, 2), (1, 0))),
    ((2, 6, 6, 4), (3, 3, 4, 8), (2, 2), ((0, 1), (0, 1))),
    ((3, 7, 7, 64), (1, 1, 64, 33), (1, 1), NONE),
    ((37, 6, 5, 16), (3, 3, 16, 16), (1, 1), SAME),  # tasks of one image more than others
    ((2, 9, 7, 32), (1, 1, 32, 16), (3, 2), NONE),
    ((1, 3, 3, 16), (3, 3, 16, 16), (1, 1), ((4, 4), (4, 4))),  # rows of padding alone
    ((2, 6, 6, 48), (3, 3, 4, 24), (1, 1), SAME),  # twelve groups
    ((2, 7, 6, 17), (3, 3, 1, 17), (1, 1), SAME),  # depthwise
    ((1, 7, 6, 16), (5, 3, 1, 32), (2, 1), SAME),  # two output channels a channel
    ((1, 4, 4, 6), (7, 7, 1, 6), (1, 1), ((3, 3), (3, 3))),
]


def check(x, kernel, geometry, *, may_be_refused=True):
    for dtype in DTYPES:
        problem = Problem(x, kernel, geometry, dtype)
        assert problem.parts
        assert may_be_refused or set(PARTS) <= set(problem.parts)
        exact, sums = problem.expected()
        for part in problem.parts:
            problem.check(part, run_part(problem, part), exact, sums)


@pytest.mark.parametrize(("x", "kernel", "strides", "padding"), ODD)
def test_each_part_of_an_odd_convolution_is_exact_up_to_rounding(x, kernel, strides, padding):
    check(x, kernel, Geometry(strides, padding))


@settings(max_examples=15, derandomize=True)
@given(problems())
def test_each_part_of_any_convolution_is_exact_up_to_rounding(problem):
    check(*problem)


def shapes_of(net, image_size, monkeypatch):
    """Return the shapes and geometries of all convolutions of a network for one image."""
    found: dict[Any, None] = {}

    def record(_, geometry, x, kernel):
        size = geometry.output_size(x.shape[1:3], kernel.shape[:2])
        found[(x.shape, kernel.shape, geometry)] = None
        return jnp.zeros((x.shape[0], *size, kernel.shape[3]), x.dtype)

    monkeypatch.setattr("loopfeed.models.layers.convolution._convolution", record)
    net = at_image_size(net, image_size)
    family = family_of(net)
    init, apply = partial(family.init, net, 10), partial(family.apply, net, train=True, dtype=jnp.dtype("float32"))
    images = jax.ShapeDtypeStruct((1, image_size, image_size, 3), jnp.float32)
    jax.eval_shape(apply, *jax.eval_shape(init, jax.random.key(0)), images)
    return list(found)


@pytest.mark.usefixtures("untraced_blocks")
@pytest.mark.parametrize(
    ("net", "image_size"),
    [
        (networks()["resnet8"], 32),
        (networks()["convnet8"], 31),
        (ConvNeXt(depths=(1, 1), widths=(96, 192)), 32),
    ],
    ids=["resnet8", "convnet8", "convnext"],
)
def test_the_convolutions_of_small_networks_are_exact_up_to_rounding(monkeypatch, net, image_size):
    shapes = shapes_of(net, image_size, monkeypatch)
    assert len(shapes) >= 2
    for shape in shapes:
        check(*shape, may_be_refused=False)


@pytest.mark.integration
@pytest.mark.usefixtures("untraced_blocks")
def test_every_convolution_of_the_registry_is_exact_up_to_rounding(monkeypatch):
    shapes: dict[Any, None] = {}
    # Deeper networks have the same shapes as these.
    for name in ("resnet20", "convnet8", "convnet8-wide"):
        shapes |= dict.fromkeys(shapes_of(networks()[name], 32, monkeypatch))
    for name in ("resnet18", "resnet50", "resnet50-d", "resnet50-xlajl", "convnext-tiny"):
        shapes |= dict.fromkeys(shapes_of(networks()[name], 64, monkeypatch))
    assert len(shapes) == 62
    for shape in shapes:
        check(*shape, may_be_refused=False)


def of_kernels(kernels, function, *arguments):
    with using_kernels(kernels):
        return jax.jit(function)(*arguments)


def step_of(problem):
    """Return the program of a problem, which takes `x`, `kernel` and `gradient` and returns all parts."""
    strides, padding = problem.geometry
    return partial(value_and_gradients, partial(convolution, stride=strides, padding=padding, groups=problem.groups))


def operands_of(problem):
    return problem.x, problem.kernel, problem.gradient


def check_in_program(problem):
    exact, sums = problem.expected()
    for part, found in zip(PARTS, of_kernels("onednn", step_of(problem), *operands_of(problem)), strict=True):
        assert found.dtype == problem.x.dtype
        problem.check(part, np.asarray(found), exact, sums)


def forms_of(problem):
    """Return the chosen form of each part of a problem with oneDNN's kernels."""
    return chosen_forms(problem.x.shape, problem.kernel.shape, problem.geometry, problem.dtype, "cpu", ONEDNN)


def check_chosen(problem, parts):
    """Assert that oneDNN computes these parts, F(orward), I(nput) and K(ernel), where it is fast for the dtype."""
    is_fast = load_library().supports(problem.dtype)
    names = "".join(name for name, each in zip("FIK", forms_of(problem), strict=True) if each.form == "oneDNN")
    assert names == (parts if is_fast else "")


@pytest.mark.parametrize(
    ("shape", "window", "stride", "K", "groups"),
    [((9, 16, 15, 32), (3, 3), 2, 64, 1), ((4, 15, 16, 64), (1, 1), 1, 128, 1), ((2, 9, 8, 32), (3, 3), 1, 32, 32)],
)
def test_a_convolution_in_a_program_is_that_of_xlas_forms(shape, window, stride, K, groups):
    x, kernel = normal(0, shape), normal(1, (*window, shape[3] // groups, K))
    step = partial(value_and_gradients, partial(convolution, stride=stride, groups=groups))
    gradient = normal(2, (shape[0], -(-shape[1] // stride), -(-shape[2] // stride), K))
    ours, wanted = (of_kernels(kernels, step, x, kernel, gradient) for kernels in ("onednn", "xla"))
    for found, reference in zip(ours, wanted, strict=True):
        # Two orders of the same float32 sums of at most a few thousand products.
        np.testing.assert_allclose(found, reference, rtol=0, atol=1e-5 * np.abs(reference).max())


PRODUCT = "one product of patches and gradient"
FEW = "few positions: one product of bfloat16 operands"


@pytest.mark.parametrize(
    ("window", "stride", "xlas"), [((3, 3), 1, "output rows"), ((3, 3), 2, "taps"), ((1, 1), 2, "taps")]
)
def test_few_positions_in_bfloat16_are_products_chosen_by_instruction_set(window, stride, xlas):
    """The filter gradient is one product with AMX only: where it was measured without, it was no faster."""
    padding = SAME if window == (3, 3) else NONE
    problem = Problem((4, 4, 4, 64), (*window, 64, 48), Geometry((stride, stride), padding), "bfloat16")
    for isa in (Isa.AVX512, Isa.AVX512_BF16, Isa.AMX):
        with choosing_for(isa):
            forward, of_input, of_filter = forms_of(problem)
        assert (forward.form, of_input.form) == ("patches", "columns")
        assert (forward.reason == FEW, of_input.reason == FEW) == ((isa != Isa.AVX512,) * 2)
        assert of_filter.form == ("oneDNN" if isa == Isa.AMX else xlas)
        assert of_filter.reason.startswith(PRODUCT) == (isa == Isa.AMX)
    check_in_program(problem)


@pytest.mark.parametrize(
    ("x", "kernel", "stride", "padding", "by_product"),
    [
        ((4, 16, 16, 64), (3, 3, 64, 64), 1, SAME, False),
        ((8, 7, 7, 64), (3, 3, 64, 48), 1, SAME, True),
        ((8, 13, 11, 32), (3, 3, 32, 48), 2, SAME, True),
        ((8, 15, 16, 64), (1, 1, 64, 32), 1, NONE, True),
        ((8, 15, 16, 64), (1, 1, 64, 32), 2, NONE, True),  # an odd height, whose last stride is not whole
        ((9, 15, 16, 64), (1, 1, 64, 32), 2, NONE, True),
        ((16, 2, 2, 64), (3, 3, 64, 48), 1, SAME, True),  # few positions
        ((8, 5, 4, 64), (1, 1, 64, 48), 2, NONE, True),
    ],
)
def test_a_bfloat16_convolution_in_a_program_is_exact_up_to_rounding(x, kernel, stride, padding, by_product):
    problem = Problem(x, kernel, Geometry((stride, stride), padding), "bfloat16")
    for isa in (Isa.AVX512_BF16, Isa.AMX):
        with choosing_for(isa):
            assert forms_of(problem)[2].reason.startswith(PRODUCT) == (by_product and isa == Isa.AMX)
    check_in_program(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x", "window", "stride", "parts"),
    [
        ((2, 9, 8, 17), (3, 3), 1, "FIK"),
        ((1, 9, 8, 3), (3, 3), 2, "FIK"),
        ((2, 9, 10, 32), (7, 7), 1, "FIK"),  # the gradient of seven columns, three at a time
        ((3, 4, 3, 48), (7, 7), 1, "FIK"),  # a kernel larger than the map
        ((2, 11, 9, 17), (5, 4), 2, "FI"),  # no fast kernel for this gradient of the kernel
        ((2, 1, 1, 32), (7, 7), 1, ""),
        ((2, 9, 8, 16), (3, 3), 3, "FIK"),
    ],
)
def test_a_depthwise_convolution_in_a_program_is_exact_up_to_rounding(x, window, stride, parts, dtype):
    (top, bottom), (left, right) = ((size // 2, (size - 1) // 2) for size in window)
    padding = (top, bottom), (left, right)
    problem = Problem(x, (*window, 1, x[3]), Geometry((stride, stride), padding), dtype)
    check_chosen(problem, parts)
    check_in_program(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x", "kernel", "stride", "parts"),
    [
        ((6, 15, 14, 96), (3, 3, 8, 48), 2, "FIK"),
        ((8, 12, 11, 34), (5, 5, 2, 34), 1, "FIK"),
        ((4, 16, 16, 96), (1, 1, 32, 48), 1, "FIK"),
        ((9, 14, 13, 48), (3, 3, 3, 64), 1, "FIK"),  # two blocks of eight groups
        ((9, 14, 13, 24), (3, 3, 6, 24), 1, "FIK"),  # one block
        ((16, 3, 3, 64), (7, 7, 16, 64), 1, "FIK"),  # a kernel larger than the map
        ((2, 6, 6, 24), (3, 3, 8, 24), 1, ""),  # too few products
        ((8, 14, 14, 48), (3, 3, 1, 96), 1, ""),  # two output channels a group
    ],
)
def test_a_grouped_convolution_in_a_program_is_exact_up_to_rounding(x, kernel, stride, parts, dtype):
    low = kernel[0] // 2
    padding = (low, low), (low, low)
    problem = Problem(x, kernel, Geometry((stride, stride), padding), dtype)
    check_chosen(problem, parts)
    check_in_program(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x", "kernel", "stride", "across"),
    [
        ((600, 1, 1, 8), (3, 3, 8, 32), 1, (1, 1)),
        ((300, 4, 1, 16), (3, 3, 16, 32), 2, (1, 1)),
        ((300, 2, 2, 32), (5, 4, 32, 16), 3, (0, 2)),
        ((700, 4, 1, 16), (3, 3, 4, 32), 2, (1, 1)),  # four groups
        ((16, 3, 3, 64), (7, 7, 16, 64), 1, (3, 3)),  # four groups
        ((9, 5, 1, 22), (3, 3, 1, 22), 2, (1, 1)),  # depthwise
    ],
)
def test_the_gradient_of_a_column_that_meets_only_padding_is_zero(x, kernel, stride, across, dtype):
    low = kernel[0] // 2
    padding = (low, low), across
    problem = Problem(x, kernel, Geometry((stride, stride), padding), dtype)
    # The memory that the kernels share now holds numbers that no gradient may contain: a kernel in another layout.
    of_kernels("onednn", convolution, jnp.ones((4, 16, 16, 256), dtype), jnp.full((3, 3, 256, 256), np.nan, dtype))
    assert (problem.expected()[0][Part.FILTER_GRADIENT] == 0).all((0, 2, 3)).any()
    check_in_program(problem)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x", "kernel", "strides", "padding"),
    [
        ((600, 8, 9, 16), (5, 5, 16, 16), (4, 4), ((2, 2), (3, 0))),  # three columns on the right are never read
        ((600, 8, 9, 16), (5, 5, 4, 24), (4, 4), ((2, 2), (3, 0))),
        ((600, 8, 13, 16), (8, 8, 4, 32), (5, 5), ((2, 2), (4, 0))),
        ((9, 8, 9, 16), (5, 5, 1, 16), (4, 4), ((2, 2), (3, 0))),
        ((4, 11, 48, 512), (2, 3, 512, 16), (3, 1), NONE),  # each third row is never read
        ((16, 14, 14, 48), (2, 2, 48, 24), (2, 2), NONE),  # two columns as 96 channels
        ((16, 24, 24, 16), (4, 4, 16, 24), (4, 4), NONE),  # four columns as 64 channels
    ],
)
def test_what_the_library_computes_wrong_is_right_in_a_program(x, kernel, strides, padding, dtype):
    check_in_program(Problem(x, kernel, Geometry(strides, padding), dtype))


WRONG = [
    # part, x, kernel, strides, padding
    (Part.FILTER_GRADIENT, (2, 4, 1, 16), (3, 3, 16, 32), (2, 2), SAME),
    (Part.FILTER_GRADIENT, (2, 4, 2, 16), (1, 3, 4, 32), (1, 3), SAME),
    (Part.FORWARD, (2, 8, 9, 16), (5, 5, 16, 16), (4, 4), ((2, 2), (3, 0))),
    (Part.FORWARD, (2, 8, 13, 16), (8, 8, 4, 8), (5, 5), ((2, 2), (4, 0))),
    (Part.FORWARD, (2, 12, 48, 512), (2, 3, 512, 16), (3, 1), NONE),
    (Part.FORWARD, (2, 4, 48, 320), (1, 8, 320, 16), (4, 8), ((0, 2), (0, 0))),
    (Part.FORWARD, (2, 8, 8, 48), (2, 2, 48, 16), (2, 2), NONE),
    (Part.FORWARD, (2, 8, 8, 16), (4, 4, 16, 16), (4, 4), NONE),
    (Part.FORWARD, (2, 8, 8, 24), (1, 8, 24, 16), (1, 4), NONE),
]


@pytest.mark.parametrize(("part", "x", "kernel", "strides", "padding"), WRONG)
def test_what_the_library_computes_wrong_in_bfloat16_is_refused(part, x, kernel, strides, padding):
    operation = Problem(x, kernel, Geometry(strides, padding), "bfloat16").operation(part)
    with pytest.raises(RuntimeError, match="oneDNN computes this wrong in bfloat16; use XLA's form: Convolution"):
        build(operation)
    assert not has_fast_kernel(operation)
    assert not replace(operation, dtype="float32").is_wrong_in_library()


@pytest.mark.parametrize(
    ("part", "x", "kernel", "strides", "padding"),
    [
        (Part.FILTER_GRADIENT, (2, 2, 2, 16), (3, 3, 16, 32), (2, 2), SAME),
        (Part.FORWARD, (2, 8, 224, 3), (7, 7, 3, 64), (4, 4), ((3, 3), (3, 3))),
        (Part.FORWARD, (2, 8, 32, 16), (3, 3, 16, 16), (2, 2), SAME),
        (Part.FORWARD, (2, 8, 31, 16), (3, 3, 16, 16), (2, 2), SAME),
        (Part.FORWARD, (2, 8, 31, 48), (1, 1, 48, 16), (2, 2), NONE),
        (Part.FORWARD, (2, 8, 8, 96), (2, 2, 96, 16), (2, 2), NONE),
        (Part.FORWARD, (2, 8, 8, 16), (2, 2, 16, 16), (2, 2), NONE),
        (Part.FORWARD, (2, 224, 224, 3), (4, 4, 3, 96), (4, 4), NONE),
    ],
)
def test_what_the_library_computes_right_in_bfloat16_is_not_refused(part, x, kernel, strides, padding):
    assert not Problem(x, kernel, Geometry(strides, padding), "bfloat16").operation(part).is_wrong_in_library()


def test_the_gradients_are_finite_differences():
    """A convolution is linear in each operand, so that a difference over any distance is its derivative."""
    problem = Problem((4, 16, 16, 64), (3, 3, 64, 64), Geometry((1, 1), SAME), "float32")
    along_x, along_kernel = normal(3, problem.x.shape), normal(4, problem.kernel.shape)

    def loss(x, kernel):
        return (convolution(x, kernel) * problem.gradient).sum()

    def differences(x, kernel):
        both = (loss(x + along_x, kernel), loss(x - along_x, kernel), loss(x, kernel + along_kernel))
        return (both[0] - both[1]) / 2, both[2] - loss(x, kernel)

    of_x, of_kernel = of_kernels("onednn", jax.grad(loss, (0, 1)), problem.x, problem.kernel)
    wanted = of_kernels("onednn", differences, problem.x, problem.kernel)
    found = (of_x * along_x).sum(), (of_kernel * along_kernel).sum()
    # Sums of 65,536 values of size 600 in float32, of both signs.
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6 * 600 * 65536)
    assert min(map(abs, wanted)) > 1e-3 * 600 * 65536**0.5


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("x", "kernel", "stride"),
    [
        ((19, 8, 8, 16), (3, 3, 16, 24), 1),
        ((6, 15, 15, 8), (1, 1, 8, 64), 2),
        ((1, 7, 7, 40), (3, 3, 40, 1), 1),
        ((11, 12, 9, 17), (3, 3, 1, 17), 1),
        ((5, 8, 9, 32), (7, 3, 1, 32), 1),
    ],
)
def test_bits_do_not_depend_on_the_number_of_threads(x, kernel, stride, dtype):
    down, across = kernel[0] // 2, kernel[1] // 2
    problem = Problem(x, kernel, Geometry((stride, stride), ((down, down), (across, across))), dtype)
    for part in problem.parts:
        found = set()
        for num_threads in (1, 2, 3, 16):
            library = replace(load_library(), num_threads=num_threads)
            with library.one_thread():
                primitives = problem.operation(part).build(Builder(library))
            shape, result_dtype = problem.result_shape(part), problem.result_dtype(part)
            found.add(run_primitives(primitives, problem.operands(part), shape, dtype=result_dtype)[0].tobytes())
        assert len(found) == 1, part
