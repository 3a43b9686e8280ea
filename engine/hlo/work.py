"""What the instructions of a program do: floating-point operations, bytes, and whether XLA:CPU has a fast kernel.

Counted from shapes alone. XLA's own count (`cost_analysis`) is one number for the whole program, in which the body of a
loop counts once, however often it runs.
"""

import math
import re
from collections.abc import Iterator

from loopfeed.engine.hlo.program import (
    Array,
    Computation,
    HloProgram,
    Instruction,
    count_meetings,
    is_kernel,
    kernel_operation,
    operation_products,
)

# Cross-correlation of NHWC images by an HWIO kernel, in any number of axes.
_CANONICAL = re.compile(r"b(\d*)f_\1io->b\1f")
_FAST_PRODUCTS = frozenset({"f16", "bf16", "f32", "f64", "s32", "c64", "c128"})

_IDLE = (
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier partition-id replica-id domain "
    "add-dependency async-update async-done copy-done"
)
NO_KERNELS = frozenset(_IDLE.split())
"""Instructions that compute nothing when the program runs."""
CONTAINERS = frozenset({"while", "conditional", "call", "async-start"})
"""Instructions whose work is that of the computations that they run."""
_FLOAT_KINDS = ("f", "b", "c")
_ARITHMETIC = (
    "abs add atan2 cbrt ceil clamp cosine divide erf exponential exponential-minus-one floor log log-plus-one logistic "
    "maximum minimum multiply negate power remainder round-nearest-afz round-nearest-even rsqrt sign sine sqrt "
    "subtract tan tanh"
)
_PER_ELEMENT = frozenset(_ARITHMETIC.split())
_SLICING = frozenset({"slice", "dynamic-slice", "gather"})
_RENAMING = frozenset({"bitcast", "reshape"})
_LIBRARY_CONVOLUTION = re.compile(r"__cudnn\$conv(\w*)")
_LIBRARY_PRODUCT = re.compile(r"__cublas\$|__onednn\$matmul|__cublas\$lt\$matmul")


def flops_of(program: HloProgram, instruction: Instruction) -> int:
    """Return the floating-point operations of an instruction, those fused into it included.

    A multiplication and an addition are two. Integer arithmetic and what only moves or compares values counts nothing.
    """
    return sum(own_flops(program, each) for each in fused_into(program, instruction))


def fused_into(program: HloProgram, instruction: Instruction) -> Iterator[Instruction]:
    """Yield the instructions that run in an instruction's kernel: those of a fusion, or the instruction itself."""
    called = instruction.called_as("calls") if instruction.opcode == "fusion" else None
    if called is None or called not in program.computations:
        yield instruction
        return
    for each in program.computations[called].instructions:
        yield from fused_into(program, each)


def own_flops(program: HloProgram, instruction: Instruction) -> int:
    """Return the floating-point operations of an instruction itself."""
    if products := products_of(program, instruction):
        return 2 * products
    results = [each for each in instruction.results if each.dtype.startswith(_FLOAT_KINDS)]
    if not results:
        return 0
    if instruction.opcode in _PER_ELEMENT:
        return results[0].size
    operands = program.operands_of(instruction)
    if instruction.opcode == "reduce" and operands:
        size = operands[0].results[0].size if operands[0].results else 0
        return len(results) * max(size - results[0].size, 0)
    if instruction.opcode in ("reduce-window", "select-and-scatter"):
        return results[0].size * max(math.prod(_window(instruction, "size")) - 1, 0)
    return 0


def products_of(program: HloProgram, instruction: Instruction) -> int:
    """Return the multiply-accumulates of a matrix product or convolution, 0 for any other instruction.

    In a convolution, those with padding and with the zeros of a dilation are left out, as XLA does. In a convolution of
    cuDNN, which computes them, those with padding count.
    """
    if is_kernel(instruction):
        return operation_products(kernel_operation(instruction))
    operands = program.operands_of(instruction)
    if len(operands) < 2 or not operands[0].results or not operands[1].results or not instruction.results:
        return 0
    left, right, result = operands[0].results[0], operands[1].results[0], instruction.results[0]
    if instruction.opcode == "dot":
        axes = _numbers(instruction.attribute("lhs_contracting_dims"))
        return result.size * math.prod(left.shape[axis] for axis in axes if axis < len(left.shape))
    if instruction.opcode == "convolution":
        return _convolution_products(instruction, left, right, result)
    target = instruction.target
    if found := _LIBRARY_CONVOLUTION.match(target):
        return _library_products(instruction, found[1], left, right, result)
    if _LIBRARY_PRODUCT.match(target):
        found = re.search(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]', instruction.attributes)
        axes = _numbers(found[1]) if found is not None else ()
        return result.size * math.prod(left.shape[axis] for axis in axes if axis < len(left.shape))
    return 0


def bytes_of(program: HloProgram, instruction: Instruction) -> int:
    """Return the bytes that a kernel reads and writes: its operands and results, of slices only the part.

    What fits into a cache may be read from there, so that this is more than what reaches the memory.
    """
    operands = program.operands_of(instruction)
    if instruction.opcode in _SLICING:
        return 2 * instruction.num_bytes
    if instruction.opcode == "dynamic-update-slice" and len(operands) > 1:
        return 2 * operands[1].num_bytes
    written = sum(each.num_bytes for each in kept_results(instruction))
    called = instruction.called_as("calls") if instruction.opcode == "fusion" else None
    fused = None if called is None else program.computations.get(called)
    if fused is None:
        return written + sum(each.num_bytes for each in operands)
    read = sum(_bytes_read(program, fused, number, each) for number, each in enumerate(operands))
    return read + _bytes_written(program, fused, written)


