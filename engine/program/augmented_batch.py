"""The images of a training batch as the model receives them; traced into the training step, or alone to show them."""

import jax
from jaxtyping import Array, Float32, Int32

from loopfeed.engine.crossing.infeed import Batch
from loopfeed.engine.images.augment import apply_user_augmentation, augment_images
from loopfeed.engine.images.positions import Positions, image_keys, positions
from loopfeed.engine.scopes import AUGMENT
from loopfeed.engine.updates.settings import CompiledSettings, RuntimeSettings


def augment_batch(
    settings: CompiledSettings, batch: Batch, batch_index: Int32[Array, ""], values: RuntimeSettings
) -> tuple[Float32[Array, "b h w 3"], Int32[Array, "b"] | None, Positions]:
    """Augment this device's part of a batch, and normalise it.

    Args:
        settings: the compiled settings.
        batch: the images as pulled, and their labels.
        batch_index: number of batches before this one.
        values: the runtime settings.

    Returns:
        The images; the share of each image's own label as `augment_images` returns it; and the positions of the images.
    """
    num_images, replicas, origin = len(batch.labels), settings.replicas, values.origin
    with jax.named_scope(AUGMENT):
        rows = num_images * replicas.count, replicas.this_device() * num_images, num_images
        if origin is None:
            at = positions(batch_index, *rows)
        else:
            at = positions(batch_index - origin.batch_index, *rows, (origin.high, origin.low))
    images, mix_weight = augment_images(
        settings.augmentation, batch.pixels, at, values.seed_words, values.scale, batch.extents
    )
    if settings.user_augmentation is not None:
        with jax.named_scope(AUGMENT):
            images = apply_user_augmentation(settings.user_augmentation, images, image_keys(values.seed_words, at))
    return images, mix_weight, at
