"""What is damaged in a split: a file, why, and which images, by index and name."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.split_arrays import SplitNames

_NAMED = 3
_READ_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Damage:
    """One instance of damage in a split.

    Attributes:
        file: the file, relative to the split's folder.
        what: description of the damage, in one line.
        images: indices of the affected images; empty if the damage does not concern individual images.
        is_unreadable: whether the path is not a regular file, or a file too large to be read at all.
        remedy: what to do if the system or the store refused to read the file, which is then perhaps not damaged.
        names: the names of the first three of these images; empty in packs without names.
    """

    file: str
    what: str
    images: tuple[int, ...] = ()
    is_unreadable: bool = False
    remedy: str = ""
    names: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.file}: {self._images()}{self.what}{f'; {self.remedy}' if self.remedy else ''}"

    def _images(self) -> str:
        """Return the images as text (``images 3, 7–9 (cat/1.jpg, dog/2.jpg, …): ``), or "" if there are none."""
        if not self.images:
            return ""
        more = ", …" if len(self.images) > len(self.names) else ""
        names = f" ({', '.join(map(printable, self.names))}{more})" if self.names else ""
        return f"image{'s' if len(self.images) > 1 else ''} {_ranges(self.images)}{names}: "


def with_names(location: Location, manifest: Manifest, damages: Iterable[Damage]) -> tuple[Damage, ...]:
    """Return the damages of a split with the names of their first images, if the split has names that can be read."""
    damages = tuple(damages)
    if not manifest.has_names or not any(each.images for each in damages):
        return damages
    with suppress(ShardError):
        names, deadline = SplitNames(location, manifest), time.monotonic() + _READ_TIMEOUT_S
        return tuple(
            replace(each, names=tuple(names.read(np.array(each.images[:_NAMED], np.int64), deadline)))
            for each in damages
        )
    return damages


def _ranges(images: tuple[int, ...]) -> str:
    """Return image indices as text, such as ``3, 7–9``."""
    runs = []
    for _, run in groupby(enumerate(images), key=lambda pair: pair[1] - pair[0]):
        indices = [index for _, index in run]
        runs.append(str(indices[0]) if len(indices) == 1 else f"{indices[0]}–{indices[-1]}")
    shown = runs if len(runs) <= 12 else [*runs[:12], f"… {len(images)} in all"]
    return ", ".join(shown)
