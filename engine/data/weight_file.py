"""Reads a table of weights, CSV: of classes, or of images by name. Owns its form, and weights as whole numbers.

The header decides: `class,weight` or `name,weight`, separated by commas, semicolons or tabs. A weight is a decimal
number of at least 0. What is not listed has the weight 1.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import number_remedy
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.sources.table_file import TableFile, read_header
from loopfeed.preprocess.storage_options import expand_home
from loopfeed.preprocess.suggestions import did_you_mean, did_you_mean_name
from loopfeed.preprocess.system_errors import error_text, reading_remedy

_MOST_BYTES = 2**30
_KEYS: dict[str, Literal["class", "name"]] = {
    "class": "class",
    "label": "class",
    **dict.fromkeys(("name", "path", "file", "filename", "image"), "name"),
}
_WEIGHT = "weight"
_NUMBER = re.compile(r"[0-9]{1,30}([.][0-9]{1,30})?([eE][+-]?[0-9]{1,2})?")
# More different weights than this are rounded to 52 bits.
_MOST_EXACT = 1 << 16


@dataclass(frozen=True)
class WeightFile:
    """A table of weights.

    Attributes:
        path: the file.
        digest: SHA-256 of its bytes, hexadecimal.
        kind: whether the weights are those of classes, or of images by name.
        weights: the weights by class or name, ≥ 0.
    """

    path: str
    digest: str
    kind: Literal["class", "name"]
    weights: Mapping[str, Fraction]

    def of_classes(self, classes: Sequence[ImageClass], setting: str, where: str) -> list[Fraction]:
        """Return the weight of each class by identifier or else readable name; raise SettingError for an unknown one.

        Args:
            classes: the classes of a split.
            setting: the setting that gives the file.
            where: the name of the split.
        """
        if self.kind != "class":
            raise SettingError(
                setting,
                "{setting} must be a table class,weight, got {path}, which has names",
                path=printable(self.path),
            )
        names = Counter(each.name for each in classes)
        index_of = {each.name: index for index, each in enumerate(classes) if names[each.name] == 1}
        index_of |= {each.id: index for index, each in enumerate(classes)}
        found, lines = [Fraction(1)] * len(classes), dict[int, str]()
        for name, weight in self.weights.items():
            if name not in index_of:
                what = "the name of one class alone" if name in names else "a class"
                raise self.unknown(setting, name, f"{what} of {where}", index_of)
            if (index := index_of[name]) in lines:
                raise self.unknown(setting, name, f"another class than {lines[index]!r}", {})
            found[index], lines[index] = weight, name
        return found

    def of_images(
        self,
        names: Iterable[Sequence[str]],
        setting: str,
        where: str,
        elsewhere: Callable[[], Iterable[Sequence[str]]] = tuple,
    ) -> tuple[NDArray[np.float64], int]:
        """Return the weight of each image, float64 [N], by its name, and how many names are those of other splits.

        Args:
            names: the names of the images, piece by piece, so that they need not all be in memory.
            setting: the setting that gives the file.
            where: the name of the split.
            elsewhere: returns the names of the images of the other splits, piece by piece; called if it is needed.

        Raises:
            SettingError: a name is that of no image.
        """
        unseen, found = set(self.weights), list[NDArray[np.float64]]()
        piece: Sequence[str] = ()
        for piece in names:
            found.append(np.array([self.weights.get(name, 1) for name in piece], np.float64))
            unseen.difference_update(piece)
        num_unseen = len(unseen)
        for others in elsewhere() if unseen else ():
            unseen.difference_update(others)
        if unseen:
            name = next(name for name in self.weights if name in unseen)
            near = did_you_mean_name(name, piece) if len(found) == 1 else ""
            raise self.unknown(setting, name, f"the name of an image of {where}", (), near)
        return np.concatenate(found), num_unseen

    def unknown(
        self, setting: str, name: str, what: str, known: Sequence[str] | Mapping[str, int], near: str = ""
    ) -> SettingError:
        """Return the error that a line of the file names what there is not."""
        return SettingError(
            setting,
            "{setting}: {path} has a weight of {name!r}, which is not {what}{near}: correct or remove that line",
            path=printable(self.path),
            name=name,
            what=what,
            near=near or (did_you_mean(name, known) if len(known) <= _MOST_EXACT else ""),
        )


def read_weight_file(path: str, setting: str, words: Sequence[str]) -> WeightFile:
    """Read a table of weights.

    Args:
        path: the file.
        setting: the setting that gives it.
        words: what the setting may be instead.

    Raises:
        SettingError: it cannot be read, or has another form; the message names the line.
    """

    def error(where: str, found: str, remedy: str) -> SettingError:
        return SettingError(setting, "{setting}: {where}: {found}: {remedy}", where=where, found=found, remedy=remedy)

    table = TableFile(Path(path), error=error)
    read_header(table, _read(path, setting, words))
    header = [each.lower() for each in table.columns]
    keys = [column for column, name in enumerate(header) if name in _KEYS]
    if len(keys) != 1 or header.count(_WEIGHT) != 1:
        table.fail(table.line, f"the header is {printable(','.join(header)[:80])!r}", f"begin with {_forms(setting)}")
    weights = _weights_in(table, keys[0], header.index(_WEIGHT))
    return WeightFile(path, table.digest, _KEYS[header[keys[0]]], weights)


def _read(path: str, setting: str, words: Sequence[str]) -> bytes:
    try:
        return read_regular(expand_home(path), max_bytes=_MOST_BYTES)
    except OSError as error:
        otherwise = f"give a table {_forms(setting)}, or one of {', '.join(words)}{did_you_mean(path, words)}"
        raise SettingError(
            setting,
            "{setting}: {path} cannot be read ({fault}): {remedy}",
            path=printable(path),
            fault=error_text(error),
            remedy=reading_remedy(error, otherwise),
        ) from error


def _forms(setting: str) -> str:
    return "class,weight" if setting == "class_weights" else "class,weight or name,weight"


def _weights_in(table: TableFile, key: int, weight: int) -> dict[str, Fraction]:
    """Return the weights of the rows behind the header by class or name."""
    weights: dict[str, Fraction] = {}
    for line, row in table.cells:
        number = row[weight].strip()
        if not _NUMBER.fullmatch(number):
            remedy = number_remedy(number[:40], "give a number of at least 0")
            table.fail(line, f"the weight is {number[:40]!r}", remedy)
        if row[key] in weights:
            table.fail(line, f"{row[key]!r} has a weight already", "remove one of the two lines")
        weights[row[key]] = Fraction(number)
    return weights


def whole_weights(weights: Sequence[Fraction], counts: Sequence[int], most: int) -> list[int]:
    """Return whole numbers in the proportions of weights; rounded only if they would be larger than `most` together.

    Args:
        weights: each ≥ 0, not all 0.
        counts: how often each occurs.
        most: the largest sum, each number as often as it occurs.
    """
    least = math.lcm(*(each.denominator for each in weights))
    numbers = [each.numerator * (least // each.denominator) for each in weights]
    common = math.gcd(*numbers)
    numbers = [each // common for each in numbers]
    total = sum(number * count for number, count in zip(numbers, counts, strict=True))
    if total <= most:
        return numbers
    # A weight above 0 stays above 0, for which a quarter of the sum is left.
    scaled = [number * (3 * most // 4) // total for number in numbers]
    return [max(part, 1) if number else 0 for part, number in zip(scaled, numbers, strict=True)]


def whole_weights_of(weights: NDArray[np.floating], most: int) -> NDArray[np.int64]:
    """Return whole numbers, int64 [n], in the proportions of weights, of which each counts as its shortest decimal.

    Args:
        weights: floats [n], each ≥ 0 and finite, not all 0.
        most: the largest sum, at least 4 · n.
    """
    values, inverse, counts = np.unique(weights, return_inverse=True, return_counts=True)
    if len(values) <= _MOST_EXACT:
        exact = [Fraction(str(each)) for each in values]
        return np.array(whole_weights(exact, counts.tolist(), most), np.int64)[inverse]
    scale = (3 * most // 4) / float(np.sum(values.astype(np.float64) * counts))
    scaled = np.maximum(np.floor(values.astype(np.float64) * scale), values > 0)
    return scaled.astype(np.int64)[inverse]
