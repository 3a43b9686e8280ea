"""The operations that programs call, each a value with a text from which it can be built again."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, ClassVar, Protocol

import jax

from models.kernels.onednn.convolutions import Convolution
from models.kernels.onednn.handler import call
from models.kernels.onednn.library import load_library
from models.kernels.onednn.primitives import Builder, Primitives


class Operation(Protocol):
    """A dataclass of numbers, strings and tuples that can build its primitives.

    Attributes:
        kind: the name of the class in texts.
    """

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, builder: Builder) -> Primitives:
        """Build the sequence of primitives."""


_KINDS: dict[str, type[Any]] = {each.kind: each for each in (Convolution,)}


def text_of(operation: Operation) -> str:
    """Return the text of an operation, as in a program's custom calls."""
    return json.dumps({"kind": operation.kind, **asdict(operation)}, separators=(",", ":"))


def operation_of(text: str) -> Operation:
    """Return the operation of a text.

    Raises:
        ValueError: if its kind is unknown, such as one of a later version.
    """
    fields = json.loads(text)
    kind = fields.pop("kind")
    if kind not in _KINDS:
        raise ValueError(f"the program calls the kernel {kind!r}, which this version does not have; compile it again")
    operation: Operation = _KINDS[kind](**fields)
    return operation


def prepare(text: str) -> Primitives:
    """Build the sequence of primitives of an operation from its text."""
    return build(operation_of(text))


def build(operation: Operation) -> Primitives:
    """Build the sequence of primitives of an operation, for one thread each."""
    library = load_library()
    with library.one_thread():
        return operation.build(Builder(library))


@cache
def implementations(operation: Operation) -> tuple[str, ...]:
    """Return the names of the library's kernels for an operation, without its reorders; empty if it has none.

    Primitives are built for it, which takes about a millisecond.
    """
    try:
        names = build(operation).names
    except RuntimeError:
        return ()
    return tuple(name for name in names if "reorder" not in name)


def call_operation(
    operation: Operation, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
) -> Sequence[jax.Array]:
    """Call an operation in the program that is being traced; see `handler.call`."""
    return call(prepare, text_of(operation), results, *operands)
