"""Logs on file systems that read less than was asked for, or nothing: no line is lost, and nothing is cut in error."""

import errno
import json
import os
from itertools import count
from pathlib import Path

import pytest

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.records.digests import RunningDigest
from loopfeed.engine.records.evaluation_log import EvaluationLog
from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.json_lines import JsonLines
from loopfeed.engine.records.run_folder import LOSS_LOG, RunFolder
from loopfeed.engine.runtime.goodput import _last_line
from tests.chained_run import STEPS, run

LINES = b"".join(b'{"step": %d, "time": %d}\n' % (step, step) for step in range(1, 400))


def read_in_pieces(monkeypatch, num_bytes):
    """Have each `pread` return at most `num_bytes`, as network and FUSE file systems may."""
    real = os.pread
    monkeypatch.setattr(os, "pread", lambda file, size, start: real(file, min(size, num_bytes), start))


@pytest.mark.parametrize("num_bytes", [1, 7, 64])
def test_a_log_is_continued_where_it_ends_however_little_is_read_at_once(tmp_path, monkeypatch, num_bytes):
    path = tmp_path / "loss.jsonl"
    path.write_bytes(LINES + b'{"step": 4')
    read_in_pieces(monkeypatch, num_bytes)
    assert _last_line(path, None) == (399, 399.0)
    lines = JsonLines(path)
    lines.open()
    lines.append('{"step": 400}')
    lines.close()
    whole = RunningDigest()
    whole.update(LINES + b'{"step": 400}\n')
    assert path.read_bytes() == LINES + b'{"step": 400}\n'
    assert lines.state() == whole.state()


@pytest.mark.parametrize("failing", range(1, 4))
def test_a_log_that_cannot_be_read_to_its_end_is_left_as_it_is(tmp_path, monkeypatch, failing):
    """One read returns nothing although the file goes on."""
    path, real, number = tmp_path / "loss.jsonl", os.pread, count(1)
    path.write_bytes(LINES + b'{"step": 4')
    monkeypatch.setattr(
        os,
        "pread",
        lambda file, size, start: b"" if next(number) == failing else real(file, min(size, 6_000), start),
    )
    with pytest.raises(OSError, match=rf"it ends after .* bytes, before its size: '{path}'"):
        JsonLines(path).open()
    assert path.read_bytes() == LINES + b'{"step": 4'


@pytest.mark.parametrize("content", [LINES[:-1], LINES + LINES, b"", LINES[:-24] + b"x" * 2_000_000])
def test_a_log_that_is_not_what_the_run_wrote_is_refused_before_it_is_cut(tmp_path, content):
    path, begun = tmp_path / "loss.jsonl", RunningDigest()
    begun.update(LINES)
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"must contain the {len(LINES):,} bytes that this run wrote to it"):
        JsonLines(path, begun).open()
    assert path.read_bytes() == content


def test_a_failed_append_cuts_nothing_that_another_program_wrote(tmp_path, monkeypatch):
    path = tmp_path / "loss.jsonl"
    lines = JsonLines(path)
    lines.open()

    def write(file, content):
        path.write_bytes(LINES)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(OSError, match="No space left"):
        lines.append("{}")
    assert path.read_bytes() == LINES


@pytest.fixture
def opened(tmp_path):
    lines = JsonLines(tmp_path / "control.jsonl")
    lines.open()
    lines.append('{"step": 1}')
    yield lines
    lines.close()


def test_a_line_that_is_removed_again_does_not_come_back_after_a_power_failure(opened, tmp_path, monkeypatch):
    synced, real = [], os.fsync

    def fsync(file):
        real(file)
        synced.append((tmp_path / "control.jsonl").read_bytes())

    opened.sync()
    monkeypatch.setattr(os, "fsync", fsync)
    opened.sync()
    assert synced == []
    assert not opened.append('{"step": 2}', confirm=lambda: False)
    opened.sync()
    assert synced == [b'{"step": 1}\n']


def test_a_line_that_should_be_removed_but_stays_fails_each_later_sync(opened, monkeypatch):
    def truncate(*_):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "ftruncate", truncate)
    with pytest.raises(OSError, match=r"error: '.*control.jsonl'"):
        opened.append('{"step": 2}', confirm=lambda: False)
    for _ in range(2):
        with pytest.raises(OSError, match=r"error: '.*control.jsonl'"):
            opened.sync()


def test_a_run_is_resumed_whole_where_reads_are_short(tmp_path, monkeypatch):
    path = tmp_path / "run"
    run(path)
    before = (path / "loss.jsonl").read_bytes()
    read_in_pieces(monkeypatch, 64)
    assert run(path, resume=True, steps=STEPS + 2).steps_done == STEPS + 2
    assert (path / "loss.jsonl").read_bytes().startswith(before)
    steps = [json.loads(line)["step"] for line in (path / "loss.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 3))
    assert EvaluationLog(path / "eval.jsonl").read()


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO])
def test_a_disk_that_fails_has_not_lost_the_folder(tmp_path, monkeypatch, number):
    """An error that may pass must not be told as the loss of the record, after which another run is to be started."""
    with RunFolder(tmp_path / "run") as folder:
        folder.write_config(TrainConfig(steps=1), {}, None, origins={})
        (folder.path / LOSS_LOG).touch()
        (folder.path / "snapshots/4").mkdir(parents=True)
        log = JsonLines(folder.path / LOSS_LOG)
        log.open()
        real = os.stat

        def fail(path, *args, **more):
            if not isinstance(path, int) and Path(path).is_relative_to(folder.path):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **more)

        with monkeypatch.context() as failing:
            failing.setattr(os, "stat", fail)
            for check in (log.check_place, folder.check_kept):
                with pytest.raises(OSError, match=os.strerror(number)) as caught:
                    check()
                assert not isinstance(caught.value, LostFileError)
            assert folder.can_resume_from(4)
        assert folder.can_resume_from(4)
        assert not folder.can_resume_from(6)
        (folder.path / LOSS_LOG).unlink()
        for check in (log.check_place, log.sync):
            with pytest.raises(LostFileError):
                check()
        log.close()
