"""Errors about settings that do not fit the data or the registry, raised in training and in evaluation."""

from loopfeed.engine.settings import SettingError
from loopfeed.models.registry import UnknownModelError


def too_large_image(image_size: int, height: int, width: int) -> SettingError:
    """Return the error for an image size that exceeds the `height` × `width` px of packed images."""
    return SettingError(
        "image_size",
        "{setting} must be at most the size of the images, {height} × {width} px, got {size}: leave it out, or pack "
        "the data with --size {size}",
        height=height,
        width=width,
        size=image_size,
    )


def unknown_model(error: UnknownModelError) -> SettingError:
    """Convert the registry's error about an unknown model to an error about the setting `model`."""
    return SettingError("model", "{setting} {rule}", rule=error.rule)
