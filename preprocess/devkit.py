"""Reads ImageNet's development kit: which WordNet id each class number means, its words, and the validation labels."""

import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from preprocess.listing import SourceError
from preprocess.matfile import MatFileError, read_matfile

ARCHIVE = "ILSVRC2012_devkit_t12.tar.gz"
FOLDER = "ILSVRC2012_devkit_t12"
SYNSETS_FILE = "data/meta.mat"
GROUND_TRUTH_FILE = "data/ILSVRC2012_validation_ground_truth.txt"

# meta.mat has 0.3 MB and the ground truth 0.2 MB; this only keeps a forged archive from filling the memory.
_MAX_MEMBER_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Devkit:
    """What the development kit says.

    Attributes:
        names: WordNet id to readable name, for the classes that have images (1000 in the official kit).
        validation_ids: WordNet id of validation image 1, 2, … in this order.
    """

    names: dict[str, str]
    validation_ids: list[str]


def find_devkit(folder: Path) -> Devkit | None:
    """Reads the development kit in a folder, packed or unpacked; None where there is none.

    Raises:
        SourceError: it is there and cannot be understood.
    """
    if (folder / ARCHIVE).is_file():
        path = folder / ARCHIVE
        return _read(path, _members_of(path))
    path = folder / FOLDER
    if path.is_dir():
        try:
            return _read(path, {name: (path / name).read_bytes() for name in (SYNSETS_FILE, GROUND_TRUTH_FILE)})
        except OSError as error:
            raise SourceError(f"{error.filename} cannot be read: {error.strerror}; unpack {ARCHIVE} again") from error
    return None


def _members_of(path: Path) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:gz") as archive:
            for member in archive:
                wanted = next(
                    (name for name in (SYNSETS_FILE, GROUND_TRUTH_FILE) if member.name.endswith("/" + name)), None
                )
                if wanted and member.size > _MAX_MEMBER_BYTES:
                    raise SourceError(f"{path}: its {wanted} has {member.size} bytes, too many; download it again")
                if wanted and member.isreg():
                    content = archive.extractfile(member)
                    found[wanted] = content.read() if content else b""
                if len(found) == 2:
                    break
    except SourceError:
        raise
    except (OSError, EOFError, tarfile.TarError, ValueError) as error:
        raise SourceError(f"{path} cannot be read: {error}; download it again") from error
    return found


def _read(path: Path, members: dict[str, bytes]) -> Devkit:
    for name in (SYNSETS_FILE, GROUND_TRUTH_FILE):
        if name not in members:
            raise SourceError(f"{path} has no {name}; is it the development kit of tasks 1 and 2?")
    id_of, names = _read_synsets(path, members[SYNSETS_FILE])
    validation_ids = []
    for line, number in enumerate(members[GROUND_TRUTH_FILE].split(), start=1):
        if not number.isdigit() or int(number) not in id_of:
            found = number.decode("latin-1")
            raise SourceError(
                f"{path}, {GROUND_TRUTH_FILE}, line {line}: {found!r} is no class number of {SYNSETS_FILE}"
            )
        validation_ids.append(id_of[int(number)])
    return Devkit(names, validation_ids)


def _read_synsets(path: Path, content: bytes) -> tuple[dict[int, str], dict[str, str]]:
    """Class number to WordNet id, and WordNet id to name, of the synsets without children (those with images)."""
    try:
        synsets = read_matfile(content)["synsets"]
        leaves = [synset for synset in synsets if _number(synset["num_children"]) == 0]
        id_of = {_number(synset["ILSVRC2012_ID"]): synset["WNID"] for synset in leaves}
        names = {synset["WNID"]: synset["words"].partition(",")[0] for synset in leaves}
    except (MatFileError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise SourceError(f"{path}, {SYNSETS_FILE}: the table of synsets cannot be read: {error}") from error
    return id_of, names


def _number(value: Any) -> int:
    return int(value.flat[0])
