"""Run operations of oneDNN between pages that may not be touched, for `tests/test_onednn_handler.py`.

    python -m tests.guarded_kernels

A read or a write outside of an operand, a result or the arena kills the process; prints the number of runs.
"""

import ctypes
import faulthandler
import mmap
from typing import Any

import numpy as np

from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.kernels.onednn.operations import BatchedProduct, Product, prepare, text_of
from loopfeed.models.kernels.onednn.team import PythonTeam
from loopfeed.models.layers.convolution_forms import Geometry
from tests.direct_operations import DTYPES, Problem, normal

# XLA's buffers begin at multiples of this; a vector that is read whole may end up to there, but never on another page.
ALIGNED = 64
CANARY = 0xA5
NO_ACCESS = 0
SAME = ((1, 1), (1, 1))
PROBLEMS = [
    ((9, 8, 8, 16), (3, 3, 16, 16), (1, 1), SAME),
    ((3, 7, 5, 3), (3, 3, 3, 17), (2, 2), SAME),
    ((5, 5, 7, 17), (3, 3, 17, 5), (1, 1), SAME),
    ((2, 9, 9, 64), (1, 1, 64, 48), (1, 1), ((0, 0), (0, 0))),
    ((2, 9, 8, 64), (1, 1, 64, 32), (2, 2), ((0, 0), (0, 0))),
    ((2, 2, 3, 5), (7, 7, 5, 6), (1, 1), ((3, 3), (3, 3))),
    ((2, 7, 6, 24), (7, 7, 1, 24), (1, 1), ((3, 3), (3, 3))),
    ((3, 6, 6, 32), (3, 3, 8, 16), (1, 1), SAME),
    ((2, 19, 17, 3), (7, 7, 3, 64), (2, 2), ((3, 3), (3, 3))),
]
NUM_WIDE = 60
PRODUCTS = [(3, 17, 5), (37, 129, 33), (64, 128, 96), (130, 64, 10)]
# Matrices, rows, depth and columns; the last one is split into tasks.
BATCHES = [(1, 1, 1, 1), (3, 5, 17, 3), (7, 65, 16, 65), (70, 33, 129, 40)]


class Guarded:
    """Memory between two pages that may not be touched: at its end up to alignment, or at its beginning."""

    def __init__(self, num_bytes: int, at_end: bool) -> None:
        page, self.num_bytes = mmap.PAGESIZE, num_bytes
        room = -(-max(num_bytes, 1) // page) * page
        self._memory = mmap.mmap(-1, room + 2 * page)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        protect = ctypes.CDLL(None, use_errno=True).mprotect
        protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        for guard in (start, start + page + room):
            assert protect(guard, page, NO_ACCESS) == 0
        gap = (room - num_bytes) // ALIGNED * ALIGNED if at_end else 0
        self._room = np.ctypeslib.as_array((ctypes.c_uint8 * room).from_address(start + page))
        self._room[:] = CANARY
        self.bytes = self._room[gap : gap + num_bytes]
        self.address = start + page + gap

    def check(self) -> None:
        """Assert that nothing around the bytes has been written."""
        gap = self.address - self._room.ctypes.data
        assert (self._room[:gap] == CANARY).all()
        assert (self._room[gap + self.num_bytes :] == CANARY).all()


def holding(array: np.ndarray, at_end: bool) -> Guarded:
    guarded = Guarded(array.nbytes, at_end)
    guarded.bytes[:] = array.view(np.uint8).reshape(-1)
    return guarded


def run_guarded(operation: Any, operands: tuple[np.ndarray, ...], like: np.ndarray, at_end: bool) -> np.ndarray:
    """Run an operation in guarded memory, and return a result like this array."""
    primitives = prepare(text_of(operation))
    given, result = [holding(each, at_end) for each in operands], holding(like, at_end)
    arena, team = Guarded(primitives.arena_bytes, at_end), PythonTeam(load_library())
    team._arena_address, team._arena_bytes = arena.address, arena.num_bytes
    team.run(primitives, [each.address for each in given], [result.address])
    for guarded, held in zip(given, operands, strict=True):
        np.testing.assert_array_equal(guarded.bytes, held.view(np.uint8).reshape(-1))
    for each in (*given, result, arena):
        each.check()
    # A copy, because the guarded memory ends here.
    return result.bytes.copy().view(like.dtype).reshape(like.shape)


def wide_problems() -> list[Any]:
    """Return random convolutions with wide strides and padding; in half of them columns on the right are never read."""
    draws, found = np.random.default_rng(0), []
    for number in range(NUM_WIDE):
        groups, C, K = (int(size) for size in draws.choice([1, 2, 4, 8, 16], 3))
        (kh, kw), strides = draws.integers(1, 9, 2).tolist(), tuple(draws.integers(1, 9, 2).tolist())
        left, right, Q = draws.integers(0, 8), draws.integers(0, 2), draws.integers(1, 5)
        W = kw + (Q - 1) * strides[1] if number % 2 else kw + draws.integers(0, 20)
        shape = 2, kh + int(draws.integers(0, 3)), int(W), groups * C
        found.append((shape, (kh, kw, C, groups * K), strides, ((1, 1), (int(left), int(right)))))
    return found


def run_convolutions(dtype: str, at_end: bool) -> int:
    num_runs = 0
    for shape, kernel, strides, padding in [*PROBLEMS, *wide_problems()]:
        problem = Problem(shape, kernel, Geometry(strides, padding), dtype)
        exact, sums = problem.expected()
        for part in problem.parts:
            like = np.full(problem.result_shape(part), np.nan, problem.result_dtype(part))
            found = run_guarded(problem.operation(part), problem.operands(part), like, at_end)
            problem.check(part, found, exact, sums)
            num_runs += 1
    return num_runs


def run_products(dtype: str, at_end: bool) -> int:
    for rows, depth, columns in PRODUCTS:
        for x_axis, y_axis in np.ndindex(2, 2):
            x = normal(0, (rows, depth) if x_axis else (depth, rows), dtype)
            y = normal(1, (columns, depth) if y_axis else (depth, columns), dtype)
            like = np.full((rows, columns), np.nan, np.float32)
            found = run_guarded(Product(dtype, x.shape, y.shape, x_axis, y_axis), (x, y), like, at_end)
            assert np.isfinite(found).all()
    return 4 * len(PRODUCTS)


def run_batches(dtype: str, at_end: bool) -> int:
    for matrices, rows, depth, columns in BATCHES:
        for x_axis, y_axis in ((2, 2), (2, 1), (1, 1), (1, 2)):
            x = normal(0, (matrices, rows, depth) if x_axis == 2 else (matrices, depth, rows), dtype)
            y = normal(1, (matrices, columns, depth) if y_axis == 2 else (matrices, depth, columns), dtype)
            like = np.full((matrices, rows, columns), np.nan, x.dtype)
            operation = BatchedProduct(dtype, x.shape, y.shape, x_axis, y_axis, dtype)
            assert np.isfinite(run_guarded(operation, (x, y), like, at_end).astype(np.float32)).all()
    return 4 * len(BATCHES)


def main() -> None:
    faulthandler.enable()
    num_runs = 0
    for dtype in DTYPES:
        for at_end in (True, False):
            num_runs += sum(run(dtype, at_end) for run in (run_convolutions, run_products, run_batches))
    print(num_runs)


if __name__ == "__main__":
    main()
