"""Reading a log that grows, breaks and starts again; and the summary of it against the plain sums."""

import json
import math
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.loss_log import LossHistory, LossLog, LossRows, RunEnd, RunFacts, read_run_end, read_run_facts

NAN = float("nan")


def line_of(step, loss=1.5, **more) -> bytes:
    return json.dumps({"step": step, "loss": loss, "lr": 0.1, "time": 100.0 + step} | more).encode() + b"\n"


def rows_of(steps, losses=None, times=None) -> LossRows:
    step = np.array(steps, np.int64)
    loss = np.array(losses if losses is not None else [1.0] * len(step), np.float64)
    blank = np.full(len(step), NAN)
    return LossRows(step, loss, blank, blank, blank, np.array(times if times is not None else blank, np.float64))


def read_all(log) -> LossRows:
    batch = log.read()
    rows = batch.rows
    while batch.more:
        batch = log.read()
        rows = rows.followed_by(batch.rows)
    return rows


def test_every_column_comes_through_and_what_is_missing_is_nan(tmp_path):
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
def test_however_the_writer_and_the_reader_cut_it_each_row_comes_once_and_in_order(
    tmp_path_factory, num, cuts, chunk_bytes
):
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


def test_a_missing_log_gives_nothing_until_it_is_there(tmp_path):
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
def test_a_log_that_began_anew_is_read_from_its_start(tmp_path, change):
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


def test_a_log_that_only_grew_did_not_restart(tmp_path):
    path = tmp_path / "loss.jsonl"
    log = LossLog(path)
    for step in range(1, 6):
        with path.open("ab") as file:
            file.write(line_of(step))
        assert not log.read().restarted


def test_chunk_bytes_must_be_positive(tmp_path):
    with pytest.raises(ValueError, match="chunk_bytes must be at least 1, got 0"):
        LossLog(tmp_path / "loss.jsonl", 0)


# --- the summary


LOSSES = st.lists(st.floats(-1e3, 1e3, width=32) | st.just(NAN) | st.just(math.inf), min_size=1, max_size=200)


@given(losses=LOSSES, cut=st.integers(0, 200), smoothing=st.floats(0, 0.99))
def test_while_it_is_short_the_history_is_every_point(losses, cut, smoothing):
    history = LossHistory(smoothing)
    history.add(rows_of([]))
    whole = rows_of(range(1, len(losses) + 1), losses)
    history.add(whole.take(slice(0, cut)))
    history.add(whole.take(slice(cut, None)))
    curve = history.curve()
    finite = np.where(np.isfinite(losses), losses, NAN)
    np.testing.assert_array_equal(curve.step, np.arange(1, len(losses) + 1))
    np.testing.assert_array_equal(curve.low, finite)
    np.testing.assert_array_equal(curve.high, finite)
    np.testing.assert_array_equal(curve.num_broken, ~np.isfinite(losses))
    # The definition as a weighted mean of everything so far, in place of the recurrence.
    for index in np.flatnonzero(np.isfinite(losses)):
        past = finite[: index + 1][np.isfinite(finite[: index + 1])]
        weights = smoothing ** np.arange(len(past) - 1, -1, -1.0)
        scale = np.abs(past).max()
        # Two orders of adding up to 200 float64 terms, each with a weight of at most 1.
        assert curve.smoothed[index] == pytest.approx(weights @ past / weights.sum(), abs=1e-12 * scale + 1e-300)


@given(
    num=st.integers(1, 700),
    gap=st.integers(1, 9),
    cut=st.integers(0, 700),
    num_bins=st.sampled_from([2, 4, 16, 64]),
    seed=st.integers(0, 99),
)
def test_long_histories_keep_extremes_counts_and_steps(num, gap, cut, num_bins, seed):
    generator = np.random.default_rng(seed)
    steps = np.cumsum(generator.integers(1, gap + 1, num))
    losses = np.where(generator.random(num) < 0.1, NAN, generator.normal(size=num))
    history = LossHistory(0.0, num_bins=num_bins)
    rows = rows_of(steps, losses)
    history.add(rows.take(slice(0, cut)))
    history.add(rows.take(slice(cut, None)))
    curve = history.curve()
    assert len(curve.step) <= num_bins
    assert np.all(np.diff(curve.step) > 0)
    assert curve.num_broken.sum() == np.isnan(losses).sum()
    finite = losses[np.isfinite(losses)]
    if len(finite):
        assert (np.nanmin(curve.low), np.nanmax(curve.high)) == (finite.min(), finite.max())
    # The width a bin has come to, and then every bin from its own rows.
    width = 1
    while steps[-1] // width - steps[0] // width >= num_bins:
        width *= 2
    bins = steps // width
    for index, number in enumerate(np.unique(bins)):
        inside = bins == number
        assert curve.step[index] == pytest.approx(steps[inside].mean())
        mine = losses[inside][np.isfinite(losses[inside])]
        if len(mine):
            assert (curve.low[index], curve.high[index]) == (mine.min(), mine.max())
            # Sums in another order: a few units in the last place of losses of order 1.
            assert curve.smoothed[index] == pytest.approx(mine.mean(), abs=1e-12)
        else:
            assert np.isnan(curve.low[index])


