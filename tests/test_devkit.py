"""The development kit: class numbers to WordNet ids, words, validation labels."""

import gzip
import os
import re

import pytest

from loopfeed.preprocess.sources.devkit import ARCHIVE, FOLDER, find_devkit
from loopfeed.preprocess.sources.listing import SourceError

pytest.importorskip("scipy.io")
import tarfile

from tests.imagenet_archives import SYNSETS, devkit, tar_bytes

GROUND_TRUTH = "ILSVRC2012_validation_ground_truth.txt"
TRUTH = [3, 1, 1, 2]


def test_numbers_become_ids_and_words_names(tmp_path):
    (tmp_path / ARCHIVE).write_bytes(devkit(TRUTH))
    found = find_devkit(tmp_path)
    assert found is not None
    assert found.names == {"n02000003": "kit fox", "n02000001": "tench", "n02000002": "crane"}
    assert found.validation_ids == [SYNSETS[number][0] for number in TRUTH]


def test_an_unpacked_kit_has_the_same_content(tmp_path):
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
    monkeypatch.setattr("loopfeed.preprocess.sources.devkit._MAX_MEMBER_BYTES", num_bytes)
    assert find_devkit(tmp_path) is not None
    monkeypatch.setattr("loopfeed.preprocess.sources.devkit._MAX_MEMBER_BYTES", num_bytes - 1)
    with pytest.raises(
        SourceError,
        match=rf"data/meta\.mat in .* has {num_bytes} bytes, more than the \d+ allowed; download the archive",
    ):
        find_devkit(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"not gzip", "cannot be read: .*; download it again"),
        (devkit(TRUTH)[:600], "cannot be read: .*; download it again"),
        (
            tar_bytes({"x/readme.txt": b""}, "w:gz"),
            r"has no data/meta\.mat; use the development kit for tasks 1 and 2",
        ),
        (devkit([1, 4]), "line 2: '4' is not a class number"),
        (devkit([1, "n1"]), "line 2: 'n1' is not a class number"),
        (
            tar_bytes({"x/data/meta.mat": b"x", "x/data/ILSVRC2012_validation_ground_truth.txt": b"1"}, "w:gz"),
            r"data/meta\.mat: a MAT file begins with a header of 128 bytes, but this file has 1 bytes; download",
        ),
    ],
    # Not the archives themselves, which hold the time: every process must name its tests alike.
    ids=["no-gzip", "cut-short", "another-archive", "class-4", "class-n1", "no-mat"],
)
def test_each_fault_of_a_kit_is_named(tmp_path, content, message):
    (tmp_path / ARCHIVE).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        find_devkit(tmp_path)


def headers(*sizes):
    """Pax headers that announce so many bytes, each followed by what an archive of zeros has."""
    parts = []
    for num_bytes in sizes:
        info = tarfile.TarInfo("x")
        info.type, info.size = tarfile.XHDTYPE, num_bytes
        parts.append(info.tobuf(tarfile.GNU_FORMAT))
    return b"".join(parts)


@pytest.mark.parametrize(
    ("content", "message"),
    # Made by the test: every process collects it, and compressing takes a second.
    [
        (
            lambda: gzip.compress(headers(3 * 2**30) + bytes(2**20)),
            "is truncated: it ends at byte",
        ),
        (lambda: gzip.compress(headers(2**21) + bytes(2**22)), "the extension header at byte 512 has 2097152 bytes"),
        (lambda: gzip.compress(headers(*[0] * 400) + bytes(2**10)), "more than 16 extension headers in a row"),
        (
            lambda: gzip.compress(bytes(2**27 + 1)),
            "cannot be read: it unpacks to more than the 134,217,728 bytes allowed",
        ),
        (lambda: gzip.compress(b"")[:-4], "cannot be read: it ends early; download it again"),
        (lambda: devkit(["9" * 5000]), "line 1: '9{40}' is not a class number"),
    ],
    ids=["3-GiB-header", "2-MiB-header", "headers", "bomb", "early", "digits"],
)
def test_a_hostile_kit_is_refused(tmp_path, content, message):
    (tmp_path / ARCHIVE).write_bytes(content())
    with pytest.raises(SourceError, match=message) as caught:
        find_devkit(tmp_path)
    assert ARCHIVE in str(caught.value)


def huge_file(path):
    path.touch()
    os.truncate(path, 2**40)


@pytest.mark.parametrize("name", [ARCHIVE, f"{FOLDER}/data/meta.mat", f"{FOLDER}/data/{GROUND_TRUTH}"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "it is a pipe, not a file"),
        (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a file"),
        (huge_file, "the file is larger than the .* bytes allowed"),
    ],
    ids=["pipe", "device", "huge"],
)
def test_a_kit_that_is_not_a_regular_file_is_refused(tmp_path, name, make, message):
    for path in (tmp_path / FOLDER / "data" / "meta.mat", tmp_path / FOLDER / "data" / GROUND_TRUTH):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"")
    (tmp_path / name).unlink(missing_ok=True)
    make(tmp_path / name)
    with pytest.raises(SourceError, match=rf"{re.escape(name)} cannot be read: {message}"):
        find_devkit(tmp_path)
