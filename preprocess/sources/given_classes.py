"""The classes of the images that a Python program gives: by the numbers or names that are their labels."""

import operator
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np

from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import MAX_CLASSES, ImageClass
from loopfeed.preprocess.sources.class_names import UnitedClasses, describe_lacking, unite_classes
from loopfeed.preprocess.sources.listing import SourceError, index_classes

ONE_LABEL = "for several classes or numbers per image, write the images as files and give a table with labels="


class Labelled(Protocol):
    """The labels of a split, whole numbers or names, and the classes that its data set knows; None if it knows none."""

    labels: list[Any]
    classes: tuple[ImageClass, ...] | None


def item_name(number: int, split: str) -> str:
    """Return how messages name an item."""
    return f"item {number} of {split}"


def first_faulty(members: list[str]) -> int | None:
    """Return the number of the first name that is empty or repeated."""
    seen: set[str] = set()
    for number, each in enumerate(members):
        if not each or each in seen:
            return number
        seen.add(each)
    return None


def number_classes(
    read: Mapping[str, Labelled], names: list[str] | None, wanted: Collection[str]
) -> tuple[tuple[ImageClass, ...], dict[str, list[int]], tuple[str, ...]]:
    """Return the classes of all splits, the number of the class of each image of each split, and messages about them.

    Args:
        read: the splits.
        names: the classes that the user names; None takes those of the data sets, else the labels.
        wanted: the splits that will be packed; others that have unknown classes have no numbers.

    Raises:
        SourceError: a label is neither a whole number nor a name, or not that of a class; the message names the item.
            Or a split has a class that the first one lacks, as with class folders.
    """
    if names is not None:
        given = _given_classes(names)
        own: dict[str, tuple[ImageClass, ...] | None] = dict.fromkeys(read, given)
    else:
        found = [each.classes for each in read.values() if each.classes is not None]
        own = {name: each.classes or (found[0] if found else None) for name, each in read.items()}
    ids = {name: _class_ids(each.labels, own[name], name) for name, each in read.items()}
    known = list(dict.fromkeys(each for each in own.values() if each is not None))
    united = UnitedClasses((), (), {})
    if len(known) == 1 and None not in own.values():
        classes = known[0]
    else:
        readable = {each.id: each.name for some in known for each in some}
        ids_of = {name: dict.fromkeys([*readable, *some]) for name, some in ids.items()}
        united = unite_classes(ids_of, (), "the given data set", "name all classes with classes=")
        for name in wanted:
            united.check(name)
        classes = index_classes(united.ids, readable, "the given data set", numeric=True)
    numbers = {each.id: number for number, each in enumerate(classes)}
    labels = {name: [numbers[each] for each in some] for name, some in ids.items() if name not in united.faults}
    notes = united.notes
    if known:  # of which no split needs to have images
        notes = (*notes, *describe_lacking({name: some for name, some in ids.items() if some}, [*numbers]))
    return classes, labels, notes


def _given_classes(names: list[str]) -> tuple[ImageClass, ...]:
    faulty = first_faulty([each if isinstance(each, str) else "" for each in names])
    if faulty is not None or not 0 < len(names) <= MAX_CLASSES:
        what = f"classes[{faulty}] is {names[faulty]!r}" if faulty is not None else f"there are {len(names)}"
        raise SourceError(f"classes must be 1 to {MAX_CLASSES} different names, but {what}; correct classes=")
    return tuple(ImageClass(each, each) for each in names)


def _class_ids(labels: list[Any], classes: tuple[ImageClass, ...] | None, split: str) -> list[str]:
    """Return the id of the class of each image.

    Raises:
        SourceError: a label is neither a whole number nor a name, or not that of a class.
    """
    found: list[str] = []
    kinds: dict[bool, int] = {}
    by_name = None if classes is None else {each.id for each in classes}
    for number, label in enumerate(labels):
        value = _label_value(label, item_name(number, split))
        is_name = isinstance(value, str)
        kinds.setdefault(is_name, number)
        if len(kinds) > 1:
            raise SourceError(
                f"{item_name(number, split)} has the label {label!r:.80}, but "
                f"{item_name(kinds[not is_name], split)} has {labels[kinds[not is_name]]!r:.80}; "
                "give all labels as whole numbers, or all as names"
            )
        if isinstance(value, str):
            if not value or (by_name is not None and value not in by_name):
                raise SourceError(
                    f"{item_name(number, split)} has the label {value!r:.80}, which is not one of the "
                    f"{quantity(len(classes or ()), 'class')}; correct it, or classes="
                )
            found.append(value)
        elif value < 0 or (classes is not None and value >= len(classes)):
            most = "" if classes is None else f" to {len(classes) - 1}, for {quantity(len(classes), 'class')}"
            raise SourceError(
                f"{item_name(number, split)} has the label {value}, but labels must be numbers from 0{most}; leave out "
                "images without a label, or correct classes="
            )
        else:
            found.append(str(value) if classes is None else classes[value].id)
    return found


def _label_value(label: Any, where: str) -> int | str:
    if isinstance(label, str):
        return str(label)
    try:
        if getattr(label, "shape", ()) == (1,):  # as MedMNIST has them
            label = label[0]
        return int(label) if isinstance(label, np.bool) else operator.index(label)
    except (TypeError, ValueError, RuntimeError):
        raise SourceError(
            f"{where} has the label {label!r:.80}, but a label must be a whole number or a name; {ONE_LABEL}"
        ) from None
