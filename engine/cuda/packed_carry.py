"""What a loop on a card carries, with its short vectors put together.

A network has six or so for every convolution: scale and bias of its norm, their moments, the running statistics. To
update each takes a kernel of its own, which lasts as long for sixteen numbers as for ten thousand; put together they
are updated by a few. What is computed of them stays the same to the bit.
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
# Vectors; each is made of one or two arrays, and XLA gives a kernel at most 96.
MOST_TOGETHER = 48


@dataclass(frozen=True)
class PackedForm:
    """How the leaves of a pytree of arrays are carried.

    Attributes:
        structure: of the tree.
        groups: the numbers of the leaves that are put together, of one dtype each.
        alone: those of the others.
        lengths: of each leaf that is put together.
    """

    structure: Any
    groups: tuple[tuple[int, ...], ...]
    alone: tuple[int, ...]
    lengths: dict[int, int]

    @classmethod
    def of(cls, tree: Any) -> "PackedForm":
        """Gives the form of trees like this one: of vectors up to `LONGEST`, `MOST_TOGETHER` are put together."""
        leaves, structure = jax.tree.flatten(tree)
        by_dtype: dict[Any, list[int]] = defaultdict(list)
        alone, lengths = [], {}
        for number, leaf in enumerate(leaves):
            if leaf.ndim == 1 and leaf.size <= LONGEST:
                by_dtype[leaf.dtype].append(number)
                lengths[number] = leaf.size
            else:
                alone.append(number)
        groups = tuple(group for numbers in by_dtype.values() for group in batched(numbers, MOST_TOGETHER))
        return cls(structure, groups, tuple(alone), lengths)

    def pack(self, tree: Any) -> list[jax.Array]:
        """Gives a vector for each group, and behind them the other leaves as they are."""
        leaves = self.structure.flatten_up_to(tree)
        together = [jnp.concatenate([leaves[number] for number in group]) for group in self.groups]
        return together + [leaves[number] for number in self.alone]

    def unpack(self, packed: list[jax.Array]) -> Any:
        """Gives the tree that was packed."""
        leaves = dict(zip(self.alone, packed[len(self.groups) :], strict=True))
        for group, together in zip(self.groups, packed, strict=False):
            start = 0
            for number in group:
                stop = start + self.lengths[number]
                leaves[number] = lax.slice(together, (start,), (stop,))
                start = stop
        return self.structure.unflatten([leaves[number] for number in range(len(leaves))])
