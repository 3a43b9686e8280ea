"""Reads ImageNet's development kit: the WordNet id and name for each class number, and the validation labels."""

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.matfile import MatFileError, read_matfile
from loopfeed.preprocess.sources.tarindex import members
from loopfeed.preprocess.system_errors import error_text, reading_remedy

ARCHIVE = "ILSVRC2012_devkit_t12.tar.gz"
FOLDER = "ILSVRC2012_devkit_t12"
SYNSETS_FILE = "data/meta.mat"
GROUND_TRUTH_FILE = "data/ILSVRC2012_validation_ground_truth.txt"

# The archive is 2.5 MB, meta.mat 0.3 MB and the ground truth 0.2 MB. These limits only prevent a forged kit from
# exhausting memory or time.
_MAX_ARCHIVE_BYTES = 64 * 2**20
_MAX_UNPACKED_BYTES = 128 * 2**20
_MAX_MEMBER_BYTES = 32 * 2**20
_MAX_GZIP_PARTS = 1_000
_MAX_NUMBER_DIGITS = 9
_MAX_ID_CHARACTERS = 255

_GZIP_MAGIC = b"\x1f\x8b"


@dataclass(frozen=True)
class Devkit:
    """The class names and validation labels of the development kit.

    Attributes:
        names: WordNet id to readable name, for the classes that have images (1000 in the official kit).
        validation_ids: WordNet ids of validation images 1, 2, …, in that order.
    """

    names: dict[str, str]
    validation_ids: list[str]


def find_devkit(folder: Path) -> Devkit | None:
    """Read the development kit, archived or unpacked, from a folder; return None if the folder has none.

    Raises:
        SourceError: the kit cannot be read.
    """
    path = folder / ARCHIVE
    if path.exists():
        return _read(path, _members_of(path))
    path = folder / FOLDER
    if path.is_dir():
        names = (SYNSETS_FILE, GROUND_TRUTH_FILE)
        try:
            return _read(path, {name: read_regular(path / name, max_bytes=_MAX_MEMBER_BYTES) for name in names})
        except OSError as error:
            shown = printable(error.filename or path)
            remedy = reading_remedy(error, f"unpack {ARCHIVE} again")
            raise SourceError(f"{shown} cannot be read: {error.strerror}; {remedy}") from error
    return None


@dataclass(frozen=True)
class _Unpacked:
    """An uncompressed archive in memory that `members` can list."""

    path: Path
    content: bytes

    @property
    def num_bytes(self) -> int:
        return len(self.content)

    def read(self, offset: int, size: int) -> bytes:
        return self.content[offset : offset + size]


def _members_of(path: Path) -> dict[str, bytes]:
    shown = printable(path)
    try:
        tar = _Unpacked(path, _unpack(read_regular(path, max_bytes=_MAX_ARCHIVE_BYTES)))
    except (OSError, zlib.error, ValueError) as error:
        raise SourceError(
            f"{shown} cannot be read: {error_text(error)}; {reading_remedy(error, 'download it again')}"
        ) from error
    found: dict[str, bytes] = {}
    for member in members(tar):
        wanted = next((name for name in (SYNSETS_FILE, GROUND_TRUTH_FILE) if member.name.endswith("/" + name)), None)
        if wanted and member.size > _MAX_MEMBER_BYTES:
            raise SourceError(
                f"{wanted} in {shown} has {member.size} bytes, more than the {_MAX_MEMBER_BYTES} allowed; "
                "download the archive again"
            )
        if wanted:
            found[wanted] = tar.read(member.offset, member.size)
        if len(found) == 2:
            break
    return found


def _unpack(packed: bytes) -> bytes:
    """Decompress a gzip file, which may consist of several concatenated streams.

    zlib parses the headers in C, while Python's gzip module reads a name in them byte by byte.

    Raises:
        ValueError: the file is not gzip, ends early, or unpacks to more than a kit can have.
        zlib.error: the file is damaged.
    """
    if not packed.startswith(_GZIP_MAGIC):
        raise ValueError("it is not a gzip file")
    parts: list[bytes] = []
    left = _MAX_UNPACKED_BYTES
    for _ in range(_MAX_GZIP_PARTS):
        if not packed.startswith(_GZIP_MAGIC):
            break
        unpacker = zlib.decompressobj(wbits=31)
        parts.append(unpacker.decompress(packed, left + 1))
        left -= len(parts[-1])
        if left < 0:
            raise ValueError(f"it unpacks to more than the {_MAX_UNPACKED_BYTES:,} bytes allowed")
        if not unpacker.eof:
            raise ValueError("it ends early")
        packed = unpacker.unused_data
    return b"".join(parts)


def _read(path: Path, contents: dict[str, bytes]) -> Devkit:
    shown = printable(path)
    for name in (SYNSETS_FILE, GROUND_TRUTH_FILE):
        if name not in contents:
            raise SourceError(f"{shown} has no {name}; use the development kit for tasks 1 and 2")
    id_of, names = _read_synsets(path, contents[SYNSETS_FILE])
    validation_ids = []
    for line, number in enumerate(contents[GROUND_TRUTH_FILE].split(), start=1):
        if not number.isdigit() or len(number) > _MAX_NUMBER_DIGITS or int(number) not in id_of:
            found = number[:40].decode("latin-1")
            raise SourceError(
                f"{shown}, {GROUND_TRUTH_FILE}, line {line}: {found!r} is not a class number in {SYNSETS_FILE}; "
                "download the development kit again"
            )
        validation_ids.append(id_of[int(number)])
    return Devkit(names, validation_ids)


def _read_synsets(path: Path, content: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Return WordNet ids by class number and names by WordNet id for synsets with images (those without children)."""
    try:
        synsets = read_matfile(content)["synsets"]
        leaves = [synset for synset in synsets if _number(synset["num_children"]) == 0]
        id_of = {_number(synset["ILSVRC2012_ID"]): synset["WNID"] for synset in leaves}
        names = {synset["WNID"]: synset["words"].partition(",")[0] for synset in leaves}
        _check_ids(names)
    except MatFileError as error:
        raise SourceError(f"{printable(path)}, {SYNSETS_FILE}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError, ValueError, OverflowError) as error:
        raise SourceError(
            f"{printable(path)}, {SYNSETS_FILE}: the table of synsets cannot be read: {error}; "
            "download the development kit again"
        ) from error
    return id_of, names


def _check_ids(names: dict[str, str]) -> None:
    for each in names:
        if not isinstance(each, str) or not 0 < len(each) <= _MAX_ID_CHARACTERS:
            raise ValueError(f"a WordNet id must have 1 to {_MAX_ID_CHARACTERS} characters, found {str(each)[:40]!r}")


def _number(value: Any) -> int:
    return int(value.flat[0])
