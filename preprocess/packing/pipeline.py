"""Reads and decodes a source's images with several threads and hands the outcomes out in the source's order.

Memory is bounded by the window and by what the workers share for large images, not by the data set: about 64 MB a
worker for images up to 4 megapixels, a quarter of the machine's memory for larger ones together (but always one of
them), 1 GiB for large files together, and `_WINDOW_BYTES` for crops that wait. Knows nothing of shards.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from preprocess.decoding.decode import ResizeRule, decode_image
from preprocess.decoding.memory_budget import MemoryBudget, MemoryWaitError, file_budget, pixel_budget
from preprocess.packing.channels import channel_sums
from preprocess.packing.journal import Failure
from preprocess.pixels import Layout, to_words
from preprocess.printable import printable
from preprocess.shards.location import ShardError

if TYPE_CHECKING:
    from preprocess.sources.listing import SourceImage, SourceSplit

IMAGE_TIMEOUT_S = 600.0
"""How long the next images may take to be read and decoded, in seconds: a network file system that hangs ends here."""

_BLOCK_PIXELS = 1 << 16
_MAX_BLOCK_IMAGES = 64
_BLOCKS_PER_WORKER = 4
_WINDOW_BYTES = 2**30
_JOIN_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class PackedImage:
    """An image ready for a shard.

    Attributes:
        index: its position in the source's pack order.
        label: its class, 0-based.
        words: its pixels, uint32 ``[H, W]``, of the dense layout ``[H, 3·W/4]``.
        sums: its channel sums, int64 ``[2, 3]``, see `channel_sums`.
    """

    index: int
    label: int
    words: NDArray[np.uint32]
    sums: NDArray[np.int64]


Outcome = PackedImage | Failure


def decode_in_order(
    source: SourceSplit, rule: ResizeRule, *, start: int, num_workers: int, layout: Layout = "packed"
) -> Generator[list[Outcome]]:
    """Decode the images ``start``.. of ``source`` with ``num_workers`` threads; blocks of outcomes in source order.

    The outcomes depend on nothing but the source and the rule. Closing the generator stops the threads.

    Raises:
        ShardError: a listed image can't be read any more, or nothing came for `IMAGE_TIMEOUT_S`.
        Exception: whatever else a worker met, with its own traceback.
    """
    # A task costs about 50 µs of interpreter time, as much as a third of a 32 px image: small images go in blocks.
    block = max(1, min(_MAX_BLOCK_IMAGES, _BLOCK_PIXELS // rule.size**2))
    blocks = iter(range(start, len(source), block))
    tasks: queue.SimpleQueue[tuple[Future[list[Outcome]], int] | None] = queue.SimpleQueue()
    pending: deque[tuple[Future[list[Outcome]], int]] = deque()
    window = max(num_workers, min(num_workers * _BLOCKS_PER_WORKER, _WINDOW_BYTES // (block * 4 * rule.size**2)))
    decoder = _Decoder(source, rule, layout, pixel_budget(IMAGE_TIMEOUT_S), file_budget(IMAGE_TIMEOUT_S))

    def work() -> None:
        while (task := tasks.get()) is not None:
            future, first = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(decoder.outcomes(first, min(first + block, len(source))))
            except BaseException as error:  # noqa: BLE001 - kept, and raised in the consumer
                future.set_exception(error)

    # Daemons: a thread stuck in a dead network file system must not keep the command from ending.
    threads = [threading.Thread(target=work, name=f"decode-{n}", daemon=True) for n in range(num_workers)]
    for thread in threads:
        thread.start()
    try:
        while True:
            while len(pending) < window and (first := next(blocks, None)) is not None:
                pending.append((Future(), first))
                tasks.put(pending[-1])
            if not pending:
                return
            future, first = pending.popleft()
            yield _wait(future, source, first)
    finally:
        _stop(threads, tasks)


@dataclass(frozen=True)
class _Decoder:
    """What the workers share: the source, the rule, and the memory for large images."""

    source: SourceSplit
    rule: ResizeRule
    layout: Layout
    pixels: MemoryBudget
    files: MemoryBudget

    def outcomes(self, start: int, stop: int) -> list[Outcome]:
        decoded = [self._decode(self.source.image(index), index) for index in range(start, stop)]
        images = [each for each in decoded if not isinstance(each, Failure)]
        if not images:
            return [each for each in decoded if isinstance(each, Failure)]
        # Packed and summed a block at a time: image by image it took a quarter more time at 32 px.
        rgb = np.stack(images)
        packed = zip(to_words(rgb, self.layout), channel_sums(rgb), strict=True)
        outcomes: list[Outcome] = []
        for index, each in enumerate(decoded, start=start):
            outcomes.append(
                each if isinstance(each, Failure) else PackedImage(index, self.source.image(index).label, *next(packed))
            )
        return outcomes

    def _decode(self, image: SourceImage, index: int) -> NDArray[np.uint8] | Failure:
        try:
            # The file, and a copy of it without its metadata.
            with self.files.held(2 * self.source.num_bytes(index)):
                return self._read_and_decode(image, index)
        except MemoryWaitError as error:
            raise ShardError(
                f"{printable(image.name)}: {error}; check the disk or the network, or use fewer --workers, and run "
                "again, the pack continues"
            ) from error
        except MemoryError as error:
            raise MemoryError(f"for {printable(image.name)}") from error

    def _read_and_decode(self, image: SourceImage, index: int) -> NDArray[np.uint8] | Failure:
        try:
            encoded = self.source.read(index)
        except OSError as error:
            # It was there when the source was listed. Noted as failures, the images of a disk that went away would
            # make a "complete" split of almost nothing.
            raise ShardError(
                f"{printable(image.name)}: {_cause(error)}; the source has changed or can't be reached: mend that and "
                "run the same command again, or remove this image and pack with --overwrite"
            ) from error
        except ValueError as error:
            return Failure(index, image.name, image.label, _cause(error))
        try:
            return decode_image(encoded, self.rule, budget=self.pixels)
        except (OSError, ValueError) as error:
            return Failure(index, image.name, image.label, _cause(error))


def _cause(error: Exception) -> str:
    """The error's text in one line, without the path that an error of the system trails."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__


def _wait(future: Future[list[Outcome]], source: SourceSplit, first: int) -> list[Outcome]:
    try:
        return future.result(timeout=IMAGE_TIMEOUT_S)
    except TimeoutError as error:
        if future.done():
            raise
        raise ShardError(
            f"{printable(source.image(first).name)}: not read and decoded in {IMAGE_TIMEOUT_S:.0f} s; "
            "check the disk or the network and run again, the pack continues"
        ) from error


def _stop(threads: list[threading.Thread], tasks: queue.SimpleQueue[tuple[Future[list[Outcome]], int] | None]) -> None:
    with suppress(queue.Empty):
        while True:
            tasks.get_nowait()
    for _ in threads:
        tasks.put(None)
    for thread in threads:
        thread.join(timeout=_JOIN_TIMEOUT_S)
