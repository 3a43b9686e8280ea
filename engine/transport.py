"""How a host function is called from inside the compiled program.

Owns the one mechanism that both crossings (`engine.infeed`, `engine.outfeed`) use, in its two forms; nothing else in
the project makes a host callback. The host function gets NumPy arrays and must keep three rules, because breaking
them hangs or aborts the program: it never touches jax, never blocks without a time limit, and never raises.
"""

import ctypes
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.experimental import io_callback
from jax.experimental.buffer_callback import buffer_callback
from numpy.typing import NDArray

from engine.config import TransportName

type Array = NDArray[Any]
type HostFunction = Callable[[Sequence[Array], Sequence[Array]], None]
"""(operands to read, results to write in place) → None."""


class Transport(Protocol):
    """A way to call the host from the device.

    Attributes:
        name: as the user gives it to --transport.
    """

    name: str

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


class _ThreadState(threading.local):
    """What Python knows of a thread of XLA's, kept from its first call on.

    Otherwise it is made at the beginning of every call and taken down at its end: 12 µs, more than the rest of a call.
    """

    def __init__(self) -> None:
        # Counted up once more than it will be counted down.
        ctypes.pythonapi.PyGILState_Ensure()

    def keep(self) -> None:
        """Keeps that of this thread, by being asked for: `__init__` has then run on it, once."""


class InplaceTransport:
    """CPU: the function reads and writes XLA's own buffers (4–7 µs a call where `io_callback` takes 120 µs)."""

    name = "inplace"

    def __init__(self) -> None:
        self._thread_state = _ThreadState()

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """See `Transport.call`."""

        # Not `np.asarray`: jaxlib then enters an address of this thread's stack among its living objects, and while any
        # such array lives, a later call whose buffer is made at that very address is handed the old one.
        def cross(_context: Any, outputs: Sequence[Any], *inputs: Any) -> None:
            self._thread_state.keep()
            function([np.from_dlpack(value) for value in inputs], [np.from_dlpack(buffer) for buffer in outputs])

        return tuple(buffer_callback(cross, tuple(results), has_side_effect=True)(*operands))


class CallbackTransport:
    """Any backend: the runtime copies operands to the host and results to the device."""

    name = "callback"

    def call(
        self, function: HostFunction, results: Sequence[jax.ShapeDtypeStruct], *operands: jax.Array
    ) -> tuple[jax.Array, ...]:
        """See `Transport.call`."""

        def cross(*inputs: Any) -> tuple[Array, ...]:
            written = tuple(np.zeros(result.shape, result.dtype) for result in results)
            function([np.asarray(value) for value in inputs], written)
            return written

        # Unordered: the address that the loop carries gives the order, so no token has to pass through the loop.
        return tuple(io_callback(cross, tuple(results), *operands, ordered=False))


def choose_transport(name: TransportName, platform: str) -> Transport:
    """Gives the transport of that name, or for "auto" the fastest one that runs on `platform` ("cpu", "gpu", "tpu").

    Raises:
        ValueError: where the named transport does not run on the platform.
    """
    if name == "auto":
        return InplaceTransport() if platform == "cpu" else CallbackTransport()
    if name == "inplace":
        if platform != "cpu":
            raise ValueError(f"--transport inplace runs on cpu only, the program runs on {platform}: use callback")
        return InplaceTransport()
    return CallbackTransport()
