"""Attribution of the wall time of traced steps to the scopes of the operations that ran.

Operations overlap, since XLA runs several at once, and calls and loops contain others. At each instant the time is
shared evenly among the operations that are active and contain none that is, so that the parts of a step add up to its
duration.
"""

import math
import warnings
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any, NamedTuple

from loopfeed.engine.hlo.program import HloProgram, is_kernel
from loopfeed.engine.scopes import ACTIONS, AUGMENT, DRAW, NO_SCOPE, PUSH, TRAIN, UNPACK, VALID, Scope, parse_op_name

_HOST_PLANE = "/host:CPU"
_DEVICE_PLANE = "/device:"
_END = "end: "
# The names of an event's properties: the instruction, its module, the device of a CPU, and the identity that an
# operation shares with its end.
_OP, _MODULE, _DEVICE, _BEGUN, _ENDED = "hlo_op", "hlo_module", "device_ordinal", "_p", "_c"
# On a GPU: the path of an operation, which begins with its program's function, and an identity whose upper 32 bits are
# those of the program.
_PATH, _IDENTITY = "name", "unique_hlo_op_id"
# XLA's thread pools record each piece of work, by far the most events of a trace; they name no operation.
_POOL_EVENT = "ThreadpoolListener"


# A trace comes from `jax.profiler.ProfileData`. On a CPU, an operation is an event of a thread of XLA's; if it is
# asynchronous, that event ends when the work is enqueued, and another event, "end: NAME", says when the work was done.
# On a GPU, it is one or more events of the device's streams.
class OpSpan(NamedTuple):
    """One execution of an operation: the name of its HLO instruction, and start and end in ns since the trace began."""

    name: str
    start_ns: float
    end_ns: float


def read_spans(profile: Any, module: str) -> list[OpSpan]:
    """Return the operations that a program's first device executed, by their start.

    Args:
        profile: a `jax.profiler.ProfileData`.
        module: name of the program's HLO module, such as "jit_train".
    """
    with warnings.catch_warnings():
        # Of jaxlib's own types, when the first of them is used.
        warnings.simplefilter("ignore", DeprecationWarning)
        planes = {plane.name: plane for plane in profile.planes}
        devices = sorted(name for name in planes if name.startswith(_DEVICE_PLANE))
        spans = [span for name in devices[:1] for span in _device_spans(planes[name], module)]
        if not spans and _HOST_PLANE in planes:
            spans = _host_spans(planes[_HOST_PLANE], module)
    return sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))


def _device_spans(plane: Any, module: str) -> Iterator[OpSpan]:
    found = [(event, properties) for event in _events(plane) if _OP in (properties := dict(event.stats))]
    # A trace without the programs' text does not name an event's module (jax 0.11.2), and not every event has a path.
    path = f"jit({module.removeprefix('jit_')})/"
    programs = {_program(each) for _, each in found if str(each.get(_PATH, "")).startswith(path)} - {None}
    for event, properties in found:
        is_ours = properties[_MODULE] == module if _MODULE in properties else _program(properties) in programs
        if is_ours:
            yield OpSpan(str(properties[_OP]), event.start_ns, event.start_ns + event.duration_ns)


def _program(properties: Mapping[str, Any]) -> int | None:
    """Return the number of the program of a GPU's event, None if it does not say."""
    return int(properties[_IDENTITY]) >> 32 if _IDENTITY in properties else None


def _host_spans(plane: Any, module: str) -> list[OpSpan]:
    begun: list[tuple[int, Any, OpSpan]] = []
    ended: dict[Any, float] = {}
    for event in _events(plane):
        if event.name.startswith(_POOL_EVENT):
            continue
        properties = dict(event.stats)
        end_ns = event.start_ns + event.duration_ns
        if event.name.startswith(_END):
            ended[properties.get(_ENDED), event.name.removeprefix(_END)] = end_ns
        elif properties.get(_MODULE) == module and _OP in properties:
            name = str(properties[_OP])
            span = OpSpan(name, event.start_ns, end_ns)
            begun.append((int(properties.get(_DEVICE, 0)), (properties.get(_BEGUN), name), span))
    first = min((device for device, _, _ in begun), default=0)
    return [
        span._replace(end_ns=max(span.end_ns, ended.get(identity, 0)))
        for device, identity, span in begun
        if device == first
    ]


