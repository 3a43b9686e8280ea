"""The loops of a compiled training program: which one turns once a batch, what they carry, how often kernels run."""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from loopfeed.engine.hlo.program import Array, HloProgram, Instruction, Source
from loopfeed.engine.hlo.work import CONTAINERS, NO_KERNELS, bytes_of, kept_results
from loopfeed.engine.scopes import (
    BACKWARD,
    FORWARD,
    NO_SCOPE,
    OPT_STEP,
    PREDICT,
    SNAPSHOT,
    TRAIN,
    VALID,
    Scope,
    parse_op_name,
)

_STATE = "state."

_LAYERS = "models/layers/"
_OF_A_BATCH = {TRAIN: (FORWARD, BACKWARD, OPT_STEP), VALID: (PREDICT,)}
# The name of the scope of what has none.
_NO_NAME = "no scope"


@dataclass(frozen=True)
class Kernel:
    """An instruction that runs as one kernel.

    Attributes:
        instruction: the instruction.
        scope: its phase, action and layer.
        times: how often it runs for a batch; what runs for each pull of batches or at a boundary counts once.
        is_looped: whether it runs in a loop at all.
    """

    instruction: Instruction
    scope: Scope
    times: int
    is_looped: bool


class Steps:
    """The kernels of a program, by scope.

    Args:
        program: a compiled training program.
    """

    def __init__(self, program: HloProgram) -> None:
        self.program = program
        self._scopes: dict[str, Scope] = {}

    @cached_property
    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel of the program."""
        frames = {loop.name for loops in self._frames.values() for loop in loops}
        return tuple(
            Kernel(
                instruction,
                self.scope_of(instruction),
                math.prod(loop.trip_count or 1 for loop in around if loop.name not in frames),
                bool(around),
            )
            for instruction, around in self._running
        )

    @cached_property
    def batch_bytes(self) -> int:
        """The bytes that the kernels of a training batch read and write."""
        own = (
            each
            for each in self.kernels
            if each.is_looped and each.scope.phase == TRAIN and each.scope.action != SNAPSHOT
        )
        return sum(each.times * bytes_of(self.program, each.instruction) for each in own)

    def loop_of(self, phase: str) -> Instruction | None:
        """Return the loop of which one turn is one batch of training or of an evaluation, None if there is none."""
        loops = self._frames[phase]
        return loops[0] if loops else None

    def largest_arrays(self, phase: str) -> list[tuple[Array, Instruction]]:
        """Return the arrays that the kernels of a batch of a phase compute, the largest first, each with its kernel."""
        own = (each.instruction for each in self.kernels if each.is_looped and each.scope.phase == phase)
        found = [(array, each) for each in own for array in kept_results(each)]
        return sorted(found, key=lambda pair: -pair[0].num_bytes)

    def scope_of(self, instruction: Instruction) -> Scope:
        """Return the phase, action and layer of an instruction."""
        if instruction.name not in self._scopes:
            name = self.program.op_name_of(instruction)
            self._scopes[instruction.name] = parse_op_name(name) if name else NO_SCOPE
        return self._scopes[instruction.name]

    def name_of(self, instruction: Instruction) -> str:
        """Return the scope of an instruction in one word, such as "train/forward/layer1/0/conv1"."""
        scope = self.scope_of(instruction)
        return "/".join(filter(None, (scope.phase, scope.action, scope.path))) or _NO_NAME

    def source_of(self, instruction: Instruction) -> Source | None:
        """Return the line that an instruction comes from: of a layer of `models`, the line that uses the layer."""
        return outside_layers(self.program.call_stack(instruction))

    @cached_property
    def _frames(self) -> dict[str, list[Instruction]]:
        return {phase: self._common_loops(phase, actions) for phase, actions in _OF_A_BATCH.items()}

    def _common_loops(self, phase: str, actions: tuple[str, ...]) -> list[Instruction]:
        """Return the loops around most kernels of these actions, the innermost first.

        Not around all: XLA moves some that are the same for every batch out of the innermost loop.
        """
        scoped = ((parse_op_name(each.op_name), around) for each, around in self._running if each.op_name and around)
        own = [around for scope, around in scoped if scope.phase == phase and scope.action in actions]
        counts = Counter(loop.name for around in own for loop in around)
        loops = {loop.name: around[depth:] for around in own for depth, loop in enumerate(around)}
        usual = [loops[name] for name, count in counts.items() if 2 * count > len(own)]
        return max(usual, key=len, default=[])

    @cached_property
    def _running(self) -> tuple[tuple[Instruction, list[Instruction]], ...]:
        """The instructions that run as kernels, each with the loops around it, the innermost first."""
        around: dict[str, list[Instruction]] = {}
        entry, found = self.program.entry, []
        for each in () if entry is None else self.program.within(entry.name):
            if each.opcode not in NO_KERNELS and each.opcode not in CONTAINERS:
                if each.computation not in around:
                    around[each.computation] = self.program.loops_around(each.computation)
                found.append((each, around[each.computation]))
        return tuple(found)


def outside_layers(places: Sequence[Source]) -> Source | None:
    """Return the first of some lines of code that is not of a layer of `models`, else the first."""
    users = (place for place in places if _LAYERS not in place.file.replace("\\", "/"))
    return next(users, places[0] if places else None)


def short_source(source: Source | None) -> str:
    """Return a line of code as "resnet.py:242", "-" without one."""
    return "-" if source is None else f"{PurePath(source.file).name}:{source.line}"


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
