"""oneDNN's matrix products against float64 within the rounding of their sums, and the layers that use them."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from engine.hlo.kernels import operation_products
from models.kernels import MissingKernelsError, using_kernels
from models.kernels.onednn.handler import TARGET
from models.kernels.onednn.library import Isa, load_library
from models.kernels.onednn.operations import prepare, text_of
from models.kernels.onednn.primitives import Builder
from models.kernels.onednn.products import Product
from models.layers.head import dense
from tests.direct_operations import DTYPES, normal, python_team

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


def test_the_work_of_a_product_is_counted():
    operation = json.loads(text_of(Product("bfloat16", (190, 96), (190, 130), 0, 0)))
    assert operation_products(operation) == 190 * 96 * 130


def gradients(x, kernel, bias, gradient):
    return jax.vjp(dense, x, kernel, bias)[1](gradient)


def of_kernels(kernels, function, *arguments):
    with using_kernels(kernels):
        lowered = jax.jit(function).lower(*arguments)
        return lowered.as_text().count(TARGET), jax.jit(function)(*arguments)


# Elsewhere XLA's products stay.
needs_isa = pytest.mark.skipif(not load_library().has(Isa.AVX512_BF16), reason="needs AVX-512 with bfloat16")


@needs_isa
@pytest.mark.parametrize(("dtype", "K", "calls"), [("bfloat16", 130, 1), ("float32", 130, 1), ("bfloat16", 10, 0)])
def test_the_gradients_of_a_dense_layer_are_xlas(dtype, K, calls):
    x, kernel, bias = normal(0, (190, 96), dtype), normal(1, (96, K)), normal(2, (K,))
    gradient = normal(3, (190, K))
    found_calls, ours = of_kernels("onednn", gradients, x, kernel, bias, gradient)
    none, wanted = of_kernels("xla", gradients, x, kernel, bias, gradient)
    assert (found_calls, none) == (calls, 0)
    for found, reference in zip(ours, wanted, strict=True):
        assert found.dtype == reference.dtype
        # The same rounded operands, in another order of the float32 sums.
        atol = 1e-5 * np.abs(np.asarray(reference, np.float32)).max()
        np.testing.assert_allclose(np.asarray(found, np.float32), np.asarray(reference, np.float32), rtol=0, atol=atol)


@needs_isa
def test_a_program_for_other_platforms_has_no_call():
    with using_kernels("onednn"):
        arguments = normal(0, (190, 96)), normal(1, (96, 130)), normal(2, (130,)), normal(3, (190, 130))
        exported = {
            platform: jax.export.export(
                jax.jit(gradients),
                platforms=[platform],
                disabled_checks=[jax.export.DisabledSafetyCheck.custom_call(TARGET)],
            )(*map(jnp.asarray, arguments))
            for platform in ("cpu", "cuda")
        }
    assert {platform: TARGET in each.mlir_module() for platform, each in exported.items()} == {
        "cpu": True,
        "cuda": False,
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "depth", "columns"), [(8, 1000, 96), (37, 129, 33), (128, 500, 100)])
def test_bits_do_not_depend_on_the_number_of_threads(rows, depth, columns, dtype):
    x, y, found = normal(0, (depth, rows), dtype), normal(1, (depth, columns), dtype), set()
    for num_threads in (1, 2, 3, 16, 64):
        library = replace(load_library(), num_threads=num_threads)
        with library.one_thread():
            primitives = Product(dtype, x.shape, y.shape, 0, 0).build(Builder(library))
        product = np.full((rows, columns), np.nan, np.float32)
        python_team().run(primitives, [x.ctypes.data, y.ctypes.data], [product.ctypes.data])
        found.add(product.tobytes())
    assert len(found) == 1
