"""Batch norm followed by an optional ReLU, in as few passes over memory as its sums allow.

Outside matrix products, a training step is limited by memory bandwidth, mostly in batch norm. Therefore both sums of a
pass are computed at once, and the derivative of a following ReLU is recomputed instead of stored. On a GPU, a small
network is also limited by its many small kernels; there each sum is two of them.
"""

from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from loopfeed.models.kernels.choice import ONEDNN, kernels_in_use, using_kernels
from loopfeed.models.layers.bfloat16_bits import converts_by_bits, round_by_bits, to_float32, widen_by_bits
from loopfeed.models.layers.platform_forms import materialize, on_platform

MOMENTUM = 0.1
EPSILON = 1e-5
# One in this many values of a channel is used to estimate the mean that is subtracted before summing.
SAMPLED = 64
# Number of parts that are added elementwise before their sum is reduced. 8 to 16 measured the same.
PARTS = 16


class RunningStats(NamedTuple):
    """Exponential moving averages of the mean and the unbiased variance of each channel."""

    mean: Float32[Array, "C"]
    var: Float32[Array, "C"]


class Frozen(NamedTuple):
    """A running statistic that a norm normalises with in training as in evaluation, and returns as it is."""

    value: Float32[Array, "C"]


class NormGroups(NamedTuple):
    """Which images a norm averages over, if these are not all images that it is given.

    Attributes:
        images: images per group, a divisor of the images that a device is given; None if all of them belong together.
        axis: the name of the mesh axis of the devices whose images belong together; None if no two devices' do.
        devices: numbers of the devices of each group; None if all devices are one group.
        num_devices: number of devices in a group.
    """

    images: int | None = None
    axis: str | None = None
    devices: tuple[tuple[int, ...], ...] | None = None
    num_devices: int = 1

    def total[T](self, tree: T) -> T:
        """Return the sums of each leaf over the devices of a group."""
        if self.axis is None:
            return tree
        summed: T = lax.psum(tree, self.axis, axis_index_groups=self.devices)
        return summed


class _Settings(NamedTuple):
    """What a norm in training does beside its arrays: jax traces it for each value."""

    relu: bool
    groups: NormGroups
    kernels: str
    epsilon: float


_GIVEN_IMAGES = NormGroups()
# jax keeps what it has traced for each value separately.
_groups = jax.make_user_context(_GIVEN_IMAGES)


def normalising_over(groups: NormGroups) -> AbstractContextManager[None]:
    """Return a context in which every norm that is traced, in training, averages over these groups of images."""
    context: AbstractContextManager[None] = _groups(groups)
    return context


