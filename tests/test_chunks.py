"""Several batches per pull: the same steps as one by one, fewer pulls, and requests that act between steps."""

import json
import shutil
import signal
import threading
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from loopfeed import replay_run, train
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.request import ControlRequest
from loopfeed.engine.crossing.cuda.ring import DeviceRing
from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.snapshot import read_snapshot, snapshot_steps
from loopfeed.engine.run.run import NonFiniteError
from tests.toy import CountedBatches, Linear, toy_batch, toy_config

EVALUATED = toy_batch(100, batch=16)
SETTINGS: dict[str, Any] = {
    "steps": 11,
    "optimizer": "nesterov",
    "schedule": "cosine",
    "ema_decay": 0.9,
    "crop": "random",
    "crop_padding": 1,
    "flip": 0.5,
    "eval_every_steps": 4,
    "snapshot_every_steps": 3,
    "keep_snapshots": 0,
}


@pytest.fixture(autouse=True)
def transport(request, monkeypatch, cards):
    """Use the transport that a test asks for: on a card, here a fake one, the host runs ahead of the program."""
    name = getattr(request, "param", "inplace")
    monkeypatch.setitem(globals(), "toy_config", partial(toy_config, transport=name))
    return name


# The tests share programs: each pair of a transport, the batches of an update and those of a chunk is one to compile.
both_transports = pytest.mark.parametrize("transport", ["inplace", "cuda"], indirect=True)


def pairs(names, values):
    """Parametrize by a transport and other values, so that each value occurs with some transport."""
    return pytest.mark.parametrize(("transport", *names), values, indirect=["transport"])


@pytest.fixture
def pulls(monkeypatch):
    """Return the first batch and the number of batches of every pull."""
    made = []
    words_of = ControlBoard.words

    def words(board, pull, num_batches):
        words = words_of(board, pull, num_batches)
        made.append((pull, int(words[2])))
        return words

    monkeypatch.setattr(ControlBoard, "words", words)
    return made


def run(path, *, batches=toy_batch, **values):
    config = toy_config(**({"run_dir": path} | SETTINGS | values))
    return train(config, model=Linear(), batches=batches, evaluation=EVALUATED)


def lines(path, *, without=("images_per_s", "wait_ms", "time")):
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in record.items() if name not in without} for record in records]


def leaves(path, step=11):
    return {name: np.asarray(value) for name, value in read_snapshot(path / "snapshots", step).leaves.items()}


def assert_same(path, reference):
    assert lines(path / "loss.jsonl") == lines(reference / "loss.jsonl")
    assert lines(path / "eval.jsonl") == lines(reference / "eval.jsonl")
    for (name, value), expected in zip(leaves(path).items(), leaves(reference).values(), strict=True):
        np.testing.assert_array_equal(value, expected, err_msg=name)


def numbers_of(record):
    """Return a record without its nulls, such as top-5 accuracy below six classes, which `approx` does not take."""
    return {name: value for name, value in record.items() if value is not None}


def assert_close(path, reference):
    """Assert that two runs are equal except for rounding in another order."""
    for log in ("loss.jsonl", "eval.jsonl"):
        for line, expected in zip(lines(path / log), lines(reference / log), strict=True):
            assert line.keys() == expected.keys()
            assert numbers_of(line) == pytest.approx(numbers_of(expected), rel=1e-5)
    for (name, value), expected in zip(leaves(path).items(), leaves(reference).values(), strict=True):
        assert value.dtype == expected.dtype
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """Return runs whose batches are pulled one by one, by the number of batches of an update."""
    paths = {accumulate: tmp_path_factory.mktemp("single") for accumulate in (1, 3)}
    for accumulate, path in paths.items():
        run(path, accumulate_steps=accumulate)
    return paths


