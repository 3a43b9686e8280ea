"""What in a compiled program is slower than it has to be, by name."""

from collections.abc import Iterator
from dataclasses import dataclass

from loopfeed.engine.hlo.program import HOST_SPACE, Instruction, Source
from loopfeed.engine.hlo.slow_kernels import naive_reason
from loopfeed.engine.hlo.work import fused_into
from loopfeed.engine.inspection.carry import Carry
from loopfeed.engine.inspection.convolutions import Convolution
from loopfeed.engine.inspection.crossings import Move
from loopfeed.engine.inspection.steps import Kernel, Steps
from loopfeed.engine.scopes import FORWARD, TRAIN

LAX_CONVOLUTION, NAIVE_CONVOLUTION, NAIVE_PRODUCT = "lax-convolution", "naive-convolution", "naive-product"
HOST_COPY = "host-copy"
FLOAT64, COPIED_CARRY, NOT_DONATED, LARGE_MOVE, LARGE_CONSTANT = (
    "float64",
    "copied-carry",
    "not-donated",
    "large-move",
    "large-constant",
)
"""The kinds of findings."""
LARGE_BYTES = 1 << 20
"""A constant, copy or transpose of at least so many bytes is named."""
# A move is named if it is more than this part of all bytes of a batch.
_LEAST_SHARE = 0.01
_WIDE = ("f64", "c128")
# The kind of a fusion that a library computes, whose products are fast whatever their form.
_LIBRARY = "kCustom"


@dataclass(frozen=True)
class Finding:
    """Something that makes a program slower or larger than it has to be.

    Attributes:
        kind: a word for it, such as `LAX_CONVOLUTION`.
        message: what it is, and what to do.
        scope: where it is in the model, or the name of what it is about.
        source: the line of code that it comes from, None if XLA added it.
        num_bytes: its size, 0 if that does not matter.
    """

    kind: str
    message: str
    scope: str
    source: Source | None = None
    num_bytes: int = 0


def find_faults(
    steps: Steps, convolutions: tuple[Convolution, ...], carry: Carry, moves: tuple[Move, ...], *, is_cpu: bool
) -> tuple[Finding, ...]:
    """Return what is suboptimal in a program.

    Args:
        steps: the program.
        convolutions: its convolutions.
        carry: its carry.
        moves: its copies and transposes.
        is_cpu: whether it runs on a CPU.
    """
    found = [*_wide(steps), *_to_host(steps), *_carried(carry), *_moved(steps, moves), *_constants(steps)]
    if is_cpu:
        found = [*_lax(convolutions), *_naive(steps), *found]
    return tuple(found)


def _lax(convolutions: tuple[Convolution, ...]) -> Iterator[Finding]:
    for each in convolutions:
        if each.is_lax:
            yield Finding(
                LAX_CONVOLUTION,
                "a convolution is jax.lax.conv_general_dilated, whose gradients are many times slower in a loop on a "
                "CPU: use loopfeed.convolution, loopfeed.conv_general_dilated or an adapter of "
                "loopfeed.engine.adapters",
                "/".join(filter(None, (TRAIN, FORWARD, each.scope))),
                each.source,
            )


def _naive(steps: Steps) -> Iterator[Finding]:
    for kernel, each in _looped(steps):
        if kernel.instruction.attribute("kind") == _LIBRARY:
            continue
        if (reason := naive_reason(steps.program, each)) is not None:
            is_convolution = each.opcode == "convolution"
            what = "a convolution" if is_convolution else "a product"
            yield Finding(
                NAIVE_CONVOLUTION if is_convolution else NAIVE_PRODUCT,
                f"{what} runs as a naive loop nest on a CPU, because {reason}",
                steps.name_of(each if each.op_name else kernel.instruction),
                steps.source_of(each),
            )


def _wide(steps: Steps) -> Iterator[Finding]:
    seen = set()
    for kernel, each in _looped(steps):
        if not any(array.dtype in _WIDE for array in each.results):
            continue
        scope, source = steps.name_of(kernel.instruction), steps.source_of(each)
        if (scope, source) not in seen:
            seen.add((scope, source))
            yield Finding(
                FLOAT64,
                "float64 is computed, which is half as fast as float32 or slower: convert the operand that is float64",
                scope,
                source,
            )


def _to_host(steps: Steps) -> Iterator[Finding]:
    for kernel in steps.kernels:
        each = kernel.instruction
        if not kernel.is_looped or not each.opcode.startswith("copy"):
            continue
        arrays = [array for operand in (*steps.program.operands_of(each), each) for array in operand.results]
        if any(array.space == HOST_SPACE for array in arrays):
            yield Finding(
                HOST_COPY,
                "an array is copied between the memory of the host and of the device in the loop",
                steps.name_of(each),
                steps.source_of(each),
                each.results[0].num_bytes,
            )


def _carried(carry: Carry) -> Iterator[Finding]:
    for leaf in carry.leaves:
        if not leaf.is_donated:
            yield Finding(
                NOT_DONATED,
                "a leaf of the state does not give its memory to the result, so that both exist",
                leaf.name,
                num_bytes=leaf.num_bytes,
            )
        if leaf.copied_bytes >= LARGE_BYTES:
            yield Finding(
                COPIED_CARRY,
                "a leaf of the state is copied for every batch, as if two values of it were needed at once",
                leaf.name,
                num_bytes=leaf.copied_bytes,
            )


def _moved(steps: Steps, moves: tuple[Move, ...]) -> Iterator[Finding]:
    least = max(LARGE_BYTES, _LEAST_SHARE * steps.batch_bytes)
    for move in moves:
        if move.num_bytes >= least:
            yield Finding(
                LARGE_MOVE,
                f"a {move.kind} of {move.shapes} moves much memory and computes nothing",
                move.scope,
                move.source,
                move.num_bytes,
            )


def _constants(steps: Steps) -> Iterator[Finding]:
    for each in steps.program.instructions.values():
        if each.opcode == "constant" and each.num_bytes > LARGE_BYTES:
            users = steps.program.users_of(each)
            user = users[0] if users else each
            yield Finding(
                LARGE_CONSTANT,
                "a large constant is part of the program, which makes it slow to compile: compute it, or make it a "
                "parameter",
                steps.name_of(user),
                steps.source_of(user),
                each.num_bytes,
            )


def _looped(steps: Steps) -> Iterator[tuple[Kernel, Instruction]]:
    """Yield the kernels in the loops, each with every instruction that runs in it."""
    for kernel in steps.kernels:
        if kernel.is_looped:
            for each in fused_into(steps.program, kernel.instruction):
                yield kernel, each
