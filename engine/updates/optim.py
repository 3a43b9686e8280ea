"""The optimizers: optax transformations whose hyperparameters are runtime values of the program.

Each is built inside the program at every trace: the structure of an optimizer's state depends only on its name, never
on its hyperparameters, so that another learning rate, momentum or decay needs no recompilation. Does not depend on
schedules or the loop.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
from jaxtyping import Array, Bool, Float32

from loopfeed.engine.config import OptimizerName
from loopfeed.engine.patterns import Group
from loopfeed.engine.updates.selection import groups_of, scale_leaves
from loopfeed.engine.updates.skipping import choose, clip_gradient, global_norm
from loopfeed.models.layers.bfloat16_bits import to_float32
from loopfeed.models.layers.platform_forms import materialize

type Mask = Callable[[Any], Any]
"""Parameters → a tree of the same structure with a bool at each leaf."""


class Hyperparams(NamedTuple):
    """The hyperparameters of an optimizer; traced, so that a change needs no recompilation.

    Attributes:
        learning_rate: learning rate of this update, at least 0.
        momentum: in [0, 1); β1 of Adam, AdamW, LAMB and Lion; β of Muon and β1 of its AdamW.
        weight_decay: at least 0. SGD, Nesterov, LARS and Adam add it, times the parameter, to the gradient; AdamW,
            LAMB, Lion and Muon add it to the direction computed from the moments ("decoupled"), so that the learning
            rate multiplies it.
        beta2: decay of the second moment of Adam, AdamW, LAMB and Muon's AdamW; of the momentum of Lion; in [0, 1).
        epsilon: added to the denominator of Adam, AdamW, LAMB and Muon, above 0. LAMB's paper uses 1e-6.
        trust_coefficient: η of LARS.
        clip_norm: largest global norm of a gradient, above 0; inf clips nothing.
        clip_value: largest magnitude of an element of a gradient, above 0; used if the optimizer clips values.
    """

    learning_rate: Float32[Array, ""]
    momentum: Float32[Array, ""]
    weight_decay: Float32[Array, ""]
    beta2: Float32[Array, ""] | np.float32 = np.float32(0.999)
    epsilon: Float32[Array, ""] | np.float32 = np.float32(1e-8)
    trust_coefficient: Float32[Array, ""] | np.float32 = np.float32(1e-3)
    clip_norm: Float32[Array, ""] | np.float32 = np.float32(np.inf)
    clip_value: Float32[Array, ""] | np.float32 = np.float32(np.inf)


def kernels_only(params: Any, *, undecayed: Collection[str] = ()) -> Any:
    """Return a mask that selects the kernels: the leaves with at least two dimensions, without those of some keys.

    A leaf with fewer dimensions is a bias, a norm's scale or a layer scale in every network of `models`. These are
    excluded, as in Goyal et al. (2017, arXiv:1706.02677, section 5.1) and He et al. (2018, arXiv:1812.01187, "no bias
    decay"): there is no need to keep them small, and their norm says little about their layer.

    Args:
        params: the parameters.
        undecayed: the last keys of the leaves that are no kernels although they have at least two dimensions, such as
            `loopfeed.Model.undecayed`; timm excludes the same class tokens and position embeddings.
    """

    def is_kernel(path: tuple[Any, ...], leaf: Any) -> bool:
        return jnp.ndim(leaf) > 1 and jax.tree_util.keystr(path[-1:], simple=True) not in undecayed

    return jax.tree_util.tree_map_with_path(is_kernel, params)


def every_leaf(params: Any) -> Any:
    """Return a mask that selects all leaves, as in PyTorch's optimizers without parameter groups."""
    return jax.tree.map(lambda _: True, params)


def make_optimizer(
    name: OptimizerName,
    hyperparams: Hyperparams,
    *,
    decay_mask: Mask = kernels_only,
    trust_mask: Mask = kernels_only,
    applied: Bool[Array, ""] | np.bool = np.True_,
    clip: optax.GradientTransformation | None = None,
    groups: Sequence[Group] = (),
) -> optax.GradientTransformationExtraArgs:
    """Return the named optimizer, which first clips the global norm of the gradient.

    - "sgd": m ← momentum · m + g, parameter ← parameter - learning rate · m, with g the clipped gradient + decay ·
      parameter, as torch.optim.SGD with dampening 0.
    - "nesterov": the same with g + momentum · m (the new m) instead of m, as torch.optim.SGD with nesterov=True.
    - "adamw": Loshchilov and Hutter (2019), arXiv:1711.05101, as torch.optim.AdamW.
    - "lars": You et al. (2017), arXiv:1708.03888, with the local rate of equation 6, as in MLPerf's reference. The
      learning rate multiplies before the momentum accumulates, so that a falling learning rate does not shrink what was
      accumulated under a higher one.
    - "lamb": You et al. (2020), arXiv:1904.00962, without a bound on the trust ratio.
    - "adam": Kingma and Ba (2014), arXiv:1412.6980, as torch.optim.Adam, with the decay added to the gradient.
    - "lion": Chen et al. (2023), arXiv:2302.06675, as optax.lion.
    - "muon": Jordan (2024), https://kellerjordan.github.io/posts/muon/, as optax.contrib.muon: the momentum of each
      kernel, as a matrix whose columns are its last dimension, is orthogonalised; other leaves use AdamW with Nesterov
      momentum.

    The optimizer's computation and state are float32, whatever the dtypes of parameters and gradients. Its `update`
    needs the parameters, and returns float32 updates for `optax.apply_updates`, which keeps the parameters' dtypes. On
    several devices pass gradients that are already reduced, because norms are computed from the gradients passed.

    Args:
        name: name of the optimizer; static.
        hyperparams: its hyperparameters, traced or not.
        decay_mask: the leaves to decay; static.
        trust_mask: the leaves that LARS and LAMB rescale by their trust ratio, and Muon orthogonalises; static.
        made: whether the update is made. If false, the state is unchanged, and the updates must not be used.
        clip: clips the gradient; None clips its Euclidean norm to `hyperparams.clip_norm`.
        groups: factors on the learning rate and the weight decay of some parameters; static.

    Raises:
        ValueError: if the name is unknown.
    """
    if name not in get_args(OptimizerName):
        raise ValueError(f"optimizer must be one of {', '.join(get_args(OptimizerName))}, got {name!r}")
    clip = clip_gradient(hyperparams.clip_norm) if clip is None else clip
    decay = optax.add_decayed_weights(hyperparams.weight_decay, mask=decay_mask)
    rate = optax.scale_by_learning_rate(hyperparams.learning_rate)
    if groups:
        decay, rate = _by_group(groups, hyperparams, decay_mask)
    return in_float32(optax.chain(clip, *_parts(name, hyperparams, decay, rate, trust_mask, jnp.asarray(applied))))


def init_optimizer(name: OptimizerName, params: Any) -> optax.OptState:
    """Return the state before the first update: zeros, with a structure fixed by the name and the parameters."""
    zero = jnp.zeros((), jnp.float32)
    return make_optimizer(name, Hyperparams(zero, zero, zero)).init(params)


def _parts(
    name: OptimizerName,
    hyperparams: Hyperparams,
    decay: optax.GradientTransformation,
    rate: optax.GradientTransformation,
    trust_mask: Mask,
    applied: Bool[Array, ""],
) -> tuple[optax.GradientTransformation, ...]:
    """Return the optax transformations of an optimizer, in the order in which they are applied.

    optax's own `sgd` omits the trace if its momentum is None, and its schedules compare step counts in Python; the
    transformations here only compute with their hyperparameters, so that these can be traced.
    """
    momentum = jnp.asarray(hyperparams.momentum)
    if name in ("sgd", "nesterov"):
        return decay, trace(momentum, nesterov=name == "nesterov", applied=applied), rate
    if name == "lars":
        local = _local_rate(hyperparams.trust_coefficient, decay, trust_mask)
        return local, rate, trace(momentum, nesterov=False, applied=applied)
    beta2, epsilon = jnp.asarray(hyperparams.beta2), jnp.asarray(hyperparams.epsilon)
    if name == "lion":
        return keeping(optax.scale_by_lion(b1=momentum, b2=beta2), applied=applied), decay, rate
    if name == "muon":
        return keeping(_muon_direction(momentum, beta2, epsilon, trust_mask), applied=applied), decay, rate
    adam = scale_by_adam(momentum, beta2, epsilon, applied=applied)
    if name == "adam":
        return decay, adam, rate
    if name == "adamw":
        return adam, decay, rate
    return adam, decay, optax.masked(optax.scale_by_trust_ratio(), trust_mask), rate


def _local_rate(
    coefficient: Float32[Array, ""] | np.float32, decay: optax.GradientTransformation, trust_mask: Mask
) -> optax.GradientTransformation:
    """Return the decay and the local rate of LARS, η·‖w‖ / (‖g‖ + λ·‖w‖) times g + λ·w, of each selected leaf.

    The rate of a leaf without weights or without gradient is 1, as in MLPerf's reference.
    """

    def scale(gradient: jax.Array, term: jax.Array, param: jax.Array, is_scaled: bool) -> jax.Array:
        if not is_scaled:
            return gradient + term
        weights, gradients, decayed = map(global_norm, (param, gradient, term))
        is_still = (weights == 0) | (gradients == 0)
        return (gradient + term) * jnp.where(is_still, 1, coefficient * weights / (gradients + decayed))

    def update(updates: Any, params: Any) -> Any:
        terms, _ = decay.update(jax.tree.map(jnp.zeros_like, updates), decay.init(params), params)
        return jax.tree.map(scale, updates, terms, params, trust_mask(params))

    return optax.stateless(update)


def _muon_direction(
    beta: Float32[Array, ""], beta2: Float32[Array, ""], epsilon: Float32[Array, ""], kernels: Mask
) -> optax.GradientTransformation:
    """Return optax's Muon without weight decay, with a learning rate of 1 and without the change of sign."""

    def matrices(params: Any) -> Any:
        # XLA and the networks of `models` store [h, w, C, K] and [C, K]: the outputs are the last dimension.
        def axes(leaf: Any, is_kernel: bool) -> Any:
            last = jnp.ndim(leaf) - 1
            return optax.contrib.MuonDimensionNumbers(tuple(range(last)), (last,)) if is_kernel else None

        return jax.tree.map(axes, params, kernels(params))

    return optax.contrib.muon(
        -1.0,
        beta=beta,
        eps=epsilon,
        adam_b1=beta,
        adam_b2=beta2,
        muon_weight_dimension_numbers=matrices,
    )


def _by_group(
    groups: Sequence[Group], hyperparams: Hyperparams, decay_mask: Mask
) -> tuple[optax.GradientTransformation, optax.GradientTransformation]:
    """Return the decay and the learning rate as transformations with the factors of each parameter's group."""

    def decay(updates: Any, params: Any) -> Any:
        decayed = optax.add_decayed_weights(hyperparams.weight_decay, mask=decay_mask)
        zeros = jax.tree.map(jnp.zeros_like, updates)
        terms, _ = decayed.update(zeros, decayed.init(params), params)
        scaled = scale_leaves(terms, [group.weight_decay for group in groups_of(updates, groups)])
        return jax.tree.map(jnp.add, updates, scaled)

    def rate(updates: Any, _: Any) -> Any:
        factors = [group.learning_rate for group in groups_of(updates, groups)]
        return scale_leaves(jax.tree.map(lambda leaf: -hyperparams.learning_rate * leaf, updates), factors)

    return optax.stateless(decay), optax.stateless(rate)


def in_float32(inner: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Wrap `inner` so that gradients and parameters are cast to float32 before they reach it.

    A traced float32 number times a bfloat16 moment is float32: the state would change its dtype at the first update,
    which the loop's carry does not allow, and moments of 8 bits lose the small additions of a low learning rate.
    """

    def cast(tree: Any) -> Any:
        return jax.tree.map(to_float32, tree)

    def init(params: Any) -> optax.OptState:
        return inner.init(cast(params))

    def update(updates: Any, state: optax.OptState, params: Any = None, **extra: Any) -> tuple[Any, optax.OptState]:
        return inner.update(cast(updates), state, cast(params), **extra)

    return optax.GradientTransformationExtraArgs(init, update)


# The parameters' update reads the new moments. If XLA recomputes these there from the old moments (see
# `materialize`), the old ones cannot be overwritten, and the loop copies moments and parameters
# at every step, which takes a quarter of a step of ResNet-50 at 64 px. Here the new moments are stored, and everything
# else reads them.
def trace(momentum: Float32[Array, ""], *, nesterov: bool, applied: Bool[Array, ""]) -> optax.GradientTransformation:
    """Return `optax.trace` (a decayed sum of past gradients); its state is unchanged if `applied` is false."""
    inner = optax.trace(momentum)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(updates, state, params)
        kept = _store(applied, moved, state)
        if not nesterov:
            return kept.trace, kept
        return jax.tree.map(lambda gradient, moment: gradient + momentum * moment, updates, kept.trace), kept

    return optax.GradientTransformation(inner.init, update)


def scale_by_adam(
    b1: Float32[Array, ""], b2: Float32[Array, ""], epsilon: Float32[Array, ""], *, applied: Bool[Array, ""]
) -> optax.GradientTransformation:
    """Return `optax.scale_by_adam`, which keeps two moments; its state is unchanged if `applied` is false."""
    inner = optax.scale_by_adam(b1=b1, b2=b2, eps=epsilon)

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _, moved = inner.update(updates, state, params)
        kept = _store(applied, moved, state)
        mean = optax.tree.bias_correction(kept.mu, b1, kept.count)
        square = optax.tree.bias_correction(kept.nu, b2, kept.count)
        return jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + epsilon), mean, square), kept

    return optax.GradientTransformation(inner.init, update)


def keeping(inner: optax.GradientTransformation, *, applied: Bool[Array, ""]) -> optax.GradientTransformation:
    """Return `inner` with a state that is unchanged if `applied` is false; its updates are then unusable."""

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, moved = inner.update(updates, state, params)
        return materialize((updates, choose(applied, moved, state)))

    return optax.GradientTransformation(inner.init, update)


def _store(applied: Bool[Array, ""], moved: Any, before: Any) -> Any:
    return materialize(choose(applied, moved, before))