def kept_results(instruction: Instruction) -> tuple[Array, ...]:
    """Return the results of an instruction, without the workspace of a library and what a copy names beside its own."""
    is_first_only = instruction.target.startswith("__cu") or instruction.opcode == "copy-start"
    return instruction.results[:1] if is_first_only else instruction.results


def _bytes_read(program: HloProgram, fused: Computation, number: int, operand: Instruction) -> int:
    """Return the bytes that a fusion reads of an operand: of one that it only slices, the slices."""
    parameter = fused.parameters.get(number)
    if parameter is None:
        return operand.num_bytes
    read = 0
    ahead = program.users_of(parameter)
    aliases = {parameter.name}
    for user in ahead:
        if user.opcode in _RENAMING:
            aliases.add(user.name)
            ahead += program.users_of(user)
        elif user.opcode in _SLICING and user.operands[0] in aliases:
            read += user.num_bytes
        elif user.opcode != "dynamic-update-slice" or user.operands[0] not in aliases:
            return operand.num_bytes
    return min(read, operand.num_bytes)


def _bytes_written(program: HloProgram, fused: Computation, whole: int) -> int:
    """Return the bytes that a fusion writes: of one that updates an array in place, the part."""
    root = fused.root
    while root is not None and root.opcode in _RENAMING and program.operands_of(root):
        root = program.operands_of(root)[0]
    if root is None or root.opcode != "dynamic-update-slice":
        return whole
    operands = program.operands_of(root)
    return operands[1].num_bytes if len(operands) > 1 else whole


def _convolution_products(instruction: Instruction, left: Array, right: Array, result: Array) -> int:
    labels = re.match(r"(\w+)_(\w+)->(\w+)", instruction.attribute("dim_labels"))
    if labels is None:
        return 0
    of_left, of_right, of_result = labels.groups()
    batch = left.shape[of_left.index("b")]
    images_per_group = batch // int(instruction.attribute("batch_group_count") or 1)
    products = images_per_group * right.shape[of_right.index("i")] * right.shape[of_right.index("o")]
    num_axes = len(of_left) - 2
    strides, dilated, spread = (_window(instruction, name) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    padding = re.search(r"pad=([\d_x\-]+)", instruction.attribute("window"))
    low = [int(each.split("_")[0]) for each in padding[1].split("x")] if padding else [0] * num_axes
    for axis in range(num_axes):
        digit = str(axis)
        products *= count_meetings(
            left.shape[of_left.index(digit)],
            right.shape[of_right.index(digit)],
            result.shape[of_result.index(digit)],
            strides[axis] if strides else 1,
            low[axis],
            dilated[axis] if dilated else 1,
            spread[axis] if spread else 1,
        )
    return products


def _library_products(instruction: Instruction, kind: str, left: Array, right: Array, result: Array) -> int:
    """Return the products of a convolution of cuDNN, whose labels are those of the forward convolution."""
    labels = re.match(r"\w+_\w+->(\w+)", instruction.attribute("dim_labels"))
    if labels is None:
        return 0
    images, kernel = {"BackwardFilter": (right, result), "BackwardInput": (left, right)}.get(kind, (result, right))
    features = images.shape[labels[1].index("f")]
    return images.size * kernel.size // max(features, 1)


def _window(instruction: Instruction, name: str) -> tuple[int, ...]:
    found = re.search(rf"\b{name}=([\dx]+)", instruction.attribute("window"))
    return () if found is None else tuple(map(int, found[1].split("x")))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(each) for each in re.findall(r"\d+", text))


# Outside of loops XLA rewrites most convolutions into the canonical form that has one. Products were measured inside
# `while_loop` on two AVX-512 cores, jaxlib 0.12.0, 512×512 by 512×512, in GFLOP/s (GOP/s): float16 68, float32 50,
# bfloat16 37, float64 35, int32 27, complex64 5.4; int8 1.5, uint32 0.8, int64 0.06.
def naive_reason(program: HloProgram, instruction: Instruction) -> str | None:
    """Return why an instruction in a loop has no fast kernel on a CPU; None if it has one or is no product."""
    if instruction.opcode == "convolution":
        return _of_convolution(instruction)
    if instruction.opcode == "dot":
        return _of_product(program, instruction)
    return None


def _of_convolution(instruction: Instruction) -> str | None:
    labels, window = instruction.attribute("dim_labels"), instruction.attribute("window")
    if int(instruction.attribute("feature_group_count") or 1) > 1:
        return "it has groups"
    if int(instruction.attribute("batch_group_count") or 1) > 1:
        return "it is the kernel's gradient of a convolution with groups"
    for name, reason in (("lhs_dilate", "its input is dilated"), ("rhs_dilate", "its kernel is dilated")):
        if name in window:
            return reason
    if "rhs_reversal" in window:
        return "its kernel is turned"
    if not _CANONICAL.fullmatch(labels):
        return f"its axes are {labels}, not NHWC and HWIO"
    padding = re.search(r"pad=(\S+)", window)
    if padding is not None and "-" in padding[1]:
        return "its padding is negative"
    return None


def _of_product(program: HloProgram, instruction: Instruction) -> str | None:
    operands = program.operands_of(instruction)
    dtype = next((each.results[0].dtype for each in operands if each.results), "f32")
    if dtype not in _FAST_PRODUCTS:
        return f"there is no fast kernel for {dtype}"
    axes = {name: instruction.attribute(name).strip("{}") for name in ("lhs_batch_dims", "rhs_batch_dims")}
    leading = ",".join(str(axis) for axis in range(axes["lhs_batch_dims"].count(",") + 1))
    if any(text not in ("", leading) for text in axes.values()):
        return "its batch axes do not come first"
    summed = instruction.attribute("lhs_contracting_dims").strip("{}")
    return "it sums over several axes" if "," in summed else None
