"""Packing of a loop's carry for GPUs: short vectors are concatenated.

A network has about six short vectors per convolution: scale and bias of its norm, their moments, the running
statistics. Each needs its own kernel to update, which takes as long for sixteen numbers as for ten thousand;
concatenated, a few kernels update all of them. The computed values are the same.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Longest vector that is concatenated; a longer one is worth its own kernel.
LONGEST = 8192
# Most vectors in a group. Each vector is computed from one or two arrays, and an XLA kernel takes at most 96. A step of
# ResNet-50 is 934 kernels with groups of 24, 920 with 48 and 967 with 200.
MOST_TOGETHER = 48


@dataclass(frozen=True)
class PackedForm:
    """The layout of a pytree of arrays in the carry of a loop.

    Attributes:
        structure: structure of the tree.
        leaves: shape and dtype of each leaf.
        groups: indices of the leaves that are concatenated; a group has one dtype.
        unpacked: indices of the other leaves.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[tuple[int, ...], ...]
    unpacked: tuple[int, ...]

    @classmethod
    def of(cls, tree: Any) -> "PackedForm":
        """Return the layout of a tree, grouping up to `MOST_TOGETHER` vectors of at most `LONGEST` numbers each."""
        arrays, structure = jax.tree.flatten(tree)
        leaves = tuple(_kind_of(each) for each in arrays)
        by_dtype: dict[Any, list[int]] = defaultdict(list)
        for index, leaf in enumerate(leaves):
            if leaf.ndim == 1 and leaf.size <= LONGEST:
                by_dtype[leaf.dtype].append(index)
        groups = tuple(group for indices in by_dtype.values() for group in batched(indices, MOST_TOGETHER))
        together = {index for group in groups for index in group}
        return cls(structure, leaves, groups, tuple(index for index in range(len(leaves)) if index not in together))

    def pack(self, tree: Any) -> list[jax.Array]:
        """Return one vector per group, followed by the other leaves of the tree unchanged.

        Raises:
            ValueError: if the structure of the tree, or the shape or dtype of a leaf, differs.
        """
        arrays = self.structure.flatten_up_to(tree)
        for (path, array), leaf in zip(jax.tree.leaves_with_path(tree), self.leaves, strict=True):
            if _kind_of(array) != leaf:
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"the carry of a loop must keep its shapes and dtypes, but {name} changed from {_describe(leaf)} "
                    f"to {_describe(_kind_of(array))}"
                )
        together = [jnp.concatenate([arrays[index] for index in group]) for group in self.groups]
        return together + [arrays[index] for index in self.unpacked]

    def unpack(self, packed: list[jax.Array]) -> Any:
        """Rebuild the tree from the result of `pack`."""
        arrays = dict(zip(self.unpacked, packed[len(self.groups) :], strict=True))
        for group, together in zip(self.groups, packed, strict=False):
            start = 0
            for index in group:
                stop = start + self.leaves[index].size
                arrays[index] = lax.slice(together, (start,), (stop,))
                start = stop
        return self.structure.unflatten([arrays[index] for index in range(len(arrays))])


def _kind_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, ignoring weak types."""
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array))


def _describe(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
