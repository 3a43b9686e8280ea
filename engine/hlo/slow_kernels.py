"""Products and convolutions for which XLA:CPU has no fast kernel where they stand: it writes a naive loop nest.

Outside of loops XLA rewrites most convolutions into the canonical form that has one. Products were measured inside
`while_loop` on two AVX-512 cores, jaxlib 0.12.0, 512×512 by 512×512, in GFLOP/s (GOP/s): float16 68, float32 50,
bfloat16 37, float64 35, int32 27, complex64 5.4; int8 1.5, uint32 0.8, int64 0.06.
"""

import re

from loopfeed.engine.hlo.program import HloProgram, Instruction

# Cross-correlation of NHWC images by an HWIO kernel, in any number of axes.
_CANONICAL = re.compile(r"b(\d*)f_\1io->b\1f")
_FAST_PRODUCTS = frozenset({"f16", "bf16", "f32", "f64", "s32", "c64", "c128"})


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
