"""A user-defined augmentation, applied after those of the settings; its random keys and the check of its result."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float32, Key

from loopfeed.engine.given_values import describe_given
from loopfeed.engine.images.positions import Purpose, key_of_purpose

type UserAugmentation = Callable[[Float32[Array, "B H W 3"], Key[Array, "B"]], Float32[Array, "B H W 3"]]
"""(normalised images, one PRNG key per image) → images."""


def apply_user_augmentation(
    augment: UserAugmentation, images: Float32[Array, "B H W 3"], keys: Key[Array, "B"]
) -> Float32[Array, "B H W 3"]:
    """Apply a user-defined augmentation to a batch; called while tracing.

    Args:
        augment: the function.
        images: normalised.
        keys: keys of the images, from `loopfeed.engine.images.positions.image_keys`.

    Raises:
        ValueError: if the function returns anything but images of the same shape and dtype.
    """
    found: Any = augment(images, key_of_purpose(keys, Purpose.OWN_AUGMENTATION))
    if isinstance(found, jax.Array) and found.shape == images.shape and found.dtype == images.dtype:
        return found
    raise ValueError(
        f"augment must return images of the same shape and dtype, {images.dtype} {list(images.shape)}, but returned "
        f"{describe_given(found)}: change sizes with the setting image_size, and convert with astype(images.dtype)"
    )
