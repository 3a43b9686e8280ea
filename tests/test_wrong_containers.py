"""Files that are not what their names or their containers say: each is one error of one line, with its remedy."""

import os
import pickle
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loopfeed.preprocess.regular_file import read_at
from loopfeed.preprocess.sources import open_source as open_source_module
from loopfeed.preprocess.sources import source_file
from loopfeed.preprocess.sources.listing import ChangedSourceError, SourceError
from loopfeed.preprocess.sources.open_source import open_source
from tests import container_files as forms


def folder(root: Path, contents: dict[str, bytes]) -> Path:
    root.mkdir()
    for name, content in contents.items():
        (root / name).write_bytes(content)
    return root


def npz(path: Path, **found) -> Path:
    np.savez(path, allow_pickle=True, **found)
    return path


def changed(root: Path, name: str, change) -> Path:
    path = root / name
    path.write_bytes(change(path.read_bytes()))
    return root


def parquet(root: Path, columns: dict[str, Any], **options: Any) -> Path:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    root.mkdir()
    pq.write_table(pa.table(columns), root / "train.parquet", **options)
    return root


def text_of(*values: bytes) -> Any:
    """Return a column of text that is not UTF-8."""
    pa = pytest.importorskip("pyarrow")
    return pa.Array.from_buffers(pa.string(), len(values), pa.array(values, pa.binary()).buffers())


def npz_folder(root: Path) -> Path:
    root.mkdir()
    return root


def understate(archive: bytes) -> bytes:
    """Return a zip archive whose first member declares fewer bytes than it unpacks to."""
    entry = archive.index(b"PK\x01\x02")
    return archive[: entry + 24] + (9).to_bytes(4, "little") + archive[entry + 28 :]


def two_tars(root: Path) -> Path:
    for number, form in enumerate(("jpg", "png")):
        forms.write_tar(root / f"train-{number}.tar", {f"1.{form}": b"1", "1.cls": b"1"})
    return root


