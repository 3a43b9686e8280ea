"""Calls of oneDNN's kernels in compiled programs are found, named and counted."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from loopfeed import convolution
from loopfeed.engine.compilation.ahead_of_time import compile_traced, trace_ahead
from loopfeed.engine.hlo.program import KERNEL_TARGET, is_kernel, kernel_flops, kernel_operation
from loopfeed.engine.hlo.text import parse_hlo
from loopfeed.engine.hlo.work import bytes_of, flops_of
from loopfeed.engine.profile.attribution import operations_of
from loopfeed.engine.runtime.slow_operations import find_slow_operations
from loopfeed.engine.scopes import parse_op_name
from loopfeed.models.kernels import ONEDNN, using_kernels
from loopfeed.models.kernels.onednn.handler import TARGET
from loopfeed.models.layers.chosen_forms import FILTER_GRADIENT, FORWARD, INPUT_GRADIENT, chosen_forms
from loopfeed.models.layers.convolution_forms import Geometry
from tests.kernels import needs_onednn, onednn_for_all_shapes

pytestmark = pytest.mark.kernels

B, SIZE, C, K, STRIDE = 32, 11, 4, 6, 2
X, KERNEL = jnp.ones((B, SIZE, SIZE, C)), jnp.ones((3, 3, C, K))


@pytest.fixture(scope="module", autouse=True)
def _onednn_for_all_shapes():
    with onednn_for_all_shapes():
        yield


def loss(x, kernel):
    with jax.named_scope("train"), jax.named_scope("forward"), jax.named_scope("conv1"):
        return (convolution(x, kernel, stride=STRIDE) ** 2).sum()


@pytest.fixture(scope="module")
def compiled():
    """Return a compiled loop with the three parts of a convolution."""

    def program(count, x, kernel):
        def step(_, carry):
            with using_kernels(ONEDNN):
                of_x, of_kernel = jax.grad(loss, (0, 1))(*carry)
            return carry[0] + of_x, carry[1] + of_kernel

        return lax.fori_loop(0, count, step, (x, kernel))

    return compile_traced(trace_ahead(program, jnp.int32(2), X, KERNEL, platform="cpu"))


@needs_onednn
def test_each_call_says_what_it_computes_and_belongs_to_its_layer(compiled):
    text = compiled.call.as_text()
    program = parse_hlo(text)
    calls = [each for each in program.instructions.values() if is_kernel(each)]
    assert [each.target for each in calls] == [KERNEL_TARGET] * 3
    found = {kernel_operation(each)["part"]: parse_op_name(program.op_name_of(each)) for each in calls}
    assert {part: (scope.action, scope.path) for part, scope in found.items()} == {
        "forward": ("forward", "conv1"),
        "input gradient": ("backward", "conv1"),
        "filter gradient": ("backward", "conv1"),
    }
    operations = operations_of(program)
    for each in calls:
        operation = operations[each.name]
        assert (operation.is_container, operation.calls_host) == (False, False)
    assert find_slow_operations(text, is_cpu=True) == ()


@needs_onednn
def test_their_work_is_counted_from_what_they_say(compiled):
    # A sum over ones counts the products, without those with padding.
    axes = ("NHWC", "HWIO", "NHWC")
    counted = int(lax.conv_general_dilated(X, KERNEL, (STRIDE, STRIDE), "SAME", dimension_numbers=axes).sum())
    text = compiled.call.as_text() or ""
    program = parse_hlo(text)
    calls = [each for each in program.instructions.values() if is_kernel(each)]
    assert [flops_of(program, each) for each in calls] == [2 * counted] * 3
    assert kernel_flops(text) == 6 * counted
    assert compiled.step_flops == pytest.approx(compiled.call.cost_analysis()["flops"] + 6 * counted)
    forward = next(each for each in calls if kernel_operation(each)["part"] == "forward")
    assert bytes_of(program, forward) == 4 * (X.size + KERNEL.size + B * 6 * 6 * K)


@needs_onednn
@pytest.mark.parametrize("groups", [1, 2])
def test_the_forms_that_are_named_are_those_that_are_traced(groups):
    x, kernel = (B, SIZE, SIZE, C), (3, 3, C // groups, K)
    geometry = Geometry((1, 1), ((1, 1), (1, 1)))
    forms = chosen_forms(x, kernel, geometry, "float32", "cpu", ONEDNN)
    assert [each.part for each in forms] == [FORWARD, INPUT_GRADIENT, FILTER_GRADIENT]
    with using_kernels(ONEDNN):
        conv = partial(convolution, padding=geometry.padding, groups=groups)
        arrays = jnp.zeros(x), jnp.zeros(kernel)
        texts = [
            jax.jit(function).lower(*arrays).compile().as_text()
            for function in (
                conv,
                jax.grad(lambda x, kernel: conv(x, kernel).sum(), 0),
                jax.grad(lambda x, kernel: conv(x, kernel).sum(), 1),
            )
        ]
    for form, text in zip(forms, texts, strict=True):
        assert (form.form == "oneDNN") == (TARGET in str(text))
        assert form.reason
    assert chosen_forms(x, kernel, geometry, "float16", "cpu", ONEDNN) == chosen_forms(
        x, kernel, geometry, "float16", "cpu"
    )
