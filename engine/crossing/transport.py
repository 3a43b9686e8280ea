"""Transports, which call host functions from inside the compiled program.

Both crossings (`loopfeed.engine.crossing.infeed`, `loopfeed.engine.crossing.outfeed`) use a transport; nothing else in
the project makes a host callback. The host function receives NumPy arrays. It must never call jax or block without a
time limit, because both hang the program. No exception reaches the program, which it would abort: the first one is
kept, to be raised by the code that launched the program, and from then on all calls are answered with zeros, which end
the loops.
"""

import ctypes
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from numpy.typing import NDArray

from loopfeed.engine.crossing.token import TOKEN_SHAPE, Token

type Array = NDArray[Any]
type HostFunction = Callable[[Sequence[Array], Sequence[Array]], None]
"""(operands to read, results to write in place) → None."""
type _Crossing = Callable[[Sequence[Any], Sequence[Any]], None]
"""The same, of XLA's own buffers."""


class Transport(Protocol):
    """A mechanism by which a program on the device calls the host.

    A program does not keep alive the transport with which it was traced; the owner of the program must
    (`Compiled.keeps`).

    Attributes:
        name: value of --transport.
        runs_ahead: whether the host is called when the work is enqueued, not when the device reaches it.
        failure: the first exception of a call, or of the delivery of emitted values, or None.
    """

    name: str
    runs_ahead: bool
    failure: BaseException | None

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], token: Token, *operands: jax.Array
    ) -> tuple[Token, tuple[jax.Array, ...]]:
        """Insert a call to `function` into the program, after the crossing that returned `token`; called while tracing.

        Args:
            function: called on a thread of XLA's runtime with the operands' values and the arrays to write.
            results: shapes and dtypes of the arrays that it writes.
            token: the token of the crossing before.
            operands: traced arrays of any shape, of NumPy's own dtypes.

        Returns:
            The token for the next crossing, and one traced array for each of `results`.
        """
        ...

    def emit(self, function: Callable[[Sequence[Array]], None], token: Token, *operands: jax.Array) -> Token:
        """Insert into the program a call to `function` with the values of the operands; called while tracing.

        Calls come in the order of the tokens, one at a time, at once or later, but before the end of `running`. When
        the function returns, the operands' memory belongs to the program again.

        Returns:
            The token for the next crossing.
        """
        ...

    def running(self) -> AbstractContextManager[None]:
        """Open the transport for one launch; on exit, wait until all emitted values have arrived, and close it."""
        ...


class _PromptTransport(ABC):
    """Base of transports whose calls receive the operands' values immediately, so that `emit` is a plain `call`."""

    runs_ahead = False
    failure: BaseException | None = None

    def __init__(self) -> None:
        self._called = Called[_Crossing]()

    @abstractmethod
    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], token: Token, *operands: jax.Array
    ) -> tuple[Token, tuple[jax.Array, ...]]:
        """Insert a call to `function` into the program; see `Transport.call`."""

    def emit(self, function: Callable[[Sequence[Array]], None], token: Token, *operands: jax.Array) -> Token:
        """Insert a call to `function` that has no results but the token; see `Transport.emit`."""
        token, _ = self.call(lambda operands, _: function(operands), (), token, *operands)
        return token

    def _guard(self, function: HostFunction, to_array: Callable[[Any], Array]) -> _Crossing:
        """Return a function of XLA's buffers that calls `function` with arrays and never raises."""

        def cross(inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
            try:
                if self.failure is None:
                    function([to_array(each) for each in inputs], [to_array(each) for each in outputs])
                    return
            except BaseException as error:  # noqa: BLE001 - raising through XLA would lose it: kept, raised by the host
                self.failure = error
                # The traceback keeps the frames alive, which must not refer to the program's memory.
                traceback.clear_frames(error.__traceback__)
            for each in outputs:
                np.asarray(each)[...] = 0
            del inputs, outputs

        return cross

    def running(self) -> AbstractContextManager[None]:
        """Return a context that does nothing, because there is nothing to open; see `Transport.running`."""
        return nullcontext()


class Called[F]:
    """Host functions that a compiled program calls; the program holds only a weak reference to this object.

    Python's garbage collector cannot traverse a compiled program, which is C++. With a strong reference to the
    launch that it calls, a failed launch would stay in memory forever, because the frames of its error refer to the
    program.
    """

    def __init__(self) -> None:
        self._functions: list[F] = []

    def enter(self, function: F) -> Callable[[], F]:
        """Register a function and return a callable that looks it up.

        The callable raises RuntimeError if this object no longer exists.
        """
        number, reference = len(self._functions), weakref.ref(self)
        self._functions.append(function)

        def find() -> F:
            called = reference()
            if called is None:
                raise RuntimeError(
                    "a program called a transport that has been deleted: keep a reference to the transport while the "
                    "program runs"
                )
            return called._functions[number]

        return find


class ThreadState(threading.local):
    """Python's thread state for each of XLA's threads, kept alive after the thread's first call.

    Otherwise it is created at the start of every call and destroyed at its end: 12 µs, more than the rest of a call.
    """

    def __init__(self) -> None:
        # One more Ensure than Release, so that the count never returns to 0.
        ctypes.pythonapi.PyGILState_Ensure()

    def keep(self) -> None:
        """Keep the current thread's state; a thread's first access to this `threading.local` object runs `__init__`."""


class InplaceTransport(_PromptTransport):
    """The CPU transport: functions access XLA's own buffers (4–7 µs per call; `io_callback` takes 120 µs)."""

    name = "inplace"

    def __init__(self) -> None:
        super().__init__()
        self._thread_state = ThreadState()

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], token: Token, *operands: jax.Array
    ) -> tuple[Token, tuple[jax.Array, ...]]:
        """Insert a call to `function` into the program; see `Transport.call`."""
        # Not `np.asarray`: jaxlib would register an address on this thread's stack as a live object, and as long as
        # that array lives, a later call whose buffer is at the same address gets the old array.
        guarded = self._guard(function, np.from_dlpack)
        find, thread_state = self._called.enter(guarded), self._thread_state

        def cross(_context: Any, outputs: Sequence[Any], _token: Any, *inputs: Any) -> None:
            thread_state.keep()
            find()(inputs, outputs[1:])

        called = buffer_callback(cross, (TOKEN_SHAPE, *results), has_side_effect=True)
        byte, *values = called(token.byte, *operands)
        return Token(byte), tuple(values)


class CallbackTransport(_PromptTransport):
    """The transport for any backend: the runtime copies operands to the host and results to the device."""

    name = "callback"

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], token: Token, *operands: jax.Array
    ) -> tuple[Token, tuple[jax.Array, ...]]:
        """Insert a call to `function` into the program; see `Transport.call`."""
        find = self._called.enter(self._guard(function, np.asarray))

        def cross(_token: Any, *inputs: Any) -> tuple[Array, ...]:
            written = tuple(np.zeros(result.shape, result.dtype) for result in results)
            find()(inputs, written)
            return np.zeros((), TOKEN_SHAPE.dtype), *written

        # Unordered for jax, whose own tokens are slower and do not pass through `shard_map`.
        byte, *values = io_callback(cross, (TOKEN_SHAPE, *results), token.byte, *operands, ordered=False)
        return Token(byte), tuple(values)