def cut(content: bytes) -> bytes:
    return content[: len(content) * 2 // 3]


def npy(descr: str) -> bytes:
    """Return an array without elements, with a type and what follows it in the header."""
    header = f"{{'descr': {descr}}}".encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


X, Y = np.zeros((4, 5, 6), np.uint8), np.arange(4)
PAGE, POINTER = b"<!DOCTYPE html><html><body>404", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n"
WRONG: dict[str, tuple[Callable[[Path], Any], str]] = {
    # WebDataset
    "no class": (
        lambda p: folder(p, {}) and forms.write_tar(p / "a.tar", {"1.jpg": b"1", "1.txt": b"a dog"}).parent,
        r"a\.tar: the sample 1 has no class: expected \.cls, or one of label, class, .* found \.jpg, \.txt\.",
    ),
    "json without class": (
        lambda p: forms.write_tar(p, {"1.jpg": b"1", "1.json": b'{"caption": "x"}'}),
        r"the sample 1 has no class: .* found \.jpg, \.json",
    ),
    "no image": (
        lambda p: forms.write_tar(p, {"1.jpg": b"1", "1.cls": b"1", "2.cls": b"1"}),
        "the sample 2 has a class but no image",
    ),
    "two images": (
        lambda p: forms.write_tar(p, {"1.jpg": b"1", "1.png": b"1", "1.cls": b"1"}),
        r"the sample 1 has two images, \.jpg and \.png",
    ),
    "key twice": (lambda p: two_tars(p), r"the sample train-0\.tar!1\.jpg exists twice, as train-1\.tar!1\.png too"),
    "truncated tar": (
        lambda p: changed(forms.write_webdataset(p), "val-000000.tar", cut),
        r"val-000000\.tar is truncated",
    ),
    "class of two lines": (
        lambda p: forms.write_tar(p, {"1.jpg": b"1", "1.cls": b"1\n2"}),
        r"the sample 1 has the class '1\\n2'; a class must be a number from 0, or a name",
    ),
    "class is a list": (
        lambda p: forms.write_tar(p, {"1.jpg": b"1", "1.json": b'{"label": [1, 2]}'}),
        "the sample 1 has the class list; a class must be",
    ),
    "no JSON": (lambda p: forms.write_tar(p, {"1.jpg": b"1", "1.json": b"{"}), r"1\.json is not JSON"),
    "two splits in a name": (
        lambda p: folder(p, {}) and forms.write_tar(p / "train-val.tar", {"1.jpg": b"1", "1.cls": b"1"}).parent,
        "has the names of two splits, train and val",
    ),
    "compressed shards": (
        lambda p: folder(p, {"train-000000.tar.gz": b"\x1f\x8b"}),
        r"train-000000\.tar\.gz is a compressed archive, whose images cannot be read in place; unpack it, or, of We",
    ),
    "Arrow": (
        lambda p: folder(p, {"data.arrow": b""}),
        "is an Arrow file, such as .*; write Parquet, such as with its to_",
    ),
    "HDF5": (
        lambda p: folder(p, {"set.h5": b""}),
        "is an HDF5 file; save its arrays of images and labels with numpy.sav",
    ),
    # Parquet
    "page as parquet": (
        lambda p: folder(p, {"train.parquet": PAGE}),
        "train.parquet is an HTML page, such as .*, not a Pa",
    ),
    "pointer": (
        lambda p: folder(p, {"train.parquet": POINTER}),
        "is a Git LFS pointer .*, not a Parquet file; run `git lfs",
    ),
    "truncated parquet": (
        lambda p: changed(forms.write_parquet(p), "data/train-00000-of-00002.parquet", cut),
        "train-00000-of-00002.parquet is a damaged or truncated Parquet file: .*; download it again",
    ),
    "addresses": (
        lambda p: parquet(p, {"url": ["http://x/1.jpg"], "label": [1]}),
        r"has no column of encoded images \(found url, label\): paths and addresses are not followed",
    ),
    "no bytes": (
        lambda p: parquet(
            p, {"image": [{"bytes": None, "path": "1.jpg"}, {"bytes": b"1", "path": "2"}], "label": [1, 2]}
        ),
        "has images without bytes, only with paths or addresses",
    ),
    "null": (
        lambda p: parquet(p, {"image": [None, {"bytes": b"1", "path": "2"}], "label": [1, 2]}),
        "has images without bytes",
    ),
    "no labels": (
        lambda p: parquet(p, {"image": [{"bytes": b"1", "path": "1"}], "text": ["x"]}),
        r"has no column of classes named label, .* \(found image, text\); name it with --class-column",
    ),
    "several classes": (
        lambda p: parquet(p, {"image": [{"bytes": b"1", "path": "1"}], "labels": [[1, 2]]}),
        "the column labels has several classes for an image",
    ),
    "two forms": (
        lambda p: folder(p, {"train.parquet": b"", "x.npy": b""}),
        "has files of several forms: 1 file such as ",
    ),
    "text of other bytes": (
        lambda p: parquet(p, {"image": [b"1", b"2"], "label": text_of(b"\xff", b"a")}),
        "train.parquet is a damaged or truncated Parquet file: 'utf-8' codec can't decode byte 0xff",
    ),
    "column of other bytes": (
        lambda p: changed(
            parquet(p, {"image": [b"1"], "label": [1]}, store_schema=False),
            "train.parquet",
            lambda c: c.replace(b"image", b"im\xb4ge"),
        ),
        "train.parquet is a damaged or truncated Parquet file: 'utf-8' codec can't decode byte 0xb4",
    ),
    "columns with escapes": (
        lambda p: parquet(
            p, {"\x1ba": [{"bytes": b"1", "path": "1"}], "\x1bb": [{"bytes": b"1", "path": "1"}], "label": [1]}
        ),
        r"has several columns of images, '\\x1ba', '\\x1bb'; write one",
    ),
    # NumPy
    "page as npz": (lambda p: changed(folder(p, {"set.npz": b""}), "set.npz", lambda _: PAGE), "is an HTML page"),
    "empty npy": (
        lambda p: folder(p, {"images.npy": b"", "labels.npy": b""}),
        "images.npy is an empty file instead of",
    ),
    "truncated npz": (
        lambda p: changed(npz(folder(p, {}) / "a.npz", x=X, y=Y).parent, "a.npz", cut),
        "a.npz is truncated",
    ),
    "truncated npy": (
        lambda p: changed(forms.write_npy(p), "train/images.npy", cut),
        "images.npy is truncated: it has .* instead of",
    ),
    "floats": (
        lambda p: npz(p.with_suffix(".npz"), x=X / 255, y=Y),
        r"!x has images of float64; save them as uint8, with \(255 \* images\)\.round",
    ),
    "int64 images": (
        lambda p: npz(p.with_suffix(".npz"), x=X.astype(int), y=Y),
        "has images of int64; save them as uint8",
    ),
    "objects": (
        lambda p: npz(p.with_suffix(".npz"), x=np.array([X[0], X[1], None, 1], object), y=Y),
        "!x is an array of Python objects, which is never read",
    ),
    "labels of objects": (
        lambda p: npz(p.with_suffix(".npz"), x=X, y=np.array([1, "a", None, 1], object)),
        "!y is an array of Python objects, but labels must be whole numbers or text",
    ),
    "count": (lambda p: npz(p.with_suffix(".npz"), x=X, y=Y[:3]), "!y has 3 labels for 4 images"),
    "one-hot": (
        lambda p: npz(p.with_suffix(".npz"), x=X, y=np.eye(4, dtype=int)),
        r"has labels of the shape \[4, 4\] instead of \[N\]; one-hot labels become numbers with \.argmax\(1\)",
    ),
    "negative": (
        lambda p: npz(p.with_suffix(".npz"), x=X, y=Y - 1),
        "has the label -1 for image 0; labels must be from 0",
    ),
    "float labels": (
        lambda p: npz(p.with_suffix(".npz"), x=X, y=Y / 2),
        "of the type float64, but labels must be whole",
    ),
    "channels first": (
        lambda p: npz(p.with_suffix(".npz"), x=np.zeros((4, 3, 8, 8), np.uint8), y=Y),
        r"its channels before height and width; save it with images\.transpose\(0, 2, 3, 1\)",
    ),
    "channels": (
        lambda p: npz(p.with_suffix(".npz"), x=np.zeros((4, 8, 8, 5), np.uint8), y=Y),
        r"has the shape \[4, 8, 8, 5\]; images must be",
    ),
    "names": (
        lambda p: npz(p.with_suffix(".npz"), arr_0=X, arr_1=Y),
        "found arr_0, arr_1; name them images and labels",
    ),
    "no labels array": (
        lambda p: npz(p.with_suffix(".npz"), x_train=X, foo=Y),
        r"!x_train, but no array of labels for train \(found foo\)",
    ),
    "Fortran": (lambda p: npz(p.with_suffix(".npz"), x=np.asfortranarray(X), y=Y), "is stored column by column"),
    "records": (
        lambda p: npz(p.with_suffix(".npz"), x=np.zeros(4, [("a", "u1")]), y=Y),
        "or one of records: its header",
    ),
    "one npy": (
        lambda p: changed(folder(p, {"images.npy": b""}), "images.npy", lambda _: b"\x93NUMPY\x01"),
        "its header is not valid",
    ),
    "bomb": (
        lambda p: changed(forms.write_npz(npz_folder(p) / "a.npz", compressed=True).parent, "a.npz", understate),
        "a.npz!train_images: it is damaged in the zip archive: Bad CRC-32|is truncated: it has .* instead of",
    ),
    "huge shape": (
        lambda p: changed(forms.write_npy(p), "train/images.npy", lambda c: c.replace(b"(8, 32", b"(9**9")),
        "its header is not valid",
    ),
    "more than there is": (
        lambda p: changed(forms.write_npy(p), "train/images.npy", lambda c: c.replace(b"32, 32, 3)", b"32, 99, 3)")),
        r"images\.npy is truncated: it has 24,704 instead of 76,160 bytes",
    ),
    # IDX and CIFAR
    "page as IDX": (
        lambda p: changed(forms.write_idx(p), "train-images-idx3-ubyte", lambda _: PAGE),
        "not an IDX file",
    ),
    "truncated gzip": (
        lambda p: changed(forms.write_idx(p, packed=True), "train-labels-idx1-ubyte.gz", cut),
        "train-labels-idx1-ubyte.gz is a truncated gzip file",
    ),
    "truncated IDX": (
        lambda p: changed(forms.write_idx(p), "t10k-images-idx3-ubyte", cut),
        "t10k-images.* is truncated",
    ),
    "no labels of IDX": (
        lambda p: folder(p, {"train-images-idx3-ubyte": forms.idx(X)}),
        "has train-images-idx3-ubyte, but no file of labels for train; download it too",
    ),
    "two sets": (
        lambda p: folder(p, {f"emnist-{name}-train-images-idx3-ubyte": forms.idx(X) for name in "ab"}),
        "has the IDX files of several data sets",
    ),
    "large images": (
        lambda p: changed(
            forms.write_idx(p),
            "train-images-idx3-ubyte",
            lambda c: c[:4] + struct.pack(">3I", 8, 2**16, 2**16) + c[16:],
        ),
        "has images of 4,294,967,296 bytes, more than the 536,870,912 allowed; make them smaller",
    ),
    "IDX of floats": (
        lambda p: changed(forms.write_idx(p), "train-images-idx3-ubyte", lambda c: c[:2] + b"\x0d" + c[3:]),
        r"has values of the IDX type 0xd; save it as uint8",
    ),
    "counts of IDX": (
        lambda p: changed(forms.write_idx(p), "train-labels-idx1-ubyte", lambda _: forms.idx(Y.astype("u1"))),
        "has 4 labels for 8 images",
    ),
    "IDX of t10k and test": (
        lambda p: folder(p, {f"{name}-images-idx3-ubyte": forms.idx(X) for name in ("t10k", "test")}),
        "has IDX files test-… and t10k-… of the split test; keep one",
    ),
    "CIFAR-10 and CIFAR-100": (
        lambda p: forms.write_cifar_binary(forms.write_cifar_binary(p), fine=True),
        "has the files of both CIFAR-10 and CIFAR-100; keep those of one",
    ),
    "label of CIFAR": (
        lambda p: changed(forms.write_cifar_binary(p), "data_batch_1.bin", lambda c: b"\x07" + c[1:]),
        r"data_batch_1\.bin has the label 7 for image 0; labels must be from 0 to 2",
    ),
    "truncated CIFAR": (
        lambda p: changed(forms.write_cifar_binary(p), "test_batch.bin", lambda c: c[:-9]),
        r"test_batch\.bin is truncated: its 12283 bytes are no multiple of the 3073",
    ),
    "label of 71 bits": (
        lambda p: changed(
            forms.write_cifar_pickles(p),
            "test_batch",
            lambda c: pickle.dumps(pickle.loads(c) | {"labels": [2**70] * 4}, 2),
        ),
        "test_batch has a label of more than 64 bits",
    ),
    "key of many digits": (
        lambda p: changed(forms.write_cifar_pickles(p), "test_batch", lambda _: pickle.dumps({1 << 80_000: 1}, 2)),
        "test_batch has no data and labels",
    ),
    "page as CIFAR": (lambda p: changed(forms.write_cifar_pickles(p), "test_batch", lambda _: PAGE), "is an HTML page"),
    "truncated pickle": (
        lambda p: changed(forms.write_cifar_pickles(p), "test_batch", cut),
        "is not one of CIFAR's pickles",
    ),
    "both versions": (
        lambda p: (
            forms.write_cifar_binary(forms.write_cifar_pickles(p / "x").parent / "y")
            and [(p / "y" / each.name).write_bytes(each.read_bytes()) for each in (p / "x").iterdir()]
            and p / "y"
        ),
        "has both the binary and the Python version",
    ),
    # Files that are a part of a data set
    "shape of many digits": (
        lambda p: changed(
            forms.write_npy(p),
            "train/images.npy",
            lambda _: npy(f"'|u1', 'fortran_order': False, 'shape': (0x{'f' * 9_000},)"),
        ),
        "images.npy is a damaged NumPy array, .*: its header is not valid",
    ),
    "header of other text": (
        lambda p: changed(
            forms.write_npy(p),
            "val/labels.npy",
            lambda c: c[:8] + b"v\0 '<i8', 'fortran_order': False, 'shape': (4,), }" + b" " * 60 + b"\n\2" + bytes(39),
        ),
        "labels.npy is a damaged NumPy array, .*: its header is not valid",
    ),
    "header with escapes": (
        lambda p: changed(
            forms.write_npy(p), "val/labels.npy", lambda _: npy(r"'\h\d', 'fortran_order': False, 'shape': (4,)")
        ),
        "labels.npy is a damaged NumPy array, .*: its header is not valid",
    ),
    "labels of no characters": (
        lambda p: npz(p.with_suffix(".npz"), x=X, y=np.array([2**31 - 1] * 4, "<u4").view("<U1")),
        "!y has a label that is not valid text",
    ),
    "labels of other bytes": (
        lambda p: npz(p.with_suffix(".npz"), x=X, y=np.array([b"\xff", b"\xfe", b"a", b"a"])),
        "!y has a label that is not valid text: .*; write it as UTF-8",
    ),
    "labels of half pairs": (
        lambda p: npz(p.with_suffix(".npz"), x=X, y=np.array([0xD800] * 4, "<u4").view("<U1")),
        r"!y has the class '\\ud800'; a class must be a number from 0, or a name of",
    ),
    "class of half a pair": (
        lambda p: forms.write_tar(p, {"1.jpg": b"1", "1.json": b'{"label": "\\ud800"}'}),
        r"the sample 1 has the class '\\ud800'; a class must be a number from 0, or a name of",
    ),
    "a single array": (
        lambda p: folder(p, {"a": b"\x93NUMPY"}) / "a",
        "is a NumPy array, which is a part of a data set",
    ),
    "a single IDX": (lambda p: folder(p, {"a": forms.idx(X)}) / "a", "is an IDX file, which is a part of a data set"),
    "a pickle": (lambda p: folder(p, {"a": b"\x80\x04"}) / "a", "is a Python pickle, which is a part of a data set"),
    "page as parquet file": (
        lambda p: folder(p, {"a.npz": PAGE}) / "a.npz",
        "is an HTML page, .*, not a NumPy archive",
    ),
}


@pytest.mark.parametrize("form", ["<U0", "|S0", "(2,)u1", "|V0"])
def test_labels_of_no_size_or_of_arrays_are_one_clear_error(tmp_path, form):
    header = npy(f"'{form}', 'fortran_order': False, 'shape': (8,)")
    source = changed(forms.write_npy(tmp_path / "set"), "train/labels.npy", lambda _: header)
    with pytest.raises(SourceError, match=r"labels.npy is a damaged NumPy array, .*: its header is not valid"):
        open_source(source)


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_file_is_one_clear_error(tmp_path, case):
    write, message = WRONG[case]
    if "both" in case:
        (tmp_path / "wrong").mkdir()
    if "parquet" in case:
        pytest.importorskip("pyarrow")
    source = write(tmp_path / "wrong")
    with pytest.raises(SourceError, match=message) as caught:
        open_source(source)
    assert "\n" not in str(caught.value)


FORMS = {
    "tar": lambda p: forms.write_tar(p / "set.tar", {"a/1.png": b"1", "b/1.png": b"2"}),
    "zip": lambda p: forms.write_zip(p / "set.zip", {"a/1.png": b"1", "b/1.png": b"2"}),
    "npz": lambda p: npz(p / "set.npz", x=X, y=Y),
    "idx": lambda p: forms.write_idx(p / "set"),
    "cifar": lambda p: forms.write_cifar_binary(p / "set"),
    "parquet": lambda p: parquet(p / "set", {"image": [b"1", b"2"], "label": [0, 1]}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_file_that_is_replaced_between_its_labels_and_its_images_is_refused(tmp_path, monkeypatch, form):
    """Even by one of the same size and modification time: its images would get the labels of others."""
    source = FORMS[form](tmp_path)
    check = open_source_module._check_holdout

    def replace(*arguments):
        for path in [source] if source.is_file() else [*source.iterdir()]:
            other = tmp_path / "other"
            shutil.copy2(path, other)
            other.replace(path)
        check(*arguments)

    monkeypatch.setattr(open_source_module, "_check_holdout", replace)
    with pytest.raises(SourceError, match=r"was replaced or written to while it was listed; run the command again"):
        open_source(source)


@pytest.mark.parametrize("form", ["tar", "zip", "npz", "cifar"])
def test_a_file_that_is_written_to_while_an_image_is_read_is_refused(tmp_path, monkeypatch, form):
    source = FORMS[form](tmp_path)
    files = [source] if source.is_file() else [*source.iterdir()]

    def then_written(function):
        def call(*arguments):
            found = function(*arguments)
            for each in files:
                os.utime(each, ns=(1, 1))
            return found

        return call

    with open_source(source) as found:
        monkeypatch.setattr(source_file, "read_at", then_written(read_at))
        monkeypatch.setattr(zipfile.ZipFile, "open", then_written(zipfile.ZipFile.open))
        with pytest.raises(ChangedSourceError, match="has changed since it was listed"):
            found.splits["train"].read(0)


def test_a_webdataset_archive_that_is_replaced_is_not_read(tmp_path):
    source = forms.write_tar(tmp_path / "set.tar", {"1.png": b"1", "1.cls": b"1"})
    with open_source(source) as found:
        shutil.copy2(source, tmp_path / "other")
        (tmp_path / "other").replace(source)
        with pytest.raises(OSError, match=r"set\.tar has changed since it was listed"):
            found.splits["train"].read(0)


def test_a_parquet_file_that_repeats_an_image_takes_neither_memory_nor_disk(tmp_path, monkeypatch):
    pa = pytest.importorskip("pyarrow")
    monkeypatch.setattr("loopfeed.preprocess.sources.parquet._ALWAYS_ALLOWED_BYTES", 2**24)
    images = pa.DictionaryArray.from_arrays(pa.array([0] * 64, pa.int32()), pa.array([bytes(2**24)], pa.binary()))
    source = parquet(tmp_path / "set", {"image": images, "label": [0] * 64}, store_schema=False)
    before = pa.total_allocated_bytes()
    with pytest.raises(SourceError, match=r"repeats images until they have more than .* write each image once"):
        open_source(source)
    assert pa.default_memory_pool().max_memory() - before < 2**28


def test_without_pyarrow_the_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(SourceError, match=r'which pyarrow reads; install it with pip install "loopfeed\[parquet\]"$'):
        open_source(folder(tmp_path / "set", {"train.parquet": b"PAR1"}))
