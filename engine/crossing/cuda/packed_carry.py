"""What a loop on a card carries, with its short vectors put together.

A network has six or so for every convolution: scale and bias of its norm, their moments, the running statistics. To
update each takes a kernel of its own, which lasts as long for sixteen numbers as for ten thousand; put together they
are updated by a few. Nothing is computed of them but what was computed before.
"""

from collections import defaultdict
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Numbers; what is longer is worth a kernel.
LONGEST = 8192
# Vectors; each is made of one or two arrays, and XLA gives a kernel at most 96. ResNet-50's step is 934 kernels with
# 24, 920 with 48 and 967 with 200.
MOST_TOGETHER = 48


@dataclass(frozen=True)
class PackedForm:
    """How the leaves of a pytree of arrays are carried.

    Attributes:
        structure: of the tree.
        leaves: what each leaf is.
        groups: the indices of those that are put together, of one dtype each.
        alone: the indices of the others.
    """

    structure: jax.tree_util.PyTreeDef
    leaves: tuple[jax.ShapeDtypeStruct, ...]
    groups: tuple[tuple[int, ...], ...]
    alone: tuple[int, ...]

    @classmethod
    def of(cls, tree: Any) -> "PackedForm":
        """Gives the form of trees like this one: of vectors up to `LONGEST`, `MOST_TOGETHER` are put together."""
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
        """Gives a vector for each group, and behind them the other leaves as they are.

        Raises:
            ValueError: for a tree of another structure, or with a leaf of another shape or dtype.
        """
        arrays = self.structure.flatten_up_to(tree)
        for (path, array), leaf in zip(jax.tree.leaves_with_path(tree), self.leaves, strict=True):
            if _kind_of(array) != leaf:
                name = jax.tree_util.keystr(path)
                raise ValueError(
                    f"what a loop carries must keep its form, and {name}, {_in_words(leaf)}, became "
                    f"{_in_words(_kind_of(array))}"
                )
        together = [jnp.concatenate([arrays[index] for index in group]) for group in self.groups]
        return together + [arrays[index] for index in self.alone]

    def unpack(self, packed: list[jax.Array]) -> Any:
        """Gives the tree that was packed."""
        arrays = dict(zip(self.alone, packed[len(self.groups) :], strict=True))
        for group, together in zip(self.groups, packed, strict=False):
            start = 0
            for index in group:
                stop = start + self.leaves[index].size
                arrays[index] = lax.slice(together, (start,), (stop,))
                start = stop
        return self.structure.unflatten([arrays[index] for index in range(len(arrays))])


def _kind_of(array: Any) -> jax.ShapeDtypeStruct:
    """Shape and dtype; a weak type counts as what it is."""
    return jax.ShapeDtypeStruct(jnp.shape(array), jnp.result_type(array))


def _in_words(leaf: jax.ShapeDtypeStruct) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
