"""The handler of `team.c`, and what it is given.

Without a C compiler the Python of `team.py` and `handler.py` does the same, with the same results: it takes longer for
each call, and waits for other Python threads (docs/concepts/kernels.md has figures).
"""

import ctypes
from collections.abc import Callable
from typing import Any

from loopfeed.models.kernels.onednn.library import Library
from loopfeed.models.kernels.onednn.primitives import Primitives

type Prepare = Callable[[str], Primitives]


class _Place(ctypes.Structure):
    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("kind", ctypes.c_int64),
        ("number", ctypes.c_int64),
        ("offset", ctypes.c_int64),
    )


class _Task(ctypes.Structure):
    _fields_ = (
        ("primitive", ctypes.c_void_p),
        ("num_arguments", ctypes.c_int64),
        ("arguments", ctypes.c_void_p),
        ("num_places", ctypes.c_int64),
        ("places", ctypes.POINTER(_Place)),
    )


class _Phase(ctypes.Structure):
    _fields_ = (("num_tasks", ctypes.c_int64), ("tasks", ctypes.POINTER(_Task)))


class _Sequence(ctypes.Structure):
    _fields_ = (("arena_bytes", ctypes.c_int64), ("num_phases", ctypes.c_int64), ("phases", ctypes.POINTER(_Phase)))


_PREPARE = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t)


class _Functions(ctypes.Structure):
    _fields_ = (
        ("execute", ctypes.c_void_p),
        ("set_address", ctypes.c_void_p),
        ("set_num_threads", ctypes.c_void_p),
        ("get_max_threads", ctypes.c_void_p),
        ("prepare", _PREPARE),
        ("streams", ctypes.POINTER(ctypes.c_void_p)),
        ("num_threads", ctypes.c_int64),
    )


class CompiledHandler:
    """The handler of `team.c`.

    Args:
        team: `team.c` as a library.
        library: oneDNN.
        prepare: builds the sequence of primitives of an operation from its text.

    Attributes:
        function: the C function.
    """

    def __init__(self, team: ctypes.CDLL, library: Library, prepare: Prepare) -> None:
        self._prepare = prepare
        # What C holds the addresses of.
        self._kept: list[Any] = []
        streams = (ctypes.c_void_p * library.num_threads)(*(stream.value for stream in library.streams))
        functions = _Functions(
            *(_address(library.long.dnnl_primitive_execute), _address(library.long.dnnl_memory_set_data_handle)),
            *(_address(library.threads.omp_set_num_threads), _address(library.threads.omp_get_max_threads)),
            *(_PREPARE(self._build), streams, library.num_threads),
        )
        self._kept += [streams, functions]
        self._team = team
        self._team.loopfeed_set_up(ctypes.byref(functions))
        self.function = self._team.loopfeed_handle

    def refuse(self, reason: str) -> None:
        """Wait until the operation that runs has ended, and fail all later ones with this reason."""
        self._team.loopfeed_refuse(reason.encode())

    def _build(self, text: int, length: int, message: int, message_bytes: int) -> int | None:
        """Return the address of an operation's sequence; None, and a message, if it cannot be built."""
        try:
            sequence, kept = pack(self._prepare(ctypes.string_at(text, length).decode()))
        except BaseException as error:  # noqa: BLE001 - XLA returns it as the program's error
            said = f"{type(error).__name__}: {error}".encode("ascii", "replace")[: message_bytes - 1] + b"\0"
            ctypes.memmove(message, said, len(said))
            return None
        self._kept.append((sequence, kept))
        return ctypes.addressof(sequence)


def _address(function: Any) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0


def pack(primitives: Primitives) -> tuple[_Sequence, list[Any]]:
    """Return a sequence as `team.c` reads it, and what must live as long."""
    kept: list[Any] = [primitives]
    phases = (_Phase * len(primitives.phases))()
    for phase, listed in zip(phases, primitives.phases, strict=True):
        tasks = (_Task * len(listed))()
        for task, given in zip(tasks, listed, strict=True):
            places = (_Place * len(given.memories))(
                *(_Place(memory.value, int(kind), number, offset) for memory, (kind, number, offset) in given.memories)
            )
            kept.append(places)
            task.primitive, task.num_arguments = given.primitive.value, len(given.arguments)
            task.arguments = ctypes.addressof(given.arguments)
            task.num_places, task.places = len(places), places
        kept.append(tasks)
        phase.num_tasks, phase.tasks = len(tasks), tasks
    kept.append(phases)
    return _Sequence(primitives.arena_bytes, len(phases), phases), kept
