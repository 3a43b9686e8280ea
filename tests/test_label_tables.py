"""Tables of one class per image, as people write them: each image's class, split, group and weight, or one error."""

import re
import tarfile
import unicodedata
import zipfile

import numpy as np
import pytest

from loopfeed.preprocess.sources.label_columns import LabelOptions
from loopfeed.preprocess.sources.label_paths import _files_with_ends
from loopfeed.preprocess.sources.labels_file import read_labels
from loopfeed.preprocess.sources.listing import Listing, SourceError
from loopfeed.preprocess.sources.open_source import open_source

TWO = ("a/1.jpg", "a/2.jpg")
SPLITS = ("train/x/1.jpg", "train/y/2.jpg", "val/x/1.jpg")
NFC, NFD = (unicodedata.normalize(form, "Küche") for form in ("NFC", "NFD"))


def opened(tmp_path, files, content, *, name="l.csv", **options):
    root = tmp_path / "photos"
    root.mkdir(parents=True, exist_ok=True)
    for each in files:
        (root / each).parent.mkdir(parents=True, exist_ok=True)
        (root / each).write_bytes(each.encode())
    table = tmp_path / name
    table.write_bytes(content if isinstance(content, bytes) else content.encode())
    return open_source(root, labels=table, **options)


def classes_of(source):
    """Return the class of each image by its name, of each split."""
    return {
        name: {image.name: split.classes[image.label].id for image in map(split.image, range(len(split)))}
        for name, split in source.splits.items()
    }


CATS_AND_DOGS = {"train": {"a/1.jpg": "cat", "a/2.jpg": "dog"}}
VALID = {"train": {"a/1.jpg": "cat"}, "val": {"a/2.jpg": "dog"}}
NUMBERS = {"train": {"a/1.jpg": "10", "a/2.jpg": "2"}}
FORMS = [
    ("class", "path,class\na/1.jpg,cat\na/2.jpg,dog\n", CATS_AND_DOGS),
    ("label, in capitals", "Path,LABEL\na/1.jpg,cat\na/2.jpg,dog\n", CATS_AND_DOGS),
    ("a byte order mark", "\ufefffilename,class\na/1.jpg,cat\na/2.jpg,dog\n", CATS_AND_DOGS),
    ("blanks", " path , class \na/1.jpg, cat \n a/2.jpg , dog\n", CATS_AND_DOGS),
    ("semicolons and CRLF", "file;class\r\na/1.jpg;cat\r\na/2.jpg;dog\r\n", CATS_AND_DOGS),
    ("Excel's first line", "sep=;\r\npath;class\r\na/1.jpg;cat\r\na/2.jpg;dog\r\n", CATS_AND_DOGS),
    ("old line ends", "path,class\ra/1.jpg,cat\ra/2.jpg,dog\r", CATS_AND_DOGS),
    ("tabs", "image\tclass\na/1.jpg\tcat\na/2.jpg\tdog\n", CATS_AND_DOGS),
    ("UTF-16", "path,class\na/1.jpg,cat\na/2.jpg,dog\n".encode("utf-16"), CATS_AND_DOGS),
    ("UTF-16, big end first", b"\xfe\xff" + "id;class\n1;cat\n2;dog\n".encode("utf-16-be"), CATS_AND_DOGS),
    ("quotes", '"path", "class"\n"a/1.jpg","cat"\n"a/2.jpg", "dog"\n', CATS_AND_DOGS),
    ("a separator in quotes", '"path","a;b;c;d",class\na/1.jpg,"x;y",cat\na/2.jpg,,dog\n', CATS_AND_DOGS),
    ("an ignored text of two lines", 'path,note,class\na/1.jpg,"one\ntwo",cat\na/2.jpg,,dog\n', CATS_AND_DOGS),
    ("empty rows and columns", "path,class,,\na/1.jpg,cat,,\n,,,\na/2.jpg,dog,,,,\n", CATS_AND_DOGS),
    ("the index of pandas", ",path,label\n0,a/1.jpg,cat\n1,a/2.jpg,dog\n", CATS_AND_DOGS),
    ("ids without a suffix", "id,class\n1,cat\n2,dog\n", CATS_AND_DOGS),
    ("a path beside an id", "id,path,class\n7,a/1.jpg,cat\n8,a/2.jpg,dog\n", CATS_AND_DOGS),
    ("bare names", "file_name,class\n1.jpg,cat\n2.jpg,dog\n", CATS_AND_DOGS),
    ("a folder before SOURCE", "path,class\nphotos/a/1.jpg,cat\n./photos/a/2.jpg,dog\n", CATS_AND_DOGS),
    ("backslashes", "path,class\na\\1.jpg,cat\n.\\a\\2.jpg,dog\n", CATS_AND_DOGS),
    ("the same line twice", "path,class\na/1.jpg,cat\na/2.jpg,dog\na/1.jpg,cat\n1.jpg,cat\n", CATS_AND_DOGS),
    ("names and numbers of classes", "path,class_id,class_name\na/1.jpg,3,cat\na/2.jpg,4,dog\n", CATS_AND_DOGS),
    ("whole numbers", "path,label\na/1.jpg,10\na/2.jpg,2\n", NUMBERS),
    ("numbers with gaps", "path,label\na/1.jpg,7\na/2.jpg,-1\n", {"train": {"a/1.jpg": "7", "a/2.jpg": "-1"}}),
    ("a leading zero", "path,label\na/1.jpg,01\na/2.jpg,10\n", {"train": {"a/1.jpg": "01", "a/2.jpg": "10"}}),
    ("a huge number", f"path,label\na/1.jpg,{'9' * 40}\na/2.jpg,1\n", {"train": {"a/1.jpg": "9" * 40, "a/2.jpg": "1"}}),
    ("a class with a slash", "path,class\n1,a/b|c\n2,dog\n", {"train": {"a/1.jpg": "a/b|c", "a/2.jpg": "dog"}}),
    ("a column of splits", "path,class,split\n1,cat,Training\n2,dog,VALID\n", VALID),
]  # fmt: skip


