"""Reads the rows of a table as spreadsheets and programs write it: CSV with any usual separator, TSV, or JSON lines.

Owns the encoding, the separator and the header, and what is a fault of them, each with its file and line. Does not know
what a column means.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

from loopfeed.preprocess.file_kinds import HEAD_BYTES, JSON_TEXT, SAVE_AS_CSV, UNPACK, kind_of
from loopfeed.preprocess.printable import is_unicode, printable
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.system_errors import reading_remedy

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson")
_SPREADSHEETS = (".xlsx", ".xlsm", ".xls", ".ods", ".numbers")
SEPARATORS = (",", ";", "\t")
OPEN_QUOTE = "a quoted field does not end on its line"

MAX_FILE_BYTES = 2**30
MAX_LINE_BYTES = 2**21
_SHOWN_CHARACTERS = 60
_SEPARATOR_NAMES = {",": "a comma", ";": "a semicolon", "\t": "a tab"}
_QUOTED = re.compile('"[^"]*"')
_EXCELS_LINE = re.compile("sep=([,;\t])\\s*", re.IGNORECASE)
"""Tells Excel the separator; it stands before the header."""
_UTF16_MARKS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True, slots=True)
class JsonCells:
    """The cells of an object, which are looked up one by one: the first object may have any number of keys."""

    keys: tuple[str, ...]
    document: dict[str, Any]

    def __getitem__(self, place: int) -> Any:
        return self.document.get(self.keys[place])


type Cells = list[Any] | JsonCells
"""The cells of a row in the order of the columns: text in CSV, values in JSON lines, None without a key."""


def _source_error(where: str, fault: str, remedy: str) -> SourceError:
    return SourceError(f"{where}: {fault}; {remedy}")


@dataclass
class TableFile:
    """A table whose header is read, and whose rows are read once.

    Attributes:
        file: the file.
        digest: SHA-256 of its bytes, hexadecimal.
        is_json: whether it has JSON lines.
        columns: the names of the columns without blanks around them, or the keys of the first object.
        line: the number of the line that was read last, from 1; at first that of the header or first object.
        separator: what separates the fields of CSV.
        cells: the number of the line, from 1, and the cells of each row.
        error: makes the error of a fault from the file and line that it is in, the fault, and what to do.
        several: what else to do about a row with more fields than the header.
    """

    file: Path
    digest: str = ""
    is_json: bool = False
    columns: tuple[str, ...] = ()
    line: int = 0
    separator: str = ","
    cells: Iterator[tuple[int, Cells]] = field(default=iter(()), repr=False)
    error: Callable[[str, str, str], Exception] = field(default=_source_error, repr=False)
    several: str = ""

    def fail(self, line: int | None, fault: str, remedy: str) -> NoReturn:
        """Raise the error of a fault in a line, or in the whole file."""
        raise self.error(printable(self.file) + ("" if line is None else f", line {line}"), fault, remedy)


def open_table(
    path: str | Path,
    *,
    what: str = "the file of labels",
    remedy: str = "check --labels",
    max_bytes: int | None = None,
) -> TableFile:
    """Read a table and its header.

    Args:
        path: the file.
        what: what it is, for messages.
        remedy: what to do if there is no such file.
        max_bytes: a larger file is refused; None is 1 GiB.

    Raises:
        SourceError: the file cannot be read, is no table, or breaks a rule; the message names the line. Its rows raise
            it too.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix in _SPREADSHEETS:
        raise SourceError(f"{what} {printable(file)} is a spreadsheet; {SAVE_AS_CSV}")
    if suffix not in SUFFIXES:
        raise SourceError(
            f"{what} must end with {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}, got {printable(file)}; "
            "rename it, or save it in one of these forms"
        )
    table = TableFile(file, is_json=suffix in (".jsonl", ".ndjson"), several=", and separate several classes by |")
    try:
        content = read_regular(file, max_bytes=max_bytes or MAX_FILE_BYTES)
    except OSError as error:
        raise SourceError(
            f"{what} {printable(file)} cannot be read: {error.strerror}; {reading_remedy(error, remedy)}"
        ) from error
    read_header(table, content)
    return table


def read_header(table: TableFile, content: bytes) -> None:
    """Read the header of a table from the bytes of its file; its rows then wait in `cells`.

    Raises:
        Exception: that of the table's `error`: it is no table, or breaks a rule. Its rows raise it too.
    """
    table.digest = hashlib.sha256(content).hexdigest()
    lines = _lines_of(table, _as_utf8(table, content))
    try:
        (_open_json if table.is_json else _open_csv)(table, lines)
    except RecursionError:
        table.fail(table.line, "its values are nested too deeply", "give a flat object")


def _as_utf8(table: TableFile, content: bytes) -> bytes:
    """Return the content as UTF-8: spreadsheets also write UTF-16, with a mark at its begin."""
    if content.startswith(_UTF16_MARKS):
        try:
            content = content.decode("utf-16").encode()
        except UnicodeError as error:
            table.fail(None, f"it begins as UTF-16, but is not ({error})", "save the file as UTF-8")
    found = kind_of(content[:HEAD_BYTES])
    if found is not None and found != JSON_TEXT and (found.is_lost or found.remedy in (UNPACK, SAVE_AS_CSV)):
        table.fail(None, f"it is {found.name}", found.remedy)
    if b"\0" in content[:HEAD_BYTES]:
        table.fail(None, "it has zero bytes, so it is not UTF-8", "save the file as UTF-8")
    # Programs of old Macs end lines with a carriage return alone.
    return content if b"\n" in content else content.replace(b"\r", b"\n")


