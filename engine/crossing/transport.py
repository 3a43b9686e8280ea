"""How a host function is called from inside the compiled program.

Owns the one mechanism that both crossings (`engine.crossing.infeed`, `engine.crossing.outfeed`) use, in its two forms;
nothing else in the project makes a host callback. The host function gets NumPy arrays and must keep three rules,
because breaking
them hangs or aborts the program: it never touches jax, never blocks without a time limit, and never raises.
"""

import ctypes
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from numpy.typing import NDArray

type Array = NDArray[Any]
type HostFunction = Callable[[Sequence[Array], Sequence[Array]], None]
"""(operands to read, results to write in place) → None."""


class Transport(Protocol):
    """A way to call the host from the device.

    Whoever may run a program keeps the transport that it was traced with (`Compiled.keeps`): the program does not.

    Attributes:
        name: as the user gives it to --transport.
        runs_ahead: whether the host is called when the work is enqueued, not when the device has come so far.
        failure: what kept something that was emitted from its function, None while nothing did.
    """

    name: str
    runs_ahead: bool
    failure: BaseException | None

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Calls `function` each time that the program passes here, while tracing.

        Args:
            function: called on a thread of the runtime with the operands' values and the arrays to write.
            results: the shapes and dtypes of what it writes.
            operands: traced arrays of any shape, of dtypes that NumPy itself has.

        Returns:
            One traced array for each of `results`.
        """
        ...

    def emit(self, function: Callable[[Sequence[Array]], None], *operands: jax.Array) -> None:
        """Has `function` called with the operands' values each time that the program passes here, while tracing.

        In the order of the program, on one thread at a time, now or later, but before the end of `running`; the
        operands' memory is the program's again when the function returns.
        """
        ...

    def running(self) -> AbstractContextManager[None]:
        """Opens what a launch of the program needs, and closes it behind the program, when all emitted arrived."""
        ...


class _PromptTransport(ABC):
    """Transports whose calls have the operands' values at once: to emit is to call."""

    runs_ahead = False
    failure: BaseException | None = None

    def __init__(self) -> None:
        self._called = Called[HostFunction]()

    @abstractmethod
    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """See `Transport.call`."""

    def emit(self, function: Callable[[Sequence[Array]], None], *operands: jax.Array) -> None:
        """See `Transport.emit`."""

        def take(operands: Sequence[Array], results: Sequence[Array]) -> None:
            results[0][...] = 0
            function(operands)

        # A call without any result is dropped by some backends; one byte keeps it.
        self.call(take, (jax.ShapeDtypeStruct((), jnp.uint8),), *operands)

    def running(self) -> AbstractContextManager[None]:
        """See `Transport.running`: there is nothing to open."""
        return nullcontext()


class Called[F]:
    """What a program calls, found through a weak reference.

    A compiled program is C++, through which Python's collector cannot look. If it referred to the launch that it calls,
    a launch that failed, whose error's frames hold the program, would stay in memory for ever.
    """

    def __init__(self) -> None:
        self._functions: list[F] = []

    def enter(self, function: F) -> Callable[[], F]:
        """Takes a function in; gives what finds it again.

        That raises:
            RuntimeError: this is gone.
        """
        number, reference = len(self._functions), weakref.ref(self)
        self._functions.append(function)

        def find() -> F:
            these = reference()
            if these is None:
                raise RuntimeError("a transport must live as long as its program runs, and is gone: keep it")
            return these._functions[number]

        return find


class ThreadState(threading.local):
    """What Python knows of a thread of XLA's, kept from its first call on.

    Otherwise it is made at the beginning of every call and taken down at its end: 12 µs, more than the rest of a call.
    """

    def __init__(self) -> None:
        # Counted up once more than it will be counted down.
        ctypes.pythonapi.PyGILState_Ensure()

    def keep(self) -> None:
        """Keeps that of this thread, by being asked for: `__init__` has then run on it, once."""


class InplaceTransport(_PromptTransport):
    """CPU: the function reads and writes XLA's own buffers (4–7 µs a call where `io_callback` takes 120 µs)."""

    name = "inplace"

    def __init__(self) -> None:
        super().__init__()
        self._thread_state = ThreadState()

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """See `Transport.call`."""
        find, thread_state = self._called.enter(function), self._thread_state

        # Not `np.asarray`: jaxlib then enters an address of this thread's stack among its living objects, and while any
        # such array lives, a later call whose buffer is made at that very address is handed the old one.
        def cross(_context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
            thread_state.keep()
            find()([np.from_dlpack(value) for value in inputs], [np.from_dlpack(buffer) for buffer in outputs])

        return tuple(buffer_callback(cross, tuple(results), has_side_effect=True)(*operands))


class CallbackTransport(_PromptTransport):
    """Any backend: the runtime copies operands to the host and results to the device."""

    name = "callback"

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """See `Transport.call`."""
        find = self._called.enter(function)

        def cross(*inputs: Any) -> tuple[Array, ...]:
            written = tuple(np.zeros(result.shape, result.dtype) for result in results)
            find()([np.asarray(value) for value in inputs], written)
            return written

        # Unordered: the address that the loop carries gives the order, so no token has to pass through the loop.
        return tuple(io_callback(cross, tuple(results), *operands, ordered=False))