@pytest.mark.parametrize(("content", "expected"), [pytest.param(*each, id=name) for name, *each in FORMS])
def test_each_form_of_a_table_gives_each_image_its_class(tmp_path, content, expected):
    with opened(tmp_path, TWO, content) as source:
        assert classes_of(source) == expected
        assert not source.targets


@pytest.mark.parametrize("source", ["photos", "sub/../photos", "link", "/photos", "/sub/../photos", "/link"])
@pytest.mark.parametrize("written", ["photos", "sub/../photos", "link", "sub\\..\\photos"])
def test_absolute_paths_name_the_images_however_the_source_is_written(tmp_path, monkeypatch, source, written):
    for each in ("photos/a", "photos/b", "sub"):
        (tmp_path / each).mkdir(parents=True)
    for each in "ab":
        (tmp_path / f"photos/{each}/1.jpg").write_bytes(each.encode())
    (tmp_path / "link").symlink_to("photos")
    table = tmp_path / "sub" / "l.csv"
    table.write_text(f"path,class\n{tmp_path}/{written}/a/1.jpg,cat\n{tmp_path}/{written}/b/1.jpg,dog\n")
    monkeypatch.chdir(tmp_path)
    with open_source(f"{tmp_path}{source}" if source[0] == "/" else source, labels=table) as found:
        assert classes_of(found) == {"train": {"a/1.jpg": "cat", "b/1.jpg": "dog"}}


JSON_LINES = [
    ('{"path": "a/1.jpg", "class": "cat"}\n\n{"class": "dog", "path": "a/2.jpg", "more": [1]}', CATS_AND_DOGS),
    ('{"path": "a/1.jpg", "label": 10}\n{"path": "a/2.jpg", "label": 2.0}', NUMBERS),
    ('{"id": 1, "label": "cat", "split": "train"}\n{"id": 2, "label": "dog", "split": "train"}', CATS_AND_DOGS),
]


@pytest.mark.parametrize(("content", "expected"), JSON_LINES)
def test_json_lines_say_the_same(tmp_path, content, expected):
    with opened(tmp_path, TWO, content, name="l.jsonl") as source:
        assert classes_of(source) == expected


def test_classes_that_are_whole_numbers_are_in_numerical_order(tmp_path):
    table = "path,label\na/1.jpg,10\na/2.jpg,2\n"
    with opened(tmp_path, TWO, table) as source:
        assert [each.id for each in source.splits["train"].classes] == ["2", "10"]
    with opened(tmp_path, TWO, table.replace("2\n", "02\n")) as source:
        assert [each.id for each in source.splits["train"].classes] == ["02", "10"]
    (tmp_path / "photos" / "classes.txt").write_text("2 dog\n10 cat\n")
    with opened(tmp_path, TWO, table) as source:
        assert [(each.id, each.name) for each in source.splits["train"].classes] == [("2", "dog"), ("10", "cat")]
        assert len(source.notes) == 1
        assert source.unread is None


