"""Where batches come from: a packed split, random pixels, or a function of the user's.

A batch source fills the buffers of one step, addressed by the step alone, so that a resumed run sees what the
uninterrupted one would have. Knows nothing of rings, threads or devices.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

from engine.order import EpochOrder

if TYPE_CHECKING:
    from preprocess.shards import ShardSplit

type Pixels = NDArray[np.uint32]
type Labels = NDArray[np.int32]
type BatchFunction = Callable[[int], tuple[Any, Any]]


class BatchSource(Protocol):
    """What a feeder reads from.

    Attributes:
        batch, height, width: the shape of every batch, B images of H × W pixels.
        thread_safe: whether `fill` may be called by several threads at once and in any order of steps.
    """

    batch: int
    height: int
    width: int
    thread_safe: bool

    def fill(self, step: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Writes the batch of `step` (from 0) into uint32 [B, H, W] packed pixels and int32 [B] labels."""
        ...


class ShardBatches:
    """Batches of a packed split, in the keyed order of `seed`, every image once an epoch."""

    thread_safe = True

    def __init__(self, split: "ShardSplit", *, batch: int, seed: int) -> None:
        self._split = split
        self._order = EpochOrder(split.num_images, seed)
        self.batch, self.height, self.width = batch, split.height, split.width

    def fill(self, step: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:
        """Reads the step's images from the shards; raises preprocess.shards.ShardError where that fails."""
        self._split.read_into(self._order.batch(step, self.batch), pixels, labels, timeout_s=timeout_s)


class SyntheticBatches:
    """Random pixels and labels, a function of (seed, step): what the loop costs without a data set."""

    thread_safe = True

    def __init__(self, *, batch: int, height: int, width: int, num_classes: int, seed: int) -> None:
        self.batch, self.height, self.width = batch, height, width
        self._num_classes, self._seed = num_classes, seed

    def fill(self, step: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Draws the step's batch; needs no waiting."""
        # A fixed number of words for the seed: SeedSequence joins the words of its integers and takes missing ones as
        # zeros, so that [2**32, 0] and [0, 1] would draw the same batch.
        words = [self._seed & 0xFFFFFFFF, self._seed >> 32, step]
        random = np.random.Generator(np.random.SFC64(words))
        labels[...] = random.integers(self._num_classes, size=self.batch, dtype=np.int32)
        drawn = np.frombuffer(random.bytes(pixels.nbytes), np.uint32).reshape(pixels.shape)
        np.bitwise_and(drawn, np.uint32(0xFFFFFF00), out=pixels)


class FunctionBatches:
    """Batches from a function of the user's: step (from 0) → (uint32 [B, H, W] pixels, integer [B] labels).

    The function is called once for each step, in order, from one thread. Its batch for `first_step` is asked for
    at once, because its shape is part of the program, and kept until that step is filled.

    Args:
        function: the user's.
        first_step: the step that the run begins with.
        num_classes: K; labels must lie in 0 … K - 1. None takes what an int32 holds.

    Raises:
        ValueError: where a batch is not of the stated form; whatever the function raises passes through.
    """

    thread_safe = False

    def __init__(self, function: BatchFunction, *, first_step: int = 0, num_classes: int | None = None) -> None:
        self._function, self._num_classes = function, num_classes
        self._first: tuple[int, Pixels, Labels] | None = (first_step, *self._ask(first_step))
        self.batch, self.height, self.width = self._first[1].shape

    def fill(self, step: int, pixels: Pixels, labels: Labels, *, timeout_s: float) -> None:  # noqa: ARG002
        """Copies the function's batch; the feeder bounds the wait for a function that does not return."""
        first, self._first = self._first, None
        given_pixels, given_labels = first[1:] if first and first[0] == step else self._ask(step)
        if given_pixels.shape != pixels.shape:
            raise ValueError(
                f"every batch must have the shape of the first, {pixels.shape}; "
                f"the batch source gave {given_pixels.shape} at step {step}"
            )
        pixels[...], labels[...] = given_pixels, given_labels

    def _ask(self, step: int) -> tuple[Pixels, Labels]:
        given = self._function(step)
        if not isinstance(given, tuple) or len(given) != 2:
            raise ValueError(f"a batch must be a tuple (pixels, labels); the source gave {type(given).__name__}")
        pixels, labels = np.asarray(given[0]), np.asarray(given[1])
        if pixels.dtype != np.uint32 or pixels.ndim != 3:
            raise ValueError(
                f"pixels must be uint32 [B, H, W], packed R<<24 | G<<16 | B<<8 (preprocess.pixels.pack_rgb); "
                f"the batch source gave {pixels.dtype} {list(pixels.shape)} at step {step}"
            )
        if not np.issubdtype(labels.dtype, np.integer) or labels.shape != pixels.shape[:1]:
            raise ValueError(
                f"labels must be integers [{pixels.shape[0]}], one for each image; "
                f"the batch source gave {labels.dtype} {list(labels.shape)} at step {step}"
            )
        highest = np.iinfo(np.int32).max if self._num_classes is None else self._num_classes - 1
        if labels.size and not 0 <= labels.min() <= labels.max() <= highest:
            raise ValueError(
                f"labels must lie in 0 … {highest}; "
                f"the batch source gave {labels.min()} … {labels.max()} at step {step}"
            )
        return pixels, labels.astype(np.int32)
