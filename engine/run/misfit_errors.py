"""Errors about a setting that does not fit the data or the registry, raised by training and by evaluation."""

from engine.settings import SettingError
from models.registry import UnknownModelError


def too_large_image(image_size: int, height: int, width: int) -> SettingError:
    """Return the error about an image size larger than stored images of `height` × `width` px."""
    return SettingError(
        "image_size",
        "{setting} must be at most that of the data, {height} × {width} px, got {size}: leave it out, or pack the data "
        "at that --size",
        height=height,
        width=width,
        size=image_size,
    )


def unknown_model(error: UnknownModelError) -> SettingError:
    """Return the registry's error as one of the setting."""
    return SettingError("model", "{setting} {rule}", rule=error.rule)
