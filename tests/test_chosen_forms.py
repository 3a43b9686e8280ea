"""The forms that convolutions are said to take, against the primitives that they are traced to on each platform."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest

from models.kernels import ONEDNN
from models.kernels.onednn.library import Isa, load_library
from models.layers import convolution as module
from models.layers.chosen_forms import chosen_forms
from models.layers.convolution_forms import Geometry
from tests.kernels import needs_instructions

# B, size, kernel, stride, C, K, groups, and the names of the three forms on a CPU.
CASES = [
    ((8, 16, 3, 1, 8, 16, 1), ("XLA's own", "correlation", "output rows")),
    ((32, 16, 3, 1, 8, 16, 1), ("XLA's own", "correlation", "output rows in tiles")),
    ((8, 16, 3, 2, 8, 16, 1), ("XLA's own", "phases", "taps")),
    ((8, 16, 3, 2, 64, 16, 1), ("XLA's own", "columns", "taps")),
    ((8, 16, 1, 1, 8, 16, 1), ("patches", "columns", "taps")),
    ((8, 4, 3, 1, 8, 16, 1), ("patches", "columns", "output rows")),
    ((8, 16, 3, 1, 3, 16, 1), ("XLA's own", "correlation", "input rows")),
    ((8, 16, 3, 1, 8, 8, 8), ("depthwise sums",) * 3),
]


def primitives(function, *shapes):
    """Return the names of all primitives that a function is traced to, and how many products there are."""
    jaxpr = jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes))
    found: list[str] = []

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            found.append(equation.primitive.name)
            for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda each: hasattr(each, "eqns")):
                if hasattr(value, "eqns"):
                    walk(value)

    walk(jaxpr)
    return found


@pytest.mark.parametrize(("case", "names"), CASES, ids=[" ".join(map(str, case)) for case, _ in CASES])
def test_the_names_are_those_of_what_is_traced(case, names):
    B, size, window, stride, C, K, groups = case
    x, kernel = (B, size, size, C), (window, window, C // groups, K)
    low = window // 2
    geometry = Geometry((stride, stride), ((low, low), (low, low)))
    found = chosen_forms(x, kernel, geometry, "float32", "cpu")
    assert tuple(each.form for each in found) == names
    assert all(each.reason for each in found)

    forward = primitives(partial(module._forward_cpu, geometry), x, kernel)
    assert ("conv_general_dilated" in forward) == (names[0] == "XLA's own")
    assert ("dot_general" in forward) == (names[0] == "patches")
    size_of_y = geometry.output_size((size, size), (window, window))
    of_input, of_filter = (
        primitives(
            lambda *operands, part=part: module._gradients_cpu(geometry, *operands)[part], x, kernel, (B, *size_of_y, K)
        )
        for part in (0, 1)
    )
    # Both gradients are traced each time: what remains is told by how many of each there are.
    dots = {"taps": window * window, "input rows": window, "output rows": window, "depthwise sums": window * window}
    expected = dots[names[2].removesuffix(" in tiles")] + (names[1] == "columns")
    assert of_filter.count("dot_general") == expected
    assert ("scan" in of_filter) == names[2].endswith("in tiles")
    assert of_input.count("conv_general_dilated") == (names[1] in ("correlation", "phases"))


@pytest.mark.parametrize(
    ("size", "window", "reason"),
    [
        ((8, 8), 9, "the kernel is larger than the map"),
        ((4, 4), 3, "a map of at most 7 px"),
        ((9, 9), 1, "a 1×1 kernel is one product"),
    ],
)
def test_the_reason_of_columns_is_what_chose_them(size, window, reason):
    low = window // 2
    geometry = Geometry((1, 1), ((low, low), (low, low)))
    found = chosen_forms((2, *size, 8), (window, window, 8, 8), geometry, "float32", "cpu")
    assert (found[1].form, found[1].reason) == ("columns", reason)


def test_groups_are_joined_in_blocks():
    forms = chosen_forms((8, 16, 16, 64), (3, 3, 4, 64), Geometry((1, 1), ((1, 1), (1, 1))), "float32", "cpu")
    assert [each.form for each in forms] == [
        "XLA's own, 2 blocks of 8 groups",
        "correlation, 2 blocks of 8 groups",
        "output rows, 2 blocks of 8 groups",
    ]


@pytest.mark.parametrize(
    ("platform", "dtype", "C", "form"),
    [
        ("cuda", "bfloat16", 3, "XLA's own, 3 channels padded to 4"),
        ("cuda", "float32", 3, "XLA's own"),
        ("cuda", "bfloat16", 64, "XLA's own"),
        ("tpu", "bfloat16", 3, "XLA's own"),
    ],
)
def test_other_devices_take_xlas_own(platform, dtype, C, form):
    forms = chosen_forms((8, 32, 32, C), (3, 3, C, 64), Geometry((1, 1), ((1, 1), (1, 1))), dtype, platform)
    assert [each.form for each in forms] == [form] * 3


@needs_instructions(Isa.AVX512_BF16)
def test_the_forms_of_few_positions_in_bfloat16_are_named():
    geometry = Geometry((1, 1), ((1, 1), (1, 1)))
    found = chosen_forms((2, 4, 4, 64), (3, 3, 64, 48), geometry, "bfloat16", "cpu", ONEDNN)
    assert [each.form for each in found[:2]] == ["patches", "columns"]
    assert {each.reason for each in found[:2]} == {"few positions: one product of bfloat16 operands"}
    assert (found[2].form == "oneDNN") == load_library().has(Isa.AMX)