def _events(plane: Any) -> Iterable[Any]:
    for line in plane.lines:
        yield from line.events


_CALLS_HOST = "custom-call"
_CONTAINERS = frozenset({"while", "conditional", "call", "async-start"})


class Operation(NamedTuple):
    """What is known of an operation of the program.

    Attributes:
        scope: where it belongs.
        is_container: whether it calls other operations, so that its own time is what these leave.
        calls_host: whether it is a call to the host.
    """

    scope: Scope
    is_container: bool = False
    calls_host: bool = False


_UNKNOWN = Operation(NO_SCOPE)


@dataclass(frozen=True)
class TracedBatch:
    """One batch of a trace, or several that are drawn at once, from the draw to the next one.

    Attributes:
        phase: "train" or "valid".
        parts_ns: the time of each scope, in ns, in the order in which they were mostly active; NO_SCOPE is what belongs
            to none, idle time included.
        num_batches: the number of batches.
    """

    phase: str
    parts_ns: Mapping[Scope, float]
    num_batches: int = 1

    @property
    def duration_ns(self) -> float:
        """The duration of all its batches, which its parts add up to."""
        return sum(self.parts_ns.values())


def operations_of(program: HloProgram) -> dict[str, Operation]:
    """Return what is known of each operation of a program, by its name.

    A fusion belongs to the scope of its root. What XLA added belongs to that of what it computes from or for.
    """
    return {
        each.name: Operation(
            parse_op_name(program.op_name_of(each)),
            each.opcode in _CONTAINERS,
            each.opcode == _CALLS_HOST and not is_kernel(each),
        )
        for each in program.instructions.values()
    }


def attribute(
    spans: Sequence[OpSpan], operations: Mapping[str, Operation], chunk: Mapping[str, int] = MappingProxyType({})
) -> list[TracedBatch]:
    """Divide a trace into whole batches, and the duration of each among the scopes.

    A batch lasts from its draw to the next draw, the last one to the end of its push, if there is one.

    Args:
        spans: the operations that ran on one device, by their start.
        operations: what is known of them; an unknown one has no scope.
        chunk: the largest number of batches that one draw of a phase has, 1 if left out.
    """
    spans = [span for span in spans if span.end_ns > span.start_ns]
    marks = _draws(spans, operations)
    starts = [start for start, _ in marks]
    if marks and (end := _last_push(spans, operations, *marks[-1])) is not None:
        starts.append(end)
    begun = [
        _batches_of_draw(spans, operations, phase, start, end, chunk.get(phase, 1))
        for (start, phase), end in zip(marks, starts[1:], strict=False)
    ]
    parts: list[dict[Scope, float]] = [defaultdict(float) for _ in begun]
    moments: list[dict[Scope, list[float]]] = [defaultdict(lambda: [0.0, 0.0]) for _ in begun]
    for start, end, scopes in _instants(spans, operations, starts):
        number = bisect_right(starts, start) - 1
        if 0 <= number < len(parts):
            for scope in scopes or (NO_SCOPE,):
                share = (end - start) / max(len(scopes), 1)
                parts[number][scope] += share
                if len(begun[number]) == 1 or start < begun[number][1]:
                    moment = moments[number][scope]
                    moment[0] += share
                    moment[1] += share * (start + end) / 2
    for part, moment_of in zip(parts, moments, strict=True):
        # By the mean time of activity in the first batch of a draw: a constant of the last layer may be computed first.
        means = {scope: total / share for scope, (share, total) in moment_of.items()}
        ordered = sorted(part, key=lambda scope: means.get(scope, math.inf))
        part |= {scope: part.pop(scope) for scope in ordered}
    return [TracedBatch(phase, part, len(each)) for (_, phase), part, each in zip(marks, parts, begun, strict=False)]


