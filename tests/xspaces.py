"""Traces as jax's profiler writes them, made up from lists of events."""

from typing import NamedTuple

import jax

HOST, CARD = "/host:CPU", "/device:GPU:0"
_STATS = ("hlo_op", "hlo_module", "device_ordinal", "_p", "_c", "name", "unique_hlo_op_id")


class Event(NamedTuple):
    """An event: its name, start and duration in ns, and its properties (strings and integers)."""

    name: str
    start_ns: int
    duration_ns: int
    stats: dict[str, str | int]


def op(name, start_ns, end_ns, *, identity=0, device=0, module="jit_train"):
    """Return the event of an operation on a CPU."""
    stats = {"hlo_op": name, "hlo_module": module, "device_ordinal": device, "_p": identity}
    return Event(name, start_ns, end_ns - start_ns, stats)


def end_of(name, at_ns, identity):
    """Return the event that ends an asynchronous operation on a CPU."""
    return Event(f"end: {name}", at_ns, 0, {"_c": identity})


def make_trace(*lines, plane=HOST):
    """Return a `jax.profiler.ProfileData` with one plane, whose lines are lists of events."""
    names = dict.fromkeys(event.name for line in lines for event in line)
    numbers = {name: number for number, name in enumerate(names, 1)}
    kinds = {name: number for number, name in enumerate(_STATS, 1)}
    text = [f'planes {{ id: 1 name: "{plane}"']
    for number, line in enumerate(lines):
        text.append(f'lines {{ id: {number} name: "line {number}" timestamp_ns: 0')
        for event in line:
            stats = " ".join(
                f"stats {{ metadata_id: {kinds[name]} {'str_value' if isinstance(value, str) else 'int64_value'}: "
                + (f'"{value}" }}' if isinstance(value, str) else f"{value} }}")
                for name, value in event.stats.items()
            )
            times = f"offset_ps: {event.start_ns * 1000} duration_ps: {event.duration_ns * 1000}"
            text.append(f"events {{ metadata_id: {numbers[event.name]} {times} {stats} }}")
        text.append("}")
    for name, number in numbers.items():
        text.append(f'event_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}')
    for name, number in kinds.items():
        text.append(f'stat_metadata {{ key: {number} value {{ id: {number} name: "{name}" }} }}')
    return jax.profiler.ProfileData.from_text_proto("\n".join([*text, "}"]))