@given(
    num=st.integers(1, 600),
    last=st.integers(1, 700),
    num_bins=st.sampled_from([2, 4, 16]),
    chunk=st.integers(1, 300),
    start=st.sampled_from([0, 1, 10**6]),
)
def test_last_steps_keeps_those_and_at_most_a_bin_more(num, last, num_bins, chunk, start):
    steps = np.arange(start, start + num)
    history = LossHistory(0.9, last, num_bins)
    for index in range(0, num, chunk):
        history.add(rows_of(steps[index : index + chunk], steps[index : index + chunk]))
    curve = history.curve()
    wanted = steps[-last:]
    width = 1
    while num_bins // 2 * width < last:
        width *= 2
    assert np.nanmax(curve.high) == steps[-1]
    assert wanted[0] - width < np.nanmin(curve.low) <= wanted[0]
    assert len(curve.step) <= num_bins


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 9)), min_size=1, max_size=80), st.integers(1, 80))
def test_a_resumed_run_replaces_the_steps_it_does_again(pairs, chunk):
    history = LossHistory(0.0)
    truth: dict[int, float] = {}
    for step, loss in pairs:
        truth = {s: value for s, value in truth.items() if s < step} | {step: loss}
    for index in range(0, len(pairs), chunk):
        part = pairs[index : index + chunk]
        history.add(rows_of([s for s, _ in part], [value for _, value in part]))
    curve = history.curve()
    assert dict(zip(curve.step.tolist(), curve.high.tolist(), strict=True)) == truth
    assert history.last_step == pairs[-1][0]


def test_pace_is_taken_from_the_newest_times():
    history = LossHistory()
    assert math.isnan(history.seconds_per_step)
    history.add(
        rows_of(range(1, 1001), times=[10.0 * s for s in range(1, 801)] + [8000 + 0.5 * s for s in range(1, 201)])
    )
    assert history.seconds_per_step == 0.5
    history.clear()
    assert math.isnan(history.seconds_per_step)
    assert history.last_step is None
    assert len(history.curve().step) == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"smoothing": 1.0}, "smoothing must be at least 0 and below 1, got 1.0"),
        ({"smoothing": NAN}, "got nan"),
        ({"last_steps": 0}, "last_steps must be at least 1, got 0"),
        ({"num_bins": 3}, "num_bins must be even and at least 2, got 3"),
    ],
)
def test_wrong_settings_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        LossHistory(**arguments)


# --- the other files of the run folder


def test_facts_prefer_what_the_settings_resolved_to(tmp_path):
    recorded = {"config": {"steps": 1000, "batch": 128, "model": "auto"}, "resolved": {"model": "resnet50"}}
    (tmp_path / "config.json").write_text(json.dumps(recorded))
    assert read_run_facts(tmp_path) == RunFacts(1000, 128, "resnet50")
    (tmp_path / "config.json").write_text(json.dumps({"config": recorded["config"]}))
    assert read_run_facts(tmp_path) == RunFacts(1000, 128, "auto")


@pytest.mark.parametrize(
    "text", [None, "", "{", "[]", '{"config": 3}', '{"config": {"steps": "many", "batch": true, "model": 5}}', "\xff"]
)
def test_strange_settings_tell_nothing(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
    assert read_run_facts(tmp_path) == RunFacts()


def test_the_end_is_there_once_its_file_is_whole(tmp_path):
    assert read_run_end(tmp_path) is None
    (tmp_path / "result.json").write_text('{"steps_done": 5, "stopped')
    assert read_run_end(tmp_path) is None
    (tmp_path / "result.json").write_text('{"steps_done": 5, "stopped_by": "SIGINT", "error": null}')
    assert read_run_end(tmp_path) == RunEnd(5, "SIGINT", None)
    (tmp_path / "result.json").write_text("{}")
    assert read_run_end(tmp_path) == RunEnd()


def test_neither_the_log_nor_the_command_loads_jax():
    program = "import sys, engine.loss_log, engine.tail_cli; print('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"
