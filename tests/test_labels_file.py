"""Files of labels: what they mean, and one error with file and line for each fault."""

import hashlib

import numpy as np
import pytest

from loopfeed.preprocess.shards.targets import unpack_bits
from loopfeed.preprocess.sources import label_columns, labels_file, table_file
from loopfeed.preprocess.sources.labels_file import read_labels
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.table_file import MAX_LINE_BYTES


def read(tmp_path, name, content):
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_labels(file)


def classes_by_path(table):
    bits = unpack_bits(table.values, len(table.names))
    return {path: [table.names[c] for c in np.flatnonzero(bits[row])] for row, path in enumerate(table.paths)}


def test_classes_are_sorted_by_bytes_and_blanks_around_them_do_not_count(tmp_path):
    text = '\ufeffpath,classes\n\na.jpg, dog | cat \n./b/"".jpg,\n"c,d.jpg",Żaba\r\ne.jpg,Zebra\n'
    table = read(tmp_path, "labels.csv", text.replace('./b/""', '"./b/""').replace(".jpg,\n", '.jpg",\n'))
    assert (table.kind, table.names) == ("classes", ("Zebra", "cat", "dog", "Żaba"))
    assert classes_by_path(table) == {"a.jpg": ["cat", "dog"], 'b/".jpg': [], "c,d.jpg": ["Żaba"], "e.jpg": ["Zebra"]}
    assert table.lines.tolist() == [3, 4, 5, 6]
    assert table.digest == hashlib.sha256((tmp_path / "labels.csv").read_bytes()).hexdigest()


def test_numbers_are_rounded_to_float32_once(tmp_path):
    table = read(tmp_path, "a.csv", "path,age,b\nx, 0.1 ,3.4028235e38\ny,-1e-46,16777217\n")
    assert (table.kind, table.names, table.values.dtype) == ("numbers", ("age", "b"), np.float32)
    expected = np.array([[0.1, 3.4028235e38], [-1e-46, 16777217]]).astype(np.float32)
    assert table.values.tobytes() == expected.tobytes()
    table = read(tmp_path, "a.jsonl", '{"path": "x", "targets": [0.1, 2]}\n{"path": "\\udcff", "targets": [1e0, -3]}\n')
    assert table.names == ("0", "1")
    assert table.paths == ["x", "\udcff"]
    assert table.values.tolist() == [[float(np.float32(0.1)), 2], [1, -3]]


def test_more_classes_than_a_word_has_bits_and_more_rows_than_are_packed_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(labels_file, "_BITS_AT_ONCE", 200)
    names = [f"{number:02d}" for number in range(70)]
    random = np.random.default_rng(0)
    bits = random.random((9, 70)) < 0.3
    bits[0] = True
    rows = ["|".join(np.array(names)[each]) for each in bits]
    table = read(tmp_path, "a.csv", "path,classes\n" + "".join(f"{i},{row}\n" for i, row in enumerate(rows)))
    assert table.values.shape == (9, 3)
    by_hand = [
        [sum(1 << (c - 32 * w) for c in range(32 * w, min(32 * w + 32, 70)) if row[c]) for w in range(3)]
        for row in bits
    ]
    assert table.values.tolist() == by_hand
    assert np.array_equal(unpack_bits(table.values, 70), bits)


