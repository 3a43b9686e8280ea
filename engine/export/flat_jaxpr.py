"""A traced function as one flat list of primitive operations, without calls and without what its results do not need.

Operations on constants alone are computed here. Must not know: ONNX, models.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import Literal

_CALLED = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CALLS = (
    "jit", "pjit", "closed_call", "core_call", "remat", "remat2", "checkpoint", "custom_jvp_call", "custom_vjp_call",
    "custom_vjp_call_jaxpr", "custom_lin",
)  # fmt: skip
"""The primitives that only call another jaxpr; control flow is not among them."""

_BATCH_SIZE = "dim_as_value"
"""The primitive, without operands, for a size that is symbolic."""


@dataclass(eq=False)
class Value:
    """The result of an operation, an input or a constant.

    Attributes:
        shape: its sizes, whole numbers or symbolic.
        dtype: its dtype.
        constant: its elements if they are known, else None.
    """

    shape: tuple[Any, ...]
    dtype: np.dtype[Any]
    constant: np.ndarray[Any, Any] | None = field(default=None, repr=False)


class Operation(NamedTuple):
    """One primitive with its operands, parameters and results."""

    name: str
    operands: tuple[Value, ...]
    parameters: Mapping[str, Any]
    results: tuple[Value, ...]


class FlatJaxpr(NamedTuple):
    """The operations in their order, and the values that the function takes and returns."""

    operations: tuple[Operation, ...]
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]


def flatten_jaxpr(closed: Any) -> FlatJaxpr:
    """Return the operations of a traced function that its results need."""
    inputs = tuple(_value_of(each.aval) for each in closed.jaxpr.invars)
    operations: list[Operation] = []
    outputs = _inline(closed.jaxpr, closed.consts, inputs, operations)
    return FlatJaxpr(tuple(needed(operations, outputs)), inputs, outputs)


def _value_of(aval: Any, constant: Any = None) -> Value:
    return Value(tuple(aval.shape), np.dtype(aval.dtype), None if constant is None else np.asarray(constant))


def _inline(
    jaxpr: Any, constants: Sequence[Any], arguments: Sequence[Value], operations: list[Operation]
) -> tuple[Value, ...]:
    known: dict[Any, Value] = dict(zip(jaxpr.invars, arguments, strict=True))
    known |= {
        variable: constant if isinstance(constant, Value) else _value_of(variable.aval, constant)
        for variable, constant in zip(jaxpr.constvars, constants, strict=True)
    }

    def look_up(atom: Any) -> Value:
        return _value_of(atom.aval, np.asarray(atom.val, _dtype_of(atom))) if isinstance(atom, Literal) else known[atom]

    for equation in jaxpr.eqns:
        operands = tuple(map(look_up, equation.invars))
        name = equation.primitive.name
        if name == "concatenate":  # parts without elements, as padding has them, have no form in some formats
            operands = tuple(each for each in operands if not _is_empty(each)) or operands
        if name in _CALLS:
            called = next(equation.params[key] for key in _CALLED if key in equation.params)
            inner, consts = (called.jaxpr, called.consts) if hasattr(called, "consts") else (called, ())
            results = _inline(inner, consts, operands, operations)
        elif (folded := _fold(equation, operands)) is not None:
            results = folded
        else:
            results = tuple(_value_of(each.aval) for each in equation.outvars)
            operations.append(Operation(name, operands, equation.params, results))
        known |= dict(zip(equation.outvars, results, strict=True))
    return tuple(map(look_up, jaxpr.outvars))


def _is_empty(value: Value) -> bool:
    return any(isinstance(size, int) and size == 0 for size in value.shape)


def _dtype_of(atom: Any) -> Any:
    return atom.aval.dtype


def _fold(equation: Any, operands: Sequence[Value]) -> tuple[Value, ...] | None:
    """Compute an operation whose operands are all constants and whose results have known, not much larger, sizes."""
    if any(each.constant is None for each in operands) or equation.effects or _has_jaxpr(equation.params):
        return None
    if equation.primitive.name == _BATCH_SIZE:
        return None
    shapes = [each.aval.shape for each in equation.outvars]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return None
    found = equation.primitive.bind(*(each.constant for each in operands), **equation.params)
    found = found if equation.primitive.multiple_results else (found,)
    return tuple(
        _value_of(variable.aval, np.asarray(each)) for variable, each in zip(equation.outvars, found, strict=True)
    )


def _has_jaxpr(parameters: Mapping[str, Any]) -> bool:
    return any(hasattr(each, "eqns") or hasattr(each, "jaxpr") for each in jax.tree.leaves(list(parameters.values())))


def needed(operations: Sequence[Operation], outputs: Sequence[Value]) -> list[Operation]:
    """Return the operations on which some results depend, in their order."""
    used, kept = set(map(id, outputs)), []
    for each in reversed(operations):
        if any(id(result) in used for result in each.results):
            used |= set(map(id, each.operands))
            kept.append(each)
    return kept[::-1]
