"""Reads Python pickles that contain nothing but arrays, strings, bytes, numbers, lists, tuples and dicts.

The `pickle` module calls whatever a file names, and allocates whatever it asks for: a class for `Unpickler.find_class`
prevents the first, but not an array of 2^40 elements or a memo with 2^31 places. Here, a pickle is a sequence of
opcodes (`pickletools` reads them) for a small machine of a stack and a memo. It calls nothing; the few functions by
which NumPy pickles its arrays are known by their names, and an array is a view of bytes that are in the file. The
number of opcodes is limited, so that memory and time are limited by the size of the file.
"""

import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from loopfeed.preprocess.printable import printable_name

MAX_OPCODES = 4_000_000  # CIFAR-100's training set has 300,000
_MAX_ARRAYS = 1_000
_MAX_DIMENSIONS, _MAX_LENGTH = 8, 2**48
_SIMPLE_DTYPES = "biufSU"
_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric", "numpy")
_NUMPY_NAMES = frozenset({"_reconstruct", "_frombuffer", "scalar", "dtype", "ndarray"})
_KEY_TYPES = (str, bytes, int)
_BYTES = frozenset({"STRING", "BINSTRING", "SHORT_BINSTRING", "BINBYTES", "SHORT_BINBYTES", "BINBYTES8", "BYTEARRAY8"})
_CONSTANTS = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False}
_IGNORED = frozenset({"PROTO", "FRAME"})
_VALUES = frozenset(
    {"INT", "BININT", "BININT1", "BININT2", "LONG", "LONG1", "LONG4", "FLOAT", "BINFLOAT"}
    | {"UNICODE", "SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"}
)


class UnsafePickleError(ValueError):
    """Error raised if a pickle contains something else than plain values, is damaged, or exceeds a limit."""


@dataclass(frozen=True)
class _Name:
    """What a pickle names to call or to build."""

    module: str
    name: str

    @property
    def is_of_numpy(self) -> bool:
        return self.module in _NUMPY and self.name in _NUMPY_NAMES


@dataclass
class _DType:
    """A type of elements: "u1" and its byte order, once that is known."""

    code: str
    order: str = "="

    def find(self) -> np.dtype[Any]:
        if self.code[:1] == "O":
            raise UnsafePickleError("it contains an array of Python objects")
        if len(self.code) > 8 or self.code[:1] not in _SIMPLE_DTYPES or not self.code[1:].isdecimal():
            raise UnsafePickleError(f"it contains an array of the type {_shown(self.code)}")
        return np.dtype(self.code).newbyteorder("=" if self.order == "|" else self.order)  # type: ignore[arg-type]


@dataclass(eq=False)
class _Building:
    """An array whose shape, type and elements are still to come, and its places in the memo."""

    places: list[int] = field(default_factory=list)


_Mark = object()


def load_plain(content: bytes) -> Any:
    """Return the value in a pickle; strings of Python 2 are bytes.

    Raises:
        UnsafePickleError: it contains anything but plain values, is damaged, or has more opcodes than allowed.
    """
    machine = _Machine(len(content))
    try:
        for count, (opcode, argument, _) in enumerate(pickletools.genops(content)):
            if count == MAX_OPCODES:
                raise UnsafePickleError(f"it has more than {MAX_OPCODES:,} opcodes")
            if opcode.name == "STOP":
                return machine.finished()
            machine.step(opcode.name, argument)
    except UnsafePickleError:
        raise
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, EOFError) as error:
        raise UnsafePickleError(f"it is damaged ({printable_name(str(error))[:100]})") from error
    raise UnsafePickleError("it ends early")


