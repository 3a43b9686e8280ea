"""Where batches come from: what a source must do, random pixels, arrays, or a function of the user's.

A batch source fills the buffers of one batch, addressed by its index alone, so that a resumed run sees what the
uninterrupted one would have. Knows nothing of rings, threads or devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

type Pixels = NDArray[np.uint32]
type Labels = NDArray[np.int32]
type BatchFunction = Callable[[int], tuple[Any, Any]]
type EvaluationArrays = tuple[Any, Any]

PADDING_LABEL = -1
"""The label of a place in the last batch of an evaluation that holds no image: it is not counted."""


class BatchSource(Protocol):
    """What a feeder reads from.

    Attributes:
        batch, height, width: the shape of every batch, B images of H × W pixels.
        thread_safe: whether `fill` may be called by several threads at once and in any order of batches.
    """

    batch: int
    height: int
    width: int
    thread_safe: bool

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Writes batch `batch_index` (from 0) into uint32 [B, H, W] packed pixels and int32 [B] labels.

        Of a source with an attribute `row_words` other than its width the pixels are of the dense layout, uint32
        [B, H, row_words] (`preprocess.pixels`); whatever wraps such a source must have it too.
        """
        ...


def row_words(source: BatchSource) -> int:
    """Words of a row of a source's pixels: of a packed split with the dense layout `row_words`, else its width."""
    return int(getattr(source, "row_words", source.width))


class Lent(Protocol):
    """Images in the source's own memory, in place of copies."""

    @property
    def images(self) -> Sequence[NDArray[np.uint32]]:
        """The B images, uint32 [H, words of a row] each, to be read until the step is done."""
        ...

    def check(self) -> None:
        """Make sure, after the images were copied, that they were sound all the while; raises what the source does."""
        ...


@runtime_checkable
class LendingSource(Protocol):
    """A `BatchSource` that may have its images in memory already, so that they need to be copied only once."""

    def lend(self, batch_index: int, labels: Labels, *, timeout_s: float) -> Lent | None:
        """Write the labels of a batch and return its images; None where `fill` must be asked for that batch.

        The labels then hold nothing.
        """
        ...


@runtime_checkable
class CheckedSource(Protocol):
    """A `BatchSource` that can tell afterwards whether its files were written to while it read them."""

    def check_unchanged(self) -> None:
        """Raise an error where batches may have been others than they should; to be called after the last of them."""
        ...


class EvaluationSource(BatchSource, Protocol):
    """Batches of which every `num_batches` hold each image of a split once.

    Batch b of evaluation e has the index e · num_batches + b; places of the last one that hold no image have the label
    PADDING_LABEL.
    """

    num_batches: int


