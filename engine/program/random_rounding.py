"""Random rounding: a disturbance of each operation's result as large as its rounding error may be.

The changes that it causes further on show how much of a difference between two programs rounding explains (Monte Carlo
arithmetic: Parker, Pierce and Eggert, 2000, "Monte Carlo arithmetic: how to gamble with floating point and win").

A change of a number near a bound switches a ReLU, a choice between two numbers, and with it a derivative. Such switches
can be held where they were, which shows what rounding does beyond them.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from loopfeed.engine.program.flat_program import FlatProgram, Operation

# These copy numbers, and so do not round.
_COPIES = (
    "reshape transpose broadcast_in_dim slice dynamic_slice squeeze concatenate pad copy select_n rev gather "
    "expand_dims optimization_barrier stop_gradient dynamic_update_slice"
)
_CHOICES = "neg abs max min sign floor round iota split bitcast_convert_type"
_EXACT = frozenset(f"{_COPIES} {_CHOICES}".split())
_SUMS = ("reduce_sum", "dot_general", "conv_general_dilated", "cumsum", "reduce_window_sum", "add_any")


class RandomRounding:
    """Changes the results of operations at random, by about their rounding errors.

    An elementary operation is changed by up to its unit roundoff twice. A sum of n terms is also changed by √n times
    the unit of the sum, relative to its typical size, because n roundings in another order add up like a random walk
    (Higham and Mary, 2019, "A new approach to probabilistic rounding error analysis").

    Args:
        seed: another seed gives other changes.
        held: results by the number of their value, which are used in the place of those of their operations.
        widens_sums: whether a sum is changed by the roundings of its terms; otherwise, as if it were rounded once.
    """

    def __init__(self, seed: int, held: Mapping[int, Any] | None = None, *, widens_sums: bool = True) -> None:
        self._number = seed << 20
        self._held = held or {}
        self._widens_sums = widens_sums

    def __call__(self, operation: Operation, outputs: list[Any]) -> list[Any]:
        """Return the changed results of an operation."""
        if operation.outputs and operation.outputs[0] in self._held:
            return [self._held[operation.outputs[0]]]
        if operation.name in _EXACT:
            return outputs
        spread = math.sqrt(_num_terms(operation)) if self._widens_sums else 1.0
        return [self._change(value, spread) if _is_float(value) else value for value in outputs]

    def _change(self, value: jax.Array, spread: float) -> jax.Array:
        self._number += 1
        return _disturb(value, np.uint32(self._number & 0xFFFFFFFF), np.float32(spread if spread > 1 else 0))


def switches(flat: FlatProgram) -> frozenset[int]:
    """Return the results, by number, that choose a side: of a bound, as a ReLU does, or of two numbers.

    The choice between two numbers that are nearly equal matters little. Whether two computed numbers *are* equal is no
    such choice: they may be the same number, computed twice with other roundings.
    """
    constant: set[int] = set()
    extremes: set[tuple[int, int]] = set()
    found = set()
    for operation in flat.operations:
        computed = [value for value in operation.inputs if value not in constant]
        if not computed:
            constant.update(operation.outputs)
        elif operation.name in ("max", "min", "clamp"):
            extremes.update((value, operation.outputs[0]) for value in computed)
        elif operation.name in ("gt", "lt", "argmax", "argmin", "sign"):
            found.add(operation.outputs[0])
        elif operation.name in ("ge", "le", "eq", "ne"):
            # The derivative of a larger of two numbers asks which of them it is; no rounding lies between.
            is_side = operation.name in ("eq", "ne") and (
                tuple(computed) in extremes or tuple(computed[::-1]) in extremes
            )
            if len(computed) == 1 or is_side:
                found.add(operation.outputs[0])
    return frozenset(found)


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
