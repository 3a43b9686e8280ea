"""The loops of a compiled training program: which one turns once a batch, and how often each kernel runs in a batch."""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from loopfeed.engine.hlo.program import HloProgram, Instruction, Source
from loopfeed.engine.hlo.work import CONTAINERS, NO_KERNELS, bytes_of
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

_LAYERS = "models/layers/"
_OF_A_BATCH = {TRAIN: (FORWARD, BACKWARD, OPT_STEP), VALID: (PREDICT,)}


NO_NAME = "no scope"
"""The name of the scope of what has none."""


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
        found = []
        for instruction in self._running():
            around = self._loops_around(instruction.computation)
            times = math.prod(loop.trip_count or 1 for loop in around if loop.name not in frames)
            found.append(Kernel(instruction, self.scope_of(instruction), times, bool(around)))
        return tuple(found)

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

    def frames_of(self, phase: str) -> list[Instruction]:
        """Return the loops around a batch, the innermost first."""
        return self._frames[phase]

    def scope_of(self, instruction: Instruction) -> Scope:
        """Return the phase, action and layer of an instruction."""
        if instruction.name not in self._scopes:
            name = self.program.op_name_of(instruction)
            self._scopes[instruction.name] = parse_op_name(name) if name else NO_SCOPE
        return self._scopes[instruction.name]

    def name_of(self, instruction: Instruction) -> str:
        """Return the scope of an instruction in one word, such as "train/forward/layer1/0/conv1"."""
        return scope_name(self.scope_of(instruction))

    def source_of(self, instruction: Instruction) -> Source | None:
        """Return the line that an instruction comes from: of a layer of `models`, the line that uses the layer."""
        places = self.program.call_stack(instruction)
        users = (place for place in places if _LAYERS not in place.file.replace("\\", "/"))
        return next(users, places[0] if places else None)

    @cached_property
    def _frames(self) -> dict[str, list[Instruction]]:
        return {phase: self._common_loops(phase, actions) for phase, actions in _OF_A_BATCH.items()}

    def _common_loops(self, phase: str, actions: tuple[str, ...]) -> list[Instruction]:
        """Return the loops around most kernels of these actions, the innermost first.

        Not around all: XLA moves some that are the same for every batch out of the innermost loop.
        """
        counts: Counter[str] = Counter()
        loops: dict[str, list[Instruction]] = {}
        total = 0
        for each in self._running():
            scope = parse_op_name(each.op_name) if each.op_name else NO_SCOPE
            around = self._loops_around(each.computation)
            if scope.phase == phase and scope.action in actions and around:
                total += 1
                for depth, loop in enumerate(around):
                    counts[loop.name] += 1
                    loops[loop.name] = around[depth:]
        usual = [loops[name] for name, count in counts.items() if 2 * count > total]
        return max(usual, key=len, default=[])

    def _running(self) -> Iterator[Instruction]:
        for each in self._within:
            if each.opcode not in NO_KERNELS and each.opcode not in CONTAINERS:
                yield each

    @cached_property
    def _within(self) -> tuple[Instruction, ...]:
        entry = self.program.entry
        return () if entry is None else tuple(self.program.within(entry.name))

    def _loops_around(self, computation: str) -> list[Instruction]:
        if computation not in self._around:
            self._around[computation] = self.program.loops_around(computation)
        return self._around[computation]

    @cached_property
    def _around(self) -> dict[str, list[Instruction]]:
        return {}


def scope_name(scope: Scope) -> str:
    """Return a scope in one word, such as "train/forward/layer1/0/conv1"."""
    return "/".join(filter(None, (scope.phase, scope.action, scope.path))) or NO_NAME


def short_source(source: Source | None) -> str:
    """Return a line of code as "resnet.py:242", "-" without one."""
    return "-" if source is None else f"{PurePath(source.file).name}:{source.line}"
