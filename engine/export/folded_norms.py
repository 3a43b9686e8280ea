"""What constants do to the channels of a convolution, as those of a norm, taken into its kernel and a bias.

Must not know: ONNX, models.
"""

from typing import Any, NamedTuple

import numpy as np

from loopfeed.engine.export.flat_jaxpr import FlatJaxpr, Operation, Value

type _Readers = dict[int, list[Operation | None]]


class _Affine(NamedTuple):
    """A factor and a summand, float64 [K], for each channel."""

    scale: np.ndarray[Any, Any]
    shift: np.ndarray[Any, Any]


def fold_norms(flat: FlatJaxpr) -> FlatJaxpr:
    """Return the operations with products and sums by constants, right after a convolution, taken into it.

    Such a convolution has a third operand, the bias [K]. Kernel and bias are computed in float64 and rounded once.
    Nothing is taken in after a result that is read twice, or if a number would not be finite.
    """
    readers = _readers(flat)
    folded: set[int] = set()
    operations = []
    for operation in flat.operations:
        if id(operation) in folded:
            continue
        affine, following = _what_follows(operation, readers)
        with_bias = _with_bias(operation, affine, following[-1].results) if following else None
        if with_bias is not None:
            folded |= set(map(id, following))
        operations.append(with_bias or operation)
    return flat._replace(operations=tuple(operations))


def _readers(flat: FlatJaxpr) -> _Readers:
    """Return the operations that read each value, by its id; None stands for what the function returns."""
    found: _Readers = {id(each): [None] for each in flat.outputs}
    for operation in flat.operations:
        for operand in operation.operands:
            found.setdefault(id(operand), []).append(operation)
    return found


def _what_follows(operation: Operation, readers: _Readers) -> tuple[_Affine, list[Operation]]:
    """Return what is done by constants to the result of a convolution, and by which operations."""
    (value, *_), following = operation.results, []
    whole = _Affine(np.ones(1), np.zeros(1))
    if operation.name != "conv_general_dilated":
        return whole, []
    axis = operation.parameters["dimension_numbers"].out_spec[1]
    while len(after := readers[id(value)]) == 1 and after[0] is not None:
        step = _affine_of(after[0], value, axis)
        if step is None:
            break
        with np.errstate(invalid="ignore"):  # of a division by zero
            whole = _Affine(whole.scale * step.scale, whole.shift * step.scale + step.shift)
        following.append(after[0])
        (value,) = after[0].results
    return whole, following


def _affine_of(operation: Operation, value: Value, axis: int) -> _Affine | None:
    """Return what an operation does to the channels of a value; None if it does something else."""
    if operation.name not in ("add", "sub", "mul", "div"):
        return None
    is_first = operation.operands[0] is value
    constant = operation.operands[is_first].constant
    (result,) = operation.results
    if constant is None or result.shape != value.shape or result.dtype != np.float32:
        return None
    if constant.size not in (1, constant.shape[axis] if constant.ndim else 1):
        return None
    number = constant.astype(np.float64).ravel()
    match operation.name, is_first:
        case "add", _:
            return _Affine(np.ones(1), number)
        case "mul", _:
            return _Affine(number, np.zeros(1))
        case "sub", first:
            return _Affine(np.ones(1), -number) if first else _Affine(-np.ones(1), number)
        case "div", True:
            with np.errstate(divide="ignore"):
                return _Affine(1 / number, np.zeros(1))
    return None


def _with_bias(operation: Operation, affine: _Affine, results: tuple[Value, ...]) -> Operation | None:
    """Return a convolution with a bias that does both; None if its kernel is no constant or becomes infinite."""
    x, kernel = operation.operands
    if kernel.constant is None or kernel.dtype != np.float32:
        return None
    axis = operation.parameters["dimension_numbers"].rhs_spec[0]
    sizes = [1] * len(kernel.shape)
    sizes[axis] = -1
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = (kernel.constant * affine.scale.reshape(sizes)).astype(np.float32)
        bias = np.broadcast_to(affine.shift, kernel.shape[axis]).astype(np.float32)
    if not (np.isfinite(scaled).all() and np.isfinite(bias).all()):
        return None
    return operation._replace(operands=(x, _constant(scaled), _constant(bias)), results=results)


def _constant(array: np.ndarray[Any, Any]) -> Value:
    return Value(array.shape, array.dtype, array)
