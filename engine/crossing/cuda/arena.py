"""What one launch takes of a device and the host for its crossings, given back together at its end."""

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engine.crossing.cuda.driver import CudaDriver, CudaError


class Arena:
    """Memory, streams and events; for any number of threads.

    Everything but `close` is called inside the driver's `current`.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._taken = ExitStack()
        self._blocks: list[NDArray[np.uint8]] = []
        self._guard = threading.Lock()

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Gives page-locked memory of the host, zeros.

        It lasts until `close` and beyond, as long as the array or a view of it: a store that was given up may still
        write there.
        """
        with self._guard:
            address = self._driver.allocate_pinned(num_bytes)
            memory = (ctypes.c_uint8 * num_bytes).from_address(address)
            weakref.finalize(memory, _free_pinned, self._driver, address).atexit = False
            block = np.frombuffer(memory, np.uint8)
            self._blocks.append(block)
        block[...] = 0
        return block

    def device(self, num_bytes: int) -> int:
        """Gives the address of memory of the device."""
        return self._keep(lambda: self._driver.allocate_device(num_bytes), self._driver.free_device)

    def stream(self) -> int:
        """Gives a stream of its own."""
        return self._keep(self._driver.create_stream, self._driver.destroy_stream)

    def event(self, *, timing: bool = False) -> int:
        """Gives an event."""
        return self._keep(lambda: self._driver.create_event(timing=timing), self._driver.destroy_event)

    def at_close(self, function: Callable[[], None]) -> None:
        """Has `function` called then: to let go of memory that was given."""
        with self._guard:
            self._taken.callback(function)

    def close(self) -> None:
        """Waits for the device and gives everything back; may be called again.

        Raises:
            CudaError: the device has failed; what could be given back was.
        """
        with self._driver.current(), self._guard, self._taken:
            # Only now does no copy look at the blocks any more.
            self._driver.synchronize_device()
            self._blocks.clear()

    def _keep(self, take: Callable[[], int], give_back: Callable[[int], None]) -> int:
        with self._guard:
            taken = take()
            self._taken.callback(partial(give_back, taken))
            return taken


def _free_pinned(driver: CudaDriver, address: int) -> None:
    # A card that has failed refuses this too; what it failed with is told elsewhere.
    with suppress(CudaError), driver.current():
        driver.free_pinned(address)