def test_what_each_column_means_is_said_in_a_line(tmp_path):
    content = "id,breed,age,note,patient,w\n1,cat,3,,p,1\n2,dog,4,,q,0\n"
    options = {"class_column": "Breed", "group_by": "patient", "weight_column": "w"}
    with opened(tmp_path, TWO, content, **options) as source:
        assert source.notes == (
            "l.csv: one class per image from column breed, paths from id, groups from patient, weights from w, "
            "not used: age, note",
        )
        split = source.splits["train"]
        by_name = {split.image(i).name: (split.groups[i], split.weights[i]) for i in range(2)}
        assert by_name == {"a/1.jpg": (0, 1), "a/2.jpg": (1, 0)}
    with opened(tmp_path, TWO, "path,classes,age\na/1.jpg,cat|dog,3\na/2.jpg,,4\n") as source:
        assert source.notes == ("l.csv: any number of classes per image from column classes, paths from path, "
                                "not used: age",)  # fmt: skip
    with opened(tmp_path, TWO, "x,path,y\n1,a/1.jpg,3\n2,a/2.jpg,4\n") as source:
        assert source.notes == ("l.csv: numbers to predict from columns x, y, paths from path",)
        assert sorted(source.targets["train"].values.tolist()) == [[1, 3], [2, 4]]


FAULTS = [
    ("path,class,class\n", {}, r"line 1: the column class occurs twice; rename one"),
    ("path,filename,class\n", {}, r"line 1: the columns path and filename could all be the paths of the images"),
    ("path,class,label\n", {}, r"line 1: the columns class and label could all be the labels .* --class-column"),
    ("path,class,classes\n", {}, r"line 1: the columns classes and class could all be the labels"),
    ("name,class\n", {}, r"line 1: no column of the header names the images; found name, class; name the column"),
    ("path,bread\n", {"class_column": "breed"}, r"line 1: there is no column breed: did you mean bread\?; found path,"),
    ("path,class\n", {"group_by": "patient"}, r"there is no column patient; found path, class; give --group-by one"),
    ("", {}, r"l\.csv: the file is empty; begin with a line such as path,class"),
    ("sep=;\n", {}, r"l\.csv: the file is empty"),
    ("path,class\n", {}, r"l\.csv: no image has a line"),
    ("path,class\na/1.jpg\n", {}, r"line 2: there is 1 field where the header names 2"),
    ("path,class\na/1.jpg,cat,dog\n", {}, r"line 2: there are 3 fields where the header names 2"),
    ("path,class\na/1.jpg,\n", {}, r"line 2: the class in column class is empty; .* --unlabelled skip"),
    ("path,class\na/1.jpg,NaN\n", {}, r"line 2: the class in column class is NaN"),
    ("path,class\na/1.jpg,#N/A\n", {}, r"line 2: #N/A in column class is a formula or its error"),
    ('path,class\na/1.jpg,"=""01"""\n', {}, r"line 2: =\"01\" in column class is a formula or its error; write"),
    ("path,class\na/1.jpg,cat\n\na/1.jpg,dog\n", {}, r"line 4: a/1\.jpg was on line 2 already, with another class"),
    ("path,class\na/1.jpg,cat\n1,dog\na/2.jpg,dog", {}, r"line 3: a/1\.jpg was on line 2 already, with other classes"),
    ("path,class\na/1.jpg,cat\n", {}, r"has no line for 1 image .*2\.jpg; .*--unlabelled skip"),
    ("path,class\na/3.jpg,cat\n", {}, r"line 2: .* has no image a/3\.jpg; correct or remove the line"),
    ("path,class\na/1.PNG,cat\n", {}, r"line 2: .* has no image a/1\.PNG; did you mean a/1\.jpg\?"),
    ("path,class\n1.jpg,cat\n2.jpg,x\n", {"more": "b/1.jpg"}, r"line 2: 1\.jpg could be a/1\.jpg or b/1\.jpg"),
    ("id,class\n1,cat\n2,x\n", {"more": "a/1.png"}, r"line 2: 1 could be a/1\.(jpg|png) or a/1\.(jpg|png); write more"),
    (f"path,class\n{NFD}.jpg,cat\n", {"more": f"{NFC}.jpg"}, r"in another Unicode form \(NFC, not NFD\)"),
    (f"path,class\n1,{NFC}\n2,{NFD}\n", {}, r"line 3: the class .* is on an earlier line .* \(NFC, not NFD\); write"),
    ("path,class,split\n1,cat,sunday\n", {}, r"line 2: the split is sunday; name train, training, val"),
    ("path,class,split\n1,cat,\n", {}, r"line 2: the split is empty; name train"),
    ("path,class,w\n1,a,-1\n", {"weight_column": "w"}, r"line 2: the weight -1\.0 is negative"),
    ("path,class,w\n1,a,inf\n", {"weight_column": "w"}, r"line 2: inf is not a finite number"),
    ("path,class,w\n1,a,\n", {"weight_column": "w"}, r"line 2: a number is missing in column w"),
    ("path,class,w\n1,a,0\n2,a,0\n", {"weight_column": "w"}, r"all weights in column w are 0"),
    ("path,class,p\n1,a,\n", {"group_by": "p"}, r"line 2: p is empty; fill it in"),
    ("path,class,p,split\n1,a,q,train\n2,a,q,val\n", {"group_by": "p"}, r"1 group of --group-by in both train and val"),
    ("path;class;w\n1;a;2,5\n", {"weight_column": "w"}, r"line 2: 2,5 in column w is not a number; write 2\.5$"),
    ("path;age\n1;-0,5\n", {}, r"line 2: -0,5 in column age is not a number; write -0\.5$"),
    ("path,a b,n\n1,pug,2\n", {}, r"or give --class-column 'a b' if it is the class of each image"),
    ("path,Patient ID,n,breed\n1,P2,2,pug\n", {}, r"--class-column with the one of Patient ID and breed that is"),
    ("path,class\nx/7.jpg,cat\nx/8.jpg,cat\n", {}, r"none of its 2 lines .* line 2 has x/7.jpg, .* such as a/.\.jpg"),
    ("path,class\na\\1.PNG,cat\n", {}, r"did you mean a/1\.jpg\?"),
    (b"PK\3\4\x14\0\6\0" + 22 * b"\0" + b"[Content_Types].xml", {}, r"l\.csv: it is a spreadsheet; save it as CSV"),
    (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(99), {}, r"l\.csv: it is a spreadsheet; save it as CSV"),
    ("", {"name": "l.xlsx"}, r"the file of labels .*l\.xlsx is a spreadsheet; save it as CSV"),
    ("path,breed\n1,pug\n", {}, r"line 2: pug in column breed is not a number; .* --class-column breed if it is"),
    ("path,class\n1,cat\n2,\udc80".encode("utf-8", "surrogateescape"), {}, r"line 3: byte 3 of the line is not UTF-8"),
    ("path,class\n1,ca\rt\n", {}, r"line 2: a carriage return is within the line; correct the line"),
    ("path,class\n1,cat\n".encode("utf-16-le"), {}, r"it has zero bytes, so it is not UTF-8; save the file as UTF-8"),
]  # fmt: skip