@pairs(("accumulate", "chunk"), [("cuda", 3, 4), ("inplace", 1, 64)])
def test_every_chunk_size_has_the_steps_and_records_of_single_batches(single, tmp_path, accumulate, chunk):
    run(tmp_path, chunk_batches=chunk, accumulate_steps=accumulate)
    assert_close(tmp_path, single[accumulate])
    # Each of evaluations and snapshots comes at its own step, which need not be a multiple of the chunk.
    assert [line["step"] for line in lines(tmp_path / "eval.jsonl")] == [4, 8, 11]
    assert 11 in snapshot_steps(tmp_path / "snapshots")


def unhurried(path, boundaries, accumulate=1):
    """Toy batches that wait for the snapshots before them: one that comes while another waits is left out."""

    def batches(pull):
        due = [boundary for boundary in boundaries if boundary <= pull // accumulate - 1]
        deadline = time.monotonic() + 30
        while due and due[-1] not in snapshot_steps(path / "snapshots") and time.monotonic() < deadline:
            time.sleep(0.005)
        return toy_batch(pull)

    return batches


@pytest.mark.parametrize("transport", ["cuda"], indirect=True)
def test_snapshots_are_taken_at_their_exact_step(tmp_path):
    batches = unhurried(tmp_path, (2, 4, 6, 8, 10))
    run(tmp_path, batches=batches, snapshot_every_steps=2, chunk_batches=4, prefetch=1)
    assert list(snapshot_steps(tmp_path / "snapshots")) == [2, 4, 6, 8, 10, 11]
    for step in (6, 8):  # within a chunk and at its end
        report = replay_run(
            tmp_path, from_step=0, to_step=step, model=Linear(), batches=toy_batch, evaluation=EVALUATED
        )
        assert report.is_same
        assert report.num_arrays


@pairs(("chunk",), [("cuda", 4), ("inplace", 1)])
def test_a_replay_that_ends_before_an_evaluation_waits_for_the_batches_of_its_last_steps(tmp_path, chunk):
    def slow(step):
        time.sleep(0.3)  # longer than a wait lasts before it looks for a stop
        return toy_batch(step)

    path = tmp_path / "run"
    run(path, steps=4, chunk_batches=chunk, eval_every_steps=0, snapshot_every_steps=0, prefetch=1)
    # As a kill before the evaluation at the end leaves it.
    (path / "eval.jsonl").write_text("")
    (path / "result.json").unlink()
    shutil.rmtree(path / "snapshots")
    report = replay_run(path, from_step=0, model=Linear(), batches=slow, evaluation=EVALUATED)
    assert report.is_same
    assert (report.num_losses, report.num_evaluations) == (4, 0)


@pairs(
    ("values", "expected"),
    [
        ("inplace", {}, [(0, 4), (4, 4), (8, 3)]),
        ("inplace", {"steps": 0}, []),
        ("cuda", {"eval_every_steps": 3}, [(0, 3), (3, 3), (6, 3), (9, 2)]),
        ("cuda", {"accumulate_steps": 3, "steps": 4, "eval_every_steps": 2}, [(0, 4), (4, 2), (6, 4), (10, 2)]),
    ],
)
def test_no_pull_goes_beyond_the_next_boundary(tmp_path, pulls, values, expected):
    batches = CountedBatches()
    run(tmp_path, batches=batches, **({"eval_every_steps": 0, "snapshot_every_steps": 0, "chunk_batches": 4} | values))
    assert pulls == expected
    assert batches.calls == list(range(max(sum(number for _, number in expected), 1)))


@both_transports
def test_a_source_that_fails_within_a_chunk_loses_no_step_and_the_run_resumes_bit_for_bit(tmp_path):
    run(tmp_path / "whole", chunk_batches=4)
    with pytest.raises(ConnectionResetError):
        run(tmp_path / "run", batches=CountedBatches(raise_at=6), chunk_batches=4)
    assert [line["step"] for line in lines(tmp_path / "run" / "loss.jsonl")] == [1, 2, 3, 4, 5, 6]
    run(tmp_path / "run", chunk_batches=4, resume=True)
    assert_same(tmp_path / "run", tmp_path / "whole")
    # Its boundaries are no longer those of its chunks.
    report = replay_run(tmp_path / "run", model=Linear(), batches=toy_batch, evaluation=EVALUATED, from_step=0)
    assert report.is_same


@pairs(("chunk",), [("cuda", 4), ("inplace", 64)])
@pytest.mark.timeout(60)
def test_a_signal_ends_the_run_after_the_batches_that_have_arrived(tmp_path, pulls, transport, chunk, monkeypatch):
    main_thread, released = threading.get_ident(), threading.Event()
    # A pull brings the batches together; on a card they come one by one, and each is waited for.
    awaited, wait_for = set(), DeviceRing._wait_for

    def noted_wait_for(ring, slot, step, is_cancelled):
        awaited.add(step)
        return wait_for(ring, slot, step, is_cancelled)

    monkeypatch.setattr(DeviceRing, "_wait_for", noted_wait_for)

    def stalling(step):
        if step == 6:
            while not (6 in awaited if transport == "cuda" else pulls):  # the program waits for this batch
                time.sleep(0.01)
            signal.pthread_kill(main_thread, signal.SIGINT)
            released.wait(30)
        return toy_batch(step)

    result = run(tmp_path / "run", batches=stalling, chunk_batches=chunk, eval_every_steps=0, snapshot_every_steps=0)
    released.set()
    assert result.stopped_by == "SIGINT"
    assert result.steps_done == 6
    assert list(snapshot_steps(tmp_path / "run" / "snapshots")) == [6]


class Requests:
    """Asks when the program comes for a batch, as if it had been asked for while it was busy with those before."""

    def __init__(self, monkeypatch, requests):
        words_of = ControlBoard.words

        def words(board, pull, num_batches):
            for asked_at in [asked_at for asked_at in requests if asked_at <= pull]:
                board.request(requests.pop(asked_at))
            return words_of(board, pull, num_batches)

        monkeypatch.setattr(ControlBoard, "words", words)


def test_a_request_that_coincides_with_a_stop_takes_effect_after_the_resume(tmp_path, monkeypatch):
    monkeypatch.setattr(ControlBoard, "words", stop_and_ask_at(4, ControlBoard.words))
    result = run(tmp_path, chunk_batches=4, eval_every_steps=0, snapshot_every_steps=0)
    assert (result.steps_done, result.stopped_by) == (4, "a test")
    (event,) = read_events(tmp_path / "control.jsonl")
    assert (event.pull, event.step) == (4, 5)
    run(tmp_path, chunk_batches=4, eval_every_steps=0, snapshot_every_steps=0, resume=True)
    rates = [line["lr"] for line in lines(tmp_path / "loss.jsonl")]
    assert rates[4] < 0.6 * rates[3]


def stop_and_ask_at(first_batch, words_of):
    """A board's `words` that is told to stop while a request waits, when the program first comes for that batch."""
    asked: list[int] = []

    def words(board, pull, num_batches):
        if pull == first_batch and not asked:
            asked.append(pull)
            board.request(ControlRequest(learning_rate_factor=0.5))
            board.request_stop("a test")
        return words_of(board, pull, num_batches)

    return words


@pairs(("accumulate",), [("cuda", 3), ("inplace", 1)])
def test_requests_wait_for_the_current_chunk_act_at_one_update_and_are_repeated_there(
    tmp_path, monkeypatch, accumulate
):
    halve, look = ControlRequest(learning_rate_factor=0.5), ControlRequest(evaluate=True, snapshot=True)
    requests = {2: halve, 9: look}
    Requests(monkeypatch, requests)
    path = tmp_path / "run"
    batches = unhurried(path, (5,), accumulate)
    cadences = {"eval_every_steps": 0, "snapshot_every_steps": 5}
    run(path, batches=batches, chunk_batches=4, accumulate_steps=accumulate, **cadences)
    assert not requests
    slow, looked = read_events(path / "control.jsonl")
    assert (slow.pull, slow.learning_rate_factor) == (4, 0.5)
    assert looked.evaluate
    # With the update that it was asked for in, and not with the end of a chunk.
    assert lines(path / "eval.jsonl")[0]["step"] == looked.pull // accumulate + 1 < 11
    # A replay pushes no snapshots, and so makes other chunks.
    assert 5 in snapshot_steps(path / "snapshots")
    for begin in (0, 5):
        report = replay_run(path, from_step=begin, model=Linear(), batches=toy_batch, evaluation=EVALUATED)
        assert report.is_same, begin


@pairs(("chunk",), [("cuda", 4), ("inplace", 1)])
def test_a_replay_finds_the_evaluation_that_is_due_after_a_stop_within_an_update(tmp_path, monkeypatch, chunk):
    look = ControlRequest(evaluate=True)
    Requests(monkeypatch, {9: look, 12: look})
    settings = {"steps": 6, "accumulate_steps": 3, "chunk_batches": chunk, "eval_every_steps": 0}
    with pytest.raises(ConnectionResetError):
        run(tmp_path, batches=CountedBatches(raise_at=13), snapshot_every_steps=0, **settings)
    begin = snapshot_steps(tmp_path / "snapshots")[-1]
    run(tmp_path, snapshot_every_steps=0, resume=True, **settings)
    # A chunk of four brings batches 8 to 11 together: the first request waits for their end.
    assert [line["step"] for line in lines(tmp_path / "eval.jsonl")] == [4, 5, 6][chunk == 4 :]
    for from_step in (0, begin):
        report = replay_run(tmp_path, from_step=from_step, model=Linear(), batches=toy_batch, evaluation=EVALUATED)
        assert report.is_same, (from_step, report)


def test_an_abandoned_update_ends_its_chunk(tmp_path):
    ends = {}
    for chunk in (1, 4):
        path = tmp_path / f"{chunk}"
        with pytest.raises(
            NonFiniteError, match="NaN or infinite at step 2; the weights are those of the last finite update"
        ):
            run(path, chunk_batches=chunk, learning_rate=1e30)
        ends[chunk] = lines(path / "loss.jsonl")
    assert [line["step"] for line in ends[1]] == [line["step"] for line in ends[4]] == [1, 2]
    # Two programs: jax 0.11.2 rounds the mean of the first batch otherwise in one of them.
    losses = [np.array([line["loss"] for line in ends[chunk]], np.float64) for chunk in (1, 4)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-6)


@both_transports
def test_a_request_in_a_pull_that_a_stop_leaves_empty_takes_effect_once(tmp_path, monkeypatch):
    """The stop comes between the words of the pull and its first batch; whoever goes on has both again."""
    words_of, boards = ControlBoard.words, list[ControlBoard]()

    def words(board, pull, num_batches):
        if pull != 4 or boards:
            return words_of(board, pull, num_batches)
        board.request(ControlRequest(evaluate=True))
        given = words_of(board, pull, num_batches)
        boards.append(board)
        board.request_stop("a test")
        return given

    def batches(step):
        deadline = time.monotonic() + 30
        while step == 4 and not boards and time.monotonic() < deadline:
            time.sleep(0.01)
        if step == 4:
            time.sleep(0.5)  # longer than a wait lasts before it looks for a stop
        return toy_batch(step)

    monkeypatch.setattr(ControlBoard, "words", words)
    settings = {"steps": 8, "eval_every_steps": 0, "snapshot_every_steps": 0, "chunk_batches": 4, "prefetch": 1}
    assert run(tmp_path, batches=batches, **settings).steps_done == 4
    run(tmp_path, **settings, resume=True)
    assert [line["step"] for line in lines(tmp_path / "eval.jsonl")] == [5, 8]


def test_images_per_second_of_a_chunk_use_the_time_of_that_chunk():
    class Records(list[Any]):
        open = close = lambda _: None
        write = list.append

        def write_evaluation(self, record):
            pass

    records = Records()
    train(toy_config(steps=8, chunk_batches=4), model=Linear(), batches=toy_batch, sinks=[records])
    assert [record.step for record in records] == list(range(1, 9))
    assert len({record.images_per_s for record in records[4:]}) == 1
    assert 0 < records[4].images_per_s < 1e6
