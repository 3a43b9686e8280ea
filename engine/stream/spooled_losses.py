"""Every loss of a launch in memory that does not grow: beyond a bound they lie in an unnamed temporary file."""

import tempfile
from array import array
from typing import IO

import numpy as np
from numpy.typing import NDArray

# Losses that stay in memory, 256 KiB of them: fewer than most runs have steps, and no disk is touched.
_HELD = 1 << 16


class SpooledLosses:
    """A sequence of float32 that grows at its end; for one thread at a time.

    Where the disk of temporary files takes nothing, they stay in memory, 4 bytes each: no loss is worth the run.
    """

    def __init__(self, held: int = _HELD) -> None:
        self._held, self._tail = held, array("f")
        self._file: IO[bytes] | None = None
        self._is_refused = False
        self._num_spooled = 0

    def __len__(self) -> int:
        return self._num_spooled + len(self._tail)

    def append(self, loss: float) -> None:
        """Append a loss."""
        self._tail.append(loss)
        if len(self._tail) >= self._held and not self._is_refused:
            self._spool()

    def _spool(self) -> None:
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="feedloop-losses-", buffering=0)  # noqa: SIM115 - kept open
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
        """Close the file, where there is one, and forget the losses; arrays that were handed out stay."""
        if self._file is not None:
            self._file.close()
        self._file, self._num_spooled, self._tail = None, 0, array("f")

    def to_array(self) -> NDArray[np.float32]:
        """Return all losses so far, float32 [n]; what was spooled is mapped, not read, and may be changed."""
        if self._file is None or not self._num_spooled:
            return np.array(self._tail, np.float32)
        self._file.seek(self._num_spooled * self._tail.itemsize)
        try:
            self._file.write(self._tail.tobytes())
            mapped = np.memmap(self._file, np.float32, "c", shape=(len(self),))
        except (OSError, ValueError):
            mapped = np.memmap(self._file, np.float32, "c", shape=(self._num_spooled,))
            return np.concatenate([mapped, np.array(self._tail, np.float32)])
        return mapped.view(np.ndarray)
