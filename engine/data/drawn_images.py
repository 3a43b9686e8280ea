"""Which images of a split an epoch of training draws, and how often: the settings `sampling` and `fold`, and `indices`.

Owns what the settings mean for the labels of a split. `loopfeed.engine.feed.draws` owns the order.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.config import BALANCED, NATURAL, SAMPLINGS, SQRT, TrainConfig
from loopfeed.engine.data.weight_file import WeightFile, read_weight_file, whole_weights
from loopfeed.engine.feed.draws import Arcs, DrawnOrder, EpochImages, ImageOrder, most_weight
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.reader import ShardSplit

SAMPLING_DIGEST = "sampling_sha256"
DRAWN_BY = {SAMPLING_DIGEST: "the weights in the file of --sampling"}
"""What the digests in the record of a run identify, by their keys."""
# Of sqrt, a class has this many bits behind the point, unless all roots are whole numbers.
_ROOT_BITS = 16


@dataclass(frozen=True)
class DrawnImages:
    """What an epoch of training draws from a split.

    Attributes:
        order: the order of the images; None for the usual one, all images once an epoch.
        num_images: the number of draws of an epoch.
        digests: what identifies the choice in the record of a run, beside settings and data.
        messages: lines about the choice.
    """

    order: ImageOrder | None
    num_images: int
    digests: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[str, ...] = ()


class SplitLabels:
    """The classes of a split's images, read once when they are first needed."""

    def __init__(self, split: ShardSplit, where: str, timeout_s: float) -> None:
        self.split, self.where, self._timeout_s = split, where, timeout_s
        self.has_classes = split.manifest.targets is None

    @cached_property
    def classes(self) -> NDArray[np.int32]:
        """The class of each image, int32 [N]."""
        return self.split.read_classes(timeout_s=self._timeout_s)


def choose_drawn(config: TrainConfig, labels: SplitLabels) -> DrawnImages:
    """Return what an epoch of a run draws from a split.

    Raises:
        SettingError: a setting does not fit the labels, or the order.
    """
    num_images = labels.split.num_images
    _check_order(config)
    if config.sampling == NATURAL:
        return DrawnImages(None, num_images)
    arcs, digests, described = _arcs(config, labels)
    every = EpochImages(arcs=arcs)
    order = DrawnOrder(num_images, config.seed, lambda _: every)
    return DrawnImages(order, num_images, digests, _messages(arcs, labels, described))


def _check_order(config: TrainConfig) -> None:
    if config.order == "windowed" and config.sampling != NATURAL:
        raise SettingError(
            "order",
            "{setting} windowed reads each image once an epoch, so it needs {sampling} natural, got {found}: leave out "
            "{setting} or {sampling}",
            found=config.sampling,
        )


def _arcs(config: TrainConfig, labels: SplitLabels) -> tuple[Arcs, dict[str, str], str]:
    """Return how often each image is drawn, what identifies that beside the settings, and a word for messages."""
    split, sampling = labels.split, config.sampling
    if sampling in (BALANCED, SQRT):
        _check_has_classes(labels, sampling)
        counts = np.bincount(labels.classes, minlength=split.num_classes)
        weights = (counts > 0).astype(np.int64) if sampling == BALANCED else _roots(counts)
        return Arcs.of_classes(labels.classes, weights), {}, sampling
    file = read_weight_file(sampling, "sampling", SAMPLINGS)
    if file.kind == "class":
        _check_has_classes(labels, f"a table of classes, {file.path}")
    return _arcs_of_file(file, labels), {SAMPLING_DIGEST: file.digest}, file.path


def _check_has_classes(labels: SplitLabels, found: str) -> None:
    if labels.has_classes:
        return
    targets = labels.split.manifest.targets
    assert targets is not None
    has = "have any number of classes each" if targets.kind == "classes" else "have numbers, not classes"
    other = ", or weigh the loss with {class_weights} balanced" if targets.kind == "classes" else ""
    raise SettingError(
        "sampling",
        "{setting} must fit the labels, but the images of {where} {has}, which {found} does not fit: give weights of "
        "images (name,weight)" + other,
        where=labels.where,
        has=has,
        found=found,
    )


def _roots(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return whole numbers, int64 [K], in proportion to the square roots of counts; exact if all roots are rational."""
    numbers = counts.tolist()
    common = math.gcd(*numbers)
    squares = [each // common for each in numbers]
    is_exact = all(math.isqrt(each) ** 2 == each for each in squares)
    shift = 0 if is_exact else 2 * _ROOT_BITS
    return np.array([math.isqrt(each << shift) for each in squares], np.int64)


def _arcs_of_file(file: WeightFile, labels: SplitLabels) -> Arcs:
    split, where, most = labels.split, labels.where, most_weight(labels.split.num_images)
    if file.kind == "class":
        counts = np.bincount(labels.classes, minlength=split.num_classes)
        weights = file.of_classes(split.manifest.classes, "sampling", where)
        _check_any(
            bool(sum(map(bool, weights)) and any(w and n for w, n in zip(weights, counts, strict=True))), file.path
        )
        own = np.array(whole_weights(weights, counts.tolist(), most), np.int64)
        return Arcs.of_classes(labels.classes, own * counts)
    raise SettingError("sampling", "{setting}: the images of {where} have no names", where=where)


def _check_any(has_any: bool, found: str) -> None:
    if not has_any:
        raise SettingError(
            "sampling", "{setting} must leave images to draw, but all of {found} have the weight 0", found=found
        )


def _messages(arcs: Arcs, labels: SplitLabels, described: str) -> tuple[str, ...]:
    """Return lines about how often images are drawn, and about those that never are."""
    split = labels.split
    num_images = split.num_images
    weights = np.diff(arcs.edges)
    sizes = np.ones(len(weights), np.int64) if arcs.starts is None else np.diff(arcs.starts)
    drawn = weights > 0
    often = num_images * weights[drawn] / sizes[drawn] / arcs.total
    num_left = int(sizes[~drawn].sum())
    found = [
        f"sampling: {described}: {quantity(num_images, 'draw')} an epoch, an image {often.min():.3g} to "
        f"{often.max():.3g} times"
    ]
    if labels.has_classes:
        shares = num_images * arcs.shares(labels.classes, split.num_classes)
        found[0] += f", a class {shares[shares > 0].min():,.0f} to {shares.max():,.0f} times"
        if num_none := int((shares == 0).sum()):
            found.append(f"sampling: {quantity(num_none, 'class')} without images or weight: never drawn")
    if num_left:
        found.append(f"sampling: {quantity(num_left, 'image')} with the weight 0: never drawn")
    return tuple(found)
