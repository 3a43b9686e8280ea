"""Reads class folders in a tar or zip archive, or in one for each split, without unpacking them.

Opening a tar archive reads its headers, and opening a zip archive its directory. Reading an image is then one
`pread` at a known offset, or three in a zip archive.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.shards.classes import MAX_CLASSES
from loopfeed.preprocess.sources.archives import Archive, open_archive, visible_members
from loopfeed.preprocess.sources.class_names import (
    MAX_NAME_FILE_BYTES,
    NAME_FILES,
    ClassFrom,
    NameFile,
    UnitedClasses,
    check_class_from,
    describe_leaves,
    leaf_folders,
    name_classes,
    parse_name_file,
    unite_classes,
)
from loopfeed.preprocess.sources.listing import FoundSplit, Layout, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.selection import SPLIT_ORDER, TopFolder, choose_splits, is_image_name, split_of
from loopfeed.preprocess.sources.tars import imagenet_archive


def archive_layout(path: Path, class_from: ClassFrom = "top") -> Layout:
    """Detect the layout of an archive from its members.

    Raises:
        SourceError: the archive is empty, damaged or unsafe, or its members are not in class folders.
    """
    with closing(open_archive(path)) as archive:
        first = next(visible_members(archive), None)
        if first is not None and (layout := imagenet_archive(path, first.name)) is not None:
            check_class_from(class_from, path, layout.description)
            return layout
        ignored: Counter[str] = Counter()
        tree = _read_tree(path, archive, ignored, class_from)
    unread = f" (not read: {tree.unread})" if tree.unread else ""
    return _layout(path, f"a {archive.kind} of class folders{unread}", {path: tree}, ignored, class_from)


def split_archives(files: Iterable[Path]) -> dict[str, Path]:
    """Return the archives among the files of a folder that have the names of splits, such as train.tar and val.zip.

    Raises:
        SourceError: a split has two.
    """
    found: dict[str, Path] = {}
    for path in files:
        split = split_of(path.stem) if path.suffix.lower() in (".tar", ".zip") else None
        if split is not None and found.setdefault(split, path) != path:
            raise SourceError(
                f"{printable(path.parent)} has both {printable(found[split].name)} and {printable(path.name)} for the "
                f"split {split}; keep one"
            )
    return {split: found[split] for split in SPLIT_ORDER if split in found}


def split_archives_layout(root: Path, files: Mapping[str, Path], class_from: ClassFrom) -> Layout:
    """Return the layout of a folder with an archive of class folders for each split.

    Raises:
        SourceError: as `archive_layout`; or an archive has other splits than its name says.
    """
    trees: dict[Path, _Tree] = {}
    ignored: Counter[str] = Counter()
    for split, path in files.items():
        with closing(open_archive(path)) as archive:
            tree = _read_tree(path, archive, ignored, class_from)
        (inside, members_of), *others = tree.splits.items()
        if others or (tree.has_split_folders and inside != split):
            shown = " and ".join(tree.splits)
            raise SourceError(f"{printable(path)} contains {shown}, unlike its name; give that archive alone")
        trees[path] = replace(tree, splits={split: members_of}, notes={split: tree.notes.get(inside, [])})
    names = " and ".join(path.name for path in files.values())
    return _layout(root, f"archives {printable(names)} of class folders", trees, ignored, class_from)


def _layout(
    where: Path, description: str, trees: Mapping[Path, "_Tree"], ignored: Counter[str], class_from: ClassFrom
) -> Layout:
    """Return the layout of archives that have different splits."""
    name_files = tuple(each for tree in trees.values() for each in tree.name_files)
    splits = {split: members_of for tree in trees.values() for split, members_of in tree.splits.items()}
    united = unite_classes(splits, name_files, str(where))
    openers: dict[str, Callable[[], FoundSplit]] = {}
    for path, tree in trees.items():
        open_once = cache(partial(open_archive, path))  # all splits have one directory of a zip archive in memory
        named = replace(tree, name_files=name_files)
        for split, members_of in tree.splits.items():
            openers[split] = partial(_read_folders, path, open_once, split, named, united, class_from, members_of)
    return Layout(description, openers, ignored)


@dataclass(frozen=True)
class _Tree:
    """The members of an archive of class folders.

    Attributes:
        splits: the members of each class of each split, all with the placeholder label 0.
        name_files: the files of class names.
        unread: the folders that are not read, for messages; "" without any.
        notes: one-line messages about the classes of a split.
        has_split_folders: whether the splits are those of folders; otherwise there is `train` alone.
    """

    splits: dict[str, dict[str, Listing]]
    name_files: tuple[NameFile, ...]
    unread: str
    notes: dict[str, list[str]]
    has_split_folders: bool


def _read_tree(path: Path, archive: Archive, ignored: Counter[str], class_from: ClassFrom) -> _Tree:
    """Return the members by split and class. A single folder that encloses everything is skipped.

    Raises:
        SourceError: images are outside class folders, or in folders that are neither splits nor classes.
    """
    everything = _list_members(path, archive, ignored)
    depth = _wrapping_depth(everything)
    tops = _top_folders(everything, depth)
    folders = choose_splits(tops, str(path))
    is_leaf = class_from == "leaf"
    leaves = set(leaf_folders(map(everything.name, range(len(everything))))) if is_leaf else set()
    splits: dict[str, dict[str, Listing]] = {}
    inside: dict[str, set[str]] = {}
    name_files, split_of_top = [], {name: split for split, name in folders.items()}
    for entry in range(len(everything)):
        name = everything.name(entry)
        parts = name.split("/")[depth:]
        if len(parts) > 1 and folders and parts[0] not in split_of_top:
            continue
        split = split_of_top[parts.pop(0)] if len(parts) > 1 and folders else "train"
        if len(parts) > 1 and is_leaf:
            if name.rpartition("/")[0] in leaves:
                _add(path, splits.setdefault(split, {}), parts[-2], "/".join(parts), everything, entry)
                inside.setdefault(split, set()).add("/".join(parts[:-1]))
        elif len(parts) > 1:
            _add(path, splits.setdefault(split, {}), parts[0], "/".join(parts[1:]), everything, entry)
        elif is_image_name(name):
            raise SourceError(
                f"{printable(path)} contains the image {printable(name)} outside any class folder; "
                "move it into the folder of its class"
            )
        elif parts[0] in NAME_FILES and everything.size(entry) <= MAX_NAME_FILE_BYTES:
            content = archive.read(name, everything.offset(entry), everything.size(entry))
            name_files.append(parse_name_file(content, f"{path}!{name}"))
    if not splits:
        raise SourceError(
            f"{printable(path)} contains no class folders (its first file is {printable(everything.name(0))}); "
            "put each image into the folder of its class"
        )
    unread = sorted(f"{printable(each.name)}/" for each in tops if folders and each.name not in split_of_top)
    return _Tree(
        {split: splits[split] for split in SPLIT_ORDER if split in splits},
        tuple(name_files),
        ", ".join(unread),
        {split: describe_leaves(folders) for split, folders in inside.items()},
        bool(folders),
    )


def _list_members(path: Path, archive: Archive, ignored: Counter[str]) -> Listing:
    """Return all members with the placeholder label 0; raise SourceError if there are none."""
    everything = Listing()
    for member in visible_members(archive, ignored):
        everything.add("", member.name, 0, member.size, member.offset)
    if not len(everything):
        raise SourceError(f"{printable(path)} is an empty archive; give one with images")
    return everything


def _top_folders(everything: Listing, depth: int) -> list[TopFolder]:
    """Return the folders at the top of an archive."""
    have_folders: dict[str, bool] = {}
    images: dict[str, str] = {}
    for entry in range(len(everything)):
        name = everything.name(entry)
        parts = name.split("/")[depth:]
        if len(parts) > 1:
            have_folders[parts[0]] = have_folders.get(parts[0], False) or len(parts) > 2
            if parts[0] not in images and is_image_name(name):
                images[parts[0]] = name
    return [TopFolder(top, has_folders, partial(images.get, top)) for top, has_folders in have_folders.items()]


def _add(path: Path, classes: dict[str, Listing], of: str, below: str, everything: Listing, entry: int) -> None:
    """Add a member to the class `of`; the end `below` of its path is what is kept as its member."""
    if len(classes) == MAX_CLASSES and of not in classes:
        raise SourceError(f"{printable(path)} has more than {MAX_CLASSES} classes; use fewer classes")
    folder = f"{path.name}!{everything.name(entry).removesuffix(below)}"
    listing = classes.setdefault(of, Listing())
    listing.add(folder, below, 0, everything.size(entry), everything.offset(entry))


def _wrapping_depth(everything: Listing) -> int:
    """Return how many folders enclose everything: each is the only one, and has no image beside its folders."""
    for depth in range(8):
        tops, has_folders = set(), False
        for parts in (everything.name(entry).split("/") for entry in range(len(everything))):
            is_loose = len(parts) == depth + 1 or (len(parts) == depth + 2 and is_image_name(parts[-1]))
            tops.add("" if is_loose else parts[depth])
            has_folders = has_folders or len(parts) > depth + 2
        if len(tops) != 1 or "" in tops or not has_folders or split_of(tops.pop()) is not None:
            return depth
    return 8


def _read_folders(
    path: Path,
    open_once: Callable[[], Archive],
    split: str,
    tree: _Tree,
    united: UnitedClasses,
    class_from: ClassFrom,
    members_of: dict[str, Listing],
) -> FoundSplit:
    united.check(split)
    named = name_classes(tree.name_files, united.ids)
    classes = index_classes(united.ids, named.names, str(path))
    listing = Listing(classes, "path" if class_from == "leaf" else "class")
    for label, each in enumerate(classes):
        found = members_of.get(each.id, Listing())
        for entry in range(len(found)):
            member = found.member(entry)
            listing.add(found.name(entry).removesuffix(member), member, label, found.size(entry), found.offset(entry))
    notes = (*united.notes, *named.notes, *tree.notes.get(split, ()))
    return FoundSplit(split, classes, listing, open_once(), notes=notes)
