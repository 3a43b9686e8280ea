"""The classes of all splits, and their names, from `classes.txt` or `LOC_synset_mapping.txt` beside the images.

Owns how a line names a class, whose identifier may contain blanks, and which identifiers look alike. Must not know:
layouts.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal, NamedTuple

from loopfeed.preprocess.printable import composed, first_names, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.sources.listing import SourceError, order_classes
from loopfeed.preprocess.sources.selection import is_image_name
from loopfeed.preprocess.suggestions import describe_forms
from loopfeed.preprocess.system_errors import reading_remedy

NAME_FILES = ("classes.txt", "LOC_synset_mapping.txt")
_REMEDY = "correct or remove it"
_NUMBER = re.compile(r"0*+((?:[1-9][0-9]*)?)(?<=[0-9])(?:\.0*)?")
MAX_NAME_FILE_BYTES = 16 * 2**20  # ImageNet's is 32 KB


ClassFrom = Literal["top", "leaf"]
"""Which folder is the class of an image: the outermost one below its split, or the one that contains it."""


def check_class_from(class_from: ClassFrom, root: Path, description: str) -> None:
    """Raise SourceError if a layout that knows its own classes should take them from other folders."""
    if class_from != "top":
        raise SourceError(f"--class-from is about class folders, but {printable(root)} is {description}; leave it out")


@dataclass(frozen=True)
class NameFile:
    """A file of class names.

    Attributes:
        where: its location, for messages.
        lines: its lines without blanks around them; empty lines are left out.
    """

    where: str
    lines: tuple[str, ...]

    @property
    def first_words(self) -> set[str]:
        """The first word of each line, which is the identifier if no identifier contains blanks."""
        return {line.split(None, 1)[0] for line in self.lines}


class ClassNames(NamedTuple):
    """Readable names by identifier, of the classes that have one, and one-line messages about their files."""

    names: dict[str, str]
    notes: tuple[str, ...]


class UnitedClasses(NamedTuple):
    """The identifiers of the classes of all splits, and one-line messages about them.

    Attributes:
        ids: the identifiers.
        notes: the messages.
        faults: what is wrong with a split that has other classes, by its name.
    """

    ids: tuple[str, ...]
    notes: tuple[str, ...]
    faults: dict[str, str]

    def check(self, split: str) -> None:
        """Raise SourceError if a split has a class that is not known."""
        if split in self.faults:
            raise SourceError(self.faults[split])


def read_name_files(*folders: Path) -> list[NameFile]:
    """Read the files of class names in folders.

    Raises:
        SourceError: such a file cannot be read as UTF-8 text.
    """
    files = []
    for path in (folder / name for folder in folders for name in NAME_FILES):
        if path.exists() and not path.is_dir():
            try:
                content = read_regular(path, max_bytes=MAX_NAME_FILE_BYTES)
            except OSError as error:
                remedy = reading_remedy(error, _REMEDY)
                raise _unreadable(str(path), error.strerror, remedy) from error
            files.append(parse_name_file(content, str(path)))
    return files


def parse_name_file(content: bytes, where: str) -> NameFile:
    """Return the lines of a file of class names; a byte order mark is left out.

    Raises:
        SourceError: the content is not UTF-8 text.
    """
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _unreadable(where, error) from error
    return NameFile(where, tuple(filter(None, map(str.strip, text.splitlines()))))


def name_classes(files: Iterable[NameFile], ids: Collection[str], *, numeric: bool = False) -> ClassNames:
    """Return the names that files give to classes; the first name of a class counts.

    A line is an identifier alone, or an identifier, white space, and a name up to the first comma ("n01440764 tench,
    Tinca tinca"). A line that is an identifier as a whole is never divided. If such lines contain blanks, or are not
    fewer than the lines that could be divided, the file is a list of identifiers, and only a tab divides its other
    lines: "red panda" does not name the class "red" in a list that contains the class "red fox".

    Args:
        files: the files.
        ids: the identifiers of all classes.
        numeric: whether whole numbers are in numerical order, as of `index_classes`.
    """
    # The same text in another form of Unicode is the same identifier.
    by_text = {composed(each): each for each in ids}
    names: dict[str, str] = {}
    notes: list[str] = []
    for file in files:
        found, unmatched = _match(file, by_text)
        for each, name in found.items():
            names[each] = names.get(each) or name
        notes += _describe(file, found, unmatched, order_classes(ids, numeric=numeric))
    return ClassNames({each: name for each, name in names.items() if name}, tuple(notes))


def unite_classes(
    ids_of: Mapping[str, Collection[str]],
    files: Collection[NameFile],
    where: str,
    naming: str = f"name it in {NAME_FILES[0]}",
) -> UnitedClasses:
    """Return the classes of all splits: those of the first, and those that a file names too.

    A split may lack classes of the first one, usually `train`: labels are positions among the classes of all splits.
    That another one has more is a fault of that split.

    Args:
        ids_of: the identifiers of the classes of each split, the first one first.
        files: the files of class names.
        where: the source, for messages.
        naming: how a class is named of which no split has an image, for messages.
    """
    (first, known), *others = ids_of.items()
    ids, faults = dict.fromkeys(known), {}
    notes = describe_alike(known, printable(where))
    alike = {_alike(each): each for each in known}
    for split, found in others:
        only = sorted(set(found) - set(known))
        named = name_lines(files, only)
        pairs = [(alike[_alike(each)], each) for each in only if _alike(each) in alike]
        unknown = [each for each in only if each not in named]
        if pairs:
            other, each = pairs[0]
            faults[split] = (
                f"{first} has {printable(other)}, which differs from {printable(each)} only in "
                f"{_difference(other, each)}; rename it so that both splits have the same name"
            )
        elif unknown:
            faults[split] = (
                f"put images of each into {first}, remove it from {split}, or {naming} if {first} has no image of it"
            )
        if split in faults:
            lacks = (
                f"{quantity(len(only), 'class')} that {first} lacks: {first_names([pairs[0][1]] if pairs else unknown)}"
            )
            faults[split] = f"the split {split} has {lacks}; {faults[split]}"
        else:
            ids |= dict.fromkeys(only)
    notes += describe_lacking({split: found for split, found in ids_of.items() if split not in faults}, ids)
    return UnitedClasses(tuple(ids), tuple(notes), faults)


def describe_lacking(ids_of: Mapping[str, Collection[str]], ids: Collection[str]) -> list[str]:
    """Return a message for each split that has no image of some of the classes `ids`."""
    lacking = {split: sorted(set(ids) - set(found)) for split, found in ids_of.items()}
    return [
        f"{split} has no image of {quantity(len(each), 'class')}: {first_names(each)}"
        for split, each in lacking.items()
        if each
    ]


def name_lines(files: Iterable[NameFile], ids: Collection[str]) -> set[str]:
    """Return those of some identifiers that have a line in a file of class names."""
    by_text = {composed(each): each for each in ids}
    return {each for file in files for each in _match(file, by_text)[0]} if by_text else set()


def leaf_folders(paths: Iterable[str]) -> list[str]:
    """Return the folders of files that are classes by themselves: those that contain an image.

    A folder that contains no folder is one too: images may have any suffix.
    """
    has_image: dict[str, bool] = {}
    for inside, slash, name in (each.rpartition("/") for each in paths):
        if slash:
            has_image[inside] = has_image.get(inside, False) or is_image_name(name)
    # What is in a folder follows it in this order: no name has a zero character.
    ordered = sorted(each.replace("/", "\0") for each in has_image)
    outer = {each for each, following in pairwise(ordered) if following.startswith(f"{each}\0")}
    return [each for each, has in has_image.items() if has or each.replace("/", "\0") not in outer]


def describe_leaves(folders: Iterable[str]) -> list[str]:
    """Return a message if folders of the same name are one class; none if all have names of their own."""
    by_name: dict[str, list[str]] = {}
    for each in sorted(folders):
        by_name.setdefault(each.rpartition("/")[2], []).append(each)
    same = [each for each in by_name.values() if len(each) > 1]
    if not same:
        return []
    more = f" (and {quantity(len(same) - 1, 'more name')} of several folders)" if same[1:] else ""
    return [f"{printable(same[0][0])}/ and {printable(same[0][1])}/ are the same class{more}"]


def describe_alike(ids: Iterable[str], where: str) -> list[str]:
    """Return a message if identifiers look as if they meant the same class; none if there are no such two."""
    by_look: dict[str, list[str]] = {}
    for each in ids:
        by_look.setdefault(_alike(each), []).append(each)
    pairs = [sorted(each)[:2] for each in by_look.values() if len(each) > 1]
    if not pairs:
        return []
    one, other = pairs[0]
    more = f" (and {quantity(len(pairs) - 1, 'more pair')})" if pairs[1:] else ""
    return [
        f"warning: {where} has two classes that differ only in {_difference(one, other)}: {printable(one)} and "
        f"{printable(other)}{more}; rename one if they are the same"
    ]


def _alike(identifier: str) -> str:
    """Return what is the same for identifiers that people take for one: forms, case, blanks, and "01" and "1"."""
    text = " ".join(composed(identifier).casefold().split())
    return number[1] or "0" if (number := _NUMBER.fullmatch(text)) else text


def _difference(one: str, other: str) -> str:
    if forms := describe_forms(one, other):
        return f"Unicode form ({forms})"
    if " ".join(composed(one).split()) == " ".join(composed(other).split()):
        return f"blanks ({one!r}, not {other!r})"
    return (
        "case" if composed(one).casefold().split() == composed(other).casefold().split() else "how a number is written"
    )


def _match(file: NameFile, by_text: Mapping[str, str]) -> tuple[dict[str, str], list[str] | None]:
    """Return the name that a file gives each class, "" for none, in the order of the file.

    Also returns the lines that are no class if the file is a list of identifiers, else None.
    """
    lines = [composed(line) for line in file.lines]
    whole, longest = [line for line in lines if line in by_text], max(map(len, by_text), default=0)
    pairs = {line: _divide(line, by_text, longest) for line in lines if line not in by_text}
    divided = {line: pair for line, pair in pairs.items() if pair is not None}
    is_list = bool(whole) and (any(len(line.split()) > 1 for line in whole) or len(whole) >= len(divided))
    found: dict[str, str] = {}
    unmatched = []
    for line in lines:
        if line in by_text:
            found.setdefault(by_text[line], "")
        elif line in divided and (not is_list or "\t" in line):
            identifier, name = divided[line]
            found[by_text[identifier]] = found.get(by_text[identifier]) or name
        else:
            unmatched.append(line)
    return found, unmatched if is_list else None


def _divide(line: str, by_text: Mapping[str, str], longest: int) -> tuple[str, str] | None:
    """Return the longest identifier, followed by white space, with which a line begins, and the name after it."""
    for stop in range(min(len(line) - 1, longest), 0, -1):
        if line[stop].isspace() and line[:stop] in by_text:
            return line[:stop], line[stop:].partition(",")[0].strip()
    return None


def _describe(file: NameFile, found: dict[str, str], unmatched: list[str] | None, in_order: list[str]) -> list[str]:
    where, notes = printable(file.where), []
    if not found and file.lines:
        return [f'{where} names no class (its first line is "{printable(file.lines[0])}"), so it is not used']
    if unmatched:
        count = quantity(len(unmatched), "line")
        notes.append(f'{where} has {count} without a class, such as "{printable(unmatched[0])}"')
    if list(found) != [each for each in in_order if each in found]:
        shown = ", ".join(f"{label} {printable(each)}" for label, each in enumerate(in_order[:2]))
        notes.append(
            f"{where} has the classes in another order: labels are in the order of the identifiers ({shown}"
            f"{', …' * (len(in_order) > 2)}), whatever the order of that file"
        )
    return notes


def _unreadable(where: str, reason: object, remedy: str = _REMEDY) -> SourceError:
    return SourceError(f"{printable(where)} cannot be read as UTF-8 text: {reason}; {remedy}")
