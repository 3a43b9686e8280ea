"""Reads WebDataset archives: tar files in which the members of a sample have the same name up to its first dot.

An image is a member with the suffix of one; its class is the text of `.cls`, or one of the fields `_JSON_KEYS` of
`.json`. A `.txt` is usually a caption, so it is never a class. Opening reads the headers of all archives and the
classes; an image is then one `pread`.
Format: https://github.com/webdataset/webdataset (members of a sample follow each other).
"""

import json
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import numpy as np

from loopfeed.preprocess.printable import first_names, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.classes import MAX_CLASSES
from loopfeed.preprocess.sources.archives import Archive, open_archive, visible_members
from loopfeed.preprocess.sources.listing import ByteStore, ChangedSourceError, Layout, Listing, SourceError
from loopfeed.preprocess.sources.samples import class_id, samples_layout, split_of_path
from loopfeed.preprocess.sources.selection import TopFolder, choose_splits, is_image_name, split_of
from loopfeed.preprocess.sources.source_file import open_source_file
from loopfeed.preprocess.sources.tarindex import Member

_JSON_KEYS = ("label", "class", "cls", "class_name")
_MAX_CLASS_BYTES = 2**20
_NUM_LOOKED_AT = 100  # members by which an archive is recognised


@dataclass
class _Split:
    """The samples of a split, in the order of the archives.

    Attributes:
        listing: the images, whose labels are the indices of their classes in `ids`.
        ids: the index of each identifier.
        archives, starts: the archives, and the offsets in `listing` of their first bytes.
    """

    listing: Listing = field(default_factory=Listing)
    ids: dict[str, int] = field(default_factory=dict)
    archives: list[tuple[Path, tuple[int, ...]]] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    key_hashes: "array[int]" = field(default_factory=lambda: array("q"))

    @property
    def class_ids(self) -> Collection[str]:
        """The identifiers of its classes."""
        return self.ids

    def list_images(self, listing: Listing, label_of: Mapping[str, int]) -> ByteStore:
        """Add its images to a listing, and return the store that reads them."""
        labels = np.array([label_of[each] for each in self.ids], np.int64)[self.listing.labels].tolist()
        for entry, label in enumerate(labels):
            member, found = self.listing.member(entry), self.listing
            folder = found.name(entry).removesuffix(member)
            listing.add(folder, member, label, found.size(entry), found.offset(entry))
        return _ClosedTars(self.archives, self.starts[:-1])


@dataclass(frozen=True)
class _ClosedTars:
    """The archives of a split, which are opened for each image: there may be more than a process may have open files.

    Attributes:
        archives: the path and the identity of each.
        starts: the offsets of their first bytes, one archive after another.
    """

    archives: Sequence[tuple[Path, tuple[int, ...]]]
    starts: Sequence[int]

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002 - the offset is sufficient
        """Return the `size` bytes at `offset`; raise ChangedSourceError if their archive is no longer what it was."""
        index = bisect_right(self.starts, offset) - 1
        path, identity = self.archives[index]
        try:
            file = open_source_file(path)
        except SourceError as error:
            raise ChangedSourceError(str(error)) from error
        try:
            if file.identity != identity:
                raise ChangedSourceError(f"{printable(path)} has changed since it was listed")
            return file.read_unchanged(offset - self.starts[index], size)
        finally:
            file.close()

    def close(self) -> None:
        """Do nothing, because each archive is closed after each image."""


def is_webdataset(archive: Archive) -> bool:
    """Return whether an archive has a sample with an image and a class among its first members.

    Images without folders beside which are other files of their samples count too, so that a missing class is named.
    """
    for _, fields in _samples(archive, Counter(), _NUM_LOOKED_AT):
        images = [each for each in fields if is_image_name(f"x.{each}")]
        others = fields.keys() - set(images)
        if images and others:
            is_below = "/" in fields[images[0]].name
            if "cls" in others or not is_below:
                return True
            if "json" in others and _has_class(archive, fields["json"]):
                return True
    return False


def _has_class(archive: Archive, member: Member) -> bool:
    try:
        return _class_in_json(archive, member) is not None
    except SourceError:  # of a file beside an image in a class folder, which need not be JSON of any kind
        return False


def webdataset_layout(root: Path, paths: Sequence[Path]) -> Layout:
    """Return the layout of one or more WebDataset archives.

    Raises:
        SourceError: a sample has no class, two images, or is in two archives; or an archive is damaged or unsafe.
    """
    splits: dict[str, _Split] = {}
    ignored: Counter[str] = Counter()
    num_images = 0
    for path in paths:
        with closing(open_archive(path)) as archive:
            _read_archive(archive, root, splits, ignored, is_alone=len(paths) == 1)
    for each in splits.values():
        _check_keys(each)
        num_images += len(each.listing)
    if not num_images:
        raise SourceError(f"{printable(root)} has no image with a class in {quantity(len(paths), 'archive')}")
    shown = first_names([each.name for each in paths], 2)
    layout = samples_layout(f"{quantity(len(paths), 'WebDataset archive')}: {shown}", root, splits)
    layout.ignored.update(ignored)
    return layout


