"""Which folder is the class of an image, and classes that only some splits have: alike in folders, tar and zip."""

import re
import tarfile
import unicodedata
import zipfile

import pytest

from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.open_source import open_source

NFC, NFD = (unicodedata.normalize(form, "Küche") for form in ("NFC", "NFD"))


@pytest.fixture(params=["folder", "tar", "zip"])
def opened(request, tmp_path):
    def open_files(files, **options):
        root = tmp_path / "set"
        for each in files:
            (root / each).parent.mkdir(parents=True, exist_ok=True)
            (root / each).write_text("zebra\nlion" if each.endswith("classes.txt") else each)
        if request.param == "folder":
            return open_source(root, **options)
        archived = tmp_path / f"set.{request.param}"
        if request.param == "tar":
            with tarfile.open(archived, "w") as tar:
                for each in sorted(files):
                    tar.add(root / each, each)
        else:
            with zipfile.ZipFile(archived, "w") as archive:
                for each in sorted(files):
                    archive.write(root / each, each)
        return open_source(archived, **options)

    return open_files


def classes_of(source):
    """Return the class and the label of each image by its key, of each split."""
    return {
        name: {
            split.key(index): (split.classes[split.image(index).label].id, split.image(index).label)
            for index in range(len(split))
        }
        for name, split in source.splits.items()
    }


def test_a_split_without_a_class_keeps_the_numbers_of_train(opened):
    files = ("train/a/1.jpg", "train/b/1.jpg", "train/c/1.jpg", "val/c/1.jpg")
    expected = {"val": {"c/1.jpg": ("c", 2)}}
    with opened(files) as source:
        assert classes_of(source) == expected | {
            "train": {"a/1.jpg": ("a", 0), "b/1.jpg": ("b", 1), "c/1.jpg": ("c", 2)}
        }
        assert source.notes == ("val has no image of 2 classes: a, b",)
    with opened(files, splits=("val",)) as source:
        assert classes_of(source) == expected
        assert len(source.splits["val"].classes) == 3


def test_a_class_that_train_lacks_is_an_error_unless_a_file_names_it(opened):
    files = ("train/lion/1.jpg", "val/lion/1.jpg", "val/zebra/1.jpg")
    for splits in (None, ("val",)):
        with pytest.raises(SourceError, match=r"the split val has 1 class that train lacks: zebra; put images of each"):
            opened(files, splits=splits)
    with opened(files, splits=("train",)) as source:
        assert classes_of(source) == {"train": {"lion/1.jpg": ("lion", 0)}}
    with opened((*files, "classes.txt")) as source:
        assert classes_of(source)["val"] == {"lion/1.jpg": ("lion", 0), "zebra/1.jpg": ("zebra", 1)}
        assert len(source.splits["train"].classes) == 2


ALIKE = [
    (NFC, NFD, r"Unicode form \(NF[CD], not NF[CD]\)"),
    ("cat", "Cat", "case"),
    ("red panda", "red panda ", "blanks"),
    ("1", "01", "how a number is written"),
]


@pytest.mark.parametrize(("one", "other", "difference"), ALIKE)
def test_classes_that_look_alike_are_an_error_between_splits_and_a_warning_within_one(opened, one, other, difference):
    with pytest.raises(SourceError, match=rf"the split val has 1 class that train lacks: .* only in {difference}"):
        opened((f"train/{one}/1.jpg", f"val/{other}/1.jpg"))
    with opened((f"train/{one}/1.jpg", f"train/{other}/1.jpg")) as source:
        assert re.search(f"^warning: .* has two classes that differ only in {difference}", source.notes[0])


def test_the_folder_of_an_image_may_be_its_class(opened):
    files = (
        "train/animals/cat/1.jpg", "train/animals/dog/1.jpg", "train/pets/cat/2.jpg", "train/animals/list.txt",
        "train/plants/tree/raw.bin", "val/cat/3.jpg",
    )  # fmt: skip
    with opened(files, class_from="leaf") as source:
        assert classes_of(source) == {
            "train": {
                "animals/cat/1.jpg": ("cat", 0),
                "pets/cat/2.jpg": ("cat", 0),
                "animals/dog/1.jpg": ("dog", 1),
                "plants/tree/raw.bin": ("tree", 2),
            },
            "val": {"cat/3.jpg": ("cat", 0)},
        }
        assert "animals/cat/ and pets/cat/ are the same class" in source.notes
        assert "val has no image of 2 classes: dog, tree" in source.notes
    with pytest.raises(SourceError, match="val has 1 class that train lacks: cat"):
        opened(files)


def test_flat_class_folders_are_packed_alike_by_either_folder(opened):
    files = [f"{split}/{name}/{k}.jpg" for split in ("train", "val") for name in "ab" for k in range(5)]
    with opened(files) as top, opened(files, class_from="leaf") as leaf:
        for name, split in top.splits.items():
            assert leaf.splits[name].digest() == split.digest()
            assert classes_of(top) == classes_of(leaf)
