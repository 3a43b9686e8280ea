"""Curves of the report page: binned as a plain loop bins, of a bounded size, and smoothed by the formula."""

import json
import math

import numpy as np
import pytest

from loopfeed.engine.report_page.absent import Absent
from loopfeed.engine.report_page.curves import Curves, read_curves


def write_log(run, losses, *, first=1, **columns):
    run.mkdir(exist_ok=True)
    lines = [
        {"step": first + index, "loss": loss, "lr": 0.1, "images_per_s": 10.0 * (first + index), "wait_ms": 1.0,
         "time": 1000.0 + first + index} | {name: values[index] for name, values in columns.items()}
        for index, loss in enumerate(losses)
    ]  # fmt: skip
    with (run / "loss.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def curves_of(run, most_points=1000) -> Curves:
    found = read_curves(run, most_points)
    assert isinstance(found, Curves)
    return found


def test_bins_are_those_of_a_plain_loop(tmp_path):
    random = np.random.default_rng(0)
    losses = [None if random.random() < 0.1 else float(random.random()) for _ in range(500)]
    write_log(tmp_path, losses)
    curves = curves_of(tmp_path, 7)
    assert len(curves.step) == 7
    by_bin: dict[int, list[tuple[int, float]]] = {}
    for step, loss in enumerate(losses, 1):
        by_bin.setdefault(step // curves.bin_steps, []).append((step, math.nan if loss is None else loss))
    assert len(curves.step) == len(by_bin)
    for index, members in enumerate(by_bin.values()):
        finite = [loss for _, loss in members if math.isfinite(loss)]
        assert curves.step[index] == members[-1][0]
        assert curves.lowest[index] == min(finite)
        assert curves.highest[index] == max(finite)
        assert curves.loss[index] == pytest.approx(sum(finite) / len(finite), rel=1e-12)
        # Images in a bin, divided by its seconds: steps of equal batches.
        seconds = sum(1 / (10.0 * step) for step, _ in members)
        assert curves.images_per_s[index] == pytest.approx(len(members) / seconds, rel=1e-12)
    assert curves.num_nonfinite == losses.count(None)
    assert curves.first_nonfinite == losses.index(None) + 1


def test_lines_after_a_resume_replace_those_before(tmp_path, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.report_page.curves._CHUNK_BYTES", 200)
    write_log(tmp_path, [9.0, 9.0, None, 9.0, 9.0, 9.0])
    write_log(tmp_path, [1.0, 2.0, 3.0, 4.0], first=3)
    curves = curves_of(tmp_path)
    assert curves.loss.tolist() == [9.0, 9.0, 1.0, 2.0, 3.0, 4.0]
    assert (curves.num_nonfinite, curves.first_nonfinite) == (0, None)


def test_unreadable_lines_are_skipped_and_counted_also_the_last(tmp_path):
    write_log(tmp_path, [1.0, 2.0])
    with (tmp_path / "loss.jsonl").open("a") as file:
        file.write("{broken}\n[]\n")
    curves = curves_of(tmp_path)
    assert curves.loss.tolist() == [1.0, 2.0]
    assert curves.num_unreadable == 2


def test_a_log_without_losses_or_that_is_a_folder_says_why(tmp_path):
    missing = read_curves(tmp_path, 100)
    (tmp_path / "loss.jsonl").mkdir()
    folder = read_curves(tmp_path, 100)
    assert missing == Absent("loss.jsonl has no losses yet")
    assert isinstance(folder, Absent)
    assert "loss.jsonl cannot be read" in folder.reason
