"""What a data set looks like before packing: its classes and a compact list of its encoded images.

ImageNet's 1.28 million images must not become as many Python objects, so a listing is one run of name bytes and five
integer columns (about 75 bytes an image); a `SourceImage` is made when somebody asks for it.

An image has two names. Its *name* says where it lies and stands in messages. Its *key*, class id and path below the
class ("n01440764/n01440764_18.JPEG"), is the same whether it lies in a folder, in an archive of any name or in Kaggle's
tree, and whichever of the folders around it is given as the source: order, held-out images and digest go by keys.
"""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from preprocess.printable import printable
from preprocess.shards.classes import MAX_CLASSES, ImageClass

MAX_FILE_BYTES = 512 * 2**20
MAX_IMAGES = 100_000_000  # a split of ImageNet-21k has 14 million
MAX_NAMES_BYTES = 8 * 2**30


class SourceError(ValueError):
    """A source that cannot be read as a labelled data set; the message names the path and the remedy."""


@dataclass(frozen=True)
class SourceImage:
    """One image: its path below the source root ("outer.tar!inner.tar!member" in archives) and its 0-based class."""

    name: str
    label: int


class SourceSplit(Protocol):
    """One split of a data set in pack order, which is the same on every machine and file system."""

    @property
    def name(self) -> str:
        """Name of the split: train, val, test."""

    @property
    def classes(self) -> tuple[ImageClass, ...]:
        """The classes in index order."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> SourceImage:
        """Returns name and label of the image at this place of the pack order."""

    def num_bytes(self, index: int) -> int:
        """Returns how many bytes `read` returns."""

    def read(self, index: int) -> bytes:
        """Returns its encoded bytes, from any thread; raises OSError or ValueError."""

    def digest(self) -> str:
        """Returns the SHA-256, in hex, of the class ids and of every image's key and size."""


class ByteStore(Protocol):
    """Where encoded bytes are: a folder or an open archive."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Returns the bytes of the entry of this name, which in an archive lies at `offset`."""

    def close(self) -> None:
        """Lets go of open files."""


class Listing:
    """Names, labels, sizes and offsets of images, in the order they were added, in plain arrays.

    Args:
        classes: what the labels mean; none for a listing whose keys nobody asks for.
    """

    def __init__(self, classes: Iterable[ImageClass] = ()) -> None:
        self._class_ids = [each.id.encode("utf-8", "surrogateescape") for each in classes]
        self._names = bytearray()
        self._name_stops = array("q")
        self._folder_lengths = array("I")
        self._labels = array("H")
        self._sizes = array("q")
        self._offsets = array("q")

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, folder: str, member: str, label: int, size: int, offset: int = 0) -> None:
        """Appends an image; its name is `folder` + `member`, its key class id + "/" + `member`.

        Args:
            folder: what is around the image, with the separator at its end: "train/n01440764/", "set.tar!n01440764/".
            member: path of the image below its class.
            label: 0-based class.
            size: length of the encoded image in bytes.
            offset: where it begins in its archive, in bytes.

        Raises:
            SourceError: there are more images, or longer names, than a listing may have.
        """
        around = folder.encode("utf-8", "surrogateescape")
        self._names += around + member.encode("utf-8", "surrogateescape")
        if len(self._names) > MAX_NAMES_BYTES or len(self._labels) >= MAX_IMAGES:
            raise SourceError(
                f"{printable(folder)} brings the split to more than {MAX_IMAGES:,} images or {MAX_NAMES_BYTES:,} bytes "
                "of names; give fewer images"
            )
        self._name_stops.append(len(self._names))
        self._folder_lengths.append(len(around))
        self._labels.append(label)
        self._sizes.append(size)
        self._offsets.append(offset)

    def name_bytes(self, index: int) -> bytes:
        """Returns the name as UTF-8; bytes of a file name that are not UTF-8 are kept as they are."""
        start = self._name_stops[index - 1] if index else 0
        return bytes(self._names[start : self._name_stops[index]])

    def key_bytes(self, index: int) -> bytes:
        """Returns class id and path below the class, as UTF-8: what order, held-out images and digest go by."""
        return self._class_ids[self._labels[index]] + b"/" + self.name_bytes(index)[self._folder_lengths[index] :]

    def member(self, index: int) -> str:
        """Returns the path below the class."""
        return self.name_bytes(index)[self._folder_lengths[index] :].decode("utf-8", "surrogateescape")

    def name(self, index: int) -> str:
        """Returns the name."""
        return self.name_bytes(index).decode("utf-8", "surrogateescape")

    def size(self, index: int) -> int:
        """Returns the length of the encoded image in bytes."""
        return self._sizes[index]

    def offset(self, index: int) -> int:
        """Returns where the encoded image begins in its archive, in bytes."""
        return self._offsets[index]

    @property
    def labels(self) -> np.ndarray:
        """The classes as uint16 `[N]`; a copy, so that the listing may still grow."""
        return np.array(self._labels, np.uint16)


