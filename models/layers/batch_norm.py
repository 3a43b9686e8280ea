"""Batch norm, with the ReLU behind it, in as few passes over memory as its sums allow.

A training step waits for memory wherever it does not multiply matrices, and batch norm is most of that: both sums of a
pass are taken at once, and where a ReLU follows its derivative is computed where needed instead of stored. On a card a
small network waits for its many small kernels as well: there each sum is two of them.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from models.layers.stored import stored

MOMENTUM = 0.1
EPSILON = 1e-5
# Of the values of a channel, the part whose mean the sums are taken about: one in so many.
SAMPLED = 64
# Parts whose sums are added value by value before they are summed up. 8 to 16 measured alike.
PARTS = 16


class RunningStats(NamedTuple):
    """Exponential averages of a channel's mean and unbiased variance, float32 `[C]` each."""

    mean: jax.Array
    var: jax.Array


def batch_norm(
    x: jax.Array,
    scale: jax.Array,
    bias: jax.Array,
    running: RunningStats,
    *,
    train: bool,
    relu: bool = False,
) -> tuple[jax.Array, RunningStats]:
    """Normalise every channel over images and places (Ioffe and Szegedy, 2015), as PyTorch does it.

    Args:
        x: `[B,H,W,C]`, any floating dtype; statistics are float32.
        scale: `[C]` float32.
        bias: `[C]` float32.
        running: used when not training; in training moved by a tenth towards the batch's mean and unbiased variance.
        train: whether to normalise by the batch's own mean and biased variance.
        relu: whether a ReLU follows. Its derivative is computed twice, which pays for one as cheap as this alone.

    Returns:
        `[B,H,W,C]` in the dtype of `x`, and the running statistics, through which no gradient flows.
    """
    if not train:
        centred = x.astype(jnp.float32) - running.mean
        normal = centred * (scale * lax.rsqrt(running.var + EPSILON)) + bias
        return _activate(relu, normal.astype(x.dtype)), running
    y, mean, var = _normalise(relu, x, scale, bias)
    count = _count(x)
    unbiased = var * (count / max(count - 1, 1))
    moved = RunningStats(
        (1 - MOMENTUM) * running.mean + MOMENTUM * mean, (1 - MOMENTUM) * running.var + MOMENTUM * unbiased
    )
    return y, lax.stop_gradient(moved)


def _count(x: jax.Array) -> int:
    """Values of a channel."""
    return x.size // x.shape[3]


