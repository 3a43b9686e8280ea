"""The interface of a model: a name and two pure functions; and its parameters by dotted path, such as `head.fc`."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
from jaxtyping import Array, Float32

type Params = dict[str, Any]
"""Nested dictionaries of float32 arrays: the learned parameters."""

type BatchStats = dict[str, Any]
"""Nested dictionaries of float32 arrays: running means and variances, updated by the forward pass in training."""


type Images = Float32[Array, "B H W 3"]
type Logits = Float32[Array, "B K"]


class Apply(Protocol):
    """The forward pass of a model."""

    def __call__(
        self, params: Params, batch_stats: BatchStats, images: Images, train: bool
    ) -> tuple[Logits, BatchStats]:
        """Return logits for normalised images, and the new batch statistics.

        In training, the batch is normalised with its own statistics, and the running statistics are updated. Otherwise
        it is normalised with the running statistics, which are returned unchanged.
        """
        ...


class Model(NamedTuple):
    """A network as pure functions over pytrees: `init(key)` returns params and batch statistics, which `apply` uses.

    Attributes:
        name: its name in messages.
        init, apply: the functions.
        undecayed: the keys, anywhere in the parameters, of the leaves that are excluded from weight decay although they
            have more than one axis, such as position embeddings.

    Example:
        >>> def init(key):
        ...     return {"kernel": jnp.zeros((3, 2)), "bias": jnp.zeros(2)}, {}
        >>> def apply(params, batch_stats, images, train):
        ...     return dense(global_average_pool(images), params["kernel"], params["bias"]), batch_stats
        >>> model = Model("colour", init, apply)
        >>> logits, _ = model.apply(*model.init(jax.random.key(0)), jnp.ones((4, 8, 8, 3)), train=False)
        >>> logits.shape
        (4, 2)
    """

    name: str
    init: Callable[[jax.Array], tuple[Params, BatchStats]]
    apply: Apply
    undecayed: tuple[str, ...] = ()


def get_at(params: Params, path: str) -> Any:
    """Return the branch or leaf at a path."""
    found: Any = params
    for key in path.split("."):
        found = found[key]
    return found


def set_at(params: Params, path: str, value: Any) -> None:
    """Set the branch or leaf at a path, and create the branches above it that do not exist."""
    *above, last = path.split(".")
    for key in above:
        params = params.setdefault(key, {})
    params[last] = value


def replace_at(params: Params, path: str, value: Any) -> Params:
    """Return parameters with another branch or leaf at a path; the others are not copied."""
    key, _, rest = path.partition(".")
    return params | {key: replace_at(params[key], rest, value) if rest else value}
