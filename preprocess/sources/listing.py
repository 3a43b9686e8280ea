"""A data set to pack: its classes and a compact listing of its encoded images.

To avoid one Python object for each of ImageNet's 1.28 million images, a listing is one buffer of name bytes and five
integer columns (about 75 bytes per image); a `SourceImage` is created on demand.

Each image has a name and a key. Its *name* is its location, which messages show. Its *key* is the class id and the path
below the class ("n01440764/n01440764_18.JPEG") or, where folders are no classes, the path below its split. The key is
the same in a folder, in an archive of any name and in Kaggle's tree, whichever of the enclosing folders is given as the
source, and in a table or container with the same paths. The pack order, the choice of held-out images and the digest
depend on the keys, and a pack keeps them as the names of its images.
"""

import hashlib
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import MAX_NAME_BYTES
from loopfeed.preprocess.shards.classes import MAX_CLASSES, ImageClass

MAX_FILE_BYTES = 512 * 2**20
MAX_IMAGES = 100_000_000  # a split of ImageNet-21k has 14 million
MAX_NAMES_BYTES = 8 * 2**30
# A whole number in canonical decimal form, such as "0", "12" and "-1", but not "01", "+1" and "1.0".
_WHOLE_NUMBER = re.compile("0|-?[1-9][0-9]{0,17}")


class SourceError(ValueError):
    """Error raised if a source cannot be read as a labelled data set; the message contains the path and the remedy."""


class ChangedSourceError(OSError):
    """Error raised if a file of the source is no longer what it was when it was listed."""


@dataclass(frozen=True)
class SourceImage:
    """An image: its path below the source root ("outer.tar!inner.tar!member" in archives) and its 0-based class."""

    name: str
    label: int


class SourceSplit(Protocol):
    """A split of a data set. Its pack order is the same on every machine and file system."""

    @property
    def name(self) -> str:
        """The name of the split: train, val or test."""

    @property
    def classes(self) -> tuple[ImageClass, ...]:
        """The classes in index order."""

    def __len__(self) -> int: ...

    def image(self, index: int) -> SourceImage:
        """Return the name and the label of the image at position `index` in the pack order."""

    def key(self, index: int) -> str:
        """Return the key of the image at position `index` in the pack order, without a leading slash.

        A pack keeps it as the image's name.
        """

    @property
    def weights(self) -> NDArray[np.float32] | None:
        """How often each image is drawn, float32 `[n]` in pack order; None if the source does not say."""

    @property
    def groups(self) -> NDArray[np.uint32] | None:
        """The group of each image, uint32 `[n]` in pack order; None if the source has no groups."""

    def num_bytes(self, index: int) -> int:
        """Return the length in bytes of the encoded image at position `index` in the pack order."""

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of the image at position `index`, or raise OSError or ValueError.

        May be called from any thread.
        """

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of the class ids and of each image's key, size, class, weight and group."""


class ByteStore(Protocol):
    """The folder or open archive that contains the encoded images."""

    def read(self, name: str, offset: int, size: int) -> bytes:
        """Return the `size` bytes of the file `name`; in an archive, they start at `offset`."""

    def close(self) -> None:
        """Close all open files."""


@runtime_checkable
class IdentifyingStore(ByteStore, Protocol):
    """A store of images that names and sizes do not tell apart, such as those of an array."""

    def identity(self, offset: int) -> bytes:
        """Return what of the content of the image at `offset` belongs to the digest."""


