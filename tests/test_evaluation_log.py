"""Reading evaluations back: valid logs, and damaged ones."""

import json
import math
import os
from dataclasses import replace

import pytest

from loopfeed.engine.objective.best_metric import parse_metric
from loopfeed.engine.records import evaluation_log
from loopfeed.engine.records.evaluation_log import EvaluationLog, best_step
from loopfeed.engine.records.run_folder_sink import RunFolderSink
from loopfeed.engine.stream.sinks import EvaluationRecord


def evaluation(step, top1=0.25, loss=1.5):
    return EvaluationRecord(step=step, num_images=12, top1=top1, top5=0.75, loss=loss, time=1.5)


def test_a_growing_log_is_read_back(tmp_path):
    log = EvaluationLog(tmp_path / "eval.jsonl")
    assert log.read() == ()
    sink = RunFolderSink(tmp_path / "loss.jsonl", tmp_path / "eval.jsonl")
    sink.open()
    for step in (10, 20):
        sink.write_evaluation(evaluation(step))
        assert log.read() == tuple(evaluation(done) for done in range(10, step + 1, 10))
        assert log.read() is log.read()  # not read again as long as nothing changed
    sink.write_evaluation(evaluation(30, loss=math.nan))
    sink.close()
    assert math.isnan(log.read()[2].loss)
    (tmp_path / "eval.jsonl").unlink()
    assert log.read() == ()


def test_a_log_of_long_lists_is_read_once_and_only_the_newest_lists_are_kept(tmp_path, monkeypatch):
    """70 MB, more than was read before: neither memory nor a limit on the size may end what reads evaluations."""
    path, rows = tmp_path / "eval.jsonl", [[0.125] * 100] * 400
    first = replace(evaluation(1, top1=0.75), metrics={"confusion": rows, "f1": 0.5}).to_json() + "\n"
    with path.open("w") as file:
        for step in range(1, 251):
            line = first.replace('"step": 1,', f'"step": {step},')
            file.write(line if step == 1 else line.replace("0.75", "0.5", 1))
    assert path.stat().st_size > 1 << 26
    parsed: list[bytes] = []
    real = evaluation_log._parse

    def parse(line):
        parsed.append(line[:10])
        return real(line)

    monkeypatch.setattr(evaluation_log, "_parse", parse)
    log = EvaluationLog(path)
    assert best_step(log.read(), range(100, 300), parse_metric("top1")) == 100
    assert best_step(log.read(), range(300), parse_metric("top1")) == 1
    assert [each.metrics for each in log.read()[-2:]] == [{"f1": 0.5}, {"confusion": rows, "f1": 0.5}]
    with path.open("a") as file:
        file.write(evaluation(251).to_json() + "\n")
    assert [len(log.read()), len(parsed), log.read()[-2].metrics] == [251, 251, {"f1": 0.5}]


def test_a_log_that_was_cut_and_written_again_is_read_from_its_start(tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text("".join(evaluation(step).to_json() + "\n" for step in (10, 20)))
    log = EvaluationLog(path)
    assert [each.step for each in log.read()] == [10, 20]
    with path.open("r+") as file:
        file.truncate(len(evaluation(10).to_json()) + 1)
        file.seek(0, os.SEEK_END)
        for step in (15, 25, 35):
            file.write(replace(evaluation(step), time=2.5).to_json() + "\n")
    assert [each.step for each in log.read()] == [10, 15, 25, 35]


def test_a_line_that_is_too_long_is_skipped(tmp_path):
    path = tmp_path / "eval.jsonl"
    with path.open("wb") as file:
        file.write(evaluation(10).to_json().encode() + b"\n" + b"x" * 3_000_000 + b"\n")
        file.write(evaluation(20).to_json().encode() + b"\n")
        file.truncate(1 << 40)  # a hole
    log = EvaluationLog(path)
    assert [each.step for each in log.read()] == [10, 20]


WHOLE = json.loads(evaluation(10).to_json())


BAD_LINES = [
    b"half a li",
    b"[1]",
    b"{}",
    b"",
    b"\xff",
    b"[" * 5000,
    *(
        json.dumps(WHOLE | changes).encode()
        for changes in (
            {"step": -1},
            {"step": True},
            {"step": 2**60},
            {"num_images": 1.5},
            {"top1": None},
            {"top1": "high"},
            {"top5": 1.5},
            {"top5": 10**400},
        )
    ),
]


@pytest.mark.parametrize("bad", BAD_LINES, ids=range(len(BAD_LINES)))
def test_a_bad_line_is_skipped_and_its_neighbours_are_kept(tmp_path, bad):
    path = tmp_path / "eval.jsonl"
    first, second = (evaluation(step).to_json().encode() + b"\n" for step in (10, 20))
    path.write_bytes(first + bad + b"\n" + second + evaluation(30).to_json().encode())
    log = EvaluationLog(path)
    assert [record.step for record in log.read()] == [10, 20]
    with path.open("ab") as file:
        file.write(b"\n")
    assert [record.step for record in log.read()] == [10, 20, 30]
