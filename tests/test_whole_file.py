"""Files written whole: the old content or the new, whatever fails on the way."""

import errno
import os
import stat
import threading
from pathlib import Path

import pytest

from loopfeed.engine.records.whole_file import remove_unfinished, write_whole


def test_a_file_has_the_content_that_was_written(tmp_path):
    path = tmp_path / "result.json"
    write_whole(path, b"first")
    assert path.read_bytes() == b"first"
    write_whole(path, b"")
    assert path.read_bytes() == b""
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("before", [None, b"old content"])
@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt("now")])
def test_a_failure_leaves_the_old_content(tmp_path, monkeypatch, before, failing, error):
    path = tmp_path / "result.json"
    if before is not None:
        path.write_bytes(before)

    def fail(*_arguments, **_settings):
        raise error

    if failing == "write":
        opened = os.fdopen

        def open_failing(handle, mode):
            file = opened(handle, mode)

            class Failing:
                __enter__ = lambda self: self  # noqa: E731 - a file that takes nothing
                __exit__ = lambda self, *_: file.close()  # noqa: E731
                write = fail

            return Failing()

        monkeypatch.setattr(os, "fdopen", open_failing)
    else:
        monkeypatch.setattr(*{"fsync": (os, "fsync", fail), "replace": (Path, "replace", fail)}[failing])
    with pytest.raises(type(error)) as caught:
        write_whole(path, b"new content")
    assert caught.value is error
    assert (path.read_bytes() if path.exists() else None) == before
    assert [entry.name for entry in tmp_path.iterdir()] == ([] if before is None else ["result.json"])


def test_content_is_on_disk_before_it_gets_its_name(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    path.write_bytes(b"old")
    seen = []
    fsync = os.fsync

    def recording_fsync(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else "file"
        seen.append((kind, os.fstat(handle).st_size if kind == "file" else None, path.read_bytes()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", recording_fsync)
    write_whole(path, b"new content")
    assert seen == [("file", 11, b"old"), ("folder", None, b"new content")]


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o027, 0o077])
def test_permissions_follow_the_umask(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "result.json", b"content")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "result.json").stat().st_mode) == 0o666 & ~mask


def test_a_reader_never_sees_partial_content(tmp_path):
    path = tmp_path / "result.json"
    contents = [bytes([letter]) * 100_000 for letter in b"ab"]
    write_whole(path, contents[0])
    done = threading.Event()

    def write():
        for turn in range(60):
            write_whole(path, contents[turn % 2])
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    while not done.wait(0):
        assert path.read_bytes() in contents
        if not writer.is_alive():
            break
    writer.join(20)
    assert done.is_set()


def test_only_the_remains_of_a_killed_write_are_removed(tmp_path, monkeypatch):
    path = tmp_path / "result.json"
    kept = ["result.json", ".result.json", ".result.json.backup", ".result_json.0123abcd", ".other.json.0123abcd"]
    for name in kept:
        (tmp_path / name).write_text("kept")
    monkeypatch.setattr(Path, "replace", lambda *_: None)
    monkeypatch.setattr(Path, "unlink", lambda *_, **__: None)
    for _ in range(2):
        write_whole(path, b"never in its place")
    monkeypatch.undo()
    assert len(list(tmp_path.iterdir())) == len(kept) + 2
    remove_unfinished(path)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(kept)
