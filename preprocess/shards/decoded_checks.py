"""Compares decoded images with their checksums: once each, as long as their shard files on this machine stay the same.

Owns which were compared. Knows nothing of how images are read, nor what is said of one that is another.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from preprocess.regular_file import FileIdentity
from preprocess.shards.arrays import PIXELS, shard_key
from preprocess.shards.checksum import crc32c
from preprocess.shards.chunk_marks import ChunkMarks
from preprocess.shards.location import Location
from preprocess.shards.manifest import Manifest

type Identities = dict[int, FileIdentity | None]
"""Shard number → what tells its file from others; None of a remote store, or where there is no file."""


class DecodedChecks:
    """The images of a split that were found to be those that were packed; for any number of threads.

    Args:
        split: the folder of the split.
        manifest: of the split.
    """

    def __init__(self, split: Location, manifest: Manifest) -> None:
        self._pixels = split.child(PIXELS)
        self._manifest = manifest
        self._checked: dict[int, tuple[FileIdentity, ChunkMarks]] = {}

    def identify(self, shards: NDArray[np.int64]) -> Identities:
        """Look at the files of ``shards``, int64 ``[s]``, before images are read from them.

        Raises:
            ShardError: in the place of one lies something else, or a file larger than any shard.
        """
        return {
            shard: self._pixels.check_regular(shard_key(shard, 3), max_bytes=self._manifest.max_shard_bytes)
            for shard in shards.tolist()
        }

    def find_other(
        self,
        indices: NDArray[np.int64],
        images: Iterable[NDArray[np.uint32]],
        expected: NDArray[np.uint32],
        before: Identities,
    ) -> int | None:
        """Compare images that were just read with their checksums.

        Args:
            indices: int64 ``[b]``, of the images.
            images: uint32 ``[H, row_words]`` each, the words that were read.
            expected: uint32 ``[b]``, their CRC-32C.
            before: `identify` of their shards, from before they were read.

        Returns:
            The index of the first that is another image; None where there is none.

        Raises:
            ShardError: as `identify`.
        """
        shards, slots = np.divmod(indices, self._manifest.shard_images)
        marks = {shard: self._marks(shard, before[shard]) for shard in before}
        for index, shard, slot, image, checksum in zip(
            indices.tolist(), shards.tolist(), slots.tolist(), images, expected.tolist(), strict=True
        ):
            found = marks[shard]
            if found is not None and slot in found:
                continue
            if crc32c(np.ascontiguousarray(image, "<u4")) != checksum:
                return index
            if found is not None:
                found.add(slot)
        return None

    def _marks(self, shard: int, before: FileIdentity | None) -> ChunkMarks | None:
        """Return the marks of a file; None where it may have changed while it was read, or nobody can tell."""
        if before is None or self.identify(np.array([shard]))[shard] != before:
            return None
        identity, marks = self._checked.get(shard, (None, None))
        if marks is None or identity != before:
            marks = ChunkMarks(self._manifest.shard_images)
            self._checked[shard] = before, marks
        return marks
