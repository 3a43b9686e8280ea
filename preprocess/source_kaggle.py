"""Kaggle's "ImageNet Object Localization Challenge" as it unpacks.

Training images lie in class folders, validation images in one folder with a table of labels; the test images have no
labels and are not read.
"""

import csv
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

from preprocess.listing import FoundSplit, Listing, SourceError, index_classes
from preprocess.source_tree import FolderStore, file_size, list_folder, read_class_folders, read_names

IMAGES = Path("ILSVRC/Data/CLS-LOC")
SOLUTION_FILE = "LOC_val_solution.csv"


def find_kaggle_tree(root: Path) -> Path | None:
    """Returns the folder with Kaggle's train/ and val/ folders, if `root` is it or one of the three above it."""
    candidates = [root.joinpath(*IMAGES.parts[skipped:]) for skipped in range(len(IMAGES.parts))]
    if root.absolute().parts[-len(IMAGES.parts) :] == IMAGES.parts:
        candidates.append(root)
    return next((each for each in candidates if (each / "train").is_dir() or (each / "val").is_dir()), None)


def kaggle_openers(root: Path, images: Path) -> dict[str, Callable[[], FoundSplit]]:
    """Returns for every labelled split a function that lists it; names in the listing are relative to `root`."""
    top = Path(os.path.normpath(images.absolute())).parents[len(IMAGES.parts) - 1]
    openers: dict[str, Callable[[], FoundSplit]] = {}
    if (images / "train").is_dir():
        openers["train"] = partial(read_class_folders, root, images / "train", "train", names_in=top)
    if (images / "val").is_dir():
        openers["val"] = partial(_read_val, root, images / "val", top)
    return openers


def _read_val(root: Path, folder: Path, top: Path) -> FoundSplit:
    """Lists the validation images, which lie flat in Kaggle's archive and in class folders after a common script.

    Raises:
        SourceError: the table of labels is missing, damaged or has no line for an image.
    """
    folders, files = list_folder(folder)
    if folders:
        return read_class_folders(root, folder, "val", names_in=top)
    id_of = _read_solution(top / SOLUTION_FILE)
    names = read_names(top)
    classes = index_classes(names or set(id_of.values()), names, str(folder))
    label_of = {each.id: label for label, each in enumerate(classes)}
    listing = Listing()
    prefix = folder.relative_to(root).as_posix()
    for entry in files:
        label = label_of.get(id_of.get(Path(entry.name).stem, ""))
        if label is None:
            raise SourceError(f"{entry.path} has no class in {top / SOLUTION_FILE}; remove it or complete the table")
        listing.add(f"{prefix}/{entry.name}", label, file_size(entry))
    return FoundSplit("val", classes, listing, FolderStore(root))


def _read_solution(path: Path) -> dict[str, str]:
    """Returns image name (without suffix) to class id; a line is `ImageId,n01440764 x y x y [n01440764 …]`."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file, strict=True))
        return {row["ImageId"]: row["PredictionString"].split()[0] for row in rows}
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}; it holds the labels of the val split") from error
    except (csv.Error, KeyError, IndexError, AttributeError, UnicodeDecodeError) as error:
        raise SourceError(f"{path} is not Kaggle's table of ImageId and PredictionString: {error}") from error
