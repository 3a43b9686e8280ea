"""The form of a batch's labels: class numbers, or any pytree of arrays, which crosses to the device as 32-bit words.

Owns the conversion in both directions: NumPy arrays to words on the host, words to traced arrays in the program.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Int32, Shaped
from numpy.typing import NDArray

_WORD_BYTES = 4
_KINDS = "biuf"
# jax computes with 32 bits by default, so wider labels are converted on the host.
_NARROWED = {np.dtype(np.float64): np.float32, np.dtype(np.int64): np.int32, np.dtype(np.uint64): np.uint32}
WEIGHT_WORDS = 1
"""Words that precede the labels of each example: its weight, float32, which is 0 in padding rows."""


@dataclass(frozen=True)
class LabelArray:
    """One array of the labels.

    Attributes:
        name: where it is in the pytree, as in `labels['boxes']`.
        shape: the shape of one example's part.
        dtype: the dtype in the program.
        is_bits: whether an example's part crosses as one bit per element, which is 0 or 1 in the program.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    is_bits: bool = False

    def describe(self) -> str:
        """Return a line of text, as recorded for a run."""
        return f"{self.name}: {self.dtype} {list(self.shape)}"

    @property
    def num_words(self) -> int:
        """Number of 32-bit words of one example's part."""
        if self.is_bits:
            return -(-int(np.prod(self.shape)) // (8 * _WORD_BYTES))
        return -(-int(np.prod(self.shape)) * self.dtype.itemsize // _WORD_BYTES)


@dataclass(frozen=True)
class LabelForm:
    """The structure, shapes and dtypes of labels that are not class numbers; the leading axis is that of the batch.

    Attributes:
        structure: the structure of the pytree.
        leaves: its arrays.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[LabelArray, ...]

    @classmethod
    def of(cls, labels: Any, num_images: int, origin: str) -> "LabelForm":
        """Return the form of a batch of labels.

        Args:
            labels: a pytree of arrays [B, …] of booleans, integers or floats.
            num_images: B.
            origin: where the labels are from, for messages.

        Raises:
            ValueError: a leaf is not such an array, or there is none.
        """
        found, structure = jax.tree_util.tree_flatten_with_path(labels)
        if not found:
            raise ValueError(f"labels must contain at least one array, but {origin} has none: return an array [B, …]")
        leaves = []
        for path, leaf in found:
            name, array = "labels" + jax.tree_util.keystr(path), np.asarray(leaf)
            if array.dtype.kind not in _KINDS or array.ndim == 0 or len(array) != num_images:
                raise ValueError(
                    f"{name} must be booleans, integers or floats [{num_images}, …], one entry for each image, but "
                    f"{origin} has {array.dtype} {list(array.shape)}"
                )
            leaves.append(LabelArray(name, array.shape[1:], np.dtype(_NARROWED.get(array.dtype, array.dtype))))
        return cls(structure, tuple(leaves))

    @classmethod
    def of_targets(cls, num_targets: int, *, are_bits: bool) -> "LabelForm":
        """Return the form of a packed split's targets, float32 [B, K] in the program.

        Args:
            num_targets: K.
            are_bits: whether they cross as bits, of which each becomes 0 or 1: bit c % 32 of word c // 32 is class c.
        """
        leaf = LabelArray("labels", (num_targets,), np.dtype(np.float32), are_bits)
        return cls(jax.tree.structure(0), (leaf,))

    @property
    def num_words(self) -> int:
        """Number of 32-bit words for each example, including its weight."""
        return WEIGHT_WORDS + sum(leaf.num_words for leaf in self.leaves)

    def take(self, labels: Any, rows: slice) -> Any:
        """Return the labels of some examples: a pytree of this form, of which each array has these rows."""
        return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], labels)

    def pack(self, labels: Any, weights: NDArray[np.float32], words: NDArray[np.int32], origin: str) -> None:
        """Write labels and weights into words.

        Args:
            labels: a pytree of this form, [n, …] each.
            weights: float32 [n].
            words: int32 [n, num_words]; written.
            origin: where the labels are from, for messages.

        Raises:
            ValueError: the labels have another form, or an integer does not fit into 32 bits.
        """
        arrays, structure = jax.tree.flatten(labels)
        if structure != self.structure:
            raise ValueError(
                f"labels must have the structure of the first batch's, {self.structure}, but {origin} has {structure}"
            )
        words[:, :WEIGHT_WORDS] = weights[:, None].view(np.int32)
        start = WEIGHT_WORDS
        for leaf, given in zip(self.leaves, arrays, strict=True):
            array = _converted(leaf, np.asarray(given), len(words), origin)
            target = words[:, start : start + leaf.num_words]
            target[...] = 0
            if array.size:
                flat = np.ascontiguousarray(array).reshape(len(words), -1).view(np.uint8)
                padded = np.zeros((len(words), leaf.num_words * _WORD_BYTES), np.uint8)
                padded[:, : flat.shape[1]] = flat
                target[...] = padded.view(np.int32)
            start += leaf.num_words

    def unpack(self, words: Int32[Array, "b {self.num_words}"]) -> tuple[Any, Float32[Array, "b"]]:
        """Return the labels, a pytree of this form, and the weights of a batch, in the program."""
        weights = lax.bitcast_convert_type(words[:, 0], jnp.float32)
        start, arrays = WEIGHT_WORDS, []
        for leaf in self.leaves:
            arrays.append(_read(leaf, words[:, start : start + leaf.num_words]))
            start += leaf.num_words
        return jax.tree.unflatten(self.structure, arrays), weights

    def draw(self, random: np.random.Generator, num_examples: int) -> Any:
        """Return random labels of this form: booleans and integers of 0 and 1, and floats in 0 … 1."""
        arrays = []
        for leaf in self.leaves:
            shape, is_whole = (num_examples, *leaf.shape), leaf.is_bits or leaf.dtype.kind != "f"
            drawn = random.integers(2, size=shape) if is_whole else random.uniform(size=shape)
            arrays.append(drawn.astype(leaf.dtype))
        return jax.tree.unflatten(self.structure, arrays)

    def describe(self) -> list[str]:
        """Return a line of text for each array, as recorded for a run."""
        return [leaf.describe() for leaf in self.leaves]


def _converted(leaf: LabelArray, array: NDArray[Any], num_examples: int, origin: str) -> NDArray[Any]:
    """Return the array in the dtype of the leaf; raise ValueError if it has another form or a number does not fit."""
    narrowed = np.dtype(_NARROWED.get(array.dtype, array.dtype))
    if narrowed != leaf.dtype or array.shape != (num_examples, *leaf.shape):
        raise ValueError(
            f"{leaf.name} must be {leaf.dtype} {[num_examples, *leaf.shape]}, as in the first batch, but "
            f"{origin} has {array.dtype} {list(array.shape)}"
        )
    converted = array.astype(leaf.dtype, copy=False)
    if array.dtype.kind in "iu" and array.dtype != leaf.dtype and not np.array_equal(converted, array):
        raise ValueError(f"{leaf.name} must fit into {leaf.dtype}, but {origin} has numbers outside it")
    return converted


def _read(leaf: LabelArray, words: Int32[Array, "b w"]) -> Shaped[Array, "b ..."]:
    """Return one array of the labels from its words."""
    count = int(np.prod(leaf.shape))
    if leaf.is_bits:
        bits = words[:, :, None] >> jnp.arange(8 * _WORD_BYTES, dtype=jnp.int32) & 1
        return bits.reshape(len(words), -1)[:, :count].astype(leaf.dtype).reshape(len(words), *leaf.shape)
    if leaf.dtype == np.bool:
        octets = lax.bitcast_convert_type(words, jnp.uint8).reshape(len(words), -1)
        flat = octets[:, :count] != 0
    elif leaf.dtype.itemsize == _WORD_BYTES:
        flat = lax.bitcast_convert_type(words, leaf.dtype)
    else:
        flat = lax.bitcast_convert_type(words, leaf.dtype).reshape(len(words), -1)[:, :count]
    return flat.reshape(len(words), *leaf.shape)