FAULTS = [
    ("a.txt", "", r"must end with \.csv, \.tsv, \.jsonl or \.ndjson, got .*a\.txt; rename it, or save it in one"),
    ("a.csv", "", r"a\.csv: the file is empty"),
    ("a.csv", "\n\n", r"a\.csv: the file is empty"),
    ("a.csv", "path,classes\n", r"a\.csv: no image has a line"),
    ("a.csv", "path,classes\nx,\n", r"a\.csv: no image has a class"),
    ("a.csv", "x.jpg,cat\n", r"line 1: no column of the header names the images; found x\.jpg, cat; name the column"),
    ("a.csv", "path\nx\n", r"line 1: no column has a label; found path; add a column class for one class per image"),
    ("a.csv", "path,a,\n", r"line 1: column 3 of the header has no name"),
    ("a.csv", "path,a,b,a\n", r"line 1: the column a occurs twice"),
    (
        "a.csv",
        "path,classes\nx,a,b\n",
        r"line 2: there are 3 fields where the header names 2; .* and separate several classes by \|",
    ),
    ("a.csv", "path,classes\nx,a||b\n", r"line 2: the name of a class is empty"),
    ("a.csv", "path,classes\nx,a|b|a\n", r"line 2: the class a occurs twice"),
    ("a.csv", "path,classes\nx,a\n\ny,b\n./x,c\n", r"line 5: x was on line 2 already; give each image one line"),
    ("a.csv", "path,classes\n,a\n", r"line 2: the path is empty"),
    ("a.csv", 'path,classes\nx,"a\ny,b\nz,"c\n', r"line 2: a quoted field does not end on its line"),
    ("a.csv", 'path,classes\nx,"a\ny,b\n', r"line 2: a quoted field does not end on its line"),
    ("a.csv", 'path,classes\nx,"a"b\n', r"line 2: ',' expected after"),
    (
        "a.csv",
        "path,a\nx,one\n",
        r"line 2: one in column a is not a number; correct it, or give --class-column a if it is the class",
    ),
    ("a.csv", "path,a\nx,1_0\n", r"line 2: 1_0 in column a is not a number"),
    ("a.csv", "path,a,b\nx,1,\n", r"line 2: a number is missing"),
    ("a.csv", "path,a\nx,nan\n", r"line 2: nan is not a finite number"),
    ("a.csv", "path,a\nx,-inf\n", r"line 2: -inf is not a finite number"),
    ("a.csv", "path,a\nx,3.5e38\n", r"line 2: 3\.5e\+38 is too large"),
    ("a.csv", "path,a,b\nx,1,2\ny,1\n", r"line 3: there are 2 fields where the header names 3"),
    ("a.csv", b"path,classes\nx,a\ny,\xff\n", r"line 3: byte 3 of the line is not UTF-8"),
    (
        "a.csv",
        b"path,classes\nx," + b"a" * MAX_LINE_BYTES,
        r"line 2: the line has 2,097,154 bytes, more than the 2,097,152",
    ),
    ("a.csv", "path,classes\nx," + "a" * 200_000, r"line 2: field larger than field limit"),
    ("a.csv", "path,classes\nx,\x1b[2J|\x1b[2J\n", r"line 2: the class '\\x1b\[2J' occurs twice"),
    ("a.jsonl", "", r"a\.jsonl: the file is empty"),
    ("a.jsonl", '{"path": "x", "classes": ["a"]\n', r"line 1: not valid JSON"),
    ("a.jsonl", "\n[1]\n", r"line 2: a line must be an object, found list"),
    ("a.jsonl", '{"path": "x"}', r"line 1: no column has a label; found path"),
    ("a.jsonl", '{"path": "x", "classes": [], "targets": []}', r"columns classes and targets could all be the labels"),
    ("a.jsonl", '{"path": true, "classes": []}', r"line 1: path must be text, found true"),
    ("a.jsonl", '{"path": "x", "classes": "cat"}', r'line 1: classes must be a list of strings, found "cat"'),
    ("a.jsonl", '{"path": "x", "\\ud800": 1}', r"line 1: the key '\\ud800' is not valid Unicode; rename it"),
    ("a.jsonl", '{"path": "x", "classes": [""]}', r"line 1: the name of a class is empty"),
    ("a.jsonl", '{"path": "x", "classes": ["\\ud800"]}', r"line 1: the class '\\ud800' is not valid Unicode"),
    ("a.jsonl", '{"path": "x", "targets": [true]}', r"line 1: targets must be a list of numbers, found \[true\]"),
    ("a.jsonl", '{"path": "x", "targets": [NaN]}', r"line 1: not valid JSON .NaN is not a finite number"),
    ("a.jsonl", '{"path": "x", "targets": [1e999]}', r"line 1: inf is not a finite number"),
    ("a.jsonl", f'{{"path": "x", "targets": [1{"0" * 400}]}}', r"line 1: inf is not a finite number"),
    ("a.jsonl", '{"path": "x", "targets": []}', r"line 1: there are 0 numbers; give 1 to 65,535"),
    ("a.jsonl", '{"path": "x", "path": "y", "targets": [1]}', r"line 1: not valid JSON .the key path occurs twice"),
    (
        "a.jsonl",
        '{"path": "x", "targets": [1]}\n{"path": "y", "targets": [1, 2]}',
        r"line 2: there are 2 numbers, but line 1 has 1; give the same count",
    ),
    (
        "a.jsonl",
        '{"path": "x", "targets": [1]}\n\n{"path": "y", "classes": ["a"]}',
        r"line 3: targets must be a list of numbers, found nothing",
    ),
    (
        "a.csv",
        "path,class\nx," + "a" * 1_025,
        r"line 2: a{60}… has 1,025 characters, more than the 1,024 allowed; shorten",
    ),
    ("a.jsonl", "[" * 100_000, r"line 1: its values are nested too deeply|line 1: not valid JSON"),
]


@pytest.mark.parametrize(("name", "content", "message"), FAULTS)
def test_each_fault_is_an_error_with_its_line(tmp_path, name, content, message):
    with pytest.raises(SourceError, match=message) as raised:
        read(tmp_path, name, content)
    assert len(str(raised.value)) < 600


def test_a_file_that_is_missing_too_large_or_a_pipe_is_an_error(tmp_path, monkeypatch):
    with pytest.raises(SourceError, match=r"the file of labels .*no\.csv cannot be read: No such file"):
        read_labels(tmp_path / "no.csv")
    (tmp_path / "d.csv").mkdir()
    with pytest.raises(SourceError, match="it is a folder, not a file"):
        read_labels(tmp_path / "d.csv")
    monkeypatch.setattr(table_file, "MAX_FILE_BYTES", 20)
    with pytest.raises(SourceError, match="larger than the 20 bytes allowed"):
        read(tmp_path, "a.csv", "path,classes\nlong.jpg,cat\n")


def test_too_many_classes_are_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(labels_file, "MAX_CLASSES", 3)
    monkeypatch.setattr(label_columns, "MAX_CLASSES", 3)
    assert read(tmp_path, "a.csv", "path,classes\nx,a|b\ny,c\n").names == ("a", "b", "c")
    with pytest.raises(SourceError, match=r"line 3: there are more than 3 classes"):
        read(tmp_path, "a.csv", "path,classes\nx,a|b\ny,c|d\n")
    with pytest.raises(SourceError, match=r"line 1: there are 4 columns, more than the 3 allowed"):
        read(tmp_path, "a.csv", "path,a,b,c,d\n")


def test_many_keys_of_the_first_object_cost_no_time_in_each_row(tmp_path):
    keys = "".join(f', "{number}": 0' for number in range(150_000))
    rows = "".join(f'{{"path": "{row}", "class": "b"}}\n' for row in range(3_000))
    table = read(tmp_path, "a.jsonl", f'{{"path": "x", "class": "a"{keys}}}\n{rows}')
    assert len(table.paths) == 3_001
    assert table.names == ("a", "b")
