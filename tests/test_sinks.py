"""The sinks: golden lines, and the content of a file when the disk is full."""

import errno
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.records.folder_lock import FolderLock
from loopfeed.engine.records.run_folder_sink import RunFolderSink
from loopfeed.engine.stream.sinks import (
    EvaluationRecord,
    LossRecord,
    PlainSink,
    RunDescription,
    evaluation_words,
    loss_fields,
)

FLOAT32 = st.floats(width=32)


def folder_sink(path):
    return RunFolderSink(path, path.with_name("eval.jsonl"))


def record(step=1, **changes):
    values = {"loss": 2.5, "lr": 0.1, "images_per_s": 100.0, "wait_ms": 0.5, "time": 1700000000.0}
    return LossRecord(step=step, **(values | changes))


def as_float32(value):
    return float(np.float32(value))


def write_all(path, *records):
    sink = folder_sink(path)
    sink.open()
    for each in records:
        sink.write(each)
    sink.close()


def test_golden_line():
    golden = LossRecord(
        step=7,
        loss=as_float32(6.9077554),
        lr=as_float32(0.05),
        images_per_s=1234.5678,
        wait_ms=0.0123456,
        time=1763712000.98765,
    )
    assert golden.to_json() == (
        '{"step": 7, "loss": 6.9077554, "lr": 0.05, "images_per_s": 1234.57, "wait_ms": 0.012, "time": 1763712000.988}'
    )


@given(loss=FLOAT32, lr=FLOAT32, step=st.integers(1, 2**31))
def test_a_line_gives_back_the_float32_it_was_made_of(loss, lr, step):
    def no_constant(name):
        raise AssertionError(f"{name} is not JSON")

    line = record(step, loss=loss, lr=lr).to_json()
    values = json.loads(line, parse_constant=no_constant)
    assert "\n" not in line
    assert list(values) == ["step", "loss", "lr", "images_per_s", "wait_ms", "time"]
    assert values["step"] == step
    for name, value in (("loss", loss), ("lr", lr)):
        if math.isfinite(value):
            assert np.float32(values[name]) == np.float32(value)
        else:
            assert values[name] is None


def test_golden_file(tmp_path):
    write_all(tmp_path / "loss.jsonl", record(1), record(2, loss=math.nan))
    assert (tmp_path / "loss.jsonl").read_bytes() == (
        b'{"step": 1, "loss": 2.5, "lr": 0.1, "images_per_s": 100.0, "wait_ms": 0.5, "time": 1700000000.0}\n'
        b'{"step": 2, "loss": null, "lr": 0.1, "images_per_s": 100.0, "wait_ms": 0.5, "time": 1700000000.0}\n'
    )


def test_a_line_is_on_disk_before_the_next_is_taken(tmp_path):
    path = tmp_path / "loss.jsonl"
    sink = folder_sink(path)
    sink.open()
    for step in range(1, 4):
        sink.write(record(step))
        assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(1, step + 1))
    sink.close()


@pytest.mark.parametrize("kept", [0, 1, 3000])
def test_a_line_that_a_crash_cut_short_is_removed(tmp_path, kept):
    path = tmp_path / "loss.jsonl"
    whole = "".join(record(step).to_json() + "\n" for step in range(1, kept + 1))
    path.write_text(whole + record(kept + 1).to_json()[:40])
    write_all(path, record(kept + 1))
    assert path.read_text() == whole + record(kept + 1).to_json() + "\n"


def test_a_file_of_something_else_is_left_alone(tmp_path):
    path = tmp_path / "loss.jsonl"
    path.write_bytes(b"x" * 1_100_000)
    with pytest.raises(
        ValueError, match=r"loss\.jsonl must be a log of a run, but its last line is longer than any line of such a log"
    ):
        write_all(path, record())
    assert path.read_bytes() == b"x" * 1_100_000


def test_a_pipe_or_a_device_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "device").symlink_to("/dev/null")
    for name, fault in (("pipe", "a pipe, not a file"), ("device", "a link, through which nothing is written")):
        with pytest.raises(OSError, match=f"it is {fault}: '.*/{name}'"):
            folder_sink(tmp_path / name).open()


FULL_DISK = """
import os, resource, signal, sys
from pathlib import Path
from loopfeed.engine.stream.sinks import (LossRecord)
from loopfeed.engine.records.run_folder_sink import (RunFolderSink)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
sink = RunFolderSink(Path(sys.argv[1]), Path(sys.argv[1]).with_name("eval.jsonl"))
sink.open()
for attempt in range(2):
    try:
        for step in range(1, 100):
            sink.write(LossRecord(step, 2.5, 0.1, 100.0, 0.5, 1700000000.0))
    except OSError as error:
        print(step, error.errno, os.path.getsize(sys.argv[1]))
sink.close()
"""


def test_a_full_disk_leaves_whole_lines(tmp_path):
    path = tmp_path / "loss.jsonl"
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, path],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[1],
    )
    line = record().to_json() + "\n"
    fits = 1000 // len(line)
    size = sum(len(record(step).to_json()) + 1 for step in range(1, fits + 1))
    # The second attempt finds the disk as full as the first left it, and again leaves no part of a line.
    assert done.stdout.split("\n")[:2] == [f"{fits + 1} {errno.EFBIG} {size}", f"1 {errno.EFBIG} {size}"]
    assert [json.loads(text)["step"] for text in path.read_text().splitlines(keepends=True)] == [*range(1, fits + 1)]


