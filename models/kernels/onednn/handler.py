"""The custom call `loopfeed_onednn` of XLA's programs: an FFI handler that runs sequences of oneDNN's primitives.

XLA calls it through its C interface (`xla/ffi/api/c_api.h`, whose structures are stable) with the addresses of operands
and results, and with one attribute: the text of an operation. The text says everything, so a program that another
process compiled runs too. No data moves, so it is no crossing. The handler is that of `team.c` if it can be built, else
a Python function that ctypes presents as a C function.
"""

import atexit
import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
from jax import ffi, lax

from loopfeed.models.kernels.onednn.library import ForkSafeLock, Library, load_library
from loopfeed.models.kernels.onednn.primitives import Primitives
from loopfeed.models.kernels.onednn.team import PythonTeam
from loopfeed.models.kernels.onednn.team_library import load_team

type Prepare = Callable[[str], Primitives]


# Without a C compiler the Python of `team.py` and `handler.py` does the same, with the same results: it takes longer
# for each call, and waits for other Python threads (docs/concepts/kernels.md has figures).
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


TARGET = "loopfeed_onednn"
"""The name of the custom call in a program."""

_API_MAJOR, _API_MINOR = 0, 1
_METADATA_EXTENSION = 1
_EXECUTE = 3
_INTERNAL_ERROR = 13
# Calls that are refused while Python is exiting return to XLA within this time, in seconds.
_LEAVE_S = 0.05


def _structure(name: str, **fields: Any) -> Any:
    """Return a C structure of XLA's interface: each begins with its own size and a list of extensions."""
    head = {"struct_size": ctypes.c_size_t, "extension_start": ctypes.c_void_p}
    return type(name, (ctypes.Structure,), {"_fields_": tuple((head | fields).items())})


_Version = _structure("_Version", major=ctypes.c_int, minor=ctypes.c_int)
_Buffer = _structure("_Buffer", dtype=ctypes.c_int, data=ctypes.c_void_p)
_Values = _structure("_Values", size=ctypes.c_int64, types=ctypes.c_void_p, values=ctypes.c_void_p)
_Attributes = _structure(
    "_Attributes", size=ctypes.c_int64, types=ctypes.c_void_p, names=ctypes.c_void_p, values=ctypes.c_void_p
)
_Frame = _structure(
    "_Frame",
    api=ctypes.c_void_p,
    context=ctypes.c_void_p,
    stage=ctypes.c_int,
    operands=_Values,
    results=_Values,
    attributes=_Attributes,
)
_Error = _structure("_Error", message=ctypes.c_char_p, code=ctypes.c_int)
_Api = _structure("_Api", version=_Version, internal=ctypes.c_void_p, create_error=ctypes.c_void_p)


class _Extension(ctypes.Structure):
    """One of a call's extensions; the only kind so far asks for the version of the interface."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("kind", ctypes.c_int),
        ("next", ctypes.c_void_p),
        ("metadata", ctypes.c_void_p),
    )


class _Metadata(ctypes.Structure):
    _fields_ = (("struct_size", ctypes.c_size_t), ("version", _Version), ("traits", ctypes.c_uint32))


class PythonHandler:
    """The handler in Python: prepares each operation at its first call, and keeps it.

    Args:
        library: oneDNN.
        prepare: builds the sequence of primitives of an operation from its text.

    Attributes:
        function: the C function.
    """

    def __init__(self, library: Library, prepare: Prepare) -> None:
        self._prepare = prepare
        self._prepared: dict[bytes, Primitives] = {}
        self._preparing = ForkSafeLock()
        self._team = PythonTeam(library)
        # Called by threads of XLA, which do not have Python's lock.
        self.function = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(self._handle)

    def refuse(self, reason: str) -> None:
        """Wait until the operation that runs has ended, and fail all later ones with this reason."""
        self._team.refuse(reason)

    def _handle(self, address: int) -> int | None:
        """Handle a call of XLA; return the address of an error, or None."""
        frame = _Frame.from_address(address)
        try:
            if frame.extension_start and self._answer(frame.extension_start):
                return None
            if frame.stage == _EXECUTE:
                self._run(frame)
        except BaseException as error:  # noqa: BLE001 - XLA returns it as the program's error
            return _error(frame.api, f"{type(error).__name__}: {error}")
        return None

    def _answer(self, address: int) -> bool:
        """Fill in the metadata if they are asked for, and return whether they are."""
        extension = _Extension.from_address(address)
        if extension.kind != _METADATA_EXTENSION:
            return False
        metadata = _Metadata.from_address(extension.metadata)
        metadata.version.major, metadata.version.minor = _API_MAJOR, _API_MINOR
        metadata.traits = 0
        return True

    def _run(self, frame: Any) -> None:
        (span,) = _addresses(frame.attributes, 1)
        text = ctypes.string_at(*(ctypes.c_size_t * 2).from_address(span))
        sequence = self._prepared.get(text) or self._build(text)
        self._team.run(sequence, _data(frame.operands), _data(frame.results))

    def _build(self, text: bytes) -> Primitives:
        with self._preparing:
            if text not in self._prepared:
                self._prepared[text] = self._prepare(text.decode())
            return self._prepared[text]


def _addresses(values: Any, size: int) -> Any:
    return (ctypes.c_size_t * size).from_address(values.values)


def _data(buffers: Any) -> list[int]:
    """Return the addresses of the elements of operands or results."""
    size = buffers.size
    return [_Buffer.from_address(address).data for address in _addresses(buffers, size)] if size else []


def _error(api: int, message: str) -> int | None:
    create = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(_Api.from_address(api).create_error)
    arguments = _Error(ctypes.sizeof(_Error), None, message.encode(), _INTERNAL_ERROR)
    created: int | None = create(ctypes.addressof(arguments))
    return created


_registering = ForkSafeLock()


def register(prepare: Prepare) -> CompiledHandler | PythonHandler:
    """Register the custom call with XLA, once per process, and return its handler."""
    with _registering:
        return _register(prepare)


@cache
def _register(prepare: Prepare) -> CompiledHandler | PythonHandler:
    handler = _make_handler(load_library(), prepare)
    ffi.register_ffi_target(TARGET, ffi.pycapsule(handler.function), platform="cpu")
    atexit.register(_end_programs, handler)
    return handler


def _make_handler(library: Library, prepare: Prepare) -> CompiledHandler | PythonHandler:
    team = load_team()
    return PythonHandler(library, prepare) if team is None else CompiledHandler(team, library, prepare)


def _end_programs(handler: CompiledHandler | PythonHandler) -> None:
    """End programs that still run, with an error: a thread that asks for Python's lock later would be aborted."""
    handler.refuse("Python is exiting, so no program can call oneDNN's kernels")
    time.sleep(_LEAVE_S)


def call(
    prepare: Prepare, text: str, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
) -> Sequence[jax.Array]:
    """Call an operation of oneDNN in the program that is being traced; its results are new arrays of these shapes.

    Under `jax.vmap` it runs once for each element of the mapped axis, one after the other.
    """
    register(prepare)
    found = ffi.ffi_call(TARGET, tuple(results), vmap_method="sequential")(*operands, operation=text)
    # Under `shard_map` a custom call does not say by itself along which axes of the mesh its results vary.
    axes = tuple(sorted(frozenset[str]().union(*map(_varying, operands)) - _varying(found[0])))
    return [lax.pcast(each, axes, to="varying") for each in found] if axes else found


def _varying(array: jax.Array) -> frozenset[str]:
    """Return the axes of the mesh along which an array varies inside `shard_map`."""
    axes: frozenset[str] = jax.typeof(array).manual_axis_type.varying
    return axes
