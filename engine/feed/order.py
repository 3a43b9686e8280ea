"""The order of the endless stream of training images, as a function from positions to images.

Owns the keyed permutation of each epoch; does not depend on pixels, shards or the contents of batches. Position
p = batch_index · batch + i; epoch = p // N; image = permutation(seed, epoch)(p mod N). The permutation is evaluated per
index in O(1) memory, so a set of 1e8 images costs no more than one of ten.

The windowed order reads large contiguous parts of the data set, which a store with a long latency can deliver fast.
Owns the map from positions to images; does not depend on pixels, files or threads. It is a function of the seed, the
number of images, the batch and the two sizes below, so that a resumed run, a replay, and any number of devices and
processes see the same images at the same positions.

In each epoch, the *blocks* of the data set (a shard each, or a part of one) are drawn in a random order, which makes a
stream. The stream is cut into *windows* of nearly equal length. The rows of a batch belong to *lanes*: each lane of a
window has a contiguous part of the window's stream, and only the images of that part, which are permuted. A process
that pulls some rows of each batch therefore needs only contiguous parts of the data set. A batch has images of all
parts of a window; the same row of the next batch mostly has an image of the same block.

Where images are mixed in pairs, the rows 2k and 2k + 1 have lanes half a window apart, so that partners are of
different blocks: with neighbouring lanes, 96 % of them were of one block. A process then needs two contiguous parts.
"""

import hashlib
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

# Luby and Rackoff (1988) prove four rounds pseudo-random for an ideal round function; eight leave a margin for the
# short halves (2 bits at N = 10) of data sets with few images.
_ROUNDS = 8
_SEED_BITS = 63