def _sums(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The sums by channel of two arrays `[B,H,W,C]` that are computed from the same ones, which are read once.

    As a reduction of a pair XLA:CPU computes them together with what makes the arrays, where it would otherwise write
    each out before; it goes at the speed of memory where they are first folded into one of `PARTS` parts. On a card the
    parts that thread blocks summed up are then added for both by one kernel.
    """
    return lax.platform_dependent(
        first, second, cpu=_folded_sums, cuda=partial(_pair_sums, (0, 1, 2)), default=_plain_sums
    )


def _plain_sums(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    return first.sum((0, 1, 2)), second.sum((0, 1, 2))


def _pair_sums(axes: tuple[int, ...], first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    zero = jnp.zeros((), first.dtype)
    return lax.reduce((first, second), (zero, zero), lambda sums, more: (sums[0] + more[0], sums[1] + more[1]), axes)


def _folded_sums(first: jax.Array, second: jax.Array) -> tuple[jax.Array, jax.Array]:
    count, C = _count(first), first.shape[3]
    parts = max(divisor for divisor in range(1, PARTS + 1) if count % divisor == 0)
    folded = _pair_sums((0,), *(operand.reshape(parts, count // parts, C) for operand in (first, second)))
    return folded[0].sum(0), folded[1].sum(0)


def _mean_and_variance(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Mean and biased variance of every channel of `x [B,H,W,C]`, float32 `[C]`, reading `x` once.

    Sums are taken about a value like the others (`_about`), as E[x²] - E[x]² loses all digits where the mean is large.
    """
    wide = x.astype(jnp.float32)
    count = _count(x)
    about = _about(wide)
    centred = wide - about
    total, squares = _sums(centred, jnp.square(centred))
    shift = total / count
    return about + shift, jnp.maximum(squares / count - jnp.square(shift), 0)


def _about(wide: jax.Array) -> jax.Array:
    """What the sums of `wide [B,H,W,C]` are taken about, `[C]`: if it is like the rest of them, no digit is lost.

    The mean of one value in n is never further off than √n deviations, however they lie, so sums about it never cancel
    to less than one in n: with one in 64, six of float32's 24 bits. On a card, where that mean would be three kernels
    more, it is one value, from the middle of an image, where padding is far. It is some deviations off, d,
    and the sums cancel to one in 1 + d². No one value keeps a bound: the only one that is not zero among n is √n off.
    The variance is then lost, of what is of no use but at that place.
    """
    count, (_, H, W, _) = _count(wide), wide.shape
    return lax.platform_dependent(
        wide,
        cuda=lambda wide: wide[0, H // 2, W // 2],
        default=lambda wide: wide.reshape(count, -1)[: -(-count // SAMPLED)].mean(0),
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _normalise(relu: bool, x: jax.Array, scale: jax.Array, bias: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Normalised (and rectified) `x`, and the batch's mean and biased variance in float32.

    The backward pass is written out so that only `x` is kept; derived automatically it kept two more arrays of its
    size.
    """
    mean, var = _mean_and_variance(x)
    normal = _affine(x, mean, scale * lax.rsqrt(var + EPSILON), bias)
    return _activate(relu, normal.astype(x.dtype)), mean, var


@jax.custom_vjp
def stored_relu(x: jax.Array) -> jax.Array:
    """ReLU whose result is stored (`models.layers.stored`), and its derivative taken from that.

    Otherwise the input of each residual block is computed anew out of the convolutions of all blocks before it, and on
    a card the derivative reads the two arrays whose sum `x` is in the place of one. (On a CPU that comes to the same.)
    """
    return stored(jnp.maximum(x, 0), on_cards=True)


def _stored_relu_forward(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    y = stored_relu(x)
    return y, y


def _stored_relu_backward(y: jax.Array, gradient: jax.Array) -> tuple[jax.Array]:
    return (jnp.where(y > 0, gradient, 0),)


stored_relu.defvjp(_stored_relu_forward, _stored_relu_backward)


def _activate(relu: bool, x: jax.Array) -> jax.Array:
    return stored_relu(x) if relu else x


def _affine(x: jax.Array, mean: jax.Array, slope: jax.Array, bias: jax.Array) -> jax.Array:
    # Centred first, here and in the backward pass: folded into one multiplication and addition, the two large terms
    # cancel, and the losses of a 12-step run were 3e-4 off those in float64 where this form is 1e-7 off.
    return (x.astype(jnp.float32) - mean) * slope + bias


def _normalise_forward(
    relu: bool, x: jax.Array, scale: jax.Array, bias: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, ...]]:
    y, mean, var = _normalise(relu, x, scale, bias)
    return (y, mean, var), (x, scale, bias, mean, var)


def _normalise_backward(
    relu: bool,
    residuals: tuple[jax.Array, ...],
    gradients: tuple[jax.Array, jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """With x̂ normalised and g the gradient before the ReLU: σ·dx = scale·(g - mean g - x̂·mean(g·x̂)).

    The gradients of mean and variance are none: they reach nothing but the running statistics.
    """
    x, scale, bias, mean, var = residuals
    inverse = lax.rsqrt(var + EPSILON)
    slope, count = scale * inverse, _count(x)

    def before_relu(x: jax.Array, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = gradient.astype(jnp.float32)
        of_normal = jnp.where(_affine(x, mean, slope, bias) > 0, wide, 0) if relu else wide
        return of_normal, x.astype(jnp.float32) - mean

    of_normal, centred = before_relu(x, gradients[0])
    of_bias, of_slope = _sums(of_normal, of_normal * centred)
    of_scale = of_slope * inverse
    # From what is stored: XLA computes the same anew, where it would otherwise write it out for both.
    of_normal, centred = before_relu(*stored((x, gradients[0])))
    of_x = slope * (of_normal - centred * (of_scale * inverse / count) - of_bias / count)
    return stored(of_x.astype(x.dtype)), of_scale, of_bias


_normalise.defvjp(_normalise_forward, _normalise_backward)