class Listing:
    """Names, labels, sizes and offsets of images in compact arrays, in the order in which the images were added.

    Args:
        classes: the classes of the labels; may be empty if no keys are needed.
        keys: whether the key of an image is its class id + "/" + its member, or, with "path", its member alone, which
            is then its path below its split.
    """

    def __init__(self, classes: Iterable[ImageClass] = (), keys: Literal["class", "path"] = "class") -> None:
        self._class_ids = [each.id.encode("utf-8", "surrogateescape") for each in classes]
        self._keys = keys
        self._names = bytearray()
        self._name_stops = array("q")
        self._folder_lengths = array("I")
        self._labels = array("H")
        self._sizes = array("q")
        self._offsets = array("q")

    def __len__(self) -> int:
        return len(self._labels)

    def add(self, folder: str, member: str, label: int, size: int, offset: int = 0) -> None:
        """Append an image. Its name is `folder` + `member`, and its key is as `keys` says.

        Args:
            folder: the enclosing folder or archive, ending with a separator: "train/n01440764/", "set.tar!n01440764/".
            member: path of the image below its class or, with `keys` "path", below its split.
            label: 0-based class.
            size: length of the encoded image in bytes.
            offset: offset of the image in its archive, in bytes.

        Raises:
            SourceError: the listing has more images, or more bytes of names, than allowed, or the name is too long.
        """
        around, encoded = folder.encode("utf-8", "surrogateescape"), member.encode("utf-8", "surrogateescape")
        self._names += around + encoded
        if len(self._names) > MAX_NAMES_BYTES or len(self._labels) >= MAX_IMAGES:
            raise SourceError(
                f"with {printable(folder)}, the split has more than {MAX_IMAGES:,} images or {MAX_NAMES_BYTES:,} bytes "
                "of names; use fewer images"
            )
        if len(self._class_ids[label] if self._class_ids else b"") + 1 + len(encoded) > MAX_NAME_BYTES:
            raise SourceError(
                f"{printable(folder + member)} is longer than the {MAX_NAME_BYTES:,} bytes allowed for the name of an "
                "image; give it a shorter name"
            )
        self._name_stops.append(len(self._names))
        self._folder_lengths.append(len(around))
        self._labels.append(label)
        self._sizes.append(size)
        self._offsets.append(offset)

    def name_bytes(self, index: int) -> bytes:
        """Return the name of an image as UTF-8. Bytes of a file name that are not valid UTF-8 are kept unchanged."""
        start = self._name_stops[index - 1] if index else 0
        return bytes(self._names[start : self._name_stops[index]])

    def key_bytes(self, index: int) -> bytes:
        """Return the key of an image as UTF-8: its class id and its path below the class, or that below its split."""
        member = self.name_bytes(index)[self._folder_lengths[index] :]
        return member if self._keys == "path" else self._class_ids[self._labels[index]] + b"/" + member

    def digest_line(self, index: int) -> bytes:
        """Return the key and the size of an image, and its class unless that is the first folder of the key."""
        key, size, class_id = self.key_bytes(index), self._sizes[index], self._class_ids[self._labels[index]]
        if key.startswith(class_id + b"/") and b"/" not in class_id:
            return b"%s\0%d\n" % (key, size)
        return b"%s\0%d\0%s\n" % (key, size, class_id)

    def member(self, index: int) -> str:
        """Return the path of an image below its class or, with `keys` "path", below its split."""
        return self.name_bytes(index)[self._folder_lengths[index] :].decode("utf-8", "surrogateescape")

    def name(self, index: int) -> str:
        """Return the name of an image, that is, its path below the source root."""
        return self.name_bytes(index).decode("utf-8", "surrogateescape")

    def size(self, index: int) -> int:
        """Return the length of the encoded image in bytes."""
        return self._sizes[index]

    def offset(self, index: int) -> int:
        """Return the offset of the encoded image in its archive, in bytes."""
        return self._offsets[index]

    @property
    def labels(self) -> np.ndarray:
        """A copy of the labels as uint16 `[N]`. Images can still be added to the listing while the copy exists."""
        return np.array(self._labels, np.uint16)


