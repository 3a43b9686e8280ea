"""The operations that programs call, each a value with a text from which it can be built again."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any, ClassVar, Protocol

import jax

from loopfeed.models.kernels.onednn.convolutions import Convolution
from loopfeed.models.kernels.onednn.handler import call
from loopfeed.models.kernels.onednn.library import load_library
from loopfeed.models.kernels.onednn.primitives import Builder, Primitives
from loopfeed.models.kernels.onednn.products import BatchedProduct, Product


class Operation(Protocol):
    """A dataclass of numbers, strings and tuples that can build its primitives.

    Attributes:
        kind: the name of the class in texts.
    """

    kind: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    def build(self, builder: Builder) -> Primitives:
        """Build the sequence of primitives."""

    def __hash__(self) -> int: ...


_REFERENCE = "ref"
_KINDS: dict[str, type[Any]] = {each.kind: each for each in (Convolution, Product, BatchedProduct)}


def text_of(operation: Operation) -> str:
    """Return the text of an operation, as in a program's custom calls."""
    return json.dumps({"kind": operation.kind, **asdict(operation)}, separators=(",", ":"))


def operation_of(text: str) -> Operation:
    """Return the operation of a text.

    Raises:
        ValueError: if its kind or a field is unknown, such as one of a later version.
    """
    fields = {name: _as_tuple(value) for name, value in json.loads(text).items()}
    try:
        operation: Operation = _KINDS[fields.pop("kind")](**fields)
    except (KeyError, TypeError) as error:
        raise ValueError(
            f"the program calls the kernel {text}, which this version does not have; compile it again"
        ) from error
    return operation


def _as_tuple(value: Any) -> Any:
    """Return a value with tuples for the lists of JSON, so that an operation equals the one that was written."""
    return tuple(map(_as_tuple, value)) if isinstance(value, list) else value


def prepare(text: str) -> Primitives:
    """Build the sequence of primitives of an operation from its text."""
    return build(operation_of(text))


@cache
def build(operation: Operation) -> Primitives:
    """Build the sequence of primitives of an operation, once per process; it takes some milliseconds.

    Raises:
        RuntimeError: if the library has no kernel for it, or only a wrong one.
    """
    library = load_library()
    with library.one_thread():
        return operation.build(Builder(library))


def has_fast_kernel(operation: Operation, among: str = "") -> bool:
    """Return whether the library has a right kernel for an operation, not only reference code; it is built for that.

    Args:
        operation: what is computed.
        among: a part of the names of the implementations that are fast for it.
    """
    try:
        names = build(operation).names
        return not any(name.startswith(_REFERENCE) for name in names) and any(among in name for name in names)
    except RuntimeError:
        return False


def call_operation(
    operation: Operation, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
) -> Sequence[jax.Array]:
    """Call an operation in the program that is being traced; see `handler.call`."""
    return call(prepare, text_of(operation), results, *operands)
