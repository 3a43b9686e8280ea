"""The development kit: class numbers to WordNet ids, words, validation labels."""

import pytest

from preprocess.devkit import ARCHIVE, FOLDER, find_devkit
from preprocess.listing import SourceError

pytest.importorskip("scipy.io")
import tarfile

from tests.imagenet_archives import SYNSETS, devkit, tar_bytes

TRUTH = [3, 1, 1, 2]


def test_numbers_become_ids_and_words_names(tmp_path):
    (tmp_path / ARCHIVE).write_bytes(devkit(TRUTH))
    found = find_devkit(tmp_path)
    assert found is not None
    assert found.names == {"n02000003": "kit fox", "n02000001": "tench", "n02000002": "crane"}
    assert found.validation_ids == [SYNSETS[number][0] for number in TRUTH]


def test_an_unpacked_kit_says_the_same(tmp_path):
    (tmp_path / ARCHIVE).write_bytes(devkit(TRUTH))
    packed = find_devkit(tmp_path)
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    (tmp_path / ARCHIVE).unlink()
    assert (tmp_path / FOLDER).is_dir()
    assert find_devkit(tmp_path) == packed


def test_a_member_that_would_fill_the_memory_is_not_read(tmp_path, monkeypatch):
    (tmp_path / ARCHIVE).write_bytes(devkit(TRUTH))
    truth_bytes = len("3\n1\n1\n2\n")
    with tarfile.open(tmp_path / ARCHIVE) as archive:
        num_bytes = archive.getmember(f"{FOLDER}/data/meta.mat").size
    assert num_bytes > truth_bytes
    monkeypatch.setattr("preprocess.devkit._MAX_MEMBER_BYTES", num_bytes)
    assert find_devkit(tmp_path) is not None
    monkeypatch.setattr("preprocess.devkit._MAX_MEMBER_BYTES", num_bytes - 1)
    with pytest.raises(SourceError, match=rf"its data/meta\.mat has {num_bytes} bytes, too many; download it again"):
        find_devkit(tmp_path)


def test_no_kit_is_none(tmp_path):
    assert find_devkit(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not gzip", "cannot be read: .*; download it again"),
        (devkit(TRUTH)[:600], "cannot be read: .*; download it again"),
        (
            tar_bytes({"x/readme.txt": b""}, "w:gz"),
            r"has no data/meta\.mat; is it the development kit of tasks 1 and 2\?",
        ),
        (devkit([1, 4]), "line 2: '4' is no class number"),
        (devkit([1, "n1"]), "line 2: 'n1' is no class number"),
        (
            tar_bytes({"x/data/meta.mat": b"x", "x/data/ILSVRC2012_validation_ground_truth.txt": b"1"}, "w:gz"),
            r"data/meta\.mat: the table of synsets cannot be read: a MAT file begins with",
        ),
    ],
    # Not the archives themselves, which hold the time: every process must name its tests alike.
    ids=["no-gzip", "cut-short", "another-archive", "class-4", "class-n1", "no-mat"],
)
def test_what_is_wrong_is_named(tmp_path, content, message):
    (tmp_path / ARCHIVE).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        find_devkit(tmp_path)
