"""Reading a log that grows, breaks and starts again, and what else the run folder tells."""

import json
import math
import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.records.loss_log import (
    LOSS_LOG_NAME,
    LossLog,
    LossRows,
    RunEnd,
    RunFacts,
    read_run_end,
    read_run_facts,
)

NAN = float("nan")


def line_of(step, loss=1.5, **more) -> bytes:
    return json.dumps({"step": step, "loss": loss, "lr": 0.1, "time": 100.0 + step} | more).encode() + b"\n"


def read_all(log) -> LossRows:
    batch = log.read()
    rows = batch.rows
    while batch.more:
        batch = log.read()
        rows = rows.followed_by(batch.rows)
    return rows


def test_every_column_is_read_and_missing_values_are_nan(tmp_path):
    path = tmp_path / "loss.jsonl"
    full = {"step": 1, "loss": 2.5, "lr": 0.1, "images_per_s": 812, "wait_ms": 0.25, "time": 1e9}
    path.write_text(json.dumps(full) + '\n{"loss": 1, "step": 2, "lr": "fast", "time": null}\n')
    rows = LossLog(path).read().rows
    assert rows.step.tolist() == [1, 2]
    columns = (rows.loss, rows.learning_rate, rows.images_per_s, rows.wait_ms, rows.time_s)
    assert [column[0] for column in columns] == [2.5, 0.1, 812.0, 0.25, 1e9]
    assert rows.loss[1] == 1.0
    assert all(math.isnan(column[1]) for column in columns[1:])


def test_losses_that_are_not_finite_are_rows(tmp_path):
    path = tmp_path / "loss.jsonl"
    path.write_bytes(
        b"".join(b'{"step": 1, "loss": %s}\n' % text for text in (b"NaN", b"null", b"Infinity", b"-Infinity"))
    )
    batch = LossLog(path).read()
    np.testing.assert_array_equal(batch.rows.loss, [NAN, NAN, math.inf, -math.inf])
    assert batch.num_unreadable == 0


@given(
    num=st.integers(0, 30),
    cuts=st.lists(st.integers(0, 2000), max_size=8),
    chunk_bytes=st.integers(80, 400),
)
def test_rows_split_anywhere_are_read_once_and_in_order(tmp_path_factory, num, cuts, chunk_bytes):
    data = b"".join(line_of(step, step / 7) for step in range(1, num + 1))
    path = tmp_path_factory.mktemp("log") / "loss.jsonl"
    log = LossLog(path, chunk_bytes)
    seen = read_all(log)
    written = 0
    for cut in [*sorted(cuts), len(data)]:
        with path.open("ab") as file:
            file.write(data[written:cut])
        written = max(written, min(cut, len(data)))
        seen = seen.followed_by(read_all(log))
    assert seen.step.tolist() == list(range(1, num + 1))
    assert seen.loss.tolist() == [step / 7 for step in range(1, num + 1)]


def test_a_partial_last_line_waits_for_its_newline(tmp_path):
    path = tmp_path / "loss.jsonl"
    path.write_bytes(line_of(1) + line_of(2)[:-1])
    log = LossLog(path)
    assert log.read().rows.step.tolist() == [1]
    batch = log.read()
    assert (len(batch.rows), batch.num_unreadable) == (0, 0)
    with path.open("ab") as file:
        file.write(b"\n")
    assert log.read().rows.step.tolist() == [2]


def test_a_missing_log_is_empty_until_it_exists(tmp_path):
    path = tmp_path / "loss.jsonl"
    log = LossLog(path)
    assert len(log.read().rows) == 0
    path.write_bytes(line_of(1))
    batch = log.read()
    assert (batch.rows.step.tolist(), batch.restarted) == ([1], False)


