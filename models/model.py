"""What a model is to the rest of the project: a name and two pure functions."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax

type Params = dict[str, Any]
"""Nested dictionaries of float32 arrays: what the optimiser updates."""

type BatchStats = dict[str, Any]
"""Nested dictionaries of float32 arrays: running means and variances, updated by the forward pass in training."""


class Apply(Protocol):
    """The forward pass."""

    def __call__(
        self, params: Params, batch_stats: BatchStats, images: jax.Array, train: bool
    ) -> tuple[jax.Array, BatchStats]:
        """Float32 logits `[B,K]` of normalised float32 images `[B,H,W,3]`, and the new batch statistics.

        In training the batch is normalised by its own statistics and the running ones move; otherwise it is normalised
        by the running ones, which come back as they were.
        """
        ...


class Model(NamedTuple):
    """A network as pure functions over pytrees: `init(key)` makes params and batch statistics, `apply` uses them."""

    name: str
    init: Callable[[jax.Array], tuple[Params, BatchStats]]
    apply: Apply