class ArrayBatches:
    """Every image of two arrays once, over and over: an evaluation set that is in memory.

    Args:
        pixels: uint32 [N, H, W], packed.
        labels: integers [N].
        batch: images a pull.
        num_classes: K; labels must lie in 0 … K - 1. None takes what an int32 holds.

    Raises:
        ValueError: where the arrays are not of this form.
    """

    thread_safe = True

    def __init__(self, pixels: Any, labels: Any, *, batch: int, num_classes: int | None = None) -> None:
        self._pixels, self._labels = _checked(pixels, labels, num_classes=num_classes, giver="the evaluation set")
        num_images, self.height, self.width = self._pixels.shape
        self.batch = batch
        self.num_batches = -(-num_images // batch)

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copies the batch's images."""
        start = batch_index % self.num_batches * self.batch
        count = min(self.batch, len(self._pixels) - start)
        pixels[:count], labels[:count] = self._pixels[start : start + count], self._labels[start : start + count]
        pixels[count:], labels[count:] = 0, PADDING_LABEL


class SyntheticBatches:
    """Random pixels and labels, a function of (seed, batch index): what the loop costs without a data set."""

    thread_safe = True

    def __init__(self, *, batch: int, height: int, width: int, num_classes: int, seed: int) -> None:
        self.batch, self.height, self.width = batch, height, width
        self._num_classes, self._seed = num_classes, seed

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Draws the batch; needs no waiting."""
        # A fixed number of words for the seed: SeedSequence joins the words of its integers and takes missing ones as
        # zeros, so that [2**32, 0] and [0, 1] would draw the same batch.
        words = [self._seed & 0xFFFFFFFF, self._seed >> 32, batch_index]
        random = np.random.Generator(np.random.SFC64(words))
        labels[...] = random.integers(self._num_classes, size=self.batch, dtype=np.int32)
        drawn = np.frombuffer(random.bytes(pixels.nbytes), np.uint32).reshape(pixels.shape)
        np.bitwise_and(drawn, np.uint32(0xFFFFFF00), out=pixels)


class FunctionBatches:
    """Batches from a function of the user's: batch index (from 0) → (uint32 [B, H, W] pixels, integer [B] labels).

    The function is called once for each batch, in order, from one thread. Batch `first_index` is asked for
    at once, because its shape is part of the program, and kept until that batch is filled.

    Args:
        function: the user's.
        first_index: of the batch that the run begins with.
        num_classes: K; labels must lie in 0 … K - 1. None takes what an int32 holds.

    Raises:
        ValueError: where a batch is not of the stated form; whatever the function raises passes through.
    """

    thread_safe = False

    def __init__(self, function: BatchFunction, *, first_index: int = 0, num_classes: int | None = None) -> None:
        self._function, self._num_classes = function, num_classes
        self._first: tuple[int, Pixels, Labels] | None = (first_index, *self._ask(first_index))
        self.batch, self.height, self.width = self._first[1].shape

    def fill(self, batch_index: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copies the function's batch; the feeder bounds the wait for a function that does not return."""
        first, self._first = self._first, None
        given_pixels, given_labels = first[1:] if first and first[0] == batch_index else self._ask(batch_index)
        if given_pixels.shape != pixels.shape:
            raise ValueError(
                f"every batch must have the shape of the first, {pixels.shape}; "
                f"the batch source gave {given_pixels.shape} for batch {batch_index}"
            )
        pixels[...], labels[...] = given_pixels, given_labels

    def limit_labels(self, num_classes: int) -> None:
        """Makes K known, before the run; raises ValueError where the first batch has a label beyond it."""
        self._num_classes = num_classes
        if self._first is not None:
            batch_index, pixels, labels = self._first
            self._check(pixels, labels, batch_index)

    def _check(self, pixels: Any, labels: Any, batch_index: int) -> tuple[Pixels, Labels]:
        return _checked(
            pixels,
            labels,
            num_classes=self._num_classes,
            giver="the batch source",
            where=f" for batch {batch_index}",
        )

    def _ask(self, batch_index: int) -> tuple[Pixels, Labels]:
        given = self._function(batch_index)
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(f"a batch must be a tuple (pixels, labels); the source gave {type(given).__name__}")
        return self._check(*given, batch_index)


def _checked(
    pixels: Any, labels: Any, *, num_classes: int | None, giver: str, where: str = ""
) -> tuple[Pixels, Labels]:
    """Gives uint32 [B, H, W] pixels and int32 [B] labels, or raises ValueError naming what is wrong with them."""
    pixels, labels = np.asarray(pixels), np.asarray(labels)
    if pixels.dtype != np.uint32 or pixels.ndim != 3:
        raise ValueError(
            f"pixels must be uint32 [B, H, W], packed R<<24 | G<<16 | B<<8 (preprocess.pixels.pack_rgb); "
            f"{giver} gave {pixels.dtype} {list(pixels.shape)}{where}"
        )
    if not np.issubdtype(labels.dtype, np.integer) or labels.shape != pixels.shape[:1]:
        raise ValueError(
            f"labels must be integers [{pixels.shape[0]}], one for each image; "
            f"{giver} gave {labels.dtype} {list(labels.shape)}{where}"
        )
    highest = np.iinfo(np.int32).max if num_classes is None else num_classes - 1
    if labels.size and not 0 <= labels.min() <= labels.max() <= highest:
        raise ValueError(f"labels must lie in 0 … {highest}; {giver} gave {labels.min()} … {labels.max()}{where}")
    return pixels, labels.astype(np.int32)
