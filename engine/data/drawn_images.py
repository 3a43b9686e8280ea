"""Which images of a split an epoch of training draws, and how often: the settings `sampling` and `fold`, and `indices`.

Owns what the settings mean for the labels of a split. `loopfeed.engine.feed.draws` owns the order.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.config import NATURAL, OFF, SAMPLINGS, SQRT, WEIGHTS, TrainConfig, parse_fold
from loopfeed.engine.data.folds import folds_of
from loopfeed.engine.data.weight_file import read_weight_file, whole_weights, whole_weights_of
from loopfeed.engine.feed.draws import Arcs, DrawnOrder, EpochImages, ImageOrder, most_weight
from loopfeed.engine.feed.subsets import Indices, Subsets
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.printable import first_names
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.reader import ShardSplit, open_split
from loopfeed.preprocess.shards.splits import find_splits

SAMPLING_DIGEST = "sampling_sha256"
INDICES_DIGEST = "indices_sha256"
CLASS_WEIGHTS_DIGEST = "class_weights_sha256"
DRAWN_BY = {
    SAMPLING_DIGEST: "the weights in the file of --sampling",
    INDICES_DIGEST: "the indices of the images that it draws (indices=…)",
    CLASS_WEIGHTS_DIGEST: "the weights in the file of --class-weights",
}
"""What the digests in the record of a run identify, by their keys."""
# Of sqrt, a class has this many bits behind the point, unless all roots are whole numbers.
_ROOT_BITS = 16
_KEPT_EPOCHS = 4
_NAMES_AT_ONCE = 1 << 16
# An index takes four bytes.
_MOST_IMAGES = 2**31 - 1


@dataclass(frozen=True)
class DrawnImages:
    """What an epoch of training draws from a split.

    Attributes:
        order: the order of the images; None for the usual one, all images once an epoch.
        num_images: the number of draws of an epoch.
        first: what the first epoch draws from.
        held_out: the images of the fold to evaluate on, int64 [n]; None without folds.
        digests: what identifies the choice in the record of a run, beside settings and data.
        messages: lines about the choice.
    """

    order: ImageOrder | None
    num_images: int
    first: EpochImages = EpochImages()  # noqa: RUF009 - it is immutable
    held_out: NDArray[np.int64] | None = None
    digests: Mapping[str, str] = field(default_factory=dict)
    messages: tuple[str, ...] = ()


class SplitLabels:
    """The classes of a split's images, read once when they are first needed.

    Attributes:
        has_classes: whether each image has one class.
    """

    def __init__(self, split: ShardSplit, where: str, timeout_s: float) -> None:
        self.split, self.where, self._timeout_s = split, where, timeout_s
        self.has_classes = split.manifest.targets is None

    @cached_property
    def classes(self) -> NDArray[np.int32]:
        """The class of each image, int32 [N]."""
        return self.split.read_classes(timeout_s=self._timeout_s)

    def classes_of(self, subset: NDArray[np.int32] | None) -> NDArray[np.int32]:
        """Return the class of each entry of a subset, int32 [n]; None stands for all images."""
        return self.classes if subset is None else self.classes[subset]


def choose_drawn(config: TrainConfig, indices: Indices | None, labels: SplitLabels) -> DrawnImages:
    """Return what an epoch of a run draws from a split.

    Args:
        config: the settings.
        indices: the part of the split that the user chose; None for all of it.
        labels: the labels of the split.

    Raises:
        ValueError: the indices are not of the split, or a setting does not fit the labels or the order.
    """
    num_images, where = labels.split.num_images, labels.where
    _check_order(config, indices)
    held_out, messages = None, list[str]()
    if config.fold is not None:
        _check_fold(config, indices)
        held_out = fold_of(config.fold, labels)
        indices = np.setdiff1d(np.arange(num_images), held_out)
        messages += _describe_fold(config.fold, held_out, labels)
    if num_images > _MOST_IMAGES and (indices is not None or config.sampling != NATURAL):
        raise ValueError(
            f"{where} must have at most {_MOST_IMAGES:,} images for a choice among them, got {num_images:,}: leave out "
            "--sampling, --fold and indices"
        )
    subsets = None if indices is None else Subsets(indices, num_images, where)
    sampler = None if config.sampling == NATURAL else Sampler(config.sampling, labels, storage_options_of(config))
    if subsets is None and sampler is None:
        return DrawnImages(None, num_images)

    @lru_cache(maxsize=_KEPT_EPOCHS)
    def images_of(epoch: int) -> EpochImages:
        subset = None if subsets is None else subsets.of_epoch(epoch)
        return EpochImages(subset, None if sampler is None else sampler.arcs(subset))

    changes = subsets is not None and subsets.changes
    first = images_of(0)
    num_drawn = num_images if subsets is None else subsets.num_drawn
    if sampler is not None and first.arcs is not None:
        messages += sampler.describe(first.arcs, labels.classes_of(first.subset) if labels.has_classes else None)
    # The images of a fold are known from the setting and the data.
    digests = {} if subsets is None or held_out is not None else {INDICES_DIGEST: subsets.digest}
    order = DrawnOrder(num_drawn, config.seed, images_of if changes else lambda _: first, is_by_epoch=changes)
    digests |= {} if sampler is None else sampler.digests
    return DrawnImages(order, num_drawn, first, held_out, digests, tuple(messages))


def _check_order(config: TrainConfig, indices: Indices | None) -> None:
    """Raise SettingError if the windowed order, which has every image in some window, is given with another choice."""
    if config.order != "windowed":
        return
    given = {"sampling": config.sampling != NATURAL, "fold": config.fold is not None}
    name = next((name for name, is_given in given.items() if is_given), None)
    if name is not None or indices is not None:
        raise SettingError(
            "order",
            "{setting} windowed reads each image of the split once an epoch, so it must not be given with "
            + ("indices of your own" if name is None else f"{{{name}}} {{found}}")
            + ": leave out one of the two",
            found=None if name is None else getattr(config, name),
        )


def _check_fold(config: TrainConfig, indices: Indices | None) -> None:
    if indices is not None:
        raise SettingError(
            "fold",
            "{setting} {found} divides the split, so it must not be given with indices of your own: leave one out",
            found=config.fold,
        )
    if config.eval_split not in (None, OFF):
        raise SettingError(
            "fold",
            "{setting} {found} is the evaluation set, so it must not be given with {eval_split} {split}: leave one out",
            found=config.fold,
            split=config.eval_split,
        )


def fold_of(fold: str, labels: SplitLabels) -> NDArray[np.int64]:
    """Return the images of a fold K/N of a split, int64 [n], ascending.

    Raises:
        SettingError: the fold, or the rest, has no images.
    """
    number, count = parse_fold(fold)
    num_images = labels.split.num_images
    classes = labels.classes if labels.has_classes else np.zeros(num_images, np.int32)
    found = np.flatnonzero(folds_of(classes, labels.split.groups(), count) == number - 1)
    if not 0 < len(found) < num_images:
        raise SettingError(
            "fold",
            "{setting} must leave images on both sides, but fold {fold} of {where} has {found} of {images}: give fewer "
            "folds",
            fold=fold,
            where=labels.where,
            found=len(found),
            images=quantity(num_images, "image"),
        )
    return found


def _describe_fold(fold: str, held_out: NDArray[np.int64], labels: SplitLabels) -> Iterator[str]:
    """Yield lines about a fold, and a warning about classes that it lacks."""
    num_images = labels.split.num_images
    yield (
        f"fold {fold} of {labels.where}: evaluated on {quantity(len(held_out), 'image')}, trained on the other "
        f"{num_images - len(held_out):,}; no other split is evaluated"
    )
    if not labels.has_classes:
        yield "fold: without regard to classes, because the images have not one class each"
        return
    counts, own = (np.bincount(each, minlength=1) for each in (labels.classes, labels.classes[held_out]))
    own = np.pad(own, (0, len(counts) - len(own)))
    for lacks, part in ((own == 0, "evaluation"), (own == counts, "training")):
        if num_lacking := int((lacks & (counts > 0)).sum()):
            yield f"warning: fold {fold} has no {part} images of {quantity(num_lacking, 'class')}: give fewer folds"


class Sampler:
    """How often images are drawn, by the setting `sampling`.

    Args:
        sampling: any value of the setting but natural.
        labels: the labels of the split.
        storage_options: how to reach the other splits of a remote pack, whose names may have weights too.

    Attributes:
        digests: what identifies the weights, beside settings and data.

    Raises:
        SettingError: the setting does not fit the labels, or its file cannot be used.
    """

    def __init__(self, sampling: str, labels: SplitLabels, storage_options: Mapping[str, str] | None = None) -> None:
        self._sampling, self._labels = sampling, labels
        self._storage_options, self._num_elsewhere = storage_options, 0
        self._file = None if sampling in SAMPLINGS else read_weight_file(sampling, "sampling", SAMPLINGS)
        self.digests = {} if self._file is None else {SAMPLING_DIGEST: self._file.digest}
        self._is_of_images = sampling == WEIGHTS or (self._file is not None and self._file.kind == "name")
        if not self._is_of_images:
            self._check_has_classes()

    def arcs(self, subset: NDArray[np.int32] | None) -> Arcs:
        """Return how often each entry of a subset, int32 [n], is drawn; None stands for all images."""
        classes = self._labels.classes_of(subset) if self._labels.has_classes else None
        if self._is_of_images:
            own = self._weights_of_images if subset is None else self._weights_of_images[subset]
            _check_any(bool(own.any()), self._sampling)
            return Arcs.of_weights(whole_weights_of(own, most_weight(len(own))), classes)
        assert classes is not None
        counts = np.bincount(classes, minlength=self._labels.split.num_classes)
        if self._file is None:
            weights = (counts > 0).astype(np.int64)
            if self._sampling == SQRT:
                weights = root_weights(counts, most_weight(len(classes)))
            return Arcs.of_classes(classes, weights)
        of_classes = self._weights_of_classes
        _check_any(any(weight and count for weight, count in zip(of_classes, counts, strict=True)), self._sampling)
        whole = np.array(whole_weights(of_classes, counts.tolist(), most_weight(len(classes))), np.int64)
        return Arcs.of_classes(classes, whole * counts)

    @cached_property
    def _weights_of_classes(self) -> list[Fraction]:
        assert self._file is not None
        return self._file.of_classes(self._labels.split.manifest.classes, "sampling", self._labels.where)

    @cached_property
    def _weights_of_images(self) -> NDArray[np.floating]:
        split, where = self._labels.split, self._labels.where
        if self._file is None:
            if (weights := split.weights()) is None:
                raise SettingError(
                    "sampling",
                    "{setting} weights needs those of the pack, but {where} has none: pack it with --weight-column, or "
                    "give {setting} a table name,weight",
                    where=where,
                )
            return weights
        if not split.manifest.has_names:
            raise SettingError(
                "sampling",
                "{setting}: {file} has weights by name, but the images of {where} have no names, because an earlier "
                "release packed them: pack them again",
                file=self._sampling,
                where=where,
            )
        of_images, self._num_elsewhere = self._file.of_images(
            _names_of(split), "sampling", where, partial(_names_elsewhere, where, self._storage_options)
        )
        return of_images

    def _check_has_classes(self) -> None:
        targets = self._labels.split.manifest.targets
        if targets is None:
            return
        has, other = "have numbers, not classes", ""
        if targets.kind == "classes":
            has = "have any number of classes each"
            other = ", or weigh the loss with {class_weights} balanced"
        raise SettingError(
            "sampling",
            "{setting} must fit the labels, but the images of {where} {has}, which {found} does not fit: give weights "
            "of images, in the pack or a table name,weight" + other,
            where=self._labels.where,
            has=has,
            found=self._sampling,
        )

    def describe(self, arcs: Arcs, classes: NDArray[np.int32] | None) -> tuple[str, ...]:
        """Return lines about how often images are drawn, and about those that never are."""
        weights = np.diff(arcs.edges)
        sizes = np.ones(len(weights), np.int64) if arcs.starts is None else np.diff(arcs.starts)
        drawn, num_draws = weights > 0, len(arcs.entries)
        often = num_draws * weights[drawn] / sizes[drawn] / arcs.total
        times = _range(f"{often.min():.3g}", f"{often.max():.3g}")
        found = [f"sampling: {self._sampling}: {quantity(num_draws, 'draw')} an epoch, an image {times} times"]
        if classes is not None:
            shares = num_draws * arcs.shares(classes, self._labels.split.num_classes)
            found[0] += f", a class {_range(f'{shares[shares > 0].min():,.0f}', f'{shares.max():,.0f}')} times"
            if len(none := np.flatnonzero(shares == 0)):
                names = first_names([self._labels.split.manifest.classes[each].name for each in none])
                found.append(f"sampling: {quantity(len(none), 'class')} without images or weight: never drawn: {names}")
        if self._num_elsewhere:
            found.append(f"sampling: {quantity(self._num_elsewhere, 'weight')} of images of other splits: not used")
        if num_left := int(sizes[~drawn].sum()):
            found.append(f"sampling: {quantity(num_left, 'image')} with the weight 0: never drawn")
        return tuple(found)


def _names_of(split: ShardSplit) -> Iterator[Sequence[str]]:
    for start in range(0, split.num_images, _NAMES_AT_ONCE):
        yield split.names(np.arange(start, min(start + _NAMES_AT_ONCE, split.num_images))) or ()


def _names_elsewhere(where: str, storage_options: Mapping[str, str] | None) -> Iterator[Sequence[str]]:
    """Yield the names of the images of the other splits of the pack of a split."""
    data, _, own = where.rpartition("/")
    for name in find_splits(data, storage_options=storage_options).complete:
        if name != own:
            with open_split(data, name, storage_options=storage_options) as split:
                yield from _names_of(split)


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def root_weights(counts: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Return whole numbers, int64 [K], in proportion to the square roots of counts; exact if all roots are rational.

    They are at most `most` together.
    """
    numbers = counts.tolist()
    common = math.gcd(*numbers)
    squares = [each // common for each in numbers]
    is_exact = all(math.isqrt(each) ** 2 == each for each in squares)
    shift = 0 if is_exact else 2 * _ROOT_BITS
    roots = [Fraction(math.isqrt(each << shift)) for each in squares]
    return np.array(whole_weights(roots, [1] * len(roots), most), np.int64)


def _check_any(has_any: bool, found: str) -> None:
    if not has_any:
        raise SettingError(
            "sampling", "{setting} must leave images to draw, but all of {found} have the weight 0", found=found
        )
