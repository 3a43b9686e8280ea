"""Reading evaluations back: valid logs, and damaged ones."""

import json
import math

import pytest

from engine.records.evaluation_log import EvaluationLog
from engine.records.run_folder_sink import RunFolderSink
from engine.stream.sinks import EvaluationRecord


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


def test_a_log_that_is_replaced_is_read_from_its_start(tmp_path):
    path = tmp_path / "eval.jsonl"
    log = EvaluationLog(path)
    for step in (10, 5):
        (tmp_path / "new").write_text(evaluation(step).to_json() + "\n")
        (tmp_path / "new").replace(path)
        assert log.read() == (evaluation(step),)


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
