"""oneDNN's matrix products against float64 within the rounding of their sums, and the layers that use them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.hlo.program import operation_products
from loopfeed.models.families.vision_transformer import self_attention
from loopfeed.models.kernels import MissingKernelsError, using_kernels
from loopfeed.models.kernels.onednn.library import Isa, load_library
from loopfeed.models.kernels.onednn.operations import BatchedProduct, Product, prepare, text_of
from loopfeed.models.kernels.onednn.primitives import Builder
from loopfeed.models.layers.head import dense
from loopfeed.models.layers.onednn_product import has_faster_batch, has_faster_kernel
from tests.direct_operations import DTYPES, normal, python_team
from tests.kernels import choosing_for

pytestmark = pytest.mark.kernels

try:
    load_library()
except MissingKernelsError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("x_axis", "y_axis"), [(1, 0), (1, 1), (0, 0), (0, 1)])
@pytest.mark.parametrize(
    ("rows", "depth", "columns"), [(1, 1, 1), (3, 17, 5), (8, 1, 9), (1, 64, 48), (37, 129, 33), (130, 64, 10)]
)
def test_each_form_of_a_product_is_exact_up_to_rounding(rows, depth, columns, x_axis, y_axis, dtype):
    x = normal(0, (rows, depth) if x_axis else (depth, rows), dtype)
    y = normal(1, (columns, depth) if y_axis else (depth, columns), dtype)
    found = np.full((rows, columns), np.nan, np.float32)
    primitives = prepare(text_of(Product(dtype, x.shape, y.shape, x_axis, y_axis)))
    python_team().run(primitives, [x.ctypes.data, y.ctypes.data], [found.ctypes.data])
    wide = (x.T if x_axis == 0 else x).astype(np.float64), (y.T if y_axis else y).astype(np.float64)
    sums = np.abs(wide[0]) @ np.abs(wide[1])
    # Each product and addition rounds by at most 2⁻²⁴ of a partial sum.
    assert (np.abs(found - wide[0] @ wide[1]) <= (depth + 1) * 2.0**-24 * sums).all()


def batched(dtype, size, x_axis, y_axis):
    """Operands of products of matrices, and the products and the sums of their sizes in float64."""
    matrices, rows, depth, columns = size
    x = normal(0, (matrices, rows, depth) if x_axis == 2 else (matrices, depth, rows), dtype)
    y = normal(1, (matrices, columns, depth) if y_axis == 2 else (matrices, depth, columns), dtype)
    wide = x.astype(np.float64), y.astype(np.float64)
    factors = wide[0] if x_axis == 2 else wide[0].swapaxes(1, 2), wide[1].swapaxes(1, 2) if y_axis == 2 else wide[1]
    return x, y, factors[0] @ factors[1], np.abs(factors[0]) @ np.abs(factors[1])


def run_batched(operation, x, y, library=None):
    library = library or load_library()
    with library.one_thread():
        primitives = operation.build(Builder(library))
    rows, columns = x.shape[3 - operation.x_axis], y.shape[3 - operation.y_axis]
    found = np.full((len(x), rows, columns), np.nan, jnp.dtype(operation.result_dtype))
    python_team().run(primitives, [x.ctypes.data, y.ctypes.data], [found.ctypes.data])
    return found


@pytest.mark.parametrize(
    ("dtype", "result"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16")]
)
@pytest.mark.parametrize(("x_axis", "y_axis"), [(2, 2), (2, 1), (1, 1), (1, 2)])
@pytest.mark.parametrize("size", [(1, 1, 1, 1), (3, 5, 17, 3), (7, 65, 16, 65), (70, 33, 129, 40)])
def test_each_form_of_a_batch_of_products_is_exact_up_to_rounding(size, x_axis, y_axis, dtype, result):
    x, y, exact, sums = batched(dtype, size, x_axis, y_axis)
    operation = BatchedProduct(dtype, x.shape, y.shape, x_axis, y_axis, result)
    found = run_batched(operation, x, y)
    # Each product and addition rounds by at most 2⁻²⁴ of a partial sum, and a bfloat16 (eight bits) by 2⁻⁸.
    bound = (size[2] + 1) * 2.0**-24 * sums
    if result == "bfloat16":
        bound = bound * (1 + 2.0**-8) + 2.0**-8 * np.abs(exact)
    assert (np.abs(found.astype(np.float64) - exact) <= bound).all()
    assert operation_products(json.loads(text_of(operation))) == np.prod(size)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_a_batch_of_products_do_not_depend_on_the_number_of_threads(dtype):
    x, y, _, _ = batched(dtype, (70, 65, 64, 65), 2, 2)
    operation = BatchedProduct(dtype, x.shape, y.shape, 2, 2, "float32")
    libraries = (replace(load_library(), num_threads=number) for number in (1, 2, 3, 64))
    assert len({run_batched(operation, x, y, library).tobytes() for library in libraries}) == 1


def attention_gradients(qkv, gradient):
    attended, pullback = jax.vjp(lambda qkv: self_attention(qkv, 3), qkv)
    return attended, pullback(gradient)[0]


def gradients(x, kernel, bias, gradient):
    return jax.vjp(dense, x, kernel, bias)[1](gradient)


def of_kernels(kernels, function, *arguments):
    with using_kernels(kernels):
        return jax.jit(function)(*arguments)


ISAS = {Isa.AVX512: {"float32"}, Isa.AVX512_BF16: set(DTYPES), Isa.AMX: set(DTYPES)}


@pytest.mark.parametrize(
    ("dtype", "K", "is_large"), [("bfloat16", 130, True), ("float32", 130, True), ("bfloat16", 10, False)]
)
def test_the_gradients_of_a_dense_layer_are_xlas(dtype, K, is_large):
    x, kernel, bias = normal(0, (190, 96), dtype), normal(1, (96, K)), normal(2, (K,))
    gradient = normal(3, (190, K))
    for isa, dtypes in ISAS.items():
        with choosing_for(isa):
            assert has_faster_kernel(jnp.asarray(x), jnp.asarray(gradient)) == (is_large and dtype in dtypes)
    ours, wanted = (of_kernels(kernels, gradients, x, kernel, bias, gradient) for kernels in ("onednn", "xla"))
    for found, reference in zip(ours, wanted, strict=True):
        assert found.dtype == reference.dtype
        # The same rounded operands, in another order of the float32 sums.
        atol = 1e-5 * np.abs(np.asarray(reference, np.float32)).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(reference, np.float32), rtol=0, atol=atol)


# With many tokens only the products that sum over them, in bfloat16.
@pytest.mark.parametrize(
    ("dtype", "tokens", "is_short"), [("float32", 17, True), ("bfloat16", 17, True), ("bfloat16", 101, False)]
)
def test_attention_and_its_gradients_are_xlas(dtype, tokens, is_short):
    qkv, gradient = normal(0, (2, tokens, 9 * 16), dtype), normal(1, (2, tokens, 3 * 16), dtype)
    scores = jax.ShapeDtypeStruct((6, tokens, tokens), dtype)
    for isa, dtypes in ISAS.items():
        with choosing_for(isa):
            assert has_faster_batch(scores, 1) == (dtype in dtypes)
            assert has_faster_batch(scores, 2) == (dtype in dtypes and is_short)
    ours, wanted = (of_kernels(kernels, attention_gradients, qkv, gradient) for kernels in ("onednn", "xla"))
    # Other orders of float32 sums; in bfloat16 they may round a weight, and then the result, to a neighbour.
    tolerance = 1e-5 if dtype == "float32" else 2.0**-7
    for found, reference in zip(ours, wanted, strict=True):
        assert found.dtype == reference.dtype
        found, reference = (np.asarray(each, np.float32) for each in (found, reference))
        np.testing.assert_allclose(found, reference, rtol=0, atol=tolerance * np.abs(reference).max())
