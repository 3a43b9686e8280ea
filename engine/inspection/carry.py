"""The training state that a compiled program carries through its loops, leaf by leaf."""

import re
from dataclasses import dataclass

from loopfeed.engine.hlo.program import HloProgram

_STATE = "state."


@dataclass(frozen=True)
class CarryLeaf:
    """A leaf of the training state.

    Attributes:
        name: its place in `TrainState`, such as "params.fc.kernel".
        dtype: its dtype as HLO calls it.
        shape: its shape.
        num_bytes: its size.
        is_donated: whether the result takes the memory of the argument.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    num_bytes: int
    is_donated: bool


def read_carry(program: HloProgram) -> tuple[CarryLeaf, ...]:
    """Return the leaves of the training state among the arguments of a program, in their order."""
    donated = set(map(int, re.findall(r"\}: \((\d+),", program.header)))
    arguments = {} if program.entry is None else program.entry.parameters
    return tuple(
        CarryLeaf(
            name=_dotted(each.op_name.removeprefix(_STATE)),
            dtype=each.results[0].dtype,
            shape=each.results[0].shape,
            num_bytes=each.num_bytes,
            is_donated=number in donated,
        )
        for number, each in sorted(arguments.items())
        if each.op_name.startswith(_STATE) and each.results
    )


def _dotted(name: str) -> str:
    """Return "params.fc.kernel" for "params['fc']['kernel']", whose quotes XLA's text escapes."""
    return re.sub(r"\[\\?'?(.*?)\\?'?\]", r".\1", name)
