"""Verifies decoded images by their checksums. Images in an unchanged local file are verified only once.

Owns the record of verified images. Knows nothing of how images are read or how a mismatch is reported.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.regular_file import FileIdentity
from loopfeed.preprocess.shards.arrays import PIXELS, shard_key
from loopfeed.preprocess.shards.checksum import ChunkMarks, crc32c
from loopfeed.preprocess.shards.location import Location
from loopfeed.preprocess.shards.manifest import Manifest

type Identities = dict[int, FileIdentity | None]
"""Shard number → identity of its file; None in a remote store, or if there is no file."""


class DecodedChecks:
    """A record of which images of a split have been verified, usable from any number of threads.

    Args:
        split: the folder of the split.
        manifest: the manifest of the split.
    """

    def __init__(self, split: Location, manifest: Manifest) -> None:
        self._pixels = split.child(PIXELS)
        self._manifest = manifest
        self._checked: dict[int, tuple[FileIdentity, ChunkMarks]] = {}

    def identify(self, shards: NDArray[np.int64]) -> Identities:
        """Return the file identity of each shard with an index in ``shards`` (int64 ``[s]``). Call this before reading.

        Raises:
            ShardError: a path leads to something other than a file, or to a file larger than any shard.
        """
        return {
            shard: self._pixels.check_regular(shard_key(shard, 3), max_bytes=self._manifest.max_shard_bytes)
            for shard in shards.tolist()
        }

    def find_mismatch(
        self,
        indices: NDArray[np.int64],
        pixels: NDArray[np.uint32],
        rows: NDArray[np.intp],
        expected: NDArray[np.uint32],
        before: Identities,
    ) -> int | None:
        """Verify newly read images by their checksums, and return the index of the first mismatch.

        Args:
            indices: int64 ``[b]``, the indices of the images.
            pixels: uint32 ``[n, H, row_words]``, the buffer that they were read into.
            rows: integer ``[b]``, the row of each image in ``pixels``.
            expected: uint32 ``[b]``, their CRC-32C.
            before: the result of `identify` for their shards, obtained before the read.

        Returns:
            The index of the first image found that does not match, or None if all match.

        Raises:
            ShardError: as `identify`.
        """
        shards, slots = np.divmod(indices, self._manifest.shard_images)
        for shard, identity in before.items():
            positions = np.flatnonzero(shards == shard)
            marks = self._marks(shard, identity)
            if marks is not None:
                positions = positions[marks.missing(slots[positions])]
            for position in positions.tolist():
                if crc32c(np.ascontiguousarray(pixels[rows[position]], "<u4")) != expected[position]:
                    return int(indices[position])
                if marks is not None:
                    marks.add(int(slots[position]))
        return None

    def _marks(self, shard: int, before: FileIdentity | None) -> ChunkMarks | None:
        """Return the record of a shard file's verified images, or None if the file may have changed during the read."""
        if before is None or self.identify(np.array([shard]))[shard] != before:
            return None
        identity, marks = self._checked.get(shard, (None, None))
        if marks is None or identity != before:
            marks = ChunkMarks(self._manifest.shard_images)
            self._checked[shard] = before, marks
        return marks
