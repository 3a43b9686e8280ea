"""The pull of batches and the innermost loop, over the batches of a pull, which training and evaluation share.

Where the host runs ahead of the device, the batches follow a pull one by one, in a loop with a fixed number of
iterations, whose kernels are all enqueued before the first is done. The small leaves of the carry are packed into a few
arrays there. An iteration without a batch changes nothing.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import batched
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int32

from loopfeed.engine.control.board import ControlWord
from loopfeed.engine.crossing.infeed import Batch, BatchInfeed, DrawBatch, Pulled, make_batch
from loopfeed.engine.crossing.token import Token
from loopfeed.engine.replicas import Replicas
from loopfeed.engine.scopes import DRAW, UNPACK
from loopfeed.engine.updates.skipping import choose

# Longest vector that is concatenated; a longer one is worth its own kernel.
LONGEST = 8192
# Most vectors in a group. Each vector is computed from one or two arrays, and an XLA kernel takes at most 96. A step of
# ResNet-50 is 934 kernels with groups of 24, 920 with 48 and 967 with 200.
MOST_TOGETHER = 48


@jax.named_scope(DRAW)
def pull_part(
    infeed: BatchInfeed,
    token: Token,
    batch_index: Int32[Array, ""],
    num_batches: Int32[Array, ""],
    replicas: Replicas,
    num_rows: int | None = None,
) -> tuple[Token, Pulled]:
    """Pull this device's rows of several batches, with a control word that is the same on all devices.

    A stop of any device stops all of them, after the batches that all of them have; requests are the first device's.
    `num_rows` are the rows of a batch on each device, as `BatchInfeed.pull` takes them.
    """
    token, pulled = infeed.pull(token, batch_index, replicas.this_device(), num_batches, num_rows)
    if replicas.count == 1:
        return token, pulled
    control, is_first = pulled.control, replicas.this_device() == 0
    # As the largest of integers, so that one small reduction carries all; the factor is positive, and so are its bits.
    factor = lax.bitcast_convert_type(control.learning_rate_factor, jnp.int32)
    own = (control.stop, is_first & control.snapshot, is_first & control.evaluate, jnp.where(is_first, factor, 0))
    *flags, factor, fewest = replicas.largest(
        jnp.stack([*(each.astype(jnp.int32) for each in own), -control.num_batches])
    )
    stop, snapshot, evaluate = (flag > 0 for flag in flags)
    agreed = lax.bitcast_convert_type(factor, jnp.float32)
    return token, pulled._replace(control=ControlWord(stop, snapshot, evaluate, agreed, -fewest))


def for_each[C](
    infeed: BatchInfeed,
    token: Token,
    pulled: Pulled,
    process_batch: Callable[[C, Batch], C],
    carry: C,
    *,
    is_over: Callable[[C], Bool[Array, ""]] = lambda _: jnp.zeros((), jnp.bool),
    emit: Callable[[Token, C], tuple[Token, C]] = lambda token, carry: (token, carry),
) -> tuple[Token, C, Int32[Array, ""]]:
    """Process the batches of a pull in order; called while tracing.

    Args:
        infeed: what was pulled from.
        token: the token of the crossing before, such as of the pull.
        pulled: the result of the pull.
        process_batch: (carry, batch) → carry; makes no crossing.
        carry: the initial carry, a pytree of arrays.
        is_over: carry → whether to skip the remaining batches.
        emit: (token, carry) → (token, carry); emits the results of at most `infeed.num_together` batches.

    Returns:
        The token of the last crossing, the final carry, and the number of batches processed: fewer than `pulled`
        states if `is_over` became true or the host ran out of batches.
    """
    if not isinstance(pulled.batches, Batch):
        return _for_each_drawn(infeed.chunk, token, pulled.control, pulled.batches, process_batch, carry, is_over, emit)
    batches = pulled.batches

    def condition(loop_carry: tuple[C, jax.Array]) -> jax.Array:
        carry, num_taken = loop_carry
        return (num_taken < pulled.control.num_batches) & ~is_over(carry)

    def body(loop_carry: tuple[C, jax.Array]) -> tuple[C, jax.Array]:
        carry, num_taken = loop_carry
        with jax.named_scope(UNPACK):
            both = batches.pixels, batches.labels
            pixels, labels = (lax.dynamic_index_in_dim(each, num_taken, keepdims=False) for each in both)
            batch = make_batch(infeed.feeder, pixels, labels)
        return process_batch(carry, batch), num_taken + 1

    # If a stop comes instead of batches, the loop has no iterations. It updates the carry in place, whereas `lax.cond`
    # copies it: 102 MB per step of ResNet-50, and a fifth of the step time of a small perceptron.
    carry, num_taken = lax.while_loop(condition, body, (carry, jnp.zeros((), jnp.int32)))
    return *emit(token, carry), num_taken


def _for_each_drawn[C](
    num_iterations: int,
    token: Token,
    control: ControlWord,
    draw: DrawBatch,
    process_batch: Callable[[C, Batch], C],
    carry: C,
    is_over: Callable[[C], jax.Array],
    emit: Callable[[Token, C], tuple[Token, C]],
) -> tuple[Token, C, jax.Array]:
    """Draw and process the batches of a pull one by one; discard the results of iterations without a batch."""
    form = PackedForm.of(carry)

    def body(
        _: jax.Array, loop_carry: tuple[Token, list[jax.Array], jax.Array]
    ) -> tuple[Token, list[jax.Array], jax.Array]:
        token, packed, num_taken = loop_carry
        carry = form.unpack(packed)
        token, batch, exists = draw(token, control, num_taken)
        is_taken = exists & ~is_over(carry)
        token, carry = emit(token, choose(is_taken, process_batch(carry, batch), carry))
        return token, form.pack(carry), num_taken + is_taken.astype(jnp.int32)

    before = token, form.pack(carry), jnp.zeros((), jnp.int32)
    token, packed, num_taken = lax.fori_loop(0, num_iterations, body, before)
    return token, form.unpack(packed), num_taken


# A network has about six short vectors per convolution: scale and bias of its norm, their moments, the running
# statistics. Each needs its own kernel to update, which takes as long for sixteen numbers as for ten thousand;
# concatenated, a few kernels update all of them. The computed values are the same.
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