def batch_norm(
    x: Float[Array, "B H W C"],
    scale: Float32[Array, "C"],
    bias: Float32[Array, "C"],
    running: RunningStats,
    *,
    train: bool,
    relu: bool = False,
    epsilon: float = EPSILON,
) -> tuple[Float[Array, "B H W C"], RunningStats]:
    """Normalise each channel over images, height and width (Ioffe and Szegedy, 2015), as PyTorch does.

    Args:
        x: of any floating dtype; statistics are float32.
        scale, bias: applied to the normalised values.
        running: used in evaluation; moved in training by a tenth towards the batch's mean and unbiased variance. If
            both are `Frozen`, they are used in training too.
        train: whether to normalise with the mean and the biased variance of the batch, or of the groups of images of
            `normalising_over`; the running statistics then follow the mean over the groups.
        relu: whether a ReLU follows. Its derivative is computed twice, which is worthwhile only because it is so cheap.
        epsilon: added to the variance.

    Returns:
        The normalised images in the dtype of `x`, and the running statistics, which have no gradient.

    Example:
        >>> x, running = jnp.array([1.0, 3.0]).reshape(1, 1, 2, 1), RunningStats(jnp.zeros(1), jnp.ones(1))
        >>> y, moved = batch_norm(x, jnp.ones(1), jnp.zeros(1), running, train=True)
        >>> y.ravel().round(3).tolist()
        [-1.0, 1.0]
        >>> [round(float(value), 4) for value in (*moved.mean, *moved.var)]  # 0.1 · 2, and 0.9 + 0.1 · 2
        [0.2, 1.1]
    """
    if isinstance(running.mean, Frozen) and isinstance(running.var, Frozen):
        values = RunningStats(running.mean.value, running.var.value)
        y, _ = batch_norm(x, scale, bias, values, train=False, relu=relu, epsilon=epsilon)
        return y, running
    if not train:
        centred = to_float32(x) - running.mean
        normal = centred * (scale * lax.rsqrt(running.var + epsilon)) + bias
        return _activate(relu, normal.astype(x.dtype)), running
    groups: NormGroups = _groups.value
    normalise = partial(_normalise, _Settings(relu, groups, kernels_in_use(), epsilon))
    count = _count(x) * groups.num_devices
    if groups.images is None or groups.images == len(x):
        y, mean, var = normalise(x, scale, bias)
    else:
        parts = x.reshape(-1, groups.images, *x.shape[1:])
        y, mean, var = jax.vmap(normalise, (0, None, None))(parts, scale, bias)
        y, mean, var, count = y.reshape(x.shape), mean.mean(0), var.mean(0), count // len(parts)
    unbiased = var * (count / max(count - 1, 1))
    moved = RunningStats(
        (1 - MOMENTUM) * running.mean + MOMENTUM * mean, (1 - MOMENTUM) * running.var + MOMENTUM * unbiased
    )
    return y, lax.stop_gradient(moved)


def _count(x: Float[Array, "B H W C"]) -> int:
    """Return the number of values per channel."""
    return x.size // x.shape[3]


def _sums(
    first: Float[Array, "B H W C"], second: Float[Array, "B H W C"]
) -> tuple[Float[Array, "C"], Float[Array, "C"]]:
    """Return the per-channel sums of two arrays; the operands from which both are computed are read once.

    XLA:CPU fuses a reduction of a pair with the computation of the arrays, each of which it would otherwise write to
    memory first; the reduction runs at the speed of memory if the arrays are first folded into one of `PARTS` parts.
    On a GPU one kernel then adds the partial sums of the thread blocks for both.
    """
    return on_platform(first, second, cpu=_folded_sums, cuda=partial(_pair_sums, (0, 1, 2)), default=_plain_sums)


