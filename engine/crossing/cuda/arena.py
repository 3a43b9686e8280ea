"""Memory, streams and events of one launch on a GPU, all released together when the launch ends."""

import ctypes
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.crossing.cuda.driver import CudaDriver, CudaError


class Arena:
    """Owner of the memory, streams and events of a launch; thread-safe.

    Every method except `close` must be called inside the driver's `current`.
    """

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._releases = ExitStack()
        self._blocks: list[NDArray[np.uint8]] = []
        self._guard = threading.Lock()

    def pinned(self, num_bytes: int) -> NDArray[np.uint8]:
        """Allocate page-locked host memory filled with zeros.

        It is valid until `close`, and after that as long as the array or a view of it exists, because an abandoned
        reader thread may still write to it.
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
        """Allocate device memory and return its address."""
        return self._keep(lambda: self._driver.allocate_device(num_bytes), self._driver.free_device)

    def stream(self) -> int:
        """Create a CUDA stream and return its handle."""
        return self._keep(self._driver.create_stream, self._driver.destroy_stream)

    def event(self, *, timing: bool = False) -> int:
        """Create a CUDA event and return its handle."""
        return self._keep(lambda: self._driver.create_event(timing=timing), self._driver.destroy_event)

    def at_close(self, function: Callable[[], None]) -> None:
        """Register a function for `close` to call, such as one that drops references to this arena's memory."""
        with self._guard:
            self._releases.callback(function)

    def close(self) -> None:
        """Wait for the device and release everything; safe to call repeatedly.

        Raises:
            CudaError: if the device has failed; everything that can be released has been.
        """
        with self._driver.current(), self._guard, self._releases:
            # After this no copy accesses the blocks.
            self._driver.synchronize_device()
            self._blocks.clear()

    def _keep(self, create: Callable[[], int], destroy: Callable[[int], None]) -> int:
        with self._guard:
            created = create()
            self._releases.callback(partial(destroy, created))
            return created


def _free_pinned(driver: CudaDriver, address: int) -> None:
    # A device that has failed refuses this too; its error is reported elsewhere.
    with suppress(CudaError), driver.current():
        driver.free_pinned(address)