def _read_archive(
    archive: Archive, root: Path, splits: dict[str, _Split], ignored: Counter[str], *, is_alone: bool
) -> None:
    """Add the samples of an archive to their splits, which are those of its name or, in a single one, its folders."""
    path = archive.file.path
    folders: dict[str, str] = {}
    if is_alone and split_of_path(path, root) == "train":
        tops = {each.name.partition("/")[0]: each.name for each in visible_members(archive) if "/" in each.name}
        if all(map(split_of, tops)):
            found = choose_splits([TopFolder(top, True, lambda: None) for top in tops], str(path))
            folders = {f"{top}/": split for split, top in found.items()}
    touched: set[str] = set()
    for key, fields in _samples(archive, ignored):
        top = next((each for each in folders if key.startswith(each)), "")
        name = folders[top] if top else split_of_path(path, root)
        split = splits.setdefault(name, _Split())
        if name not in touched:
            touched.add(name)
            split.archives.append((path, archive.file.identity))
            split.starts.append(split.starts[-1] + archive.file.num_bytes)
        _add(archive, split, key, fields, len(top))


def _add(archive: Archive, split: _Split, key: str, fields: dict[str, Member], num_before: int) -> None:
    """Add a sample, whose path below its split begins after `num_before` characters."""
    image = _image_of(fields, f"{printable(archive.file.path)}: the sample {printable(key)}")
    if image is None:
        return
    found = _class_of(archive, key, fields)
    label = split.ids.setdefault(found, len(split.ids))
    if label == MAX_CLASSES:
        raise SourceError(f"{printable(archive.file.path)} has more than {MAX_CLASSES} classes; use fewer classes")
    folder = f"{archive.file.path.name}!{image.name[:num_before]}"
    split.listing.add(folder, image.name[num_before:], label, image.size, split.starts[-2] + image.offset)
    split.key_hashes.append(hash(key[num_before:]))


def _samples(
    archive: Archive, ignored: Counter[str], limit: int | None = None
) -> Iterator[tuple[str, dict[str, Member]]]:
    """Yield the key of each sample, and its members by their extensions."""
    key, fields = "", dict[str, Member]()
    for count, member in enumerate(visible_members(archive, ignored)):
        if limit is not None and count >= limit:
            break
        folder, slash, base = member.name.rpartition("/")
        stem, _, extension = base.partition(".")
        extension = extension.lower()
        if fields and key != folder + slash + stem:
            yield key, fields
            fields = {}
        key = folder + slash + stem
        if extension in fields and limit is None:
            raise SourceError(
                f"{printable(archive.file.path)} has {printable(member.name)} twice; write the archive again without it"
            )
        fields[extension] = member
    if fields:
        yield key, fields


def _image_of(fields: dict[str, Member], where: str) -> Member | None:
    """Return the image of a sample; None if it has neither an image nor a class."""
    images = [each for each in fields if "." not in each and is_image_name(f"x.{each}")]
    images = images or [each for each in fields if is_image_name(f"x.{each}")]
    if len(images) > 1:
        raise SourceError(
            f"{where} has two images, .{printable(images[0])} and .{printable(images[1])} (a sample's name ends at its "
            "first dot); write one image for each sample"
        )
    if not images and "cls" in fields:
        raise SourceError(f"{where} has a class but no image; write its image into the same archive, beside its class")
    return fields[images[0]] if images else None


def _class_of(archive: Archive, key: str, fields: dict[str, Member]) -> str:
    where = f"{printable(archive.file.path)}: the sample {printable(key)}"
    if "cls" in fields:
        text = _text(archive, fields["cls"])
        return class_id(text, where)
    if "json" in fields and (found := _class_in_json(archive, fields["json"])) is not None:
        return class_id(found, where)
    has = ", ".join(f".{printable(each)}" for each in sorted(fields))
    raise SourceError(
        f"{where} has no class: expected .cls, or one of {', '.join(_JSON_KEYS)} in .json; found {has}. Write its "
        "class beside it, or give a file with --labels"
    )


def _class_in_json(archive: Archive, member: Member) -> object | None:
    try:
        found = json.loads(_text(archive, member))
    except (ValueError, RecursionError) as error:
        raise SourceError(
            f"{printable(archive.file.path)}: {printable(member.name)} is not JSON: {error}; write it again"
        ) from error
    if not isinstance(found, dict):
        return found if isinstance(found, int | str) else None
    return next((found[each] for each in _JSON_KEYS if found.get(each) is not None), None)


def _text(archive: Archive, member: Member) -> str:
    where = f"{printable(archive.file.path)}: {printable(member.name)}"
    if member.size > _MAX_CLASS_BYTES:
        raise SourceError(f"{where} has {member.size:,} bytes, more than the {_MAX_CLASS_BYTES:,} allowed for a class")
    try:
        return archive.read(member.name, member.offset, member.size).decode("utf-8-sig")
    except OSError as error:
        raise SourceError(f"{where} cannot be read: {error.strerror or error}; check the disk") from error
    except UnicodeDecodeError as error:
        raise SourceError(f"{where} is not UTF-8 text: {error}; write it again") from error


def _check_keys(split: _Split) -> None:
    """Check that no sample is in two archives, whatever the suffixes of its images."""
    hashes = np.array(split.key_hashes, np.int64)
    del split.key_hashes[:]
    order = np.argsort(hashes, kind="stable")
    for before, after in pairwise(order):
        if hashes[before] == hashes[after]:
            names = [split.listing.name(int(each)) for each in (before, after)]
            if _stem(split.listing.member(int(before))) == _stem(split.listing.member(int(after))):
                raise SourceError(
                    f"the sample {printable(names[0])} exists twice, as {printable(names[1])} too; the name of each "
                    "sample must be its own in its split: write the archives again, with the number of the shard in it"
                )


def _stem(path: str) -> str:
    folder, slash, base = path.rpartition("/")
    return f"{folder}{slash}{base.partition('.')[0]}"
