"""Opens a set of labelled, encoded images and detects its layout.

Supported layouts: class folders, directly in a folder or in `train/`, `val/`, `test/`; the official ImageNet archives,
read in place; Kaggle's ImageNet tree; a tar or zip archive of class folders; with a table of labels, any folder, tar or
zip archive of images. `data/README.md` shows each.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from loopfeed.preprocess.printable import first_names, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.targets import SplitTargets
from loopfeed.preprocess.sources.archive_tree import archive_layout, split_archives, split_archives_layout
from loopfeed.preprocess.sources.class_names import ClassFrom, check_class_from
from loopfeed.preprocess.sources.containers import recognise_container
from loopfeed.preprocess.sources.kaggle import find_kaggle_tree, kaggle_openers
from loopfeed.preprocess.sources.label_columns import LabelOptions
from loopfeed.preprocess.sources.labelled import labelled_layout
from loopfeed.preprocess.sources.labels_file import LabelTable, read_labels
from loopfeed.preprocess.sources.listing import FoundSplit, Layout, ListedSplit, SourceError, SourceImage, SourceSplit
from loopfeed.preprocess.sources.selection import HOLDOUT_RULE, SPLIT_ORDER, held_out, is_image_name, pack_order
from loopfeed.preprocess.sources.source_file import listing_the_same_files
from loopfeed.preprocess.sources.tars import TRAIN_ARCHIVE, VAL_ARCHIVE, imagenet_openers
from loopfeed.preprocess.sources.tree import list_folder, split_folders, split_openers
from loopfeed.preprocess.system_entries import describe_ignored
from loopfeed.preprocess.system_errors import reading_remedy, status_of

__all__ = ["ImageClass", "Source", "SourceError", "SourceImage", "SourceSplit", "open_source"]


@dataclass
class Source:
    """An open data set. Use it as a context manager to close its archives.

    Attributes:
        layout: description of the detected layout.
        splits: the splits by name.
        subfolder: a subfolder of a class that contains images, below the source root; None if there is none.
        targets: the targets of each split; empty without a file of labels.
        unread: what was not read because it has no line in the file of labels; None if there is nothing.
        notes: one-line messages to the user, such as which entries of systems and file servers are ignored.
    """

    layout: str
    splits: dict[str, SourceSplit]
    subfolder: str | None = None
    targets: dict[str, SplitTargets] = field(default_factory=dict)
    unread: str | None = None
    notes: tuple[str, ...] = ()
    _closers: list[Callable[[], None]] = field(default_factory=list, repr=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the archives. Reading then fails; closing again has no effect."""
        while self._closers:
            self._closers.pop()()


