"""An interpreter of the pickles that PyTorch writes for dictionaries of tensors, which cannot run code.

It does not use the `pickle` module, which imports and calls whatever a file names. It knows 35 of pickle's
instructions, and they can only make numbers, text, tuples, lists, dictionaries and the descriptions below. A name such
as `torch.FloatStorage` becomes a `GlobalName`, two texts; it is compared with a fixed list, and never imported. The
instruction that calls (REDUCE) is carried out here for three listed names, by constructors of this module; any other
name is refused as soon as it is read. Instructions that make objects of classes (INST, OBJ, NEWOBJ, EXT) do not exist.

Size, number of instructions, and lengths are bounded, and each instruction takes a bounded time for the bytes that it
reads or the values that it takes from the stack. Values can contain themselves: whoever uses them must not recurse.
"""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

from loopfeed.preprocess.printable import printable

MAX_PICKLE_BYTES = 1 << 23
MAX_INSTRUCTIONS = 1_000_000
_MAX_NAME_BYTES = 200
_MAX_DIMENSIONS = 16
_NEWEST_PROTOCOL = 5

STORAGES = {
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
}
"""The names of the classes of storages in the module `torch`, and NumPy's names of their types."""


class TensorPickleError(ValueError):
    """Raised if a pickle is not one of a dictionary of tensors; the message says why, but does not name the file."""


class ForeignObjectError(TensorPickleError):
    """Raised if a pickle contains an object that is not a tensor, such as an `argparse.Namespace` or a whole module."""


class GlobalName(NamedTuple):
    """A name that a pickle gives to a class or a function."""

    module: str
    name: str


class StorageEntry(NamedTuple):
    """The numbers of one or more tensors: the key of the archive's entry, the dtype, and how many numbers."""

    key: str
    dtype: str
    num_elements: int


class TensorView(NamedTuple):
    """A tensor: a view of a storage, offset and strides in elements."""

    storage: StorageEntry
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_ORDERED_DICT = GlobalName("collections", "OrderedDict")
_TENSOR = GlobalName("torch._utils", "_rebuild_tensor_v2")
_PARAMETER = GlobalName("torch._utils", "_rebuild_parameter")
_ALLOWED = {_ORDERED_DICT, _TENSOR, _PARAMETER, *(GlobalName("torch", name) for name in STORAGES)}


class _Mark:
    """The place on the stack where the elements of a collection begin."""


_MARK = _Mark()
_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False, ord("("): _MARK, ord(")"): ()}
_NUMBERS = {ord("J"): struct.Struct("<i"), ord("K"): struct.Struct("B"), ord("M"): struct.Struct("<H"),
            ord("G"): struct.Struct(">d")}  # fmt: skip
_TEXTS = {ord("X"): struct.Struct("<I"), 0x8C: struct.Struct("B")}
_MEMO_WRITES = {ord("q"): struct.Struct("B"), ord("r"): struct.Struct("<I")}
_MEMO_READS = {ord("h"): struct.Struct("B"), ord("j"): struct.Struct("<I")}
_STOP = ord(".")


def read_tensor_pickle(content: bytes) -> Any:
    """Return the value of a pickle, in which tensors are `TensorView` and ordered dictionaries are dict.

    Raises:
        TensorPickleError: if the pickle is too large, damaged, or holds anything else than dictionaries, lists,
            numbers, text and tensors.
    """
    if len(content) > MAX_PICKLE_BYTES:
        raise TensorPickleError(f"its data.pkl has {len(content):,} bytes, of at most {MAX_PICKLE_BYTES:,}")
    return _Interpreter(content).run()


