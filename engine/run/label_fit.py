"""Checks that a loss and the settings fit the labels of a packed split, in training and in evaluation."""

from engine.config import TrainConfig
from engine.settings import SettingError
from preprocess.shards.manifest import Manifest


def check_loss_fits(config: TrainConfig, manifest: Manifest, where: str, *, has_own_loss: bool) -> None:
    """Check that the loss takes the labels of a split.

    Args:
        config: the settings.
        manifest: that of the split.
        where: the name of the split in messages.
        has_own_loss: whether the loss is a user-defined one, which takes any labels.

    Raises:
        SettingError: the setting `loss` does not fit; the message names a loss that does.
    """
    if has_own_loss:
        return
    targets, loss = manifest.targets, config.loss
    if targets is None:
        if loss != "cross-entropy":
            raise _unfit(loss, where, "have one class each", "cross-entropy")
    elif targets.kind == "classes":
        if loss == "cross-entropy":
            raise _unfit(loss, where, "have any number of classes each", "binary-cross-entropy")
    elif loss == "cross-entropy":
        raise _unfit(loss, where, "have numbers, not classes", "mean-squared-error")
    elif loss == "binary-cross-entropy" and not (min(targets.minima) >= 0 and max(targets.maxima) <= 1):
        raise _unfit(loss, where, "have numbers outside 0 … 1", "mean-squared-error")


def check_num_targets(num_classes: int | None, manifest: Manifest, where: str) -> None:
    """Raise SettingError if the setting `num_classes` is given and is not the number of targets in the data."""
    if manifest.targets is None or num_classes in (None, manifest.num_classes):
        return
    raise SettingError(
        "num_classes",
        "{setting} must be {count}, the number of {what} of each image in {where}, got {found}: leave it out to use "
        "that number",
        count=manifest.num_classes,
        what="classes" if manifest.targets.kind == "classes" else "numbers",
        where=where,
        found=num_classes,
    )


def _unfit(loss: str, where: str, found: str, fitting: str) -> SettingError:
    return SettingError(
        "loss",
        "{setting} must fit the labels, but the images of {where} {found}, which {loss} does not take: give {setting} "
        "{fitting}",
        where=where,
        found=found,
        loss=loss,
        fitting=fitting,
    )