@listing_the_same_files()
def open_source(
    path: str | Path | Layout,
    *,
    splits: tuple[str, ...] | None = None,
    holdout: float = 0.0,
    limit: int | None = None,
    holdout_rule: int = HOLDOUT_RULE,
    labels: str | Path | None = None,
    class_column: str | None = None,
    group_by: str | None = None,
    weight_column: str | None = None,
    unlabelled: Literal["fail", "skip"] = "fail",
    class_from: ClassFrom = "top",
) -> Source:
    """Detect the layout of a data set and list its images.

    Args:
        path: a folder, or a tar or zip archive; or a layout that is known.
        splits: the splits to open; by default all.
        holdout: the fraction (0 ≤ holdout < 1) of the training images to use as the split `val`, if the source has
            none. They are chosen in each class by hashes of the keys (see
            `loopfeed.preprocess.sources.selection.held_out`).
        limit: maximum number of images per split, spread evenly over the classes.
        holdout_rule: the rule by which they are chosen, 1 for a pack that was begun with an earlier version.
        labels: a table of labels (`loopfeed.preprocess.sources.labels_file`), which replaces class folders. With
            several classes or numbers an image, held-out images are those of all images whose keys have the smallest
            hashes.
        class_column, group_by, weight_column, unlabelled: what the table's columns mean, and whether images without a
            label are left out; as in `loopfeed.preprocess.sources.label_columns.LabelOptions`.
        class_from: whether the class of an image is the outermost folder below its split, or the one that contains it
            (``leaf``).

    Returns:
        The source, which the caller must close. All splits have the same classes in the same order, sorted by the
        bytes of their ids.

    Raises:
        SourceError: the layout is not recognised, a split is missing or empty, the splits have different classes, an
            archive is damaged or unsafe, or an argument is out of range.
    """
    root = Path(path.description if isinstance(path, Layout) else path)
    if "://" in str(path):
        raise SourceError(
            f"SOURCE must be a folder or archive on this machine, got {printable(str(path))}; copy it here first"
        )
    if limit is not None and limit < 1:
        raise SourceError(f"limit must be at least 1 image per split, got {limit}")
    options = LabelOptions(class_column, group_by, weight_column, unlabelled)
    _check_options(options, labels, class_from)
    table = None if labels is None else read_labels(labels, options)
    if isinstance(path, Layout):
        layout = path
    else:
        layout = _recognise(root, class_from, class_column) if table is None else _recognise_labelled(root, table)
    _check_holdout(holdout, root, layout)
    available = tuple(sorted({*layout.openers, *(["val"] if holdout else [])}, key=SPLIT_ORDER.index))
    wanted = _wanted_splits(root, available, splits)
    found: dict[str, FoundSplit] = {}
    try:
        # Every line of a file of labels must have an image, in whatever split.
        needed = layout.openers if table is not None else {*wanted, *["train"] * (holdout > 0 and "val" in wanted)}
        for name in layout.openers:
            if name in needed:
                found[name] = layout.openers[name]()
        if table is None:
            _check_classes(found)
        opened = _select(found, holdout=holdout, limit=limit, holdout_rule=holdout_rule)
        _check_has_images(opened, wanted, found, layout, root, holdout=holdout, table=table)
    except BaseException:
        for close in _closers(found):
            close()
        raise
    ignored = describe_ignored(sum((each.ignored for each in found.values()), layout.ignored))
    of_classes = dict.fromkeys(note for each in found.values() for note in each.notes)
    return Source(
        layout.description,
        {name: opened[name] for name in wanted},
        next((each.subfolder for each in found.values() if each.subfolder is not None), None),
        {name: _targets_of(found, opened[name], table) for name in wanted} if table is not None and table.kind else {},
        layout.unread,
        (*([] if ignored is None else [ignored]), *of_classes),
        _closers(found),
    )


def _closers(found: dict[str, FoundSplit]) -> list[Callable[[], None]]:
    """Return what closes the stores of some splits, which may share one."""
    return [store.close for store in {id(each.store): each.store for each in found.values()}.values()]


def _check_has_images(
    opened: dict[str, SourceSplit],
    wanted: tuple[str, ...],
    found: dict[str, FoundSplit],
    layout: Layout,
    root: Path,
    *,
    holdout: float,
    table: LabelTable | None,
) -> None:
    for name in wanted:
        if len(opened[name]):
            continue
        if name == "val" and holdout:
            raise SourceError(_nothing_held_out(found["train"], holdout, root, table))
        raise SourceError(
            f"the split {name} of {printable(root)} ({layout.description}) has no images; add images to it"
        )


def _recognise(root: Path, class_from: ClassFrom, class_column: str | None) -> Layout:
    _check_exists(root)
    layout = _recognise_published(root, class_column)
    if class_column is not None and (layout is None or layout.class_column is None):
        found = "class folders" if layout is None else layout.description
        raise SourceError(
            f"--class-column is about a table of labels or Parquet files, but {printable(root)} is {found}; give the "
            "table with --labels, or leave it out"
        )
    if layout is not None:
        check_class_from(class_from, root, layout.description)
        return layout
    return _recognise_folders(root, class_from) if root.is_dir() else archive_layout(root, class_from)


