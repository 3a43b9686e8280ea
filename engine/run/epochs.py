"""Conversion of epochs (passes over the training split) to steps (updates).

The only module that counts a run in images; everything after it reads `steps` and `warmup_steps`. Needs no jax.
"""

from collections.abc import Callable
from fractions import Fraction
from math import ceil

from engine.config import COUNTED_IN_EPOCHS, SETTINGS, TrainConfig
from engine.settings import SettingError
from preprocess.quantities import quantity

_UNCOUNTED = TrainConfig()


def settle_epochs(
    config: TrainConfig, num_images: int | None, batches: str = "", notify: Callable[[str], None] = lambda _: None
) -> TrainConfig:
    """Return the settings with `steps` and `warmup_steps` computed from `epochs` and `warmup_epochs` if given.

    The epochs are kept, so that a second conversion changes nothing.

    Args:
        config: the settings.
        num_images: N of the training split; None for an endless source of batches.
        batches: a description of what the run trains on, for messages.
        notify: called with a line of text about the number of steps.

    Raises:
        ValueError: epochs are given for an endless source of batches, or together with a different number of steps, or
            they are more steps than a run may have.
    """
    given = [(epochs, steps) for epochs, steps in COUNTED_IN_EPOCHS if getattr(config, epochs) is not None]
    if not given:
        return config
    if num_images is None:
        name, counted = given[0]
        raise SettingError(
            name,
            f"{{setting}} must not be given with {batches}, which are endless, got {{found:g}}: give {{{counted}}}",
            found=getattr(config, name),
        )
    counts = {counted: _settled_count(config, name, counted, num_images) for name, counted in given}
    settled = TrainConfig.from_json(config.to_json() | counts)
    if settled != config:
        _notify_of_length(settled, num_images, notify)
    return settled


def steps_of_epochs(epochs: float, *, num_images: int, images_per_step: int) -> int:
    """Return the number of updates in `epochs` passes over the training split; a final partial update counts as one.

    `epochs` is used as the decimal number that it prints as: 0.1 of 1,000 images are 100. The binary fraction is
    slightly more, and would take another step.
    """
    return ceil(Fraction(repr(epochs)) * num_images / images_per_step)


def _notify_of_length(settled: TrainConfig, num_images: int, notify: Callable[[str], None]) -> None:
    if settled.epochs is not None:
        steps = quantity(settled.steps, "step")
        notify(f"epochs: {settled.epochs:g} of {quantity(num_images, 'image')} each, {steps} in total")


def _settled_count(config: TrainConfig, name: str, counted: str, num_images: int) -> int:
    epochs, count = getattr(config, name), getattr(config, counted)
    settled = steps_of_epochs(epochs, num_images=num_images, images_per_step=config.batch * config.accumulate_steps)
    if settled > SETTINGS[counted].largest:
        raise SettingError(
            name,
            "{setting} must be at most {most} steps, got {found:g}, which is {settled} steps for {num_images:,} images"
            ": give fewer epochs",
            most=SETTINGS[counted].largest,
            found=epochs,
            num_images=num_images,
            settled=settled,
        )
    if count not in (getattr(_UNCOUNTED, counted), settled):
        raise SettingError(
            name,
            f"{{{name}}} and {{{counted}}} must not both be given, got {{found:g}} ({{settled}} steps "
            "for {num_images:,} images) and {count}: leave one out",
            found=epochs,
            num_images=num_images,
            settled=settled,
            count=count,
        )
    return settled