def test_a_short_write_before_a_full_disk_is_undone(tmp_path, monkeypatch):
    path = tmp_path / "loss.jsonl"
    sink = folder_sink(path)
    sink.open()
    sink.write(record(1))
    write = os.write

    def nearly_full(file, content):
        if len(content) < 60:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, content[:50])

    with monkeypatch.context() as patched:
        patched.setattr(os, "write", nearly_full)
        with pytest.raises(OSError, match="No space left on device"):
            sink.write(record(2))
    assert path.read_text() == record(1).to_json() + "\n"
    sink.write(record(3))
    sink.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 3]


def test_golden_plain_line(capsys):
    sink = PlainSink(sys.stdout, steps=1000)
    sink.open()
    sink.write(record(12, wait_ms=0.012))
    sink.write(record(13, loss=math.nan))
    sink.close()
    assert capsys.readouterr().out == (
        "step 12/1000  loss 2.5000  lr 0.1  100.0 images/s  wait 0.01 ms\n"
        "step 13/1000  loss nan  lr 0.1  100.0 images/s  wait 0.50 ms\n"
    )


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (0.0, "loss 0.0000"),
        (0.00123, "loss 0.0012"),
        (0.000123456, "loss 0.0001235"),
        (-99999.5, "loss -99999.5000"),
        (123456.0, "loss 1.235e+05"),
        (math.inf, "loss inf"),
    ],
)
def test_a_loss_of_any_size_is_printed(loss, words):
    assert loss_fields(record(loss=loss), 10)[1] == words


def test_missing_values_are_left_out_and_slow_rates_keep_their_digits():
    lacking = record(3, lr=math.nan, images_per_s=0.03214, wait_ms=math.nan)
    assert loss_fields(lacking, None) == ["step 3", "loss 2.5000", "0.03 images/s"]


@pytest.mark.parametrize(
    ("top1", "top5", "expected"), [(0.5, 0.75, "top-1 50.00 %  top-5 75.00 %  "), (0.5, math.nan, "top-1 50.00 %  ")]
)
def test_top5_is_printed_where_it_exists(top1, top5, expected):
    record = EvaluationRecord(step=1, num_images=10, top1=top1, top5=top5, loss=0.1, time=1.0)
    assert evaluation_words(record) == f"evaluation at step 1: {expected}loss 0.1000  (10 images)"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_plain_line_that_finds_no_room_is_an_error():
    stream = Path("/dev/full").open("w", encoding="ascii")  # noqa: SIM115 - closing it raises, too
    with pytest.raises(OSError, match="No space left on device"):
        PlainSink(stream, steps=10).write(record())
    with pytest.raises(OSError, match="No space left on device"):
        stream.close()


def test_evaluations_have_a_log_of_their_own_that_is_made_when_needed(tmp_path):
    sink = folder_sink(tmp_path / "loss.jsonl")
    sink.open()
    sink.write(record(1))
    assert not (tmp_path / "eval.jsonl").exists()
    sink.write_evaluation(EvaluationRecord(step=1, num_images=3, top1=1 / 3, top5=1.0, loss=math.nan, time=1.0004))
    sink.close()
    assert (tmp_path / "loss.jsonl").read_text() == record(1).to_json() + "\n"
    expected = '{"step": 1, "num_images": 3, "top1": 0.3333333333333333, "top5": 1.0, "loss": null, "time": 1.0}\n'
    assert (tmp_path / "eval.jsonl").read_text() == expected


def test_closing_twice_closes_no_file_of_another(tmp_path):
    sink, lock = folder_sink(tmp_path / "loss.jsonl"), FolderLock(tmp_path)
    for begin, end in ((sink.open, sink.close), (lock.acquire, lock.release)):
        end()
        begin()
        end()
        other = os.open(tmp_path, os.O_RDONLY)
        end()
        assert os.path.samestat(os.fstat(other), tmp_path.stat())
        os.close(other)


def lines_at(times, **options):
    """Return the steps that have a line, of losses that arrive at these seconds."""
    stream = io.StringIO()
    sink = PlainSink(stream, steps=len(times), **options)
    for step, time_s in enumerate(times, 1):
        sink.write(record(step, time=time_s))
    sink.close()
    return [int(line.split()[1].partition("/")[0]) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize(
    ("every", "times", "expected"),
    [
        (1, [0.0] * 4, [1, 2, 3, 4]),
        (3, [0.0] * 8, [1, 3, 6, 8]),
        (3, [0.0] * 6, [1, 3, 6]),
        (100, [0.0] * 3, [1, 3]),
        (None, [0.0, 1.0, 4.9, 5.0, 9.9, 10.1, 10.2], [1, 4, 6, 7]),
        (None, [100.0, 101.0, 50.0, 51.0, 55.0], [1, 3, 5]),
        (None, [7.0], [1]),
    ],
)
def test_plain_lines_come_every_few_seconds_or_steps_with_the_first_and_the_last(every, times, expected):
    stream = io.StringIO()
    sink = PlainSink(stream, steps=20)
    sink.describe_run(RunDescription({}, {}, None, 0, None, print, lambda step: step / 8))
    sink.write(record(3))
    assert stream.getvalue().endswith("  epoch 0.4/2.5\n")
    assert lines_at(times, every=every) == expected


@pytest.mark.parametrize(
    ("width", "expected"),
    [
        (None, "evaluation at step 9: top-1 12.35 %  top-5 98.76 %  loss 2.0000  (50,000 images)"),
        (79, "evaluation at step 9: top-1 12.35 %  top-5 98.76 %  loss 2.0000"),
        (55, "evaluation at step 9: top-1 12.35 %  top-5 98.76 %"),
        (10, "evaluation at step 9: top-1 12.35 %"),
    ],
)
def test_the_line_of_an_evaluation_fits_a_width(width, expected):
    assert evaluation_words(EvaluationRecord(9, 50_000, 0.12346, 0.98761, 2.0, 0.0), width) == expected