def _batches_of_draw(
    spans: Sequence[OpSpan], operations: Mapping[str, Operation], phase: str, start_ns: float, end_ns: float, most: int
) -> list[float]:
    """Return when each batch, `most` at most, began that the program computed from the draw at `start_ns` to `end_ns`.

    That is each time that an operation of the first action after the draw ran. Operations of a loop inside the action
    run more often, those before the loop over the batches only once.
    """
    if most == 1:
        return [start_ns]
    first = bisect_left(spans, start_ns, key=lambda span: span.start_ns)
    stop = bisect_left(spans, end_ns, key=lambda span: span.start_ns)
    ran: dict[str | None, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for span in spans[first:stop]:
        scope, is_container, _ = operations.get(span.name, _UNKNOWN)
        if scope.phase == phase and not is_container:
            ran[scope.action][span.name].append(span.start_ns)
    for action in ACTIONS[phase]:
        found = [starts for starts in ran[action].values() if len(starts) <= most]
        if action != DRAW and found:
            return max(found, key=len)
    return [start_ns]


def _last_push(
    spans: Iterable[OpSpan], operations: Mapping[str, Operation], start_ns: float, phase: str
) -> float | None:
    """Return the end of the last push of a batch that began at `start_ns`, None if it has none."""
    ends = [
        span.end_ns
        for span in spans
        if span.start_ns > start_ns
        and (found := operations.get(span.name, _UNKNOWN)).calls_host
        and (found.scope.phase, found.scope.action) == (phase, PUSH)
    ]
    return max(ends, default=None)


def _draws(spans: Iterable[OpSpan], operations: Mapping[str, Operation]) -> list[tuple[float, str]]:
    """Return start and phase of the operation that begins each batch, in order.

    It is the call to the host that draws; on a GPU that is a copy for each array of the batch, one after the other. On
    a device that does not record such calls, it is the operation of the first action that has any, which runs once a
    batch as all do.
    """
    found: dict[tuple[str, int, str], list[float]] = defaultdict(list)
    before = None
    for span in spans:
        scope, is_container, calls_host = operations.get(span.name, _UNKNOWN)
        if is_container:
            continue
        if span.name != before and scope.phase in (TRAIN, VALID) and scope.action in _FIRST_ACTIONS:
            rank = _FIRST_ACTIONS.index(scope.action) * 2 + (not calls_host)
            found[scope.phase, rank, span.name].append(span.start_ns)
        before = span.name
    marks: list[tuple[float, str]] = []
    for phase in (TRAIN, VALID):
        ranks = [(rank, -len(starts), name) for (each, rank, name), starts in found.items() if each == phase]
        if ranks:
            rank, _, name = min(ranks)
            marks += [(start, phase) for start in found[phase, rank, name]]
    return sorted(marks)


_FIRST_ACTIONS = (DRAW, UNPACK, AUGMENT)


def _instants(
    spans: Sequence[OpSpan], operations: Mapping[str, Operation], cuts: Iterable[float]
) -> Iterator[tuple[float, float, list[Scope]]]:
    """Yield (start, end, scopes) of the intervals in which the same operations are active, with the scopes of these.

    Args:
        spans, operations: as in `attribute`.
        cuts: instants at which to end an interval in any case.
    """
    changes = [(span.start_ns, 1, number) for number, span in enumerate(spans)]
    changes += [(span.end_ns, 0, number) for number, span in enumerate(spans)]
    changes += [(cut, 2, -1) for cut in cuts]
    changes.sort()
    leaves: dict[int, Scope] = {}
    containers: dict[int, Scope] = {}
    for (at, kind, number), (following, _, _) in pairwise(changes):
        if kind < 2:
            scope, is_container, _ = operations.get(spans[number].name, _UNKNOWN)
            active = containers if is_container else leaves
            if kind:
                active[number] = scope
            else:
                active.pop(number, None)
        if following > at:
            # Of containers alone the innermost counts, which began last.
            yield at, following, list(leaves.values()) or list(containers.values())[-1:]
