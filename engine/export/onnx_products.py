"""Products of matrices, convolutions and pools of lax as nodes of ONNX, whose images have their channels first."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from loopfeed.engine.export.flat_jaxpr import Operation, Value
from loopfeed.engine.export.onnx_graph import OnnxGraph, UnsupportedError


def write_product(graph: OnnxGraph, operation: Operation) -> None:
    """Write `dot_general` as a matrix product: [batch, free, contracted] by [batch, contracted, free]."""
    (of_x, of_y), (batch_x, batch_y) = operation.parameters["dimension_numbers"]
    x, y = operation.operands
    free_x = [axis for axis in range(len(x.shape)) if axis not in (*of_x, *batch_x)]
    free_y = [axis for axis in range(len(y.shape)) if axis not in (*of_y, *batch_y)]
    left = graph.transpose(graph.read(x), [*batch_x, *free_x, *of_x])
    right = _transposed(graph, y, [*batch_y, *of_y, *free_y])
    is_plain = len(of_x) == 1 and len(free_y) == 1 and (len(free_x) == 1 or not (batch_x or not free_x))
    if not is_plain:
        sizes = [x.shape[axis] for axis in batch_x]
        rows, inner, columns = (
            math.prod(value.shape[axis] for axis in axes) for value, axes in ((x, free_x), (x, of_x), (y, free_y))
        )
        left, right = graph.reshape(left, [*sizes, rows, inner]), graph.reshape(right, [*sizes, inner, columns])
    name = graph.add("MatMul", [left, right])
    graph.put(operation.results[0], name if is_plain else graph.reshape(name, operation.results[0].shape))


def _transposed(graph: OnnxGraph, value: Value, order: Sequence[int]) -> str:
    """Return a value with its axes in another order; a constant is stored so."""
    if value.constant is None:
        return graph.transpose(graph.read(value), order)
    return graph.constant(np.ascontiguousarray(value.constant.transpose(order)))


def write_convolution(graph: OnnxGraph, operation: Operation) -> None:
    """Write a convolution, which may have a bias as its third operand."""
    x, kernel, *bias = operation.operands
    given = operation.parameters
    of_x, of_kernel, of_y = given["dimension_numbers"]
    if given["batch_group_count"] != 1 or any(each != 1 for each in given["lhs_dilation"]):
        raise UnsupportedError("a transposed convolution")
    padding = given["padding"]
    name = graph.add(
        "Conv",
        [graph.transpose(graph.read(x), of_x), _transposed(graph, kernel, of_kernel), *map(graph.read, bias)],
        strides=list(given["window_strides"]),
        dilations=list(given["rhs_dilation"]),
        group=given["feature_group_count"],
        pads=[low for low, _ in padding] + [high for _, high in padding],
    )
    graph.put(operation.results[0], graph.transpose(name, np.argsort(of_y).tolist()))


def write_pool(kind: str, graph: OnnxGraph, operation: Operation) -> None:
    """Write a pool over the two axes before the channels of [B, …, H, W, C]."""
    given, operand = operation.parameters, operation.operands[0]
    window, strides, padding = (given[key] for key in ("window_dimensions", "window_strides", "padding"))
    dilations = (*given["base_dilation"], *given["window_dilation"])
    axes = tuple(zip(window, strides, padding, strict=True))
    others = (*axes[:-3], axes[-1])
    if len(window) < 4 or any(each != (1, 1, (0, 0)) for each in others) or any(each != 1 for each in dilations):
        raise UnsupportedError(f"a pool with the window {tuple(window)}")
    attributes: dict[str, Any] = {
        "kernel_shape": list(window[-3:-1]),
        "strides": list(strides[-3:-1]),
        "pads": [low for low, _ in padding[-3:-1]] + [high for _, high in padding[-3:-1]],
    }
    if any(pad >= size for pad, size in zip(attributes["pads"], 2 * attributes["kernel_shape"], strict=True)):
        raise UnsupportedError(f"a pool with the padding {tuple(padding)}")
    if kind == "AveragePool":
        attributes["count_include_pad"] = 1
    name, (result,) = graph.read(operand), operation.results
    if len(window) > 4:
        name = graph.add("Reshape", [name, graph.ints(-1, *operand.shape[-3:])])
    name = graph.add(kind, [graph.transpose(name, (0, 3, 1, 2))], **attributes)
    if kind == "AveragePool":
        name = graph.add("Mul", [name, graph.constant(np.float32(math.prod(window)))])
    name = graph.transpose(name, (0, 2, 3, 1))
    graph.put(result, name if len(window) == 4 else graph.reshape(name, result.shape))