@dataclass(frozen=True, eq=False)
class ListedSplit:
    """A split: a listing, the store of its images, and the pack order (int64 `[n]`, indices into the listing).

    Weights (float32 `[n]`) and groups (uint32 `[n]`) are in pack order; None if the source has none.
    """

    name: str
    classes: tuple[ImageClass, ...]
    listing: Listing
    store: ByteStore
    order: np.ndarray
    weights: NDArray[np.float32] | None = None
    groups: NDArray[np.uint32] | None = None

    def __len__(self) -> int:
        return len(self.order)

    def image(self, index: int) -> SourceImage:
        """Return the name and the label of the image at position `index` in the pack order."""
        entry = self._entry(index)
        return SourceImage(self.listing.name(entry), int(self._labels[entry]))

    def key(self, index: int) -> str:
        """Return the key of the image at position `index` in the pack order, without a leading slash."""
        return self.listing.key_bytes(self._entry(index)).removeprefix(b"/").decode("utf-8", "surrogateescape")

    def num_bytes(self, index: int) -> int:
        """Return the length in bytes of the encoded image at position `index` in the pack order."""
        return self.listing.size(self._entry(index))

    def read(self, index: int) -> bytes:
        """Return the encoded bytes of the image at position `index` in the pack order.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file is implausibly large.
        """
        entry = self._entry(index)
        size = self.listing.size(entry)
        if size > MAX_FILE_BYTES:
            raise ValueError(
                f"the file has {size} bytes, more than the {MAX_FILE_BYTES} allowed for an image; make it smaller"
            )
        return self.store.read(self.listing.name(entry), self.listing.offset(entry), size)

    def digest(self) -> str:
        """Return the hexadecimal SHA-256 of the class ids and of each image's key, size, class, weight and group.

        Of an `IdentifyingStore`, it covers content as well.
        """
        return self._digest

    def _entry(self, index: int) -> int:
        if not 0 <= index < len(self.order):
            raise IndexError(
                f"image {index} is out of range for split {self.name}, which has {quantity(len(self.order), 'image')}"
            )
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
            digest.update(self.listing.digest_line(entry))
        if isinstance(self.store, IdentifyingStore):
            for entry in self.order.tolist():
                digest.update(self.store.identity(self.listing.offset(entry)))
        for name, values, dtype in ((b"weights", self.weights, "<f4"), (b"groups", self.groups, "<u4")):
            if values is not None:
                digest.update(name + b"\n" + values.astype(dtype).tobytes())
        return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class FoundSplit:
    """A split as found in a source, before images are held out, the limit is applied and the order is determined.

    Attributes:
        name, classes, listing, store: as of `ListedSplit`.
        subfolder: a subfolder of a class that contains images, below the source root; None if there is none.
        rows: the row of each listed image in a table of labels, int64; None without one.
        ignored: counts the hidden entries that were left out, by name.
        notes: one-line messages to the user about its classes.
        weights: how often each image is drawn, float32, one per listed image in the order of the listing; None if the
            source does not say.
        groups: the group of each image, uint32, in the same order: its number among the sorted names of the groups of
            the whole source; None if the source has no groups.
    """

    name: str
    classes: tuple[ImageClass, ...]
    listing: Listing
    store: ByteStore
    subfolder: str | None = None
    rows: NDArray[np.int64] | None = None
    ignored: Counter[str] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()
    weights: NDArray[np.float32] | None = None
    groups: NDArray[np.uint32] | None = None


@dataclass(frozen=True)
class Layout:
    """A detected layout.

    Attributes:
        description: what was found, for messages.
        openers: for each split, a function that lists its images.
        ignored: counts the hidden entries that were left out beside the splits, by name.
        unread: what is not read because it has no line in a table of labels; None if there is nothing.
        class_column: the column that has the classes; None if the layout has no columns.
    """

    description: str
    openers: dict[str, Callable[[], FoundSplit]]
    ignored: Counter[str] = field(default_factory=Counter)
    unread: str | None = None
    class_column: str | None = None


def index_classes(
    ids: Iterable[str], names: dict[str, str], where: str, *, numeric: bool = False
) -> tuple[ImageClass, ...]:
    """Return the classes in index order, that is, sorted by the bytes of their ids (as in torchvision).

    Args:
        ids: one id per class.
        names: readable names of some or all classes.
        where: the location to show in an error message.
        numeric: whether ids that are all whole numbers in canonical decimal form are in numerical order, so that "10"
            comes after "2": those of tables and containers, but not those of folders.

    Raises:
        SourceError: there is no class, or there are more than labels can represent, or one is not valid Unicode.
    """
    ordered = order_classes(ids, numeric=numeric)
    if not 0 < len(ordered) <= MAX_CLASSES:
        raise SourceError(
            f"{printable(where)} has {len(ordered)} classes; use a source with 1 to {MAX_CLASSES} classes"
        )
    return tuple(ImageClass(each, names.get(each) or each) for each in ordered)


def order_classes(ids: Iterable[str], *, numeric: bool) -> list[str]:
    """Return identifiers of classes in index order; `numeric` is as of `index_classes`, which raises the same."""
    ordered = sorted(ids, key=_class_bytes)
    if numeric and all(map(_WHOLE_NUMBER.fullmatch, ordered)):
        ordered.sort(key=int)
    return ordered


def _class_bytes(identifier: str) -> bytes:
    try:
        return identifier.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:  # such as half of a character in JSON
        raise SourceError(f"the class {identifier!a} is not valid Unicode; rename it") from None