def _plain_sums(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    return first.sum((0, 1, 2)), second.sum((0, 1, 2))


def _pair_sums(axes: tuple[int, ...], first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    zero = jnp.zeros((), first.dtype)
    return lax.reduce((first, second), (zero, zero), _add_pairs, axes)


# A function of the module: jax keeps each function that it reduces with, and what it traced for it.
def _add_pairs(sums: tuple[jax.Array, jax.Array], more: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    return sums[0] + more[0], sums[1] + more[1]


def _folded_sums(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    count, C = _count(first), first.shape[3]
    parts = max(divisor for divisor in range(1, PARTS + 1) if count % divisor == 0)
    folded = _pair_sums((0,), *(operand.reshape(parts, count // parts, C) for operand in (first, second)))
    return folded[0].sum(0), folded[1].sum(0)


def _mean_and_variance(groups: NormGroups, x: Float[Array, "B H W C"]) -> tuple[Float[Array, "C"], Float[Array, "C"]]:
    """Return the mean and the biased variance of each channel in float32, reading `x` only once.

    An estimate of the mean (`_estimate_mean`) is subtracted first, because E[x²] - E[x]² loses all digits if the mean
    is large.
    """
    wide = widen_by_bits(x)
    count = _count(x) * groups.num_devices
    estimate = _estimate_mean(wide)
    if groups.axis is not None:
        estimate = groups.total(estimate) / groups.num_devices
    centred = wide - estimate
    total, squares = groups.total(_sums(centred, jnp.square(centred)))
    shift = total / count
    return estimate + shift, jnp.maximum(squares / count - jnp.square(shift), 0)


def _estimate_mean(wide: Float[Array, "B H W C"]) -> Float[Array, "C"]:
    """Return an estimate of the mean of each channel; subtracting it before summing preserves precision.

    The mean of one value in n is at most √n standard deviations off, whatever the distribution, so sums about it cancel
    to no less than one in n: with one in 64, that is six of float32's 24 bits. On a GPU, where that mean would take
    three more kernels, the estimate is one value from the middle of an image, far from the padding. If it is d standard
    deviations off, the sums cancel to one in 1 + d². A single value has no bound: if only one of n values is not zero,
    it is √n off. The variance is then lost, but only of a channel that is zero everywhere else.
    """
    count, (_, H, W, _) = _count(wide), wide.shape
    estimate = on_platform(
        wide,
        cuda=lambda wide: wide[0, H // 2, W // 2],
        default=lambda wide: wide.reshape(count, -1)[: -(-count // SAMPLED)].mean(0),
    )
    # A single value would be read again by the backward pass, which jaxlib 0.12.0 on a CPU may compute in place of the
    # array: after its first position, the value is overwritten.
    return materialize(estimate) if count <= SAMPLED else estimate


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(
    settings: _Settings, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return `x` normalised (and rectified if `relu`), with the batch's mean and biased variance in float32.

    The backward pass is written by hand so that only `x` is kept; an automatic one keeps two more arrays of that size.
    It is traced after the context of `settings.kernels` has been left.
    """
    with using_kernels(settings.kernels):
        return _normalised(settings, x, scale, bias)


def _normalised(
    settings: _Settings, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    relu = settings.relu
    mean, var = _mean_and_variance(settings.groups, x)
    normal = _affine(x, mean, scale * lax.rsqrt(var + settings.epsilon), bias)
    if not converts_by_bits(x.dtype):
        return _activate(relu, normal.astype(x.dtype)), mean, var
    y = round_by_bits(jnp.maximum(normal, 0) if relu else normal, x.dtype)
    return materialize(y, on_cards=True) if relu else y, mean, var


def stored_relu(x: jax.Array, shortcut: jax.Array | None = None) -> jax.Array:
    """Return the ReLU of `x`, or of its sum with a shortcut of the same shape and dtype.

    The derivative is computed from the result, which is stored (`loopfeed.models.layers.platform_forms`). Otherwise the
    input of each residual block is recomputed from the convolutions of all blocks before it, and on a GPU the
    derivative reads `x` and the shortcut instead of one array. (On a CPU the latter makes no difference.)
    """
    if converts_by_bits(x.dtype):
        return _relu_by_bits(x, shortcut)
    return _stored_relu(x if shortcut is None else x + shortcut)


@jax.custom_vjp
def _stored_relu(x: jax.Array) -> jax.Array:
    return materialize(jnp.maximum(x, 0), on_cards=True)


def _stored_relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = _stored_relu(x)
    return y, y


def _stored_relu_backward(y: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(y > 0, gradient, 0),)


_stored_relu.defvjp(_stored_relu_forward, _stored_relu_backward)


@jax.custom_vjp
def _relu_by_bits(x: jax.Array, shortcut: jax.Array | None) -> jax.Array:
    """Return what `_stored_relu` returns; as the ReLU changes no rounding, the sum is rounded once, at the end."""
    with using_kernels(ONEDNN):
        wide = widen_by_bits(x) if shortcut is None else widen_by_bits(x) + widen_by_bits(shortcut)
        return materialize(round_by_bits(jnp.maximum(wide, 0), x.dtype), on_cards=True)


def _relu_by_bits_forward(
    x: jax.Array, shortcut: jax.Array | None
) -> tuple[jax.Array, tuple[jax.Array, jax.Array | None]]:
    y = _relu_by_bits(x, shortcut)
    return y, (y, None if shortcut is None else y)


def _relu_by_bits_backward(
    residuals: tuple[jax.Array, jax.Array | None], gradient: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    y, of_shortcut = residuals
    # Selected as float32, which is exact. Without the barrier, the sums of the norms before it, which have parts of an
    # image in their inner loops, select by jumps: 8.2 instead of 0.5 ms for 2 million values.
    with using_kernels(ONEDNN):
        selected = jnp.where(widen_by_bits(y) > 0, widen_by_bits(gradient), 0)
        found: jax.Array = materialize(round_by_bits(selected, y.dtype))
    return found, None if of_shortcut is None else found


_relu_by_bits.defvjp(_relu_by_bits_forward, _relu_by_bits_backward)


def _activate(relu: bool, x: jax.Array) -> jax.Array:
    return stored_relu(x) if relu else x


def _affine(x: jax.Array, mean: jax.Array, slope: jax.Array, bias: jax.Array) -> jax.Array:
    # Centred first, here and in the backward pass: as one multiplication and addition, two large terms cancel, and the
    # losses of a 12-step run were 3e-4 off those in float64; with this form they are 1e-7 off.
    return (widen_by_bits(x) - mean) * slope + bias


def _normalise_forward(
    settings: _Settings, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    with using_kernels(settings.kernels):
        x = _stored_for_sums(x)
    y, mean, var = _normalise(settings, x, scale, bias)
    return (y, mean, var), (x, scale, bias, mean, var)


def _stored_for_sums(x: jax.Array) -> jax.Array:
    """Return `x` stored, beside oneDNN's kernels in bfloat16, before sums and an elementwise pass read it.

    XLA would compute a pooling, a sum of gradients or the derivative of an activation again for the sums, where it
    converts and selects without vectors: a step of convnet8 was 1.3 times as fast with what a pooling returns stored.
    """
    found: jax.Array = materialize(x) if converts_by_bits(x.dtype) else x
    return found


def _normalise_backward(
    settings: _Settings,
    residuals: tuple[jax.Array, ...],
    gradients: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    with using_kernels(settings.kernels):
        return _gradients(settings, residuals, _stored_for_sums(gradients[0]))


def _gradients(
    settings: _Settings, residuals: tuple[jax.Array, ...], gradient: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return the gradients of `_normalise`.

    With x̂ normalised and g the gradient before the ReLU: σ·dx = scale·(g - mean g - x̂·mean(g·x̂)). Mean and variance
    have no gradients, because only the running statistics use them.
    """
    (x, scale, bias, mean, var), (relu, groups, *_) = residuals, settings
    inverse = lax.rsqrt(var + settings.epsilon)
    slope, count = scale * inverse, _count(x) * groups.num_devices

    def before_relu(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = widen_by_bits(gradient)
        normal_gradient = jnp.where(_affine(x, mean, slope, bias) > 0, wide, 0) if relu else wide
        return normal_gradient, widen_by_bits(x) - mean

    normal_gradient, centred = before_relu(x, gradient)
    bias_gradient, slope_gradient = _sums(normal_gradient, normal_gradient * centred)
    # The losses of all devices of a group depend on x; those of scale and bias are added up with all other gradients.
    all_bias, all_slope = groups.total((bias_gradient, slope_gradient))
    scale_gradient = slope_gradient * inverse
    # Behind a barrier, so that XLA recomputes these instead of writing them to memory for both uses.
    normal_gradient, centred = before_relu(*materialize((x, gradient)))
    x_gradient = slope * (normal_gradient - centred * (all_slope * inverse * inverse / count) - all_bias / count)
    return materialize(round_by_bits(x_gradient, x.dtype)), scale_gradient, bias_gradient


_normalise.defvjp(_normalise_forward, _normalise_backward)
