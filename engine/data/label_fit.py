"""Checks that a loss and the settings fit the labels of the images, in training and in evaluation."""

import math
import re
from collections.abc import Iterable

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.label_form import LabelArray, LabelForm
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import listed
from loopfeed.preprocess.shards.manifest import Manifest

# Arrays of one dimension are mostly targets of classes or a regression, unless their names say otherwise.
_POSITIONS = re.compile(
    "box|mask|segment|polygon|contour|point|landmark|joint|pose|corner|coord|position|heat_?map", re.IGNORECASE
)
_COORDINATE = re.compile(
    r"([a-z0-9]+[_ .])*[xyuv]\d*|[xyc][_ ]?(min|max|cent(er|re)|[xy])|left|right|top|bottom", re.IGNORECASE
)


def check_labels_stay(
    config: TrainConfig, form: LabelForm | None, columns: Iterable[str] = (), *, is_trained: bool = True
) -> None:
    """Check that the settings move no pixels of images whose labels could be positions in the image.

    Labels are not moved with the pixels: a mask of a flipped image would be that of its mirror image.

    Args:
        config: the settings.
        form: the form of the labels, None for class numbers.
        columns: the names of the numbers of each image, if they have names.
        is_trained: whether images are trained on, and so augmented; False for an evaluation alone.

    Raises:
        SettingError: an array of the labels has two or more dimensions for each image, or the name of positions, and
            `labels_are_invariant` is not set.
    """
    moving = _moving_settings(config, is_trained=is_trained)
    if form is None or not moving or config.labels_are_invariant:
        return
    found = next((array.describe().replace(": ", " is ", 1) for array in form.leaves if _may_be_positions(array)), None)
    column = next(filter(_is_coordinate, columns), None)
    if found is None and column is not None:
        found = f"the number {printable(column)}"
    if found is not None:
        raise SettingError(
            moving[0],
            "augmentations move the pixels of an image but not its labels, and {found} of each image could be a "
            f"position: leave out {listed([f'{{{name}}}' for name in moving])} or, if that leaves the labels true, say "
            "so with {labels_are_invariant} (labels_are_invariant=True)",
            found=found,
        )


def unmoved_labels_warning(config: TrainConfig, form: LabelForm | None, *, is_named: bool) -> str | None:
    """Return a warning if numbers without names are trained on while pixels move; None if there is no such doubt."""
    moving = _moving_settings(config, is_trained=True)
    if form is None or is_named or not moving or config.labels_are_invariant:
        return None
    array = next((each for each in form.leaves if each.dtype.kind == "f" and math.prod(each.shape) > 1), None)
    if array is None:
        return None
    return (
        f"warning: {listed(moving)} move the pixels of an image but not {array.describe().replace(': ', ', ', 1)}: "
        "leave them out if these numbers are positions, or hide this line with --labels-are-invariant"
    )


def _moving_settings(config: TrainConfig, *, is_trained: bool) -> list[str]:
    """Return the names of the settings by which pixels move to other places, or mix with those of other images."""
    are_set = {
        "crop": any(stage.crop != "centre" for stage in config.by_stage),
        "flip": any(stage.flip > 0 for stage in config.by_stage),
        "mixup": any(stage.mixup > 0 for stage in config.by_stage),
        "cutmix": any(stage.cutmix > 0 for stage in config.by_stage),
        "auto_augment": any(stage.auto_augment != "off" for stage in config.by_stage),
        "stages": any(stage.image_size != config.image_size for stage in config.by_stage),
    }
    return [name for name, is_set in are_set.items() if is_set and is_trained] + ["eval_mirror"] * config.eval_mirror


def _may_be_positions(array: LabelArray) -> bool:
    is_named = _POSITIONS.search(array.name) is not None
    return math.prod(array.shape) > 1 and (len(array.shape) > 1 or is_named)


def _is_coordinate(column: str) -> bool:
    return _COORDINATE.fullmatch(column) is not None or _POSITIONS.search(column) is not None


def check_loss_fits(config: TrainConfig, manifest: Manifest, where: str, *, has_user_loss: bool) -> None:
    """Check that the loss takes the labels of a split.

    Args:
        config: the settings.
        manifest: that of the split.
        where: the name of the split in messages.
        has_user_loss: whether the loss is a user-defined one, which takes any labels.

    Raises:
        SettingError: the setting `loss` does not fit; the message names a loss that does.
    """
    if has_user_loss:
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