@pytest.mark.parametrize(("content", "options", "message"), FAULTS)
def test_each_faulty_table_is_one_error(tmp_path, content, options, message):
    files = (*TWO, options.pop("more", TWO[0]))
    with pytest.raises(SourceError, match=message) as raised:
        opened(tmp_path, files, content, **options)
    assert len(str(raised.value)) < 600


def test_classes_without_images_in_a_split_are_said(tmp_path):
    for column, cat in (("class", "cat"), ("classes", "cat|dog")):
        content = f"path,{column},split\nx/1.jpg,{cat},train\ny/2.jpg,dog,train\nval/x/1.jpg,yak,val\n"
        with opened(tmp_path / column, ("x/1.jpg", "y/2.jpg", "val/x/1.jpg"), content) as source:
            assert source.notes[1:] == ("train has no image of 1 class: yak", "val has no image of 2 classes: cat, dog")


def test_images_without_a_class_are_left_out_on_demand(tmp_path):
    content = "path,class\na/1.jpg,cat\na/2.jpg,\n"
    with opened(tmp_path, (*TWO, "b/3.png", "b/notes.txt"), content, unlabelled="skip") as source:
        assert classes_of(source) == {"train": {"a/1.jpg": "cat"}}
        assert source.notes[1] == "left out: 2 images without a label, such as a/2.jpg"
        assert source.unread == "1 file without a line, such as b/notes.txt"
    content = "path,class\ntrain/x/1,cat\ny/2,dog\n"
    with opened(tmp_path / "more", SPLITS, content, unlabelled="skip") as source:
        assert classes_of(source) == {"train": {"train/x/1.jpg": "cat", "train/y/2.jpg": "dog"}}