def _recognise_published(root: Path, class_column: str | None) -> Layout | None:
    """Return the layout of a data set that knows its own classes; None for class folders."""
    if not root.is_dir():
        return recognise_container(root, class_column)
    _refuse_shards(root)
    archives = imagenet_openers(root)
    if archives:
        return Layout("ImageNet's archives of " + " and ".join(archives), archives)
    kaggle = find_kaggle_tree(root)
    if kaggle is not None:
        return Layout("Kaggle's ImageNet tree", kaggle_openers(root, kaggle))
    return recognise_container(root, class_column)


def _recognise_folders(root: Path, class_from: ClassFrom) -> Layout:
    folders = split_folders(root)
    ignored: Counter[str] = Counter()
    classes, files = list_folder(root, ignored)
    if folders:
        others = [printable(each.name) + "/" for each in classes if Path(each.path) not in folders.values()]
        description = "folders " + " and ".join(each.name + "/" for each in folders.values()) + " of class folders"
        description += f" (not read: {first_names(others)})" if others else ""
        return Layout(description, split_openers(root, folders, class_from), ignored)
    archives = {} if classes else split_archives(Path(each.path) for each in files)
    if archives:
        return split_archives_layout(root, archives, class_from)
    if not classes:
        shown = first_names([each.name for each in files]) or "an empty folder"
        is_flat = any(is_image_name(each.name) for each in files)
        hint = "; give the table of the images' labels with --labels" if is_flat else ""
        raise SourceError(
            f"{printable(root)} is not a data set: expected class folders, train/ and val/ with class folders, "
            f"{TRAIN_ARCHIVE}, {VAL_ARCHIVE}, Kaggle's ILSVRC/ or a container such as .npz or .parquet; "
            f"found {shown}{hint}"
        )
    for each in classes:
        if _is_there(Path(each.path) / "train", Path.is_dir):
            _refuse_shards(Path(each.path))
            raise SourceError(
                f"{printable(root)} is not a folder of class folders: {printable(each.name)}/ has a train/ folder; "
                f"give {printable(each.path)}"
            )
    return Layout("a folder of class folders", split_openers(root, {"train": root}, class_from))


def _recognise_labelled(root: Path, table: LabelTable) -> Layout:
    _check_exists(root)
    if root.is_dir():
        _refuse_shards(root)
    return labelled_layout(root, table)


def _check_options(options: LabelOptions, labels: str | Path | None, class_from: str) -> None:
    if class_from not in ("top", "leaf"):
        raise SourceError(f"--class-from must be top or leaf, got {class_from!r}")
    if options.unlabelled not in ("fail", "skip"):
        raise SourceError(f"--unlabelled must be fail or skip, got {options.unlabelled!r}")
    if labels is not None and class_from != "top":
        raise SourceError("--class-from is about class folders, but --labels gives the labels; leave one of them out")
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(replace(options, class_column=None)).items()
        if value not in (None, "fail")
    ]
    if labels is None and given:
        raise SourceError(f"{given[0]} is about a table of labels; give the table with --labels")


def _refuse_shards(root: Path) -> None:
    """Raise SourceError for a packed data set, whose folders "labels" and "pixels" would be mistaken for classes."""
    candidates = (root, *(Path(each.path) for each in list_folder(root)[0]))
    packed = next((each for each in candidates if _is_there(each / "pixels" / "zarr.json", Path.is_file)), None)
    if packed is not None:
        raise SourceError(
            f"{printable(root)} already contains packed shards, in {printable(packed)}; train on them with "
            "run-train --data, or give the original images"
        )


def _is_there(path: Path, is_kind: Callable[[Path], bool]) -> bool:
    """Return whether a path is of a kind; False in a folder without permission, whose listing names the fault."""
    try:
        return is_kind(path)
    except OSError:
        return False


