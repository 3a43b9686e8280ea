"""Calls of a processor's own kernels (`loopfeed.models.kernels`) in a program: the operation and the work of each.

A call says in JSON what it computes, so that nothing has to be built to count it.
"""

import json
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from loopfeed.engine.hlo.program import Instruction

KERNEL_TARGET = "loopfeed_onednn"
"""What a call of such a kernel names as its target (`loopfeed.models.kernels.onednn.handler.TARGET`)."""
_OPERATION = re.compile(r'operation = "((?:[^"\\]|\\.)*)"')
_ESCAPED = re.compile(r"\\([0-9A-Fa-f]{2}|.)")


def is_kernel(instruction: Instruction) -> bool:
    """Return whether an instruction calls one of a processor's own kernels."""
    return instruction.opcode == "custom-call" and instruction.target == KERNEL_TARGET


def kernel_operation(instruction: Instruction) -> Mapping[str, Any]:
    """Return the description of the operation that such a call makes; empty if it has none that can be read."""
    return _read(instruction.attributes)


def kernel_flops(text: str) -> int:
    """Return the floating-point operations of all such calls in a program's text, each counted once."""
    lines = (line for line in text.splitlines() if f'"{KERNEL_TARGET}"' in line)
    return sum(2 * operation_products(_read(line)) for line in lines)


def operation_products(operation: Mapping[str, Any]) -> int:
    """Return the multiply-accumulates of an operation, those with padding left out; 0 for one that has none."""
    if operation.get("kind") in ("product", "batched product"):
        others = [size for axis, size in enumerate(operation["y"]) if axis != operation["y_axis"]]
        return int(math.prod(operation["x"]) * others[-1])
    if operation.get("kind") != "convolution":
        return 0
    images, height, width, _ = operation["x"]
    kernel_height, kernel_width, in_channels, out_channels = operation["kernel"]
    (top, bottom), (left, right) = operation["padding"]
    if operation["part"] == "filter gradient by product":  # its input has the padding already
        height, width = height - top - bottom, width - left - right
    products = images * in_channels * out_channels
    for size, window, num_results, stride, low in (
        (height, kernel_height, operation["y"][1], operation["strides"][0], top),
        (width, kernel_width, operation["y"][2], operation["strides"][1], left),
    ):
        products *= count_meetings(size, window, num_results, stride, low)
    return int(products)


@lru_cache(maxsize=1024)
def count_meetings(
    size: int, window: int, num_results: int, stride: int, low: int, dilated: int = 1, spread: int = 1
) -> int:
    """Return how often an element of a window meets a number of the input, along one axis.

    Args:
        size: numbers of the input.
        window: elements of the window.
        num_results: positions of the window.
        stride: step between them.
        low: padding before the first number.
        dilated: distance of the numbers of the input.
        spread: distance of the elements of the window.
    """
    last = (size - 1) * dilated
    positions = (at * stride + tap * spread - low for at in range(num_results) for tap in range(window))
    return sum(1 for position in positions if 0 <= position <= last and position % dilated == 0)


def _read(attributes: str) -> Mapping[str, Any]:
    found = _OPERATION.search(attributes)
    if found is None:
        return {}
    try:
        operation = json.loads(_ESCAPED.sub(_unescaped, found[1]))
    except ValueError:
        return {}
    return operation if isinstance(operation, dict) else {}


def _unescaped(found: re.Match[str]) -> str:
    """Return the character that MLIR writes as a backslash and two hexadecimal digits, or after a backslash."""
    return chr(int(found[1], 16)) if len(found[1]) == 2 else found[1]
