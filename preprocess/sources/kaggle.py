"""Reads the unpacked files of Kaggle's "ImageNet Object Localization Challenge".

Training images are in class folders, validation images in one folder with a table of labels. The test images have no
labels and are not read.
"""

import csv
import io
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.regular_file import read_regular
from loopfeed.preprocess.sources.class_names import name_classes, read_name_files
from loopfeed.preprocess.sources.listing import FoundSplit, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.tree import FolderStore, file_size, list_folder, read_class_folders
from loopfeed.preprocess.system_errors import reading_remedy

IMAGES = Path("ILSVRC/Data/CLS-LOC")
SOLUTION_FILE = "LOC_val_solution.csv"
MAPPING_FILE = "LOC_synset_mapping.txt"

# The official table has 50,000 lines and is 2.7 MB in size.
_MAX_TABLE_BYTES = 64 * 2**20
_MAX_TABLE_ROWS = 1_000_000


def find_kaggle_tree(root: Path) -> Path | None:
    """Return the folder that contains Kaggle's train/ or val/, or None if there is none.

    The folder is `root` itself or up to three levels below it.
    """
    candidates = [root.joinpath(*IMAGES.parts[skipped:]) for skipped in range(len(IMAGES.parts))]
    if root.absolute().parts[-len(IMAGES.parts) :] == IMAGES.parts:
        candidates.append(root)
    return next((each for each in candidates if (each / "train").is_dir() or (each / "val").is_dir()), None)


def kaggle_openers(root: Path, images: Path) -> dict[str, Callable[[], FoundSplit]]:
    """Return, for each labelled split, a function that lists its images, with names relative to `root`."""
    top = Path(os.path.normpath(images.absolute())).parents[len(IMAGES.parts) - 1]
    names_in = (top, images / "train", images / "val")
    openers: dict[str, Callable[[], FoundSplit]] = {}
    if (images / "train").is_dir():
        openers["train"] = partial(read_class_folders, root, images / "train", "train", names_in=names_in)
    if (images / "val").is_dir():
        openers["val"] = partial(_read_val, root, images / "val", top, names_in)
    return openers


def _read_val(root: Path, folder: Path, top: Path, names_in: tuple[Path, ...]) -> FoundSplit:
    """List the validation images.

    They are either all in one folder, as in Kaggle's archive, or in class folders made by a script.

    Raises:
        SourceError: the table of labels is missing or damaged, has no line for an image, or its classes differ from
            those in the mapping of readable names.
    """
    ignored: Counter[str] = Counter()
    folders, files = list_folder(folder, ignored)
    if folders:
        return read_class_folders(root, folder, "val", names_in=names_in)
    id_of = _read_solution(top / SOLUTION_FILE)
    for entry in files:
        if Path(entry.name).stem not in id_of:
            raise SourceError(
                f"{printable(entry.path)} has no class in {printable(top / SOLUTION_FILE)}; "
                "remove the image or add it to the table"
            )
    ids, name_files = set(id_of.values()), read_name_files(top)
    if in_mapping := {word for file in name_files for word in file.first_words}:
        _check_ids(ids, in_mapping, top)
    classes = index_classes(ids, name_classes(name_files, ids).names, str(folder))
    label_of = {each.id: label for label, each in enumerate(classes)}
    listing = Listing(classes)
    prefix = folder.relative_to(root).as_posix()
    for entry in files:
        label = label_of[id_of[Path(entry.name).stem]]
        listing.add(f"{prefix}/", entry.name, label, file_size(entry))
    return FoundSplit("val", classes, listing, FolderStore(root), ignored=ignored)


def _check_ids(in_table: set[str], in_mapping: set[str], top: Path) -> None:
    """Check that the table and the mapping have the same classes, because an extra class would shift later labels."""
    for ids, has, lacks in (
        (in_table - in_mapping, SOLUTION_FILE, MAPPING_FILE),
        (in_mapping - in_table, MAPPING_FILE, SOLUTION_FILE),
    ):
        if ids:
            shown = ", ".join(map(printable, sorted(ids)[:5])) + (f" and {len(ids) - 5} more" if len(ids) > 5 else "")
            raise SourceError(
                f"{printable(top / has)} has {quantity(len(ids), 'class')} that {lacks} lacks: {shown}; "
                f"use both files from the same download, or remove {MAPPING_FILE} (it contains only readable names)"
            )


def _read_solution(path: Path) -> dict[str, str]:
    """Read the table of labels and return the class id for each image name (without suffix).

    Each line has the form `ImageId,n01440764 x y x y [n01440764 …]`.
    """
    shown = printable(path)
    id_of: dict[str, str] = {}
    try:
        text = read_regular(path, max_bytes=_MAX_TABLE_BYTES).decode("utf-8-sig")
        for count, row in enumerate(csv.DictReader(io.StringIO(text, newline=""), strict=True)):
            if count == _MAX_TABLE_ROWS:
                raise csv.Error(f"it has more than {_MAX_TABLE_ROWS:,} lines")
            image_id = row["ImageId"]
            id_of[image_id] = row["PredictionString"].split(None, 1)[0]
    except OSError as error:
        raise SourceError(
            f"{shown} cannot be read: {error.strerror}; "
            + reading_remedy(error, "restore the file, which contains the labels of the val split")
        ) from error
    except (csv.Error, KeyError, IndexError, AttributeError, UnicodeDecodeError) as error:
        raise SourceError(
            f"{shown} is not Kaggle's table of ImageId and PredictionString: {error}; download it again"
        ) from error
    return id_of
