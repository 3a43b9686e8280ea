"""Floating-point operations and bytes of instructions: counted by hand, and by XLA."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from loopfeed.engine.hlo.text import parse_hlo
from loopfeed.engine.hlo.work import bytes_of, flops_of, products_of
from loopfeed.engine.inspection.steps import Steps


def compiled(function, *arguments):
    found = jax.jit(function).lower(*arguments).compile()
    analysis = found.cost_analysis()
    return parse_hlo(found.as_text() or ""), analysis


def total(program, count):
    return sum(kernel.times * count(program, kernel.instruction) for kernel in Steps(program).kernels)


def ones(*shape, dtype=jnp.float32):
    return jnp.ones(shape, dtype)


PRODUCTS = {
    "matrices": (lambda x, y: x @ y, (ones(5, 7), ones(7, 3)), 2 * 5 * 7 * 3),
    "batched": (lambda x, y: jnp.einsum("bij,bjk->bik", x, y), (ones(4, 5, 7), ones(4, 7, 3)), 2 * 4 * 5 * 7 * 3),
    "elementwise": (lambda x, y: x * y + x, (ones(5, 7), ones(5, 7)), 2 * 35),
    "sum": (lambda x: x.sum(0), (ones(64, 3),), 63 * 3),
    "integers": (lambda x: x * x + 1, (ones(9, dtype=jnp.int32),), 0),
}


@pytest.mark.parametrize(("function", "arguments", "flops"), PRODUCTS.values(), ids=PRODUCTS)
def test_operations_are_those_counted_by_hand(function, arguments, flops):
    program, analysis = compiled(function, *arguments)
    assert total(program, flops_of) == flops
    if flops:
        assert analysis["flops"] == flops


CONVOLUTIONS = {
    "same": {"window_strides": (1, 1), "padding": "SAME"},
    "valid": {"window_strides": (1, 1), "padding": "VALID"},
    "strided": {"window_strides": (2, 2), "padding": ((1, 2), (0, 1))},
    "dilated": {"window_strides": (1, 1), "padding": ((2, 2), (3, 3)), "lhs_dilation": (2, 3)},
    "spread": {"window_strides": (1, 2), "padding": "SAME", "rhs_dilation": (2, 1)},
    "grouped": {"window_strides": (2, 1), "padding": "SAME", "feature_group_count": 2},
    "depthwise": {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4},
}


@pytest.mark.parametrize("values", CONVOLUTIONS.values(), ids=CONVOLUTIONS)
def test_convolutions_are_counted_as_numpy_counts_them(values):
    """A convolution of ones by ones counts, at each position, the products that are not with a zero."""
    groups = values.get("feature_group_count", 1)
    x, kernel = ones(3, 9, 8, 4), ones(3, 3, 4 // groups, 8)

    def convolve(x, kernel):
        return lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **values)

    program, _ = compiled(convolve, x, kernel)
    assert total(program, products_of_all) == int(convolve(x, kernel).sum())


def products_of_all(program, instruction):
    called = instruction.called_as("calls")
    inside = program.computations[called].instructions if called else ()
    return sum(products_of(program, each) for each in (instruction, *inside))


@pytest.mark.parametrize("groups", [1, 2])
def test_gradients_of_a_convolution_are_as_many_products_as_it(groups):
    """Without padding, each product of the forward pass has one in either gradient."""

    def convolve(x, kernel):
        return lax.conv_general_dilated(
            x, kernel, (2, 2), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    def gradients(x, kernel, gradient):
        return jax.vjp(convolve, x, kernel)[1](gradient)

    x, kernel = ones(3, 9, 9, 4), ones(3, 3, 4 // groups, 8)
    program, _ = compiled(gradients, x, kernel, convolve(x, kernel))
    assert total(program, products_of_all) == 2 * 3 * 4 * 4 * 8 * 9 * (4 // groups)


def test_bytes_are_those_of_operands_and_results_and_of_slices_only_the_part():
    program, _ = compiled(lambda x, y: jnp.sin(x) + y, ones(64, 32), ones(64, 32))
    assert total(program, bytes_of) == 3 * 4 * 64 * 32

    program, _ = compiled(lambda x, i: jnp.sin(lax.dynamic_slice_in_dim(x, i, 2)), ones(64, 32), np.int32(3))
    assert total(program, bytes_of) <= 2 * 4 * 2 * 32 + 64

    program, _ = compiled(lambda x: jnp.sin(x[3:5]), ones(64, 32))
    assert total(program, bytes_of) == 2 * 4 * 2 * 32


def test_an_update_in_place_moves_only_the_part():
    def body(carry):
        x, turn = carry
        return lax.dynamic_update_index_in_dim(x, jnp.sin(turn.astype(jnp.float32))[None], turn, 0), turn + 1

    program, _ = compiled(
        lambda x, n: lax.while_loop(lambda c: c[1] < n, body, (x, jnp.int32(0))), ones(4096, 1), np.int32(3)
    )
    looped = [kernel.instruction for kernel in Steps(program).kernels if kernel.is_looped]
    assert 0 < sum(bytes_of(program, each) for each in looped) < 100
