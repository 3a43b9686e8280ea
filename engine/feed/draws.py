"""The order of a stream in which some images are drawn more often than others, or which has a part of the images only.

Owns how often an image is drawn in an epoch, and when; does not depend on pixels, shards, or the source of weights. An
epoch has n draws, in the order of the keyed permutation of `loopfeed.engine.feed.order`. Draw t of epoch e is a point
of a circle of W units on which each image has an arc as long as its weight (systematic sampling, Madow, 1944):

    point(e, t) = (t · 2**b + r(e)) · W / (n · 2**b),  r(e) = reversed bits of e mod 2**b, xor bits of the seed

The n points of an epoch are equally spaced, so an arc of w units has n · w / W of them, rounded down or up: each image,
and each class, because the arcs of its images are neighbours. The points of 2**m epochs that begin at a multiple of
2**m (m ≤ b) are equally spaced as well, because r is the sequence of van der Corput (1935): over them too, each image
and each class is drawn its expected number of times, rounded down or up. Any k epochs are at most 2 · log2(k) + 1 such
spans, so no image is left out for long. All of it is integer arithmetic, exact for every n and W below the limits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.feed.order import draw_words, epoch_keys, permute

_WORD_BITS = 62
_MOST_BITS = 16


class ImageOrder(Protocol):
    """An order of training images: a function from positions in the endless stream to images."""

    @property
    def num_images(self) -> int:
        """The number of draws of an epoch."""
        ...

    @property
    def is_by_epoch(self) -> bool:
        """Whether each epoch has images of its own, which must not be asked for before it comes."""
        ...

    def images_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the image at each position, int64 of any shape; positions may span epochs."""
        ...


@dataclass(frozen=True, eq=False)
class Arcs:
    """The arcs of the circle: strata of entries, of which the entries of one have equal weights.

    Attributes:
        entries: int32 [n], all entries in the order of their arcs; those of weight 0 are never drawn.
        edges: int64 [G + 1], ascending: stratum g has the units `edges[g]` … `edges[g + 1]`.
        starts: int64 [G + 1]: stratum g has the entries `starts[g]` … `starts[g + 1]` - 1. None if each has one.

    Raises:
        ValueError: no entry has a weight, or the weights are larger than `most_weight`.
    """

    entries: NDArray[np.int32]
    edges: NDArray[np.int64]
    starts: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        most = most_weight(len(self.entries))
        if not 1 <= self.total <= most:
            raise ValueError(f"the weights must add up to 1 … {most:,}, got {self.total:,}")

    @classmethod
    def of_weights(cls, weights: NDArray[np.int64], classes: NDArray[np.int32] | None = None) -> "Arcs":
        """Return the arcs of entries with a weight each, int64 [n]; those of a class, of int32 [n], are neighbours."""
        entries = np.arange(len(weights)) if classes is None else np.argsort(classes, kind="stable")
        return cls(entries.astype(np.int32), _cumulative(weights[entries]))

    @classmethod
    def of_classes(cls, classes: NDArray[np.int32], weights: NDArray[np.int64]) -> "Arcs":
        """Return the arcs of entries of classes, int32 [n], of which each has a weight as a whole, int64 [K].

        Raises:
            ValueError: as the constructor, or a class has a weight but no entry.
        """
        counts = np.bincount(classes, minlength=len(weights))
        if bool((weights[counts == 0] > 0).any()):
            raise ValueError("a class without images must have the weight 0")
        return cls(np.argsort(classes, kind="stable").astype(np.int32), _cumulative(weights), _cumulative(counts))

    @property
    def total(self) -> int:
        """W, the number of units."""
        return int(self.edges[-1])

    def entries_at(self, draws: NDArray[np.int64], num_draws: int, epoch: int, seed: int) -> NDArray[np.int64]:
        """Return the entry of each draw, int64 [d], of an epoch of `num_draws`."""
        total = self.total
        largest = 1 if self.starts is None else int(np.diff(self.starts).max())
        sizes = (num_draws * largest, total)
        bits = max(0, min(_MOST_BITS, *(_WORD_BITS - size.bit_length() for size in sizes)))
        flipped, turned = draw_words(seed, 0, b"loopfeed-draws")[:2].tolist()
        span = 1 << bits
        shift = _reversed(epoch % span, bits) ^ (flipped % span)
        # point = units + parts / (num_draws · span), of which no product has more than 63 bits.
        units, rest = np.divmod(draws * total, num_draws)
        carried, parts = np.divmod(rest * span + shift * total, num_draws * span)
        units = (units + carried + turned % total) % total
        strata = np.searchsorted(self.edges[1:], units, side="right")
        if self.starts is None:
            return self.entries[strata].astype(np.int64)
        counts, weights = np.diff(self.starts)[strata], np.diff(self.edges)[strata]
        places = ((units - self.edges[strata]) * counts + parts * counts // (num_draws * span)) // weights
        return self.entries[self.starts[strata] + places].astype(np.int64)

    def entry_shares(self) -> NDArray[np.float64]:
        """Return the expected share of the draws of each entry, float64 [n]."""
        weights = np.diff(self.edges) / self.total
        if self.starts is not None:
            counts = np.diff(self.starts)
            weights = np.repeat(weights / np.maximum(counts, 1), counts)
        shares = np.empty(len(self.entries))
        shares[self.entries] = weights
        return shares

    def shares(self, classes: NDArray[np.int32], num_classes: int) -> NDArray[np.float64]:
        """Return the expected share of the draws of each class, float64 [K], of entries of classes, int32 [n]."""
        if self.starts is None:
            return np.bincount(classes, self.entry_shares(), num_classes)
        first = classes[self.entries[np.minimum(self.starts[:-1], len(self.entries) - 1)]]
        return np.bincount(first, np.diff(self.edges), num_classes) / self.total


class EpochImages(NamedTuple):
    """What an epoch draws from.

    Attributes:
        subset: the images, int32 [n]; None for all.
        arcs: how often each entry of the subset is drawn; None for each once.
    """

    subset: NDArray[np.int32] | None = None
    arcs: Arcs | None = None


@dataclass(frozen=True)
class DrawnOrder:
    """An order of `num_images` draws an epoch, determined by `seed`.

    Attributes:
        num_images: n ≥ 1, the draws of an epoch, as many as its subset has entries.
        seed: 0 ≤ seed < 2**63.
        images_of: returns what an epoch draws from; a pure function, called from several threads.
        is_by_epoch: whether that differs from epoch to epoch.
    """

    num_images: int
    seed: int
    images_of: Callable[[int], EpochImages]
    is_by_epoch: bool = False

    def images_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the image at each position, int64 of any shape; positions may span epochs."""
        epochs, offsets = np.divmod(positions, self.num_images)
        images = np.empty_like(offsets)
        for epoch in np.unique(epochs).tolist():
            here, (subset, arcs) = epochs == epoch, self.images_of(epoch)
            drawn = permute(offsets[here], self.num_images, epoch_keys(self.seed, epoch))
            entries = drawn if arcs is None else arcs.entries_at(drawn, self.num_images, epoch, self.seed)
            images[here] = entries if subset is None else subset[entries]
        return images


def most_weight(num_draws: int) -> int:
    """Return the largest number of units for which an epoch of `num_draws` is computed without rounding."""
    return 1 << (_WORD_BITS - max(_MOST_BITS, num_draws.bit_length()))


def _cumulative(values: NDArray[np.integer]) -> NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(values, dtype=np.int64)])


def _reversed(value: int, bits: int) -> int:
    """Return the lowest bits of a value in reversed order."""
    return int(f"{value:0{bits}b}"[::-1], 2) if bits else 0
