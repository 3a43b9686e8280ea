"""Reads and decodes a source's images in parallel and yields the results in source order.

Memory use does not depend on the size of the data set. It is at most about 64 MB per worker for images of up to 4
megapixels, a quarter of the machine's memory for all larger images together (but at least one of them at a time), 1 GiB
for all large files together, and `_WINDOW_BYTES` for decoded crops that are not yet used. Knows nothing of shards.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.decoding.decode import MissingLevelsError, ResizeRule, decode_stored
from loopfeed.preprocess.decoding.memory_budget import MemoryBudget, MemoryWaitError, file_budget, pixel_budget
from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.extents import Extent
from loopfeed.preprocess.packing.channels import channel_sums
from loopfeed.preprocess.packing.journal import AGAIN, Failure
from loopfeed.preprocess.packing.plan import DECODING_VERSION
from loopfeed.preprocess.pixels import Layout, image_bytes, words_of_row
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.sources.listing import ChangedSourceError
from loopfeed.preprocess.system_errors import Cause, cause_of, error_text, reading_remedy, remedy_and_repeat
from loopfeed.preprocess.workers import Pool

if TYPE_CHECKING:
    from loopfeed.preprocess.sources.listing import SourceImage, SourceSplit

IMAGE_TIMEOUT_S = 600.0
"""Time limit for reading and decoding the next images, in seconds; a hanging network file system becomes an error."""

_BLOCK_PIXELS = 1 << 18
_SUMMED_PIXELS = 1 << 16
_MAX_BLOCK_IMAGES = 64
_BLOCKS_PER_WORKER = 4
_WINDOW_BYTES = 2**30
_JOIN_TIMEOUT_S = 5.0
# The version of the decoding rules since which images were decoded in another way.
_SINCE_CHANGED = 2


@dataclass(frozen=True)
class PackedImage:
    """A decoded image, ready to be written to a shard.

    Attributes:
        index: its position in the source's pack order.
        label: its class, 0-based.
        words: its pixels, uint32 ``[H, W]``, or ``[H, 3·W/4]`` in the dense layout.
        sums: its channel sums, int64 ``[2, 3]``, see `channel_sums`.
        notes: what the pack should say about it.
        extent: where on its canvas it is, None without a canvas.
    """

    index: int
    label: int
    words: NDArray[np.uint32]
    sums: NDArray[np.int64]
    notes: DecodeNotes = NOTHING
    extent: Extent | None = None


Outcome = PackedImage | Failure


@dataclass(frozen=True)
class DecodeBudgets:
    """The memory that decoding threads share for large images (``pixels``) and large files (``files``)."""

    pixels: MemoryBudget
    files: MemoryBudget


def decode_budgets() -> DecodeBudgets:
    """Return new budgets; a thread waits for them for at most `IMAGE_TIMEOUT_S` while no memory is released."""
    return DecodeBudgets(pixel_budget(IMAGE_TIMEOUT_S), file_budget(IMAGE_TIMEOUT_S))


def decode_in_order(
    source: SourceSplit,
    rule: ResizeRule,
    *,
    ranges: Sequence[range],
    num_workers: int,
    layout: Layout = "packed",
    budgets: DecodeBudgets | None = None,
    decoding: int = DECODING_VERSION,
) -> Generator[list[Outcome]]:
    """Decode the images of ``source`` whose indices are in ``ranges`` with ``num_workers`` threads.

    Yields blocks of outcomes in the order of the indices. No block has images of two ranges. The outcomes depend only
    on the source and the rule. Closing the generator stops the threads.

    Args:
        source: the images.
        rule: how they are resized and cropped.
        ranges: ranges of indices, each with step 1.
        num_workers: decoding threads.
        layout: how pixels become words.
        budgets: memory for large images, which several calls may share; by default, those of this call.
        decoding: the version of the decoding rules with which the pack was begun.

    Raises:
        ShardError: a listed image can no longer be read, no result arrived within `IMAGE_TIMEOUT_S`, an image needs
            ``--levels``, or it is one of those images.
        Exception: any other exception of a worker, with its original traceback.
    """
    # A task costs about 50 µs of interpreter time, a third of the time for a 32 px image: a task is a block of images.
    num_pixels = math.prod(rule.stored_shape)
    block = max(1, min(_MAX_BLOCK_IMAGES, _BLOCK_PIXELS // num_pixels))
    blocks = iter(
        range(first, min(first + block, each.stop)) for each in ranges for first in range(each.start, each.stop, block)
    )
    pending: deque[tuple[Future[list[Outcome]], range]] = deque()
    window = max(num_workers, min(num_workers * _BLOCKS_PER_WORKER, _WINDOW_BYTES // (block * 4 * num_pixels)))
    decoder = _Decoder(source, rule, layout, budgets or decode_budgets(), decoding)
    pool = Pool(num_workers, "decode")
    try:
        while True:
            while len(pending) < window and (indices := next(blocks, None)) is not None:
                pending.append((pool.submit(decoder.outcomes, indices), indices))
            if not pending:
                return
            future, indices = pending.popleft()
            yield _wait(future, source, indices.start)
    finally:
        for future, _ in pending:
            future.cancel()
        pool.close(_JOIN_TIMEOUT_S)


@dataclass(frozen=True)
class _Decoder:
    """The state that the workers share: the source, the rule, the layout, and the memory budgets for large images."""

    source: SourceSplit
    rule: ResizeRule
    layout: Layout
    budgets: DecodeBudgets
    decoding: int

    def outcomes(self, indices: range) -> list[Outcome]:
        sources = [self.source.image(index) for index in indices]
        decoded = [self._decode(image, index) for index, image in zip(indices, sources, strict=True)]
        packed = self._packed([each.words for each in decoded if not isinstance(each, Failure)])
        return [
            each
            if isinstance(each, Failure)
            else PackedImage(index, image.label, *next(packed), each.notes, each.extent)
            for index, image, each in zip(indices, sources, decoded, strict=True)
        ]

    def _packed(self, images: list[bytes]) -> Iterator[tuple[NDArray[np.uint32], NDArray[np.int64]]]:
        """Yield the words and the channel sums of each image."""
        height, width = self.rule.stored_shape
        # Image by image took a quarter more time at 32 px than by block; large images by block leave the cache.
        step = max(1, _SUMMED_PIXELS // (height * width))
        shape = (-1, height, words_of_row(width, self.layout))
        for first in range(0, len(images), step):
            words = np.frombuffer(b"".join(images[first : first + step]), "<u4").reshape(shape)
            yield from zip(words, channel_sums(words, self.layout), strict=True)

    def _decode(self, image: SourceImage, index: int) -> _DecodedImage | Failure:
        try:
            # The file, and a copy of it without its metadata.
            with self.budgets.files.held(2 * self.source.num_bytes(index)):
                return self._read_and_decode(image, index)
        except MemoryWaitError as error:
            raise ShardError(
                f"{printable(image.name)}: {error} (--workers), or check the disk or the network; then run the same "
                "command again to continue"
            ) from error
        except MemoryError as error:
            raise MemoryError(f"for {printable(image.name)}") from error

    def _read_and_decode(self, image: SourceImage, index: int) -> _DecodedImage | Failure:
        try:
            encoded = self.source.read(index)
        except OSError as error:
            # The file existed when the source was listed. If a disk that disappeared were recorded as failures, the
            # split would be "complete" with almost no images.
            raise ShardError(f"{printable(image.name)}: {error_text(error)}; {_remedy_for_source(error)}") from error
        except ValueError as error:
            return Failure(index, image.name, image.label, error_text(error))
        notes: list[DecodeNotes] = []
        try:
            stored, extent = decode_stored(encoded, self.rule, budget=self.budgets.pixels, note=notes.append)
            decoded = _DecodedImage(image_bytes(stored, self.layout), sum(notes, NOTHING) if notes else NOTHING, extent)
        except MissingLevelsError as error:
            # Not a fault of the image: all others need the same levels, and most would be left out.
            raise ShardError(
                f"{printable(image.name)}: {error_text(error)}, with --overwrite or another DEST, because this pack "
                "was begun without"
            ) from error
        except (OSError, ValueError) as error:
            return Failure(index, image.name, image.label, error_text(error))
        if self.decoding < _SINCE_CHANGED and decoded.notes.num_changed:
            raise ShardError(
                f"{printable(image.name)}: an earlier version began this pack, and decodes this image in another way "
                f"(its orientation, its range of values, or a missing end marker); {AGAIN}"
            )
        if self.decoding < decoded.notes.added_in:
            raise ShardError(
                f"{printable(image.name)}: an earlier version began this pack, and leaves images of this format out; "
                f"{AGAIN}"
            )
        return decoded


@dataclass(frozen=True)
class _DecodedImage:
    """The words of an image as little-endian bytes, what the pack should say about it, and its place on its canvas."""

    words: bytes
    notes: DecodeNotes
    extent: Extent | None


def _remedy_for_source(error: OSError) -> str:
    """Return what to do about an image of the source that cannot be read."""
    again = "run the same command again to continue"
    if isinstance(error, ChangedSourceError):
        return f"restore it and {again}, or pack the changed source with --overwrite or into another DEST"
    if cause_of(error) == Cause.NAME:
        return "rename it, and pack with --overwrite or into another DEST"
    if cause_of(error) in (Cause.MISSING, Cause.OTHER, None):
        changed = "the source has changed or can't be reached"
        return f"{changed}. Restore it and {again}, or pack what is there with --overwrite"
    if cause_of(error) == Cause.RIGHTS:
        return f"{reading_remedy(error, '')}, then {again}"
    return remedy_and_repeat(error, again)


def _wait(future: Future[list[Outcome]], source: SourceSplit, first: int) -> list[Outcome]:
    try:
        return future.result(timeout=IMAGE_TIMEOUT_S)
    except TimeoutError as error:
        if future.done():
            raise
        raise ShardError(
            f"{printable(source.image(first).name)} was not read and decoded within {IMAGE_TIMEOUT_S:.0f} s; "
            "check the disk or the network, then run the same command again to continue"
        ) from error