def _lines_of(table: TableFile, content: bytes) -> Iterator[str]:
    """Yield the lines of the file, each with its line break, and keep the number of the last one in `table`."""
    for number, line in enumerate(io.BytesIO(content), start=1):
        table.line = number
        if len(line) > MAX_LINE_BYTES:
            table.fail(
                number, f"the line has {len(line):,} bytes, more than the {MAX_LINE_BYTES:,} allowed", "shorten it"
            )
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            table.fail(number, f"byte {error.start + 1} of the line is not UTF-8", "save the file as UTF-8")


def _open_csv(table: TableFile, lines: Iterator[str]) -> None:
    header = next((line for line in lines if line.strip()), None)
    separators: tuple[str, ...] = ("\t", *SEPARATORS) if table.file.suffix.lower() == ".tsv" else SEPARATORS
    if header is not None and (found := _EXCELS_LINE.fullmatch(header)):
        separators = (found[1],)
        header = next((line for line in lines if line.strip()), None)
    if header is None:
        table.fail(None, "the file is empty", "begin with a line such as path,class")
    unquoted = _QUOTED.sub("", header)
    table.separator = max(separators, key=unquoted.count)  # the first of those that occur most often
    try:
        (fields,) = csv.reader([header], strict=True, delimiter=table.separator, skipinitialspace=True)
    except csv.Error as error:
        table.fail(table.line, f"the header cannot be read: {_fault_of(error)}", "correct the line")
    table.columns = tuple(each.strip() for each in fields)
    table.cells = _csv_cells(table, lines)


def _csv_cells(table: TableFile, lines: Iterator[str]) -> Iterator[tuple[int, Cells]]:
    """Yield the rows of CSV. Rows and fields that a spreadsheet appends are empty, and left out."""
    count = len(table.columns)
    for number, fields in _csv_rows(table, lines):
        if len(fields) == count and fields[0]:
            yield number, fields
            continue
        if not any(each.strip() for each in fields):
            continue
        if len(fields) < count or any(each.strip() for each in fields[count:]):
            are = "is 1 field" if len(fields) == 1 else f"are {len(fields):,} fields"
            table.fail(
                number,
                f"there {are} where the header names {count:,}",
                f"give one for each column, quote fields that contain {_SEPARATOR_NAMES[table.separator]}"
                f"{table.several}",
            )
        yield number, fields[:count]


def _csv_rows(table: TableFile, lines: Iterator[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield the number of the first line and the fields of each row."""
    rows = csv.reader(lines, strict=True, delimiter=table.separator, skipinitialspace=True)
    while True:
        start = table.line + 1
        try:
            fields = next(rows, None)
        except csv.Error as error:
            is_open = "unexpected end" in str(error) or table.line > start
            table.fail(start, OPEN_QUOTE if is_open else _fault_of(error), "correct the line")
        if fields is None:
            return
        yield start, fields


def _fault_of(error: csv.Error) -> str:
    # Python's message is about its own argument.
    return "a carriage return is within the line" if "new-line" in str(error) else str(error)


def _open_json(table: TableFile, lines: Iterator[str]) -> None:
    documents = _json_objects(table, lines)
    first = next(documents, None)
    if first is None:
        table.fail(None, "the file is empty", 'give one line like {"path": "a.jpg", "class": "cat"} per image')
    number, document = first
    keys = tuple(document)
    if not all(map(is_unicode, keys)):
        table.fail(
            number,
            f"the key {shown(next(each for each in keys if not is_unicode(each)))} is not valid Unicode",
            "rename it",
        )
    table.columns, table.line = tuple(key.strip() for key in keys), number

    def rows() -> Iterator[tuple[int, Cells]]:
        yield number, JsonCells(keys, document)
        for line, each in documents:
            yield line, JsonCells(keys, each)

    table.cells = rows()


def _json_objects(table: TableFile, lines: Iterator[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    for line in lines:
        if not line.strip():
            continue
        number = table.line
        try:
            document = json.loads(line, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            table.fail(number, f"not valid JSON ({shown(str(error))})", "write one object per line")
        if not isinstance(document, dict):
            table.fail(number, f"a line must be an object, found {type(document).__name__}", "correct it")
        yield number, document


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if twice := repeated([key for key, _ in pairs]):
        raise ValueError(f"the key {twice} occurs twice")
    return dict(pairs)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a finite number")


def repeated(names: list[str] | tuple[str, ...]) -> str | None:
    """Return a name that occurs twice, or None."""
    if len(set(names)) == len(names):
        return None
    return next(name for name, following in pairwise(sorted(names)) if name == following)


def shown(text: str) -> str:
    """Return a text for a message, cut if it is long."""
    return printable(text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}…")
