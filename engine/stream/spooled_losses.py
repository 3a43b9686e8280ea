"""The losses of a launch, in bounded memory; losses beyond the bound are kept in an unnamed temporary file."""

import tempfile
import threading
from array import array
from typing import IO

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.regular_file import read_at

# Losses kept in memory, 256 KiB: most runs have fewer steps and never touch the disk.
_MOST_IN_MEMORY = 1 << 16


class SpooledLosses:
    """A growing sequence of float32 losses, which one thread may append to while others read.

    If the temporary file cannot be written, the losses stay in memory, 4 bytes each, so that the run continues.
    """

    def __init__(self, most_in_memory: int = _MOST_IN_MEMORY) -> None:
        self._most_in_memory, self._tail = most_in_memory, array("f")
        # An array that is being read cannot grow.
        self._lock = threading.Lock()
        self._file: IO[bytes] | None = None
        self._is_refused = False
        self._num_spooled = 0

    def __len__(self) -> int:
        return self._num_spooled + len(self._tail)

    def append(self, loss: float) -> None:
        """Append one loss; when the losses in memory reach the limit, move them to the file."""
        with self._lock:
            self._tail.append(loss)
            if len(self._tail) >= self._most_in_memory and not self._is_refused:
                self._spool()

    def _spool(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="loopfeed-losses-", buffering=0)  # noqa: SIM115 - kept open
            content = self._tail.tobytes()
            self._file.seek(self._num_spooled * self._tail.itemsize)
            if self._file.write(content) != len(content):
                raise OSError("short write")
        except OSError:
            self._is_refused = True
            return
        self._num_spooled += len(self._tail)
        del self._tail[:]

    def close(self) -> None:
        """Close the file, if any, and discard the losses; arrays returned by `to_array` stay valid."""
        with self._lock:
            if self._file is not None:
                self._file.close()
            self._file, self._num_spooled, self._tail = None, 0, array("f")

    def to_array(self) -> NDArray[np.float32]:
        """Return all losses so far as float32 [n]; losses in the file are memory-mapped copy-on-write, not read.

        If the file system can't map the file, they are read.
        """
        with self._lock:
            return self._to_array()

    def _to_array(self) -> NDArray[np.float32]:
        tail = np.array(self._tail, np.float32)
        if self._file is None or not self._num_spooled:
            return tail
        self._file.seek(self._num_spooled * self._tail.itemsize)
        try:
            is_whole = self._file.write(self._tail.tobytes()) == tail.nbytes
        except OSError:
            is_whole = False
        if is_whole:
            return _map_or_read(self._file, len(self))
        return np.concatenate([_map_or_read(self._file, self._num_spooled), tail])


def _map_or_read(file: IO[bytes], num_losses: int) -> NDArray[np.float32]:
    try:
        return np.memmap(file, np.float32, "c", shape=(num_losses,)).view(np.ndarray)
    except OSError:
        content = read_at(file.fileno(), num_losses * np.dtype(np.float32).itemsize, 0)
        return np.frombuffer(bytearray(content), np.float32)
