"""Random rounding: a disturbance of each operation's result as large as its rounding error may be.

The changes that it causes further on show how much of a difference between two programs rounding explains (Monte Carlo
arithmetic: Parker, Pierce and Eggert, 2000, "Monte Carlo arithmetic: how to gamble with floating point and win").
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from engine.program.flat_program import Operation

# These copy numbers, and so do not round.
_EXACT = frozenset(
    {
        *(
            "reshape",
            "transpose",
            "broadcast_in_dim",
            "slice",
            "dynamic_slice",
            "squeeze",
            "concatenate",
            "pad",
            "copy",
        ),
        *("select_n", "rev", "gather", "expand_dims", "optimization_barrier", "stop_gradient", "dynamic_update_slice"),
        *("neg", "abs", "max", "min", "sign", "floor", "round", "iota", "split", "bitcast_convert_type"),
    }
)
_SUMS = ("reduce_sum", "dot_general", "conv_general_dilated", "cumsum", "reduce_window_sum", "add_any")


class RandomRounding:
    """Changes the results of operations at random, by about their rounding errors.

    An elementary operation is changed by up to its unit roundoff twice. A sum of n terms is also changed by √n times
    the unit of the sum, relative to its typical size, because n roundings in another order add up like a random walk
    (Higham and Mary, 2019, "A new approach to probabilistic rounding error analysis").

    Args:
        seed: another seed gives other changes.
    """

    def __init__(self, seed: int) -> None:
        self._number = seed << 20

    def __call__(self, operation: Operation, outputs: list[Any]) -> list[Any]:
        """Return the changed results of an operation."""
        if operation.name in _EXACT:
            return outputs
        spread = math.sqrt(_num_terms(operation))
        return [self._change(value, spread) if _is_float(value) else value for value in outputs]

    def _change(self, value: jax.Array, spread: float) -> jax.Array:
        self._number += 1
        return _disturb(value, np.uint32(self._number & 0xFFFFFFFF), np.float32(spread if spread > 1 else 0))


@jax.jit
def _disturb(value: jax.Array, seed: jax.Array, spread: jax.Array) -> jax.Array:
    """Change a float array by its unit roundoff, and `spread` (float32 []) units of sums of its root mean square."""
    unit = float(jnp.finfo(value.dtype).eps)
    # XLA adds bfloat16 and float16 numbers in float32, and rounds the sum once.
    unit_of_sums = min(unit, float(jnp.finfo(jnp.float32).eps))
    wide = value.astype(jnp.float32)
    typical = jnp.sqrt(jnp.mean(jnp.square(wide)))
    numbers = jnp.arange(value.size, dtype=jnp.uint32).reshape(value.shape)
    size = unit * jnp.abs(wide) + unit_of_sums * spread * typical
    disturbed = (wide + size * _noise(numbers, seed)).astype(value.dtype)
    return jnp.where(jnp.isfinite(value), disturbed, value)


def _noise(numbers: jax.Array, seed: jax.Array) -> jax.Array:
    """Return a number in -1 … 1 for each uint32 number, by the finaliser of MurmurHash3."""
    mixed = numbers + seed * jnp.uint32(0x9E3779B9)
    mixed = (mixed ^ (mixed >> 16)) * jnp.uint32(0x85EBCA6B)
    mixed = (mixed ^ (mixed >> 13)) * jnp.uint32(0xC2B2AE35)
    mixed = mixed ^ (mixed >> 16)
    return mixed.astype(jnp.float32) * jnp.float32(2**-31) - 1


def _num_terms(operation: Operation) -> int:
    """Return how many numbers are summed for each number of an operation's result; 1 for elementary operations."""
    shapes = [each.aval.shape for each in operation.equation.invars]
    out = math.prod(operation.equation.outvars[0].aval.shape)
    if operation.name == "dot_general":
        (contracted, _), _ = operation.equation.params["dimension_numbers"]
        return math.prod(shapes[0][axis] for axis in contracted)
    if operation.name == "conv_general_dilated":
        kernel = operation.equation.params["dimension_numbers"].rhs_spec
        return math.prod(shapes[1][axis] for axis in kernel[1:])
    if operation.name in _SUMS or operation.equation.params.get("jaxpr") is not None or len(shapes) > 2:
        return max(1, max(map(math.prod, shapes), default=1) // max(out, 1))
    return 1


def _is_float(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jnp.floating)) and value.size > 0
