"""What the program shows of its inside on request: the gradient of an update, and the images of a batch.

Both are in the carry of the loop over the updates, so that this loop has no branch for the steps at which they are
pushed: on a GPU the host would have to wait for its condition at every step.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt8

from loopfeed.engine.images.unpack import PixelScale, to_levels
from loopfeed.engine.updates.selection import StagedParts, dotted_path, split_frozen
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.models.layers.bfloat16_bits import to_float32


class SeenImages(NamedTuple):
    """Some images of a batch as the network saw them.

    Attributes:
        levels: RGB.
        labels: None if they are not class numbers.
        mix_weights: as `loopfeed.engine.images.mixing.Mixture.own_target`; None if nothing is mixed.
    """

    levels: UInt8[Array, "k h w 3"]
    labels: Int32[Array, "k"] | None
    mix_weights: Int32[Array, "k"] | None


class Observed(NamedTuple):
    """What the last update showed.

    Attributes:
        gradients: the gradient of the trained parameters, averaged over the batches of the update and over the devices,
            before clipping; at least float32. None if it is not observed.
        images: images of the last batch, None if they are not observed.
    """

    gradients: Any
    images: SeenImages | None


def init_observed(settings: CompiledSettings, params: Any) -> Observed:
    """Return the values before the first update: zeros."""
    gradients = images = None
    if settings.histograms:
        trained, _ = split_frozen(params, settings.frozen)
        if settings.frozen_by_stage:
            trained = StagedParts.of(params, settings.frozen_by_stage).take(params)
        gradients = jax.tree.map(lambda leaf: jnp.zeros_like(to_float32(leaf)), trained)
    if settings.shown_images is not None:
        none = jnp.zeros(settings.shown_images[:1], jnp.int32)
        levels = jnp.zeros(settings.shown_images, jnp.uint8)
        has_labels, mixes = settings.objective.has_classes, settings.augmentation.mixes
        images = SeenImages(levels, none if has_labels else None, none if mixes else None)
    return Observed(gradients, images)


def observe_images(
    settings: CompiledSettings,
    images: Float32[Array, "b h w 3"],
    labels: Int32[Array, "b"] | None,
    mix_weights: Int32[Array, "b"] | None,
    scale: PixelScale,
) -> SeenImages | None:
    """Return the first images of a batch, as observed.

    Args:
        settings: the compiled settings.
        images: normalised.
        labels: class numbers, or None.
        mix_weights: as `loopfeed.engine.images.augment.augment_images` returns them.
        scale: mean and standard deviation of the pixels.
    """
    if settings.shown_images is None:
        return None
    count = settings.shown_images[0]
    levels = to_levels(images[:count], scale)
    return SeenImages(levels, *(None if each is None else each[:count] for each in (labels, mix_weights)))


def named_leaves(kind: str, tree: Any) -> dict[str, jax.Array]:
    """Return the floating-point leaves of a pytree by name, such as "weights/conv1.kernel" for the kind "weights"."""
    return {
        f"{kind}/{dotted_path(path)}": leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }
