"""The readable names of classes, from `classes.txt` or `LOC_synset_mapping.txt` beside the images.

Owns how a line names a class, whose identifier may contain blanks. Must not know: layouts.
"""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from loopfeed.preprocess.printable import composed, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.system_errors import reading_remedy

NAME_FILES = ("classes.txt", "LOC_synset_mapping.txt")
_REMEDY = "correct or remove it"
MAX_NAME_FILE_BYTES = 16 * 2**20  # ImageNet's is 32 KB


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


def name_classes(files: Iterable[NameFile], ids: Collection[str]) -> ClassNames:
    """Return the names that files give to classes; the first name of a class counts.

    A line is an identifier alone, or an identifier, white space, and a name up to the first comma ("n01440764 tench,
    Tinca tinca"). A line that is an identifier as a whole is never divided. If such lines contain blanks, or are not
    fewer than the lines that could be divided, the file is a list of identifiers, and only a tab divides its other
    lines: "red panda" does not name the class "red" in a list that contains the class "red fox".

    Args:
        files: the files.
        ids: the identifiers of all classes.
    """
    # The same text in another form of Unicode is the same identifier.
    by_text = {composed(each): each for each in ids}
    names: dict[str, str] = {}
    notes: list[str] = []
    for file in files:
        found, unmatched = _match(file, by_text)
        for each, name in found.items():
            names[each] = names.get(each) or name
        notes += _describe(file, found, unmatched, ids)
    return ClassNames({each: name for each, name in names.items() if name}, tuple(notes))


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


def _describe(file: NameFile, found: dict[str, str], unmatched: list[str] | None, ids: Collection[str]) -> list[str]:
    where, notes = printable(file.where), []
    if not found and file.lines:
        return [f'{where} names no class folder (its first line is "{printable(file.lines[0])}"), so it is not used']
    if unmatched:
        count = quantity(len(unmatched), "line")
        notes.append(f'{where} has {count} without a class folder, such as "{printable(unmatched[0])}"')
    in_order = sorted(found, key=lambda each: each.encode("utf-8", "surrogateescape"))
    if list(found) != in_order:
        labels = sorted(ids, key=lambda each: each.encode("utf-8", "surrogateescape"))
        shown = ", ".join(f"{label} {printable(each)}" for label, each in enumerate(labels[:2]))
        notes.append(
            f"{where} has the classes in another order: labels are in the order of the class folders ({shown}"
            f"{', …' * (len(labels) > 2)}), whatever the order of that file"
        )
    return notes


def _unreadable(where: str, reason: object, remedy: str = _REMEDY) -> SourceError:
    return SourceError(f"{printable(where)} cannot be read as UTF-8 text: {reason}; {remedy}")
