"""The order of the endless stream of training images, as a function from positions to images.

Owns the keyed permutation of each epoch; does not depend on pixels, shards or the contents of batches. Position
p = batch_index · batch + i; epoch = p // N; image = permutation(seed, epoch)(p mod N). The permutation is evaluated per
index in O(1) memory, so a set of 1e8 images costs no more than one of ten.
"""

import hashlib
from dataclasses import dataclass

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

    Raises:
        ValueError: if either is out of range.
    """

    num_images: int
    seed: int

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
            images[here] = self._permute(offsets[here], int(epoch))
        return images

    def batch(self, batch_index: int, batch: int) -> NDArray[np.int64]:
        """Return the image indices, int64 [batch], of the batch that begins at position batch_index · batch."""
        return self.images_at(np.arange(batch_index * batch, (batch_index + 1) * batch, dtype=np.int64))

    def _permute(self, offsets: NDArray[np.int64], epoch: int) -> NDArray[np.int64]:
        """Apply the epoch's bijection of 0 … N - 1 to int64 [n] offsets."""
        return permute(offsets, self.num_images, draw_words(self.seed, epoch, b"feedloop-order"))


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
