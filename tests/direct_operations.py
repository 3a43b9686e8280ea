"""Operations of oneDNN run on NumPy arrays without XLA, and what they must give, for the tests of the kernels."""

import ctypes
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np

from loopfeed.models.kernels.onednn.convolutions import Convolution, Part, padding_of_product
from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.kernels.onednn.operations import prepare, text_of
from loopfeed.models.kernels.onednn.primitives import Primitives
from loopfeed.models.kernels.onednn.team import PythonTeam
from loopfeed.models.layers.convolution_forms import Geometry

DTYPES = ("float32", "bfloat16")
PARTS = (Part.FORWARD, Part.INPUT_GRADIENT, Part.FILTER_GRADIENT)


def normal(seed: int, shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


class Problem:
    """A convolution with operands: `x`, `kernel` and the `gradient` of the result.

    Args:
        x: shape `[B,H,W,C]`.
        kernel: shape `[kh,kw,C/groups,K]`.
        geometry: strides and padding.
        dtype: of all arrays.
    """

    def __init__(self, x: tuple[int, ...], kernel: tuple[int, ...], geometry: Geometry, dtype: str) -> None:
        P, Q = geometry.output_size((x[1], x[2]), (kernel[0], kernel[1]))
        self.geometry, self.dtype = geometry, dtype
        self.groups = x[3] // kernel[2]
        self.x, self.kernel = normal(0, x, dtype), normal(1, kernel, dtype)
        self.gradient = normal(2, (x[0], P, Q, kernel[3]), dtype)

        self.product_padding = padding_of_product(x, self.gradient.shape, *geometry)

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that oneDNN computes right, and the one that it has only without groups."""
        by_product = (Part.FILTER_GRADIENT_BY_PRODUCT,) if self.groups == 1 else ()
        return (*(part for part in PARTS if not self.operation(part).is_wrong_in_library()), *by_product)

    def operation(self, part: Part) -> Convolution:
        x, padding = self.x, self.geometry.padding
        if part == Part.FILTER_GRADIENT_BY_PRODUCT:
            x, padding = self._padded(), self.product_padding
        shapes = x.shape, self.kernel.shape, self.gradient.shape
        return Convolution(str(part), self.dtype, *shapes, self.geometry.strides, padding)

    def _padded(self) -> np.ndarray:
        return np.pad(self.x, ((0, 0), *self.product_padding, (0, 0)))

    def operands(self, part: Part) -> tuple[np.ndarray, np.ndarray]:
        if part == Part.FILTER_GRADIENT_BY_PRODUCT:
            return self._padded(), self.gradient
        return {
            Part.FORWARD: (self.x, self.kernel),
            Part.INPUT_GRADIENT: (self.gradient, self.kernel),
            Part.FILTER_GRADIENT: (self.x, self.gradient),
        }[part]

    def result_dtype(self, part: Part) -> np.dtype:
        return np.dtype(np.float32) if part == Part.FILTER_GRADIENT_BY_PRODUCT else self.x.dtype

    def result_shape(self, part: Part) -> tuple[int, ...]:
        return {
            Part.FORWARD: self.gradient.shape,
            Part.INPUT_GRADIENT: self.x.shape,
            Part.FILTER_GRADIENT: self.kernel.shape,
            Part.FILTER_GRADIENT_BY_PRODUCT: self.kernel.shape,
        }[part]

    def num_terms(self, part: Part) -> int:
        """Return how many products at most an element of the result is the sum of."""
        kh, kw, C, K = self.kernel.shape
        B, P, Q, _ = self.gradient.shape
        return {
            Part.FORWARD: kh * kw * C,
            Part.INPUT_GRADIENT: kh * kw * K // self.groups,
            Part.FILTER_GRADIENT: B * P * Q,
            Part.FILTER_GRADIENT_BY_PRODUCT: B * P * Q,
        }[part]

    def expected(self) -> tuple[dict[Part, np.ndarray], dict[Part, np.ndarray]]:
        """Return each part in float64, and the sums of the sizes of its products."""
        arrays = [np.asarray(each, np.float64) for each in (self.x, self.kernel, self.gradient)]
        return self._textbook(*arrays), self._textbook(*map(np.abs, arrays))

    def _textbook(self, x: np.ndarray, kernel: np.ndarray, gradient: np.ndarray) -> dict[Part, np.ndarray]:
        """Sum a tap at a time, the groups side by side."""
        G, (P, Q), (sh, sw) = self.groups, gradient.shape[1:3], self.geometry.strides
        padded = _apart(np.pad(x, ((0, 0), *self.geometry.padding, (0, 0))), G)
        kernels, gradients = _apart(kernel, G), _apart(gradient, G)
        y, of_padded, of_kernel = np.zeros_like(gradients), np.zeros_like(padded), np.zeros_like(kernels)
        for i, j in np.ndindex(*kernel.shape[:2]):
            met = np.s_[:, :, i : i + (P - 1) * sh + 1 : sh, j : j + (Q - 1) * sw + 1 : sw]
            taps, tap = padded[met], kernels[:, None, i, j]
            y += taps @ tap[:, :, None]
            of_padded[met] += gradients @ tap[:, :, None].swapaxes(-1, -2)
            rows = (G, -1, taps.shape[-1]), (G, -1, gradients.shape[-1])
            of_kernel[:, i, j] = taps.reshape(rows[0]).swapaxes(1, 2) @ gradients.reshape(rows[1])
        (top, _), (left, _) = self.geometry.padding
        of_x = _joined(of_padded)[:, top:, left:][:, : x.shape[1], : x.shape[2]]
        return {
            Part.FORWARD: _joined(y),
            Part.INPUT_GRADIENT: of_x,
            Part.FILTER_GRADIENT: _joined(of_kernel),
            Part.FILTER_GRADIENT_BY_PRODUCT: _joined(of_kernel),
        }

    def check(self, part: Part, found: np.ndarray, exact: dict[Part, np.ndarray], sums: dict[Part, np.ndarray]) -> None:
        """Assert that a result is a float32 sum of the products in any order, rounded once to the dtype."""
        # Each product and addition rounds by at most 2⁻²⁴ of a partial sum, and a bfloat16 (eight bits) by 2⁻⁸.
        bound = (self.num_terms(part) + 1) * 2.0**-24 * sums[part]
        if self.result_dtype(part) == jnp.bfloat16:
            bound = bound * (1 + 2.0**-8) + 2.0**-8 * np.abs(exact[part])
        error = np.abs(found.astype(np.float64) - exact[part])
        assert np.isfinite(error).all(), self.operation(part)
        assert (error <= bound).all(), f"{self.operation(part)}: {np.max(error - bound)} beyond its bound"


def _apart(array: np.ndarray, groups: int) -> np.ndarray:
    """Bring groups of the last axis to the front."""
    return np.stack(np.split(array, groups, axis=-1))


def _joined(array: np.ndarray) -> np.ndarray:
    return np.concatenate(list(array), axis=-1)


@cache
def python_team() -> PythonTeam:
    return PythonTeam(load_library())


def run_directly(
    operation: Any, operands: tuple[np.ndarray, ...], *shapes: tuple[int, ...], dtype: Any = None
) -> list[np.ndarray]:
    """Run an operation as a program would; see `run_primitives`."""
    return run_primitives(prepare(text_of(operation)), operands, *shapes, dtype=dtype)


def run_primitives(
    primitives: Primitives, operands: tuple[np.ndarray, ...], *shapes: tuple[int, ...], dtype: Any = None
) -> list[np.ndarray]:
    """Run primitives; results have this dtype, or that of the first operand. They and the arena are NaN beforehand."""
    team = python_team()
    team._grow(max(primitives.arena_bytes, 1))
    ctypes.memset(team._arena_address, 0xFF, primitives.arena_bytes)
    results = [np.full(shape, np.nan, dtype or operands[0].dtype) for shape in shapes]
    team.run(primitives, [each.ctypes.data for each in operands], [each.ctypes.data for each in results])
    return results


def run_part(problem: Problem, part: Part) -> np.ndarray:
    shape, dtype = problem.result_shape(part), problem.result_dtype(part)
    return run_directly(problem.operation(part), problem.operands(part), shape, dtype=dtype)[0]
