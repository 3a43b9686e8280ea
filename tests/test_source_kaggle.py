"""Kaggle's ImageNet tree."""

import os

import pytest

from loopfeed.preprocess.sources.open_source import ImageClass, SourceError, open_source

CLASSES = (ImageClass("n01", "tench"), ImageClass("n02", "goldfish"))

MAPPING = "n01 tench, Tinca tinca\nn02 goldfish\n"
SOLUTION = """ImageId,PredictionString
ILSVRC2012_val_00000002,n01 85 1 499 272 
ILSVRC2012_val_00000001,n02 1 2 3 4 n02 5 6 7 8
ILSVRC2012_val_00000003,n02 1 2 3 4
"""  # noqa: W291 - as in the original


@pytest.fixture
def top(tmp_path):
    images = tmp_path / "ILSVRC" / "Data" / "CLS-LOC"
    for name in ("n01", "n02"):
        (images / "train" / name).mkdir(parents=True)
        (images / "train" / name / f"{name}_7.JPEG").write_bytes(name.encode())
    for folder in ("val", "test"):
        (images / folder).mkdir()
    for k in (1, 2, 3):
        (images / "val" / f"ILSVRC2012_val_{k:08d}.JPEG").write_bytes(bytes([k]))
    (images / "test" / "ILSVRC2012_test_00000001.JPEG").touch()
    (tmp_path / "LOC_val_solution.csv").write_text(SOLUTION, encoding="utf-8")
    (tmp_path / "LOC_synset_mapping.txt").write_text(MAPPING, encoding="utf-8")
    return tmp_path


def listed(split):
    return {split.image(i).name: (split.image(i).label, split.read(i)) for i in range(len(split))}


def test_every_root_and_form_of_the_tree_gives_the_same_pack(top):
    def digests(root):
        with open_source(root) as source:
            return {name: split.digest() for name, split in source.splits.items()}

    expected = digests(top)
    for below in ("ILSVRC", "ILSVRC/Data", "ILSVRC/Data/CLS-LOC"):
        assert digests(top / below) == expected
    val = top / "ILSVRC" / "Data" / "CLS-LOC" / "val"
    for k, name in ((1, "n02"), (2, "n01"), (3, "n02")):
        (val / name).mkdir(exist_ok=True)
        (val / f"ILSVRC2012_val_{k:08d}.JPEG").rename(val / name / f"ILSVRC2012_val_{k:08d}.JPEG")
    assert digests(top) == expected


@pytest.mark.parametrize(
    "mapping",
    [
        MAPPING + "\n",
        "\n \n" + MAPPING,
        "\ufeff" + MAPPING,
        MAPPING.replace(" ", "\t", 1),
        MAPPING.replace("\n", "\r\n"),
    ],
    ids=["blank end", "blank start", "byte order mark", "tab", "carriage returns"],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_no_table_format_shifts_a_label(top, mapping, mark):
    (top / "LOC_synset_mapping.txt").write_bytes(mapping.encode())
    (top / "LOC_val_solution.csv").write_bytes((mark + SOLUTION).encode())
    for splits in (None, ("val",)):
        with open_source(top, splits=splits) as source:
            val = source.splits["val"]
            assert val.classes == CLASSES
            found = {name[-6:-5]: label for name, (label, _) in listed(val).items()}
            assert found == {"1": 1, "2": 0, "3": 1}


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (None, r"LOC_val_solution\.csv cannot be read: No such file"),
        ("a,b\n1,2\n", r"is not Kaggle's table of ImageId and PredictionString; download it again"),
        ("ImageId,PredictionString\nILSVRC2012_val_00000001,\n", "is not Kaggle's table"),
        (
            "ImageId,PredictionString\nILSVRC2012_val_00000001,n01 1 2 3 4\n",
            r"val_00000002\.JPEG has no class in .*csv",
        ),
        (
            SOLUTION.replace("01,n02", "01,n09"),
            r"solution\.csv has 1 class that LOC_synset_mapping\.txt lacks: n09; use both files from the same",
        ),
        (SOLUTION.replace(",n02", ",n01"), r"mapping\.txt has 1 class that LOC_val_solution\.csv lacks: n02"),
    ],
)
def test_a_bad_table_is_named(top, table, message):
    (top / "LOC_val_solution.csv").unlink()
    if table is not None:
        (top / "LOC_val_solution.csv").write_text(table, encoding="utf-8")
    with pytest.raises(SourceError, match=message):
        open_source(top)


def huge_file(path):
    path.touch()
    os.truncate(path, 2**40)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "it is a pipe, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (huge_file, "the file is larger than the 67,108,864 bytes allowed"),
        (lambda path: path.write_text("ImageId,PredictionString\nx," + "y" * 200_000), "field larger than field limit"),
        (lambda path: path.write_text("ImageId,PredictionString\n" + "x,y\n" * 1_000_001), "more than 1,000,000 lines"),
    ],
    ids=["pipe", "device", "huge", "field", "lines"],
)
def test_a_hostile_table_is_refused(top, make, message):
    (top / "LOC_val_solution.csv").unlink()
    make(top / "LOC_val_solution.csv")
    with pytest.raises(SourceError, match=rf"LOC_val_solution\.csv.* .*{message}"):
        open_source(top)


def test_kaggles_tree_knows_its_own_classes(top):
    with pytest.raises(
        SourceError, match=r"--class-from is about class folders, but .* is Kaggle's ImageNet tree; leave"
    ):
        open_source(top, class_from="leaf")