@dataclass(frozen=True, eq=False)
class ListedSplit:
    """A split made of a listing, the store its bytes come from, and the pack order (int64 `[n]`, listing indices)."""

    name: str
    classes: tuple[ImageClass, ...]
    listing: Listing
    store: ByteStore
    order: np.ndarray

    def __len__(self) -> int:
        return len(self.order)

    def image(self, index: int) -> SourceImage:
        """Returns name and label of the image at this place of the pack order."""
        entry = self._entry(index)
        return SourceImage(self.listing.name(entry), int(self._labels[entry]))

    def num_bytes(self, index: int) -> int:
        """Returns the length of the encoded image at this place of the pack order."""
        return self.listing.size(self._entry(index))

    def read(self, index: int) -> bytes:
        """Returns the encoded bytes of the image at this place of the pack order.

        Raises:
            OSError: the file cannot be read.
            ValueError: it is implausibly large.
        """
        entry = self._entry(index)
        size = self.listing.size(entry)
        if size > MAX_FILE_BYTES:
            raise ValueError(f"the file has {size} bytes, more than the {MAX_FILE_BYTES} an image may have")
        return self.store.read(self.listing.name(entry), self.listing.offset(entry), size)

    def digest(self) -> str:
        """Returns the SHA-256, in hex, of the class ids and of every image's key and size, in pack order."""
        return self._digest

    def _entry(self, index: int) -> int:
        if not 0 <= index < len(self.order):
            raise IndexError(f"image {index} of split {self.name}, which has {len(self.order)}")
        return int(self.order[index])

    @cached_property
    def _labels(self) -> np.ndarray:
        return self.listing.labels

    @cached_property
    def _digest(self) -> str:
        digest = hashlib.sha256(b"feedloop listing 2\n")
        for each in self.classes:
            digest.update(each.id.encode("utf-8", "surrogateescape") + b"\n")
        for entry in self.order.tolist():
            digest.update(b"%s\0%d\n" % (self.listing.key_bytes(entry), self.listing.size(entry)))
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class FoundSplit:
    """A split as a layout finds it, before held-out images are taken away, limits applied and the order fixed."""

    name: str
    classes: tuple[ImageClass, ...]
    listing: Listing
    store: ByteStore


def index_classes(ids: Iterable[str], names: dict[str, str], where: str) -> tuple[ImageClass, ...]:
    """Returns the classes sorted by the bytes of their ids, which is their index order (torchvision's as well).

    Args:
        ids: one id a class.
        names: readable names of some or all of them.
        where: what to call the place in an error.

    Raises:
        SourceError: no class, or more than labels can tell apart.
    """
    ordered = sorted(ids, key=lambda each: each.encode("utf-8", "surrogateescape"))
    if not 0 < len(ordered) <= MAX_CLASSES:
        raise SourceError(f"{printable(where)} has {len(ordered)} classes; 1 to {MAX_CLASSES} can be stored")
    return tuple(ImageClass(each, names.get(each) or each) for each in ordered)