@dataclass(frozen=True)
class EpochOrder:
    """The order of `num_images` images, determined by `seed`; every epoch contains every image exactly once.

    Attributes:
        num_images: N ≥ 1, the number of images in the set.
        seed: 0 ≤ seed < 2**63; (seed, epoch) is hashed as a pair, so seed 0 epoch 1 differs from seed 1 epoch 0.
        is_by_epoch: False; see `loopfeed.engine.feed.draws.ImageOrder`.

    Raises:
        ValueError: if either is out of range.
    """

    num_images: int
    seed: int
    is_by_epoch: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.num_images < 1:
            raise ValueError(f"num_images must be at least 1, got {self.num_images}: the split contains no images")
        if not 0 <= self.seed < 2**_SEED_BITS:
            raise ValueError(f"seed must lie in 0 … 2**{_SEED_BITS} - 1, got {self.seed}")

    def images_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the image at each position.

        Args:
            positions: int64 of any shape, each ≥ 0; they may span epochs.

        Returns:
            int64 of the same shape, each in 0 … num_images - 1.
        """
        epochs, offsets = np.divmod(positions, self.num_images)
        images = np.empty_like(offsets)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            images[here] = permute(offsets[here], self.num_images, epoch_keys(self.seed, int(epoch)))
        return images

    def batch(self, batch_index: int, batch: int) -> NDArray[np.int64]:
        """Return the image indices, int64 [batch], of the batch that begins at position batch_index · batch."""
        return self.images_at(np.arange(batch_index * batch, (batch_index + 1) * batch, dtype=np.int64))


def epoch_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    """Return the keys, uint64 [8], of the permutation of an epoch."""
    return draw_words(seed, epoch, b"feedloop-order")


def permute(offsets: NDArray[np.int64], count: int, keys: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Apply a bijection of 0 … count - 1, determined by the keys, to int64 [n] offsets.

    A Feistel network is a bijection of 2**(2·half) numbers; cycle walking (Black and Rogaway, 2002) applies it again to
    values outside 0 … count - 1, which restricts it to a bijection of that range. The domain has fewer than 4 · count
    numbers (16 for the smallest sets), so the expected number of applications is below 4.
    """
    half = max(2, ((count - 1).bit_length() + 1) // 2)
    values = _feistel(offsets.astype(np.uint64), keys, half)
    outside = np.flatnonzero(values >= count)
    while outside.size:
        values[outside] = _feistel(values[outside], keys, half)
        outside = outside[values[outside] >= count]
    return values.astype(np.int64)


def draw_words(seed: int, number: int, purpose: bytes) -> NDArray[np.uint64]:
    """Hash (seed, number) to eight words, uint64 [8], with the same byte order on every machine.

    Args:
        seed, number: 0 ≤ each < 2**63; the number is that of an epoch or a window.
        purpose: at most 16 bytes; different purposes give independent words.
    """
    words = seed.to_bytes(8, "little") + number.to_bytes(8, "little")
    digest = hashlib.blake2b(words, digest_size=8 * _ROUNDS, person=purpose).digest()
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(values: NDArray[np.uint64], keys: NDArray[np.uint64], half: int) -> NDArray[np.uint64]:
    """Apply a balanced Feistel network, one round per key, to uint64 [n] values below 2**(2·half)."""
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (mix_words(right ^ key) & mask)
    return (left << shift) | right


def mix_words(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply the 64-bit finaliser of SplitMix64 (Steele, Lea and Flood, 2014), elementwise on uint64."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


# More lanes, or pairs of lanes, than processes are of no use; fewer leave larger parts of a window to permute.
_MOST_LANES = 64


@dataclass(frozen=True)
class WindowedOrder:
    """The windowed order of `num_images` images; every epoch contains every image exactly once.

    Attributes:
        num_images: N ≥ 1, the number of images in the set.
        seed: 0 ≤ seed < 2**63.
        batch: B ≥ 1, images per batch over all devices.
        block_images: images that are read together, in stored order.
        window_images: the largest number of images in a window.
        pairs: whether the images at the rows 2k and 2k + 1 of a batch are mixed, and so come from different halves of
            a window. Has no effect on an odd batch.

    Raises:
        ValueError: if a number is out of range.
    """

    num_images: int
    seed: int
    batch: int
    block_images: int
    window_images: int
    pairs: bool = True

    def __post_init__(self) -> None:
        for name in ("num_images", "batch", "block_images", "window_images"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed must lie in 0 … 2**63 - 1, got {self.seed}")

    @property
    def num_lanes(self) -> int:
        """The number of lanes: the largest power of two that divides the batch, at most 64, of pairs 128."""
        return min(_MOST_LANES * (1 + self.pairs), self.batch & -self.batch)

    @property
    def lane_rows(self) -> int:
        """The number of rows of a batch in each lane."""
        return self.batch // self.num_lanes

    @property
    def num_windows(self) -> int:
        """The number of windows of an epoch."""
        return -(-self.num_images // self.window_images)

    @property
    def largest_window(self) -> int:
        """The number of images in the largest window."""
        return -(-self.num_images // self.num_windows)

    def window_at(self, position: int) -> int:
        """Return the number of the window, counted from 0 over all epochs, that contains a position ≥ 0."""
        epoch, offset = divmod(position, self.num_images)
        # The last k with k · N // windows ≤ offset.
        return epoch * self.num_windows + ((offset + 1) * self.num_windows - 1) // self.num_images

    def bounds(self, window: int) -> tuple[int, int]:
        """Return `start, stop`, the range of positions in a window."""
        epoch, number = divmod(window, self.num_windows)
        start, stop = (self.num_images * k // self.num_windows for k in (number, number + 1))
        return epoch * self.num_images + start, epoch * self.num_images + stop

    def lane_starts(self, window: int) -> NDArray[np.int64]:
        """Return int64 [lanes + 1]: lane l has the places `starts[l]` … `starts[l + 1] - 1` of the window."""
        counts = np.bincount(self._lanes(window), minlength=self.num_lanes)
        return np.concatenate([[0], np.cumsum(counts)])

    def lanes_of(self, rows: range) -> NDArray[np.int64]:
        """Return the lanes of consecutive rows of a batch, int64 [n], each once, ascending."""
        return np.unique(self._lane_of(np.arange(rows.start, rows.stop)))

    def places_of(self, window: int, rows: range) -> NDArray[np.int64]:
        """Return the places of the lanes of consecutive rows, int64 [n], ascending: one or two contiguous parts."""
        starts = self.lane_starts(window)
        return np.concatenate([np.arange(starts[lane], starts[lane + 1]) for lane in self.lanes_of(rows)])

    def places(self, window: int) -> NDArray[np.int64]:
        """Return the place of the image of each position of a window, int64 [n], a permutation of 0 … n - 1.

        A place is an offset in the window's part of the stream, whose images `images_at_places` returns.
        """
        lanes = self._lanes(window)
        offsets = np.arange(len(lanes), dtype=np.uint64)
        first, second = draw_words(self.seed, window, b"feedloop-window")[:2]
        drawn = mix_words(mix_words(offsets ^ first) ^ second)
        by_lane = np.argsort(lanes, kind="stable")
        places = np.empty(len(lanes), np.int64)
        # Lane by lane, in the order of the drawn words; `lexsort` is stable, so equal words keep their order.
        places[by_lane] = np.lexsort((drawn, lanes[by_lane]))
        return places

    def images_at_places(self, window: int, places: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the indices of the images, int64 [n], at places of a window's part of the stream."""
        epoch, number = divmod(window, self.num_windows)
        offsets = self.num_images * number // self.num_windows + places
        num_whole, num_left = divmod(self.num_images, self.block_images)
        # The last block may be short. It is inserted among the others, which are permuted.
        before = self.num_images
        if num_left:
            drawn = int(draw_words(self.seed, epoch, b"feedloop-last")[0])
            before = drawn % (num_whole + 1) * self.block_images
        is_last = (offsets >= before) & (offsets < before + num_left)
        blocks, slots = np.divmod(np.where(offsets >= before, offsets - num_left, offsets), self.block_images)
        images = num_whole * self.block_images + offsets - before
        whole = ~is_last
        if num_whole:
            keys = draw_words(self.seed, epoch, b"feedloop-blocks")
            permuted = permute(blocks[whole], num_whole, keys)
            images[whole] = permuted * self.block_images + slots[whole]
        return images

    def images_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the index of the image, int64 [n], at each of the positions, int64 [n], which may span epochs."""
        windows = np.array([self.window_at(position) for position in positions.tolist()], np.int64)
        images = np.empty_like(positions)
        for window in np.unique(windows).tolist():
            here = windows == window
            places = self.places(window)[positions[here] - self.bounds(window)[0]]
            images[here] = self.images_at_places(window, places)
        return images

    def _lanes(self, window: int) -> NDArray[np.int64]:
        """Return the lane of each position of a window, int64 [n]."""
        start, stop = self.bounds(window)
        return self._lane_of(np.arange(start % self.batch, start % self.batch + stop - start) % self.batch)

    def _lane_of(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the lane of each row of a batch, int64 [n]."""
        if not self.pairs or self.num_lanes == 1:
            return rows // self.lane_rows
        return rows % 2 * (self.num_lanes // 2) + rows // 2 // self.lane_rows
