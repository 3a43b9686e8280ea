"""A split's pixels as TensorStore reads them: from mapped files or, where those can't be mapped, by plain reads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import tensorstore as ts
from numpy.typing import NDArray

from loopfeed.preprocess.shards.arrays import start_reading
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.split_arrays import open_pixels
from loopfeed.preprocess.shards.store_errors import reason
from loopfeed.preprocess.system_errors import system_reason

_IO_MODE = "file_io_mode"


def without_maps(location: Location) -> Location:
    """Return the same folder, with files that are read instead of mapped."""
    return replace(location, spec={key: value for key, value in location.spec.items() if key != _IO_MODE})


class StoredPixels:
    """The pixel array of a split, readable from any number of threads.

    Some file systems (FUSE with direct reads, some network file systems) can't map a file, and a limit on the address
    space (`ulimit -v`) prevents it. A read that fails with mapped files is repeated with plain reads; if those succeed,
    all later ones are plain.

    Args:
        location: the folder of the split.
        manifest: its manifest.
        notify: called once, from any thread, with a line of text if the files can't be mapped.

    Attributes:
        array: uint32 ``[N, H, row_words]``.

    Raises:
        ShardError: the array can't be opened.
    """

    def __init__(self, location: Location, manifest: Manifest, notify: Callable[[str], None]) -> None:
        self._location, self._manifest, self._notify = location, manifest, notify
        self._is_mapped = _IO_MODE in location.spec
        self._lock = threading.Lock()
        try:
            self.array = open_pixels(location, manifest)
        except ShardError as error:
            if not self._is_mapped:
                raise
            self._read_plainly(open_pixels(without_maps(location), manifest), error.__cause__ or error)

    def read(
        self, indices: NDArray[np.int64], pixels: NDArray[np.uint32], rows: NDArray[np.intp], deadline: float
    ) -> None:
        """Read the images ``indices`` into ``pixels[rows]`` until ``deadline`` on the monotonic clock.

        Raises:
            TimeoutError: not in time.
            ValueError, OSError, RuntimeError: TensorStore's error.
        """
        # In this order: another thread may change both in the meantime, the array first.
        is_mapped = self._is_mapped
        try:
            _read(self.array, indices, pixels, rows, deadline)
        except TimeoutError:
            raise
        except (ValueError, OSError, RuntimeError) as error:
            if not is_mapped:
                raise
            plain = open_pixels(without_maps(self._location), self._manifest)
            _read(plain, indices, pixels, rows, deadline)
            self._read_plainly(plain, error)

    def _read_plainly(self, plain: ts.TensorStore, error: BaseException) -> None:
        with self._lock:
            self.array = plain
            was_mapped, self._is_mapped = self._is_mapped, False
        if was_mapped:
            pack = self._location.display.rstrip("/").rpartition("/")[0] or "."
            self._notify(
                f"warning: files of {pack} can't be mapped into memory "
                f"({system_reason(error) or reason(error)}), so they are read, which takes longer"
            )


def _read(
    array: ts.TensorStore,
    indices: NDArray[np.int64],
    pixels: NDArray[np.uint32],
    rows: NDArray[np.intp],
    deadline: float,
) -> None:
    start_reading(array, indices, pixels, rows).result(timeout=max(0.0, deadline - time.monotonic()))