BAD_LINES = [
    b"half a li",
    b"[1, 2]",
    b'"step"',
    b"{}",
    b'{"step": 1}',
    b'{"loss": 1.0}',
    b'{"step": 1.5, "loss": 1.0}',
    b'{"step": true, "loss": 1.0}',
    b'{"step": -1, "loss": 1.0}',
    b'{"step": 99999999999999999999, "loss": 1.0}',
    b'{"step": 1, "loss": "low"}',
    b'{"step": 1, "loss": [1.0]}',
    b'{"step": 1, "loss": ' + b"9" * 400 + b"}",
    b'{"step": 1, "loss": 1.0}, {"step": 2, "loss": 1.0}',
    b"\xff\xfe\x00",
    b"[" * 5000,
]


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_counted_and_its_neighbours_are_kept(tmp_path, bad):
    path = tmp_path / "loss.jsonl"
    path.write_bytes(line_of(1) + line_of(2) + bad + b"\n\n" + line_of(3))
    log = LossLog(path)
    batch = log.read()
    assert batch.rows.step.tolist() == [1, 2, 3]
    assert (batch.num_unreadable, batch.last_unreadable_line) == (1, 3)
    with path.open("ab") as file:
        file.write(line_of(4) + bad + b"\n")
    assert log.read().last_unreadable_line == 7


def test_a_line_longer_than_a_chunk_does_not_stop_the_reader(tmp_path):
    path = tmp_path / "loss.jsonl"
    path.write_bytes(line_of(1) + b"x" * 1000 + b"\n" + line_of(2))
    log = LossLog(path, chunk_bytes=128)
    assert read_all(log).step.tolist() == [1, 2]


def _shorten(path, old):
    path.write_bytes(line_of(1, 9.0))


def _cut_back(path, old):
    """Nothing but its size tells: the file and its beginning stay the same."""
    os.truncate(path, old.index(b"\n") + 1)


def _rewrite_longer(path, old):
    path.write_bytes(b"".join(line_of(step, 9.0) for step in range(1, 20)))


def _replace_by_rename(path, old):
    """As a run does that keeps the lines up to its snapshot: the beginning stays the same."""
    new = path.with_suffix(".new")
    new.write_bytes(old[: old.index(b"\n") + 1] + line_of(2, 9.0) * 20)
    new.replace(path)


def _remove_and_begin(path, old):
    path.rename(path.with_suffix(".old"))  # its inode stays taken
    path.write_bytes(line_of(1, 9.0))


@pytest.mark.parametrize("change", [_shorten, _cut_back, _rewrite_longer, _replace_by_rename, _remove_and_begin])
def test_a_restarted_log_is_read_from_its_start(tmp_path, change):
    path = tmp_path / "loss.jsonl"
    old = b"".join(line_of(step, more="x" * 200) for step in (1, 2, 3))
    path.write_bytes(old)
    log = LossLog(path)
    assert len(log.read().rows) == 3
    change(path, old)
    batch = log.read()
    assert batch.restarted
    assert batch.rows.step.tolist() == [json.loads(line)["step"] for line in path.read_bytes().splitlines()]
    assert not log.read().restarted


# --- the other files of the run folder


def test_the_end_is_reported_when_its_file_is_complete(tmp_path):
    assert read_run_end(tmp_path) is None
    (tmp_path / "result.json").write_text('{"steps_done": 5, "stopped')
    assert read_run_end(tmp_path) is None
    (tmp_path / "result.json").write_text('{"steps_done": 5, "stopped_by": "SIGINT", "error": null}')
    assert read_run_end(tmp_path) == RunEnd(5, "SIGINT", None)
    (tmp_path / "result.json").write_text("{}")
    assert read_run_end(tmp_path) == RunEnd()


@pytest.mark.timeout(30)
def test_a_hole_of_a_terabyte_is_skipped(tmp_path):
    path = tmp_path / LOSS_LOG_NAME
    path.write_bytes(line_of(1) + b"\n" if not line_of(1).endswith(b"\n") else line_of(1))
    os.truncate(path, 1 << 40)
    log = LossLog(path)
    assert log.read().rows.step.tolist() == [1]
    for _ in range(5):
        if not log.read().more:
            return
    raise AssertionError("the hole is read piece by piece")


def test_facts_prefer_what_the_settings_resolved_to(tmp_path):
    recorded = {"config": {"steps": 1000, "batch": 128, "model": "auto"}, "resolved": {"model": "resnet50"}}
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    assert read_run_facts(tmp_path) == RunFacts(1000, 128, "resnet50")
    (tmp_path / "config.json").write_text(json.dumps({"config": recorded["config"]}))
    assert read_run_facts(tmp_path) == RunFacts(1000, 128, "auto")