def test_a_test_folder_without_any_line_is_left_out_and_said(tmp_path):
    files = ("train/1.jpg", "train/2.jpg", "test/3.jpg")
    with opened(tmp_path, files, "id,class\n1,cat\n2,dog\n") as source:
        assert classes_of(source) == {"train": {"train/1.jpg": "cat", "train/2.jpg": "dog"}}
        assert source.notes[1] == "test/ is not read, because none of its 1 image has a line"
    with pytest.raises(SourceError, match=r"no line for 1 image .* test/3\.jpg"):
        opened(tmp_path, (*files, "test/4.jpg"), "id,class\n1,cat\n2,dog\n4,cat\n")


def test_ids_that_the_test_folder_has_too_are_those_of_train(tmp_path):
    files = ("train/1.jpg", "train/2.jpg", "test/1.jpg")
    with opened(tmp_path, files, "id,class\n1,cat\n2,dog\n") as source:
        assert classes_of(source) == {"train": {"train/1.jpg": "cat", "train/2.jpg": "dog"}}
    with opened(tmp_path, files, "id,class,split\n1,cat,train\n2,dog,train\n1,dog,test\n") as source:
        assert classes_of(source)["test"] == {"test/1.jpg": "dog"}


def test_paths_may_be_below_the_folder_of_their_split(tmp_path):
    content = "path,class,split\nx/1.jpg,cat,train\ny/2,dog,train\nx/1,dog,val\n"
    expected = {"train": {"train/x/1.jpg": "cat", "train/y/2.jpg": "dog"}, "val": {"val/x/1.jpg": "dog"}}
    with opened(tmp_path, SPLITS, content) as source:
        assert classes_of(source) == expected
    # Without a column of splits, their folders are the splits, and such a path must be clear.
    with pytest.raises(SourceError, match=r"line 2: x/1 could be train/x/1\.jpg or val/x/1\.jpg"):
        opened(tmp_path, SPLITS, "path,class\nx/1,cat\ny/2,dog\n")
    # A column of splits counts more than the folders do.
    with opened(tmp_path, SPLITS, "path,class,split\ntrain/x/1,a,val\ny/2,b,val\nval/x/1,c,train\n") as source:
        assert classes_of(source) == {
            "train": {"val/x/1.jpg": "c"},
            "val": {"train/x/1.jpg": "a", "train/y/2.jpg": "b"},
        }
        assert {source.splits["val"].key(index) for index in range(2)} == {"train/x/1.jpg", "train/y/2.jpg"}


def test_a_table_has_the_order_and_digest_of_class_folders_and_archives(tmp_path):
    files = [
        f"{split}/{name}/{k}.jpg" for split, count in (("train", 9), ("val", 3)) for name in "xy" for k in range(count)
    ]
    content = "path,label\n" + "".join(f"{each},{each.split('/')[1]}\n" for each in files)
    with opened(tmp_path, files, content) as table, open_source(tmp_path / "photos") as folders:
        for name, split in folders.splits.items():
            ours = table.splits[name]
            assert ours.digest() == split.digest()
            assert [ours.key(i) for i in range(len(ours))] == [split.key(i) for i in range(len(split))]
            assert [ours.image(i) for i in range(len(ours))] == [split.image(i) for i in range(len(split))]
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(tmp_path / "photos", "outer")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for each in files:
            archive.write(tmp_path / "photos" / each, each)
    for archived in ("a.tar", "a.zip"):
        with (
            open_source(tmp_path / archived, labels=tmp_path / "l.csv") as table,
            open_source(tmp_path / "photos") as folders,
        ):
            assert [each.digest() for each in table.splits.values()] == [
                each.digest() for each in folders.splits.values()
            ]
            assert table.splits["val"].read(0) == folders.splits["val"].read(0)
    # A class that one split lacks has its number in all.
    part = content.replace("val/y", "#").split("#")[0] + "\n"
    with opened(tmp_path, (), part, unlabelled="skip") as table:
        assert [len(each.classes) for each in table.splits.values()] == [2, 2]


def test_classes_that_look_alike_are_said(tmp_path):
    for one, other, difference in (
        ("cat", "Cat", "case"),
        ("1", "01", "how a number is written"),
    ):
        with opened(tmp_path, TWO, f"path,class\n1,{one}\n2,{other}\n") as source:
            (note,) = source.notes[1:]
        assert re.search(f"two classes that differ only in {difference}", note)


