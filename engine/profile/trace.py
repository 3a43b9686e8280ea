"""The operations of a trace of jax's profiler: when each began and ended on one device.

A trace comes from `jax.profiler.ProfileData`. On a CPU, an operation is an event of a thread of XLA's; if it is
asynchronous, that event ends when the work is enqueued, and another event, "end: NAME", says when the work was done. On
a GPU, it is one or more events of the device's streams. Does not depend on what the operations mean.
"""

import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

_HOST_PLANE = "/host:CPU"
_DEVICE_PLANE = "/device:"
_END = "end: "
# The names of an event's properties: the instruction, its module, the device of a CPU, and the identity that an
# operation shares with its end.
_OP, _MODULE, _DEVICE, _BEGUN, _ENDED = "hlo_op", "hlo_module", "device_ordinal", "_p", "_c"
# XLA's thread pools record each piece of work, by far the most events of a trace; they name no operation.
_POOL_EVENT = "ThreadpoolListener"


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
    for event in _events(plane):
        properties = dict(event.stats)
        if properties.get(_MODULE) == module and _OP in properties:
            yield OpSpan(str(properties[_OP]), event.start_ns, event.start_ns + event.duration_ns)


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