class _Machine:
    """The stack and the memo of a pickle of `num_bytes`."""

    def __init__(self, num_bytes: int) -> None:
        self._num_left_to_encode = num_bytes
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._num_arrays = 0
        self._build: dict[str, Callable[[], None]] = {
            "MARK": lambda: self._stack.append(_Mark),
            "POP": lambda: self._drop(),
            "POP_MARK": lambda: self._drop(to_mark=True),
            "DUP": lambda: self._stack.append(self._stack[-1]),
            "EMPTY_LIST": lambda: self._stack.append([]),
            "EMPTY_TUPLE": lambda: self._stack.append(()),
            "EMPTY_DICT": lambda: self._stack.append({}),
            "LIST": lambda: self._stack.append(self._above_mark()),
            "TUPLE": lambda: self._stack.append(tuple(self._above_mark())),
            "DICT": lambda: self._stack.append(self._filled({}, self._above_mark())),
            "TUPLE1": lambda: self._tuple(1),
            "TUPLE2": lambda: self._tuple(2),
            "TUPLE3": lambda: self._tuple(3),
            "APPEND": lambda: self._append([self._pop()]),
            "APPENDS": lambda: self._append(self._above_mark()),
            "SETITEM": lambda: self._set_items([self._pop(), self._pop()][::-1]),
            "SETITEMS": lambda: self._set_items(self._above_mark()),
            "MEMOIZE": lambda: self._keep(len(self._memo)),
            "STACK_GLOBAL": lambda: self._name(self._pop(), self._pop()),
            "REDUCE": lambda: self._reduce(self._pop(), self._pop()),
            "BUILD": lambda: self._set_state(self._pop()),
        }

    def finished(self) -> Any:
        """Return the value that the pickle has made."""
        value = self._pop()
        if isinstance(value, _Building | _DType | _Name):
            raise UnsafePickleError("it contains an unfinished array")
        return value

    def step(self, name: str, argument: Any) -> None:
        """Carry out one opcode."""
        if name in self._build:
            self._build[name]()
        elif name in _VALUES or name in _CONSTANTS:
            self._stack.append(_CONSTANTS.get(name, argument))
        elif name in _BYTES:
            # pickletools decodes the strings of Python 2 as Latin-1, byte by byte.
            self._stack.append(argument.encode("latin-1") if isinstance(argument, str) else bytes(argument))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT"):
            self._keep(argument)
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            self._stack.append(self._memo[argument])
        elif name == "GLOBAL":
            module, _, attribute = argument.partition(" ")
            self._name(attribute, module)
        elif name not in _IGNORED:
            raise UnsafePickleError(f"it builds an object (opcode {name})")

    def _keep(self, place: int) -> None:
        self._memo[place] = value = self._stack[-1]
        if isinstance(value, _Building):
            value.places.append(place)

    def _pop(self) -> Any:
        value = self._stack.pop()
        if value is _Mark:
            raise UnsafePickleError("it is damaged (a mark in the place of a value)")
        return value

    def _drop(self, *, to_mark: bool = False) -> None:
        if to_mark:
            self._above_mark()
        else:
            self._stack.pop()

    def _above_mark(self) -> list[Any]:
        items = []
        while (item := self._stack.pop()) is not _Mark:
            items.append(item)
        return items[::-1]

    def _tuple(self, size: int) -> None:
        self._stack.append(tuple(self._pop() for _ in range(size))[::-1])

    def _append(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not list:
            raise UnsafePickleError("it builds an object (items of no list)")
        self._stack[-1].extend(items)

    def _set_items(self, items: list[Any]) -> None:
        if type(self._stack[-1]) is not dict:
            raise UnsafePickleError("it builds an object (items of no dict)")
        self._filled(self._stack[-1], items)

    @staticmethod
    def _filled(found: dict[Any, Any], items: list[Any]) -> dict[Any, Any]:
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Nested tuples take time that doubles with each level to hash.
            if not isinstance(key, _KEY_TYPES):
                raise UnsafePickleError(f"it contains a dict with a key of the type {type(key).__name__}")
            found[key] = value
        return found

    def _name(self, name: Any, module: Any) -> None:
        named = _Name(*(each.decode("latin-1") if isinstance(each, bytes) else each for each in (module, name)))
        if not named.is_of_numpy and named != _Name("_codecs", "encode"):
            raise UnsafePickleError(f"it builds an object ({_shown(named.module)}.{_shown(named.name)})")
        self._stack.append(named)

    def _reduce(self, arguments: Any, called: Any) -> None:
        if not isinstance(called, _Name) or type(arguments) is not tuple:
            raise UnsafePickleError("it calls something that is no function of NumPy")
        if called.name == "encode":
            text, encoding = arguments
            if encoding != "latin1" or type(text) is not str:
                raise UnsafePickleError("it encodes text otherwise than as Latin-1")
            # The same text again and again would take any amount of memory.
            self._num_left_to_encode -= len(text)
            if self._num_left_to_encode < 0:
                raise UnsafePickleError("it encodes more text than it contains")
            self._stack.append(text.encode("latin-1"))
        elif called.name == "dtype":
            code = arguments[0].decode("latin-1") if isinstance(arguments[0], bytes) else arguments[0]
            if type(code) is not str:  # the text of nested tuples doubles with each level
                raise UnsafePickleError("it contains an array of no plain shape or type")
            self._stack.append(_DType(code))
        elif called.name == "scalar":
            dtype, raw = arguments
            self._stack.append(_array((), dtype, raw, "C").item())
        elif called.name == "_frombuffer":
            raw, dtype, shape, order = arguments
            self._stack.append(_array(shape, dtype, raw, order))
        elif called.name == "_reconstruct":
            self._stack.append(_Building())
        else:
            raise UnsafePickleError(f"it builds an object ({called.module}.{called.name})")

    def _set_state(self, state: Any) -> None:
        built = self._stack[-1]
        if isinstance(built, _DType) and type(state) is tuple and len(state) > 1:
            order = state[1].decode("latin-1") if isinstance(state[1], bytes) else state[1]
            if order not in ("<", ">", "|", "="):
                raise UnsafePickleError("it contains an array of an unknown byte order")
            built.order = order
        elif isinstance(built, _Building) and type(state) is tuple and len(state) == 5:
            _, shape, dtype, is_fortran, raw = state
            self._num_arrays += 1
            if self._num_arrays > _MAX_ARRAYS:
                raise UnsafePickleError(f"it contains more than {_MAX_ARRAYS:,} arrays")
            array = _array(shape, dtype, raw, "F" if is_fortran else "C")
            self._stack[-1] = array
            for place in built.places:
                if self._memo[place] is built:
                    self._memo[place] = array
            built.places.clear()
        else:
            raise UnsafePickleError("it builds an object (the state of one)")


def _array(shape: Any, dtype: Any, raw: Any, order: Any) -> np.ndarray:
    if not isinstance(dtype, _DType) or type(shape) is not tuple or not all(type(each) is int for each in shape):
        raise UnsafePickleError("it contains an array of no plain shape or type")
    found = dtype.find()
    if not isinstance(raw, bytes):
        raise UnsafePickleError("it contains an array of Python objects")
    if len(shape) > _MAX_DIMENSIONS or not all(0 <= each <= _MAX_LENGTH for each in shape):
        raise UnsafePickleError("it contains an array of an implausible shape")
    num_bytes = math.prod(shape, start=found.itemsize)
    if num_bytes != len(raw):
        raise UnsafePickleError(f"it contains an array with {len(raw)} instead of {num_bytes} bytes")
    return np.frombuffer(raw, found).reshape(shape, order="F" if order in ("F", b"F") else "C")


def _shown(text: str) -> str:
    return printable_name(text[:80])
