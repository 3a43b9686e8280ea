"""The container of TensorBoard's event files: records with checksums, each a serialised message.

The format is TFRecord's (https://www.tensorflow.org/tutorials/load_data/tfrecord): the length as a little-endian
uint64, a masked CRC-32C of these eight bytes, the data, and a masked CRC-32C of the data.
"""

import re
import struct
import time
from pathlib import Path

import google_crc32c

from loopfeed.engine.records.run_folder import EVENT_FILE_SUFFIX

_MASK = 0xA282EAD8
# TensorBoard reads the files of a folder in the order of their names, which contain the second of their creation.
_NAME = "events.out.tfevents.{:010d}" + EVENT_FILE_SUFFIX
_SECOND = re.compile(r".*tfevents\.(\d{10,11})\b.*")


def frame_record(data: bytes) -> bytes:
    """Return a record with its length and checksums."""
    length = struct.pack("<Q", len(data))
    return length + _masked_checksum(length) + data + _masked_checksum(data)


def _masked_checksum(data: bytes) -> bytes:
    checksum = google_crc32c.value(data)
    rotated = (checksum >> 15 | checksum << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + _MASK) & 0xFFFFFFFF)


class EventFile:
    """A new event file, which comes after those already in its folder; a record may be cut off if writing it fails.

    Args:
        folder: created if it does not exist.

    Raises:
        OSError: the folder or the file cannot be created.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        seconds = [int(found[1]) for path in folder.iterdir() if (found := _SECOND.fullmatch(path.name))]
        self.path = folder / _NAME.format(max([int(time.time()), *(each + 1 for each in seconds)]))
        self._file = self.path.open("xb")

    def write(self, data: bytes) -> None:
        """Append a record; raise OSError if that fails."""
        self._file.write(frame_record(data))

    def flush(self) -> None:
        """Pass everything to the system; raise OSError if that fails."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close the file; raise OSError if that fails."""
        self._file.close()