def _check_exists(root: Path) -> None:
    try:
        status = status_of(root)
    except OSError as error:
        raise SourceError(
            f"{printable(root)} cannot be accessed: {error.strerror}; {reading_remedy(error, 'check its path')}"
        ) from error
    if status is None:
        fault = "is a link that leads nowhere" if root.is_symlink() else "does not exist"
        raise SourceError(f"{printable(root)} {fault}; give the folder or archive that contains the images")


def _check_holdout(holdout: float, root: Path, layout: Layout) -> None:
    if not 0.0 <= holdout < 1.0:
        raise SourceError(f"holdout must be at least 0 and less than 1, got {holdout}")
    if holdout and "train" not in layout.openers:
        raise SourceError(
            f"holdout {holdout} was given, but {printable(root)} has no train split to hold out images from; "
            "omit holdout"
        )
    if holdout and "val" in layout.openers:
        raise SourceError(f"holdout {holdout} was given, but {printable(root)} already has a val split; omit holdout")


def _nothing_held_out(train: FoundSplit, holdout: float, root: Path, table: LabelTable | None) -> str:
    nothing = f"holdout {holdout} holds out no image of {printable(root)}"
    if train.groups is not None:
        return (
            f"{nothing}, because each of its {quantity(len(np.unique(train.groups)), 'group')} has the last images of "
            "a class; leave --group-by out, or add groups"
        )
    if table is not None and table.kind is not None:
        return f"{nothing}, which has only one image; add images to it"
    most = int(np.bincount(train.listing.labels, minlength=1).max())
    return (
        f"{nothing}, because every class keeps one training image "
        f"and the largest of its {quantity(len(train.classes), 'class')} has {most}; give a folder with val/"
    )


def _wanted_splits(root: Path, available: tuple[str, ...], splits: tuple[str, ...] | None) -> tuple[str, ...]:
    missing = [name for name in splits or () if name not in available]
    if missing:
        raise SourceError(
            f"{printable(root)} has no split {', '.join(map(printable, missing))}; choose from {', '.join(available)}"
        )
    return available if splits is None else tuple(dict.fromkeys(splits))


def _check_classes(found: dict[str, FoundSplit]) -> None:
    """Check that a label means the same class in every split, as the layouts that unite their classes have it."""
    for left, right in combinations(found.values(), 2):
        for has, lacks in ((left, right), (right, left)):
            known = {each.id for each in lacks.classes}
            only = [each.id for each in has.classes if each.id not in known]
            if only:
                raise SourceError(
                    f"the split {has.name} has {quantity(len(only), 'class')} that {lacks.name} lacks: "
                    f"{first_names(only)}; give all splits the same classes, or leave these out of {has.name}"
                )


def _select(
    found: dict[str, FoundSplit], *, holdout: float, limit: int | None, holdout_rule: int
) -> dict[str, SourceSplit]:
    opened: dict[str, SourceSplit] = {}
    for name, each in found.items():
        entries = np.arange(len(each.listing))
        parts = {name: entries}
        if holdout and name == "train":
            taken = held_out(each.listing, holdout, rule=holdout_rule, groups=each.groups)
            parts = {"train": entries[~taken], "val": entries[taken]}
        for part, chosen in parts.items():
            order = pack_order(each.listing, chosen, limit)
            weights = None if each.weights is None else each.weights[order]
            groups = None if each.groups is None else each.groups[order]
            opened[part] = ListedSplit(part, each.classes, each.listing, each.store, order, weights, groups)
    return opened


def _targets_of(found: dict[str, FoundSplit], split: SourceSplit, table: LabelTable) -> SplitTargets:
    """Return the targets of a split in its pack order."""
    assert isinstance(split, ListedSplit)
    assert table.kind is not None
    rows = next(each.rows for each in found.values() if each.listing is split.listing)
    assert rows is not None
    return SplitTargets(table.kind, table.digest, table.values[rows[split.order]])