def test_a_hold_out_keeps_groups_together_and_classes_balanced(tmp_path):
    random = np.random.default_rng(0)
    groups = np.repeat(np.arange(60), random.integers(1, 12, 60))
    labels = np.where(random.random(60) < 0.3, "sick", "well")[groups]
    files = [f"{k:03}.jpg" for k in range(len(groups))]
    rows = [f"{file},{label},p{group}\n" for file, label, group in zip(files, labels, groups, strict=True)]

    def held_out(rows, fraction=0.2):
        content = "path,label,patient\n" + "".join(rows)
        with opened(tmp_path, files, content, group_by="patient", holdout=fraction) as source:
            return {name: {each.split(",")[0]: None for each in found} for name, found in classes_of(source).items()}

    of = dict(zip(files, groups.tolist(), strict=True))
    chosen = held_out(rows)
    assert not {of[each] for each in chosen["train"]} & {of[each] for each in chosen["val"]}
    for label in ("sick", "well"):
        wanted = np.floor(0.2 * (labels == label).sum() + 0.5)
        found = sum(labels[files.index(each)] == label for each in chosen["val"])
        assert abs(found - wanted) <= 1
    assert held_out(rows[::-1])["val"].keys() == chosen["val"].keys()
    # A fraction that no group fits holds one out, never all, and never the last of a class.
    assert len({of[each] for each in held_out(rows, 0.001)["val"]}) >= 1


def test_a_single_group_cannot_be_held_out(tmp_path):
    with pytest.raises(SourceError, match=r"each of its 1 group has the last images of a class; leave --group-by out"):
        opened(tmp_path, TWO, "id,class,p\n1,a,p\n2,a,p\n", group_by="p", holdout=0.5)


def test_decimal_numbers_and_lists_are_doubted_as_classes(tmp_path):
    with opened(tmp_path, TWO, "path,label\n1,23.5\n2,7\n") as source:
        assert source.notes[1].startswith(
            "warning: label has numbers such as 23.5, each of which is a class; to predict"
        )
    with opened(tmp_path, TWO, "path,label\n1,cat|dog\n2,1.0\n") as source:
        assert source.notes[1:] == (
            "warning: label has lists such as cat|dog, each of which is a class; if images have several classes, name "
            "the column classes",
        )


def test_repeated_lines_are_said_and_a_whole_name_counts_before_one_without_its_suffix(tmp_path):
    content = "path,class\n1.jpg,cat\n2.png,dog\n1.jpg,cat\nb/1.jpg.png,dog\n"
    with opened(tmp_path, ("a/1.jpg", "a/2.png", "b/1.jpg.png"), content) as source:
        assert classes_of(source) == {"train": {"a/1.jpg": "cat", "a/2.png": "dog", "b/1.jpg.png": "dog"}}
        assert source.notes[1] == "l.csv: 1 repeated line left out"


def test_a_column_that_an_option_names_is_not_that_of_the_paths(tmp_path):
    with opened(tmp_path, TWO, "image,file,class\nx,1,cat\ny,2,dog\n", group_by="image") as source:
        assert classes_of(source) == CATS_AND_DOGS


def test_options_that_mean_nothing_are_refused(tmp_path):
    opened(tmp_path, TWO, "path,class\n1,a\n2,b\n").close()
    with pytest.raises(SourceError, match=r"--group-by is about a table of labels; give the table with --labels"):
        open_source(tmp_path / "photos", group_by="x")
    with pytest.raises(SourceError, match=r"--class-from is about class folders, but --labels gives the labels"):
        open_source(tmp_path / "photos", labels=tmp_path / "l.csv", class_from="leaf")


def test_weights_are_rounded_to_float32(tmp_path):
    (tmp_path / "l.jsonl").write_text('{"path": "a", "class": "x", "w": 0.1}\n{"path": "b", "class": "y", "w": 3}\n')
    table = read_labels(tmp_path / "l.jsonl", LabelOptions(weight_column="w"))
    assert table.weights is not None
    assert table.weights.tobytes() == np.array([0.1, 3], np.float32).tobytes()


def test_paths_of_many_depths_and_many_deep_images_take_no_time_together():
    files = Listing()
    for number in range(300):
        files.add("", f"{'d/' * 1_500}{number}.png", 0, 1)
    ends = {f"{'d/' * depth}{'7.png' if depth % 2 else '8'}" for depth in range(1_500)}
    found = _files_with_ends(files, ends)
    assert found == {end: [7 if end.endswith("g") else 8] for end in ends}
