"""Clipped lines, `clip(x + b, 0, c) / c` as in hard-swish, found among the operations of a function.

Must not know: ONNX, models.
"""

from typing import Final, NamedTuple

import numpy as np

from loopfeed.engine.export.flat_jaxpr import FlatJaxpr, Operation, Value, needed

HARD_SIGMOID: Final = "hard_sigmoid"
"""The name of an operation that returns max(0, min(1, alpha · x + beta)), with these parameters."""


class _Step(NamedTuple):
    """A value and the number that an operation applies to it."""

    value: Value
    number: float


def find_hard_sigmoids(flat: FlatJaxpr) -> FlatJaxpr:
    """Return the operations with each such line as one operation, which runtimes compute in one pass."""
    made = {id(result): operation for operation in flat.operations for result in operation.results}
    operations = [_hard_sigmoid(each, made) or each for each in flat.operations]
    return flat._replace(operations=tuple(needed(operations, flat.outputs)))


def _hard_sigmoid(operation: Operation, made: dict[int, Operation]) -> Operation | None:
    """Return the operation that a division ends; None if it ends none."""
    found: Operation | None = operation
    steps = []
    for name in ("div", "min", "max", "add"):
        step = _step(found, name)
        if step is None:
            return None
        steps.append(step)
        found = made.get(id(step.value))
    divided, smaller, larger, added = steps
    top = divided.number
    if larger.number != 0 or smaller.number != top or not top > 0:
        return None
    parameters = {"alpha": 1 / top, "beta": added.number / top}
    return Operation(HARD_SIGMOID, (added.value,), parameters, operation.results)


def _step(operation: Operation | None, name: str) -> _Step | None:
    """Return what an operation of this name does with one number; None if it is another one."""
    if operation is None or operation.name != name or operation.results[0].dtype != np.float32:
        return None
    first, second = operation.operands
    if second.constant is None and name != "div":
        first, second = second, first
    if second.constant is None or second.constant.ndim:
        return None
    return _Step(first, float(second.constant))
