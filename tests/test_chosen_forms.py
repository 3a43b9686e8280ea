"""The forms that convolutions are said to take on each platform, against those that compute them."""

from functools import partial, wraps

import jax
import pytest

from loopfeed.models.kernels import ONEDNN, XLA
from loopfeed.models.layers import convolution as module
from loopfeed.models.layers import convolution_forms
from loopfeed.models.layers.chosen_forms import chosen_forms
from loopfeed.models.layers.convolution_forms import Geometry
from tests.kernels import needs_onednn

pytestmark = pytest.mark.kernels

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


FORMS = {
    "forward_lax": "XLA's own",
    "forward_patches": "patches",
    "input_gradient_columns": "columns",
    "input_gradient_correlation": "correlation",
    "input_gradient_phases": "phases",
    "filter_gradient_taps": "taps",
    "filter_gradient_input_rows": "input rows",
    "filter_gradient_output_rows": "output rows",
    "filter_gradient_tiles": "in tiles",
}


def recorded(form, name, names):
    @wraps(form)
    def record(*arguments):
        names.add(name)
        return form(*arguments)

    return record


@pytest.mark.parametrize(("case", "names"), CASES, ids=[" ".join(map(str, case)) for case, _ in CASES])
def test_the_forms_that_are_named_compute_the_parts(case, names, monkeypatch):
    B, size, window, stride, C, K, groups = case
    low = window // 2
    geometry = Geometry((stride, stride), ((low, low), (low, low)))
    shapes = (B, size, size, C), (window, window, C // groups, K)
    found = chosen_forms(*shapes, geometry, "float32", "cpu")
    assert tuple(each.form for each in found) == names
    assert all(each.reason for each in found)

    ran: set[str] = set()
    for form, name in FORMS.items():
        monkeypatch.setattr(convolution_forms, form, recorded(getattr(convolution_forms, form), name, ran))
    x, kernel, gradient = (
        jax.ShapeDtypeStruct(shape, "float32")
        for shape in (*shapes, (B, *geometry.output_size((size, size), (window, window)), K))
    )
    jax.eval_shape(partial(module._forward_cpu, geometry), x, kernel)
    assert ran == {names[0]} - {"depthwise sums"}
    ran.clear()
    jax.eval_shape(partial(module._gradients_cpu, geometry), x, kernel, gradient)
    # These two convolve in their turn.
    inner = {"XLA's own"} if names[1] in ("correlation", "phases") else set()
    name, _, tiles = names[2].partition(" in ")
    assert ran == {names[1], name, *(["in tiles"] if tiles else [])} - {"depthwise sums"} | inner


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


@needs_onednn
def test_a_part_whose_kernel_is_missing_in_the_end_is_not_said_to_use_it():
    """The gradient of a 5×4 kernel with stride 2 has a fast kernel for its first three columns only."""
    x, kernel, geometry = (2, 11, 9, 17), (5, 4, 1, 17), Geometry((2, 2), ((2, 2), (2, 1)))
    found, xlas = (chosen_forms(x, kernel, geometry, "float32", "cpu", kernels) for kernels in (ONEDNN, XLA))
    assert [each.form for each in found] == ["oneDNN", "oneDNN", "depthwise sums"]
    assert found[2] == xlas[2]
