"""The optimisers: optax transformations whose numbers are runtime values of the program.

Each is built anew, inside the program, at every trace: what an optimiser remembers depends on its name alone, never on
its numbers, so that another rate, momentum or decay compiles nothing. Knows nothing of schedules or of the loop.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax

from engine.config import OptimizerName
from engine.updates.clipping import clip_by_global_norm
from engine.updates.moments import scale_by_adam, trace

# Parameters → a tree of the same structure with a bool at each leaf.
type Mask = Callable[[Any], Any]


class Hyperparams(NamedTuple):
    """An optimiser's numbers, float32 [] each; traced, so that changing them compiles nothing.

    Attributes:
        learning_rate: of this update, at least 0.
        momentum: in [0, 1); β1 of AdamW and LAMB.
        weight_decay: at least 0. SGD, Nesterov and LARS add it, times the parameter, to the gradient; AdamW and LAMB
            add it to the direction that the moments gave ("decoupled"), so that the learning rate multiplies it too.
        beta2: decay of AdamW's and LAMB's second moment, in [0, 1).
        epsilon: added to AdamW's and LAMB's denominator, above 0. LAMB's paper takes 1e-6.
        trust_coefficient: η of LARS.
        clip_norm: largest global norm of a gradient, above 0; inf clips nothing.
    """

    learning_rate: jax.Array
    momentum: jax.Array
    weight_decay: jax.Array
    beta2: jax.Array | np.float32 = np.float32(0.999)
    epsilon: jax.Array | np.float32 = np.float32(1e-8)
    trust_coefficient: jax.Array | np.float32 = np.float32(1e-3)
    clip_norm: jax.Array | np.float32 = np.float32(np.inf)


def kernels_only(params: Any) -> Any:
    """Marks the leaves of two dimensions or more: kernels.

    A leaf of one dimension or none is a bias or a norm's scale in every network of `models`. These are left out, as
    Goyal et al. (2017, arXiv:1706.02677, section 5.1) and He et al. (2018, arXiv:1812.01187, "no bias decay") do: what
    they scale has no size to be kept small, and their norm says little of their layer.
    """
    return jax.tree.map(lambda leaf: jnp.ndim(leaf) > 1, params)


def every_leaf(params: Any) -> Any:
    """Marks all leaves, as PyTorch's optimisers do where nobody asks for parameter groups."""
    return jax.tree.map(lambda _: True, params)


def make_optimizer(
    name: OptimizerName,
    hyperparams: Hyperparams,
    *,
    decay_mask: Mask = kernels_only,
    trust_mask: Mask = kernels_only,
    made: jax.Array | np.bool = np.True_,
) -> optax.GradientTransformation:
    """Builds an optimiser behind a clip of the gradient's global norm.

    - "sgd": m ← momentum · m + g, parameter ← parameter - rate · m, with g the clipped gradient + decay · parameter, as
      torch.optim.SGD with dampening 0.
    - "nesterov": the same with g + momentum · m (the new m) in place of m, as torch.optim.SGD with nesterov=True.
    - "adamw": Loshchilov and Hutter (2019), arXiv:1711.05101, as torch.optim.AdamW.
    - "lars": You et al. (2017), arXiv:1708.03888. The rate multiplies before the momentum gathers, so that a falling
      rate does not shrink what was gathered under a higher one.
    - "lamb": You et al. (2020), arXiv:1904.00962, without a bound on the trust ratio.

    The optimiser computes and remembers in float32, whatever the types of parameters and gradients. Its `update` needs
    the parameters, and returns float32 updates for `optax.apply_updates`, which keeps the parameters' types. On
    several devices, give it gradients that are already reduced: norms are taken of what it sees.

    Args:
        name: which one; static.
        hyperparams: its numbers, traced or not.
        decay_mask: what is decayed; static.
        trust_mask: what LARS and LAMB rescale by its trust ratio; static.
        made: bool [], whether the update is made. Where it is not, the state stays, and the updates are not to be used.

    Raises:
        ValueError: for an unknown name.
    """
    if name not in get_args(OptimizerName):
        raise ValueError(f"optimizer must be one of {', '.join(get_args(OptimizerName))}, got {name!r}")
    clip = clip_by_global_norm(hyperparams.clip_norm)
    return _in_float32(optax.chain(clip, *_parts(name, hyperparams, decay_mask, trust_mask, jnp.asarray(made))))


def init_optimizer(name: OptimizerName, params: Any) -> optax.OptState:
    """Gives the state before the first update: zeros, of a structure that the name and the parameters decide alone."""
    zero = jnp.zeros((), jnp.float32)
    return make_optimizer(name, Hyperparams(zero, zero, zero)).init(params)


def _parts(
    name: OptimizerName, hyperparams: Hyperparams, decay_mask: Mask, trust_mask: Mask, made: jax.Array
) -> tuple[optax.GradientTransformation, ...]:
    """The optax transformations of an optimiser, in order.

    optax's own `sgd` leaves the trace out where its momentum is None, and its schedules compare step counts in Python;
    the transformations here only compute with their numbers, so that these may be traced.
    """
    decay = optax.add_decayed_weights(hyperparams.weight_decay, mask=decay_mask)
    rate = optax.scale_by_learning_rate(hyperparams.learning_rate)
    momentum = jnp.asarray(hyperparams.momentum)
    if name in ("sgd", "nesterov"):
        return decay, trace(momentum, nesterov=name == "nesterov", made=made), rate
    if name == "lars":
        ratio = optax.scale_by_trust_ratio(trust_coefficient=hyperparams.trust_coefficient)
        return decay, optax.masked(ratio, trust_mask), rate, trace(momentum, nesterov=False, made=made)
    adam = scale_by_adam(momentum, jnp.asarray(hyperparams.beta2), jnp.asarray(hyperparams.epsilon), made=made)
    if name == "adamw":
        return adam, decay, rate
    return adam, decay, optax.masked(optax.scale_by_trust_ratio(), trust_mask), rate


def _in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """Shows `inner` float32 only.

    A traced float32 number times a bfloat16 moment is float32: the state would change its type at its first update,
    which the loop's carry forbids, and moments of 8 bits lose what a small rate adds to them.
    """

    def cast(tree: Any) -> Any:
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float32), tree)

    def init(params: Any) -> optax.OptState:
        return inner.init(cast(params))

    def update(updates: Any, state: optax.OptState, params: Any = None) -> tuple[Any, optax.OptState]:
        return inner.update(cast(updates), state, cast(params))

    return optax.GradientTransformation(init, update)
