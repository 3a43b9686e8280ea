"""Reads the unpacked files of Kaggle's "ImageNet Object Localization Challenge".

Training images are in class folders, validation images in one folder with a table of labels. The test images have no
labels and are not read.
"""

import os
from collections import Counter
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from loopfeed.preprocess.printable import first_names, printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.sources.class_names import (
    NameFile,
    UnitedClasses,
    name_classes,
    read_name_files,
    unite_classes,
)
from loopfeed.preprocess.sources.listing import FoundSplit, Listing, SourceError, index_classes
from loopfeed.preprocess.sources.table_file import open_table
from loopfeed.preprocess.sources.tree import FolderStore, class_ids, file_size, list_folder, read_class_folders

IMAGES = Path("ILSVRC/Data/CLS-LOC")
SOLUTION_FILE = "LOC_val_solution.csv"
MAPPING_FILE = "LOC_synset_mapping.txt"

# The official table has 50,000 lines and is 2.7 MB in size.
_MAX_TABLE_BYTES = 64 * 2**20
_MAX_TABLE_ROWS = 1_000_000
_COLUMNS = ("ImageId", "PredictionString")


def find_kaggle_tree(root: Path) -> Path | None:
    """Return the folder that contains Kaggle's train/ or val/, or None if there is none.

    The folder is `root` itself or up to three levels below it.
    """
    candidates = [root.joinpath(*IMAGES.parts[skipped:]) for skipped in range(len(IMAGES.parts))]
    if root.absolute().parts[-len(IMAGES.parts) :] == IMAGES.parts:
        candidates.append(root)
    return next((each for each in candidates if (each / "train").is_dir() or (each / "val").is_dir()), None)


def kaggle_openers(root: Path, images: Path) -> dict[str, Callable[[], FoundSplit]]:
    """Return, for each labelled split, a function that lists its images, with names relative to `root`.

    The validation images are either all in one folder, as in Kaggle's archive, or in class folders made by a script.
    """
    top = Path(os.path.normpath(images.absolute())).parents[len(IMAGES.parts) - 1]
    folders = {split: images / split for split in ("train", "val") if (images / split).is_dir()}
    files = read_name_files(top, *folders.values())
    is_flat = "val" in folders and not list_folder(folders["val"])[0]
    ids_of: dict[str, Collection[str]] = {
        split: _ids_of_solution(top) if split == "val" and is_flat else class_ids(folder)
        for split, folder in folders.items()
    }
    united = unite_classes(ids_of, files, str(root))
    openers: dict[str, Callable[[], FoundSplit]] = {
        split: partial(read_class_folders, root, folder, split, files, united) for split, folder in folders.items()
    }
    if is_flat:
        openers["val"] = partial(_read_val, root, folders["val"], top, files, united)
    return openers


def _ids_of_solution(top: Path) -> set[str]:
    try:
        return set(_read_solution(top / SOLUTION_FILE).values())
    except SourceError:
        return set()  # it is raised again if the split is listed


def _read_val(root: Path, folder: Path, top: Path, name_files: list[NameFile], united: UnitedClasses) -> FoundSplit:
    """List the validation images of one folder.

    Raises:
        SourceError: the table of labels is missing or damaged, has no line for an image, or its classes differ from
            those in the mapping of readable names, or from those of the training images.
    """
    id_of = _read_solution(top / SOLUTION_FILE)
    ignored: Counter[str] = Counter()
    _, files = list_folder(folder, ignored)
    for entry in files:
        if Path(entry.name).stem not in id_of:
            raise SourceError(
                f"{printable(entry.path)} has no class in {printable(top / SOLUTION_FILE)}; "
                "remove the image or add it to the table"
            )
    if in_mapping := {word for file in read_name_files(top) for word in file.first_words}:
        _check_ids(set(id_of.values()), in_mapping, top)
    united.check("val")
    classes = index_classes(united.ids, name_classes(name_files, united.ids).names, str(folder))
    label_of = {each.id: label for label, each in enumerate(classes)}
    listing = Listing(classes)
    prefix = folder.relative_to(root).as_posix()
    for entry in files:
        label = label_of[id_of[Path(entry.name).stem]]
        listing.add(f"{prefix}/", entry.name, label, file_size(entry))
    return FoundSplit("val", classes, listing, FolderStore(root), ignored=ignored, notes=united.notes)


def _check_ids(in_table: set[str], in_mapping: set[str], top: Path) -> None:
    """Check that the table and the mapping have the same classes, because an extra class would shift later labels."""
    for ids, has, lacks in (
        (in_table - in_mapping, SOLUTION_FILE, MAPPING_FILE),
        (in_mapping - in_table, MAPPING_FILE, SOLUTION_FILE),
    ):
        if ids:
            raise SourceError(
                f"{printable(top / has)} has {quantity(len(ids), 'class')} that {lacks} lacks: "
                f"{first_names(sorted(ids))}; use both files from the same download, or remove "
                f"{MAPPING_FILE} (it contains only readable names)"
            )


def _read_solution(path: Path) -> dict[str, str]:
    """Read the table of labels and return the class id for each image name (without suffix).

    Each line has the form `ImageId,n01440764 x y x y [n01440764 …]`.
    """
    remedy = "restore the file, which contains the labels of the val split"
    table = open_table(path, what="Kaggle's table", remedy=remedy, max_bytes=_MAX_TABLE_BYTES)
    if not {*_COLUMNS} <= {*table.columns}:
        table.fail(None, f"it is not Kaggle's table of {' and '.join(_COLUMNS)}", "download it again")
    image, prediction = (table.columns.index(each) for each in _COLUMNS)
    id_of: dict[str, str] = {}
    for line, cells in table.cells:
        if line > _MAX_TABLE_ROWS + 1:
            table.fail(line, f"it has more than {_MAX_TABLE_ROWS:,} lines", "download it again")
        if not cells[prediction].strip():
            table.fail(line, f"{_COLUMNS[1]} is empty, so it is not Kaggle's table", "download it again")
        id_of[cells[image]] = cells[prediction].split(None, 1)[0]
    return id_of