class _Interpreter:
    """The state of an interpreted pickle: place in the bytes, stack, and memo."""

    def __init__(self, content: bytes) -> None:
        self._content, self._place = content, 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self._actions: dict[int, Callable[[], None]] = {
            ord("}"): lambda: self._stack.append({}),
            ord("]"): lambda: self._stack.append([]),
            0x85: lambda: self._make_tuple(1),
            0x86: lambda: self._make_tuple(2),
            0x87: lambda: self._make_tuple(3),
            ord("t"): lambda: self._stack.append(tuple(self._take_to_mark())),
            ord("a"): lambda: self._append([self._pop()]),
            ord("e"): lambda: self._append(self._take_to_mark()),
            ord("s"): lambda: self._set_items([self._pop(), self._pop()][::-1]),
            ord("u"): lambda: self._set_items(self._take_to_mark()),
            0x80: self._check_protocol,
            0x8A: lambda: self._stack.append(int.from_bytes(self._take(self._take(1)[0]), "little", signed=True)),
            0x95: self._skip_frame,
            ord("c"): self._read_global,
            0x93: self._make_global,
            0x94: lambda: self._remember(len(self._memo)),
            ord("Q"): lambda: self._stack.append(_storage_of(self._pop())),
            ord("R"): self._reduce,
            ord("b"): self._build,
        }

    def run(self) -> Any:
        for _ in range(MAX_INSTRUCTIONS):
            (instruction,) = self._take(1)
            if instruction == _STOP:
                value = self._pop()
                if self._stack:
                    raise _damaged()
                return value
            self._execute(instruction)
        raise TensorPickleError(f"its data.pkl has more than {MAX_INSTRUCTIONS:,} instructions")

    def _execute(self, instruction: int) -> None:
        if instruction in _CONSTANTS:
            self._stack.append(_CONSTANTS[instruction])
        elif instruction in _NUMBERS:
            self._stack.append(self._number(_NUMBERS[instruction]))
        elif instruction in _TEXTS:
            self._stack.append(_text(self._take(self._number(_TEXTS[instruction]))))
        elif instruction in _MEMO_READS:
            self._recall(self._number(_MEMO_READS[instruction]))
        elif instruction in _MEMO_WRITES:
            self._remember(self._number(_MEMO_WRITES[instruction]))
        elif instruction in self._actions:
            self._actions[instruction]()
        else:
            raise TensorPickleError(
                f"its data.pkl has the pickle instruction {instruction:#04x}, which no dictionary of tensors needs"
            )

    def _take(self, num_bytes: int) -> bytes:
        start, self._place = self._place, self._place + num_bytes
        if self._place > len(self._content):
            raise _damaged()
        return self._content[start : self._place]

    def _number(self, form: struct.Struct) -> Any:
        return form.unpack(self._take(form.size))[0]

    def _pop(self) -> Any:
        if not self._stack or self._stack[-1] is _MARK:
            raise _damaged()
        return self._stack.pop()

    def _top(self, kind: type) -> Any:
        if not self._stack or type(self._stack[-1]) is not kind:
            raise _damaged()
        return self._stack[-1]

    def _take_to_mark(self) -> list[Any]:
        taken = []
        while self._stack and self._stack[-1] is not _MARK:
            taken.append(self._stack.pop())
        if not self._stack:
            raise _damaged()
        self._stack.pop()
        return taken[::-1]

    def _remember(self, number: int) -> None:
        value = self._pop()
        self._stack.append(value)
        self._memo[number] = value

    def _recall(self, number: int) -> None:
        if number not in self._memo:
            raise _damaged()
        self._stack.append(self._memo[number])

    def _check_protocol(self) -> None:
        if self._take(1)[0] > _NEWEST_PROTOCOL:
            raise _damaged()

    def _skip_frame(self) -> None:
        self._take(8)  # only the number of bytes that come next

    def _make_tuple(self, length: int) -> None:
        self._stack.append(tuple([self._pop() for _ in range(length)][::-1]))

    def _append(self, values: list[Any]) -> None:
        self._top(list).extend(values)

    def _set_items(self, items: list[Any]) -> None:
        target = self._top(dict)
        if len(items) % 2:
            raise _damaged()
        for key, value in zip(items[::2], items[1::2], strict=True):
            # Only keys whose hash takes a bounded time: that of a tuple recurses.
            if type(key) not in (str, int):
                raise TensorPickleError("its data.pkl has a dictionary with a key that is neither text nor an integer")
            target[key] = value

    def _read_global(self) -> None:
        names = []
        for _ in range(2):
            end = self._content.find(b"\n", self._place, self._place + _MAX_NAME_BYTES)
            if end < 0:
                raise _damaged()
            names.append(_text(self._take(end - self._place)))
            self._take(1)
        self._stack.append(_allowed(*names))

    def _make_global(self) -> None:
        name, module = self._pop(), self._pop()
        if type(name) is not str or type(module) is not str:
            raise _damaged()
        self._stack.append(_allowed(module, name))

    def _reduce(self) -> None:
        arguments, name = self._pop(), self._pop()
        if type(arguments) is not tuple or type(name) is not GlobalName:
            raise _damaged()
        if name == _ORDERED_DICT and not arguments:
            self._stack.append({})
        elif name == _TENSOR:
            self._stack.append(_tensor_of(arguments))
        elif name == _PARAMETER and len(arguments) == 3 and type(arguments[0]) is TensorView:
            self._stack.append(arguments[0])
        else:
            raise _damaged()

    def _build(self) -> None:
        """Drop the attributes of a dictionary: `_metadata`, the versions of PyTorch's layers."""
        if type(self._pop()) is not dict:
            raise _damaged()
        self._top(dict)


def _damaged() -> TensorPickleError:
    return TensorPickleError("its data.pkl is truncated or damaged")


def _text(content: bytes) -> str:
    try:
        return content.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        raise _damaged() from None


def _allowed(module: str, name: str) -> GlobalName:
    found = GlobalName(module, name)
    if found not in _ALLOWED:
        raise ForeignObjectError(
            f"it names {printable(f'{module}.{name}')}, but only tensors are read, and no code is run"
        )
    return found


def _storage_of(value: Any) -> StorageEntry:
    """Return the storage of PyTorch's persistent id: ("storage", class, key, device, number of elements)."""
    if type(value) is not tuple or len(value) != 5 or value[0] != "storage":
        raise _damaged()
    _, kind, key, _, num_elements = value
    if type(kind) is not GlobalName or kind.name not in STORAGES or type(key) is not str or not _is_size(num_elements):
        raise _damaged()
    return StorageEntry(key, STORAGES[kind.name], num_elements)


def _tensor_of(arguments: tuple[Any, ...]) -> TensorView:
    """Return the tensor of `_rebuild_tensor_v2(storage, offset, shape, strides, requires_grad, hooks[, metadata])`."""
    if len(arguments) not in (6, 7):
        raise _damaged()
    storage, offset, shape, strides = arguments[:4]
    if type(storage) is not StorageEntry or not _is_size(offset):
        raise _damaged()
    for sizes in (shape, strides):
        if type(sizes) is not tuple or len(sizes) > _MAX_DIMENSIONS or not all(_is_size(size) for size in sizes):
            raise _damaged()
    if len(shape) != len(strides):
        raise _damaged()
    return TensorView(storage, offset, shape, strides)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value < 1 << 48
