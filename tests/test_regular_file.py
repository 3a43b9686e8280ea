"""Files are read whole; pipes, devices, sockets, folders and giants are refused at once."""

import errno
import os
import socket
from pathlib import Path

import pytest

from loopfeed.engine.records.folder_lock import FolderLock, is_locked
from loopfeed.engine.records.json_lines import JsonLines
from loopfeed.preprocess.packing.owner import Owner
from loopfeed.preprocess.regular_file import (
    IrregularFileError,
    is_regular,
    open_regular,
    read_at,
    read_into,
    read_regular,
)
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.mapped_shards import OpenFile


@pytest.mark.timeout(10)
@pytest.mark.parametrize("kind", ["pipe", "device", "socket", "folder"])
def test_refuses_anything_but_a_file_without_opening_it(tmp_path, kind, monkeypatch):
    path = tmp_path / "entry"
    listener = socket.socket(socket.AF_UNIX)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "socket":
        listener.bind(str(path))
    else:
        path.mkdir()
    opened = []
    monkeypatch.setattr(os, "open", lambda *arguments: opened.append(arguments))
    with listener, pytest.raises(IrregularFileError, match=r"it is a \w+, not a file"):
        open_regular(path)
    assert opened == []  # which has effects on some devices
    assert not is_regular(path)


@pytest.mark.timeout(10)
def test_refuses_a_replacement_of_a_file_before_it_is_opened(tmp_path, monkeypatch):
    path = tmp_path / "entry"
    path.touch()
    opened = os.open

    def replace_and_open(*arguments):
        path.unlink()
        os.mkfifo(path)
        return opened(*arguments)

    monkeypatch.setattr(os, "open", replace_and_open)
    with pytest.raises(IrregularFileError, match="it is a pipe, not a file"):
        open_regular(path)


def test_refuses_a_file_that_is_too_large(tmp_path):
    (tmp_path / "file").write_bytes(b"123")
    with pytest.raises(OSError, match="larger than the 2 bytes") as caught:
        read_regular(tmp_path / "file", max_bytes=2)
    assert caught.value.errno == errno.EFBIG


def test_leaks_no_descriptor(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    descriptors = Path("/proc/self/fd")
    if not descriptors.is_dir():
        pytest.skip("this system does not list a process's descriptors")
    before = len(list(descriptors.iterdir()))
    for _ in range(5):
        with pytest.raises(IrregularFileError):
            open_regular(tmp_path / "pipe")
    assert len(list(descriptors.iterdir())) == before


@pytest.fixture
def short_reads(monkeypatch):
    """Let each system call read at most 5 bytes, as network and FUSE file systems may."""
    pread = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, offset: pread(file, min(size, 5), offset))

    def preadv(file, buffers, offset):
        part = pread(file, min(sum(map(len, buffers)), 5), offset)
        left = part
        for each in buffers:
            each[: len(left)], left = left[: len(each)], left[len(each) :]
        return len(part)

    monkeypatch.setattr(os, "preadv", preadv)


@pytest.mark.usefixtures("short_reads")
def test_short_reads_are_continued(tmp_path):
    content = bytes(range(32))
    (tmp_path / "file").write_bytes(content)
    file = open_regular(tmp_path / "file")
    first, second, third = bytearray(3), bytearray(11), bytearray(13)
    assert read_at(file, 20, 7) == content[7:27]
    assert read_at(file, 20, 30) == content[30:]
    assert read_at(file, 20, 40) == b""
    assert read_into(file, (first, second, third), 2) == 27
    assert bytes(first + second + third) == content[2:29]
    assert read_into(file, (first, second), 28) == 4
    assert bytes(first + second[:1]) == content[28:]
    os.close(file)


def test_a_close_that_fails_hides_no_error_and_makes_none(tmp_path, monkeypatch):
    """On file servers a close may fail; the file is closed nevertheless."""
    real, closed = os.close, []

    def close(descriptor):
        real(descriptor)
        closed.append(descriptor)
        raise OSError(errno.EIO, "Input/output error")

    def use():
        with FolderLock(tmp_path), Owner(open_location(str(tmp_path / "pack"))):
            log = JsonLines(tmp_path / "log")
            log.open()
            mapped = OpenFile(os.open(tmp_path / "log", os.O_RDONLY))
            monkeypatch.setattr(os, "close", close)
            del mapped
            log.close()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        use()
    monkeypatch.undo()
    assert len(closed) == 3  # the lock closes itself
    assert not is_locked(tmp_path)
