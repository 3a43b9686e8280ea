"""Callbacks: the order of their calls, each once, over resumes too; their requests; their exceptions."""

import json
import shutil
import sys
import threading
from dataclasses import replace
from typing import Any

import pytest

from loopfeed import Callback, EvaluationRecord, LossRecord, RunHandle, replay_run, train
from loopfeed.engine.control.board import ControlBoard
from loopfeed.engine.control.request import ControlEvent
from loopfeed.engine.run.callbacks import Callbacks
from loopfeed.engine.run.epochs import steps_of_epochs
from loopfeed.engine.run.run import Run
from tests.toy import BATCH, CountedBatches, Linear, toy_batch, toy_config


class Log(Callback):
    """A callback that lists its calls and the threads on which they were made."""

    def __init__(self, name="", calls=None):
        self.name, self.calls, self.threads = name, [] if calls is None else calls, []

    def note(self, *call):
        self.calls.append((*self.name, *call))
        self.threads.append(threading.current_thread())

    def on_fit_begin(self, run):
        self.run = run
        self.note("begin", run.step)

    def on_step(self, record):
        assert isinstance(record, LossRecord)
        self.note("step", record.step)

    def on_epoch(self, epoch, record):
        self.note("epoch", epoch, record.step)

    def on_evaluation(self, record):
        assert isinstance(record, EvaluationRecord)
        self.note("evaluation", record.step)

    def on_snapshot(self, step, path):
        assert path.name == str(step)
        self.note("snapshot", step)

    def on_end(self, result):
        self.note("end", result.steps_done)

    def of(self, kind):
        return [call[1:] for call in self.calls if call[0] == kind]


class At(Callback):
    """A callback that makes a request when it gets the loss of a step."""

    def __init__(self, step, **request):
        self.step, self.values = step, request

    def on_fit_begin(self, run):
        self.run = run

    def on_step(self, record):
        if record.step == self.step:
            self.run.request(**self.values)


def run(config, *callbacks, batches=toy_batch, **parts):
    return train(config, model=Linear(), batches=batches, callbacks=callbacks, **parts)


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def steps(start, stop, eval_every=None, images=None, per_step=BATCH):
    """The calls for the steps start + 1 … stop."""
    calls: list[tuple[object, ...]] = []
    for step in range(start + 1, stop + 1):
        calls.append(("step", step))
        if images is not None:
            done = (step - 1) * per_step // images, step * per_step // images
            calls += [("epoch", epoch, step) for epoch in range(done[0] + 1, done[1] + 1)]
        if eval_every is not None and step % eval_every == 0:
            calls.append(("evaluation", step))
    return calls


@pytest.mark.parametrize("settings", [{"accumulate_steps": 3}, {"chunk_batches": 4, "transport": "callback"}])
def test_each_call_is_made_once_and_in_order(tmp_path, settings):
    log = Log()
    run(
        toy_config(steps=9, eval_every_steps=3, snapshot_every_steps=4, run_dir=tmp_path, **settings),
        log,
        evaluation=toy_batch(99),
    )
    assert log.calls[0] == ("begin", 0)
    assert log.calls[-1] == ("end", 9)
    assert [call for call in log.calls[1:-1] if call[0] != "snapshot"] == steps(0, 9, eval_every=3)
    # A snapshot that is not yet written when the next one is due may be replaced by it.
    assert log.of("snapshot")[-1] == (9,)
    assert log.of("snapshot") == sorted(set(log.of("snapshot")))
    assert log.calls.index(("snapshot", 9)) > log.calls.index(("step", 9))
    main = threading.current_thread()
    assert log.threads[0] is log.threads[-1] is main
    (thread,) = {each for call, each in zip(log.calls, log.threads, strict=True) if call[0] in ("step", "evaluation")}
    assert thread is not main


@pytest.mark.parametrize("images", [20, 3, 16])
@pytest.mark.parametrize("accumulate_steps", [1, 2])
def test_an_epoch_ends_with_the_step_that_takes_its_last_image(images, accumulate_steps):
    log = Log()
    config = toy_config(accumulate_steps=accumulate_steps)
    handle = RunHandle(config, ControlBoard(), step=0, num_images=images, is_evaluated=False, events=())
    sink = Callbacks([log], handle)
    for step in range(1, 10):
        sink.write(LossRecord(step, 1.0, 0.1, 1.0, 0.0, 0.0))
    assert log.calls == steps(0, 9, images=images, per_step=BATCH * accumulate_steps)
    ends = [
        steps_of_epochs(epoch, num_images=images, images_per_step=BATCH * accumulate_steps)
        for epoch, _ in log.of("epoch")
    ]
    assert ends == [step for _, step in log.of("epoch")]


def test_a_resumed_run_calls_each_step_once_after_its_snapshot(tmp_path):
    config = toy_config(steps=12, eval_every_steps=4, snapshot_every_steps=5, run_dir=str(tmp_path))
    parts = {"evaluation": toy_batch(99)}
    first, second = Log(), Log()
    with pytest.raises(ConnectionResetError):
        run(config, first, batches=CountedBatches(raise_at=8), **parts)
    assert [call for call in first.calls[1:] if call[0] != "snapshot"] == steps(0, 8, eval_every=4)
    shutil.rmtree(tmp_path / "snapshots/8")
    run(replace(config, resume=True), second, **parts)
    assert (second.calls[0], second.calls[-1]) == (("begin", 5), ("end", 12))
    assert [call for call in second.calls[1:-1] if call[0] != "snapshot"] == steps(5, 12, eval_every=4)
    assert second.of("snapshot")[-1] == (12,)
    assert (5,) not in second.of("snapshot")


class Waiting(At):
    """A callback that lets a test wait for its request."""

    def __init__(self, step, **request):
        super().__init__(step, **request)
        self.has_asked = threading.Event()

    def on_step(self, record):
        super().on_step(record)
        if record.step == self.step:
            self.has_asked.set()


def test_requests_are_recorded_and_repeated_by_a_resume_and_a_replay(tmp_path):
    def batches_with(callback, raise_at=None):
        def batches(step):
            if step == 20:
                callback.has_asked.wait(30)
            if step == raise_at:
                raise ConnectionResetError("cut off")
            return toy_batch(step)

        return batches

    config = toy_config(steps=40, snapshot_every_steps=4, keep_snapshots=0, run_dir=str(tmp_path), prefetch=2)
    parts = {"evaluation": toy_batch(99)}
    asking = Waiting(6, learning_rate_factor=0.5, evaluate=True)
    with pytest.raises(ConnectionResetError):
        run(config, asking, batches=batches_with(asking, raise_at=35), **parts)
    (event,) = lines(tmp_path / "control.jsonl")
    assert event["request"] == "callback-step-6-1"
    assert (event["learning_rate_factor"], event["evaluate"], event["stop"]) == (0.5, True, False)
    assert event["step"] > 6
    # Resumed from before the request, which is repeated from the log and not made a second time.
    for snapshot in (tmp_path / "snapshots").iterdir():
        if int(snapshot.name) >= 6:
            shutil.rmtree(snapshot)
    again = Waiting(6, learning_rate_factor=0.5, evaluate=True)
    run(replace(config, resume=True), again, batches=batches_with(again), **parts)
    assert again.has_asked.is_set()
    assert lines(tmp_path / "control.jsonl") == [event]
    rates = [line["lr"] for line in lines(tmp_path / "loss.jsonl")]
    assert rates == pytest.approx([0.1] * (event["step"] - 1) + [0.05] * (41 - event["step"]))
    assert [line["step"] for line in lines(tmp_path / "eval.jsonl")] == [event["step"], 40]
    report = replay_run(tmp_path, from_step=0, model=Linear(), batches=toy_batch, **parts)
    assert (report.num_losses, report.num_evaluations, report.differences) == (40, 2, ())


@pytest.mark.parametrize("again", [{"learning_rate_factor": 0.5}, {"stop": True}, {"learning_rate_factor": 0.25}])
def test_only_the_same_request_on_the_same_occasion_is_not_made_again(again):
    asked: list[dict[str, Any]] = [{"learning_rate_factor": 0.5}, {"stop": True}]
    events = [
        ControlEvent(
            learning_rate_factor=values.get("learning_rate_factor"),
            snapshot=False,
            evaluate=False,
            stop="stop" in values,
            pull=9,
            step=10,
            request="callback-step-6-1",
            time=1.0,
        )
        for values in asked
    ]
    board = ControlBoard()
    found: list[ControlEvent] = []
    board.prepare(first_batch=5, batches_per_step=1, replayed=(), record=found.append)
    handle = RunHandle(toy_config(), board, step=5, num_images=None, is_evaluated=False, events=events)
    sink = Callbacks([At(6, **again), At(7, **again)], handle)
    sink.open()
    for step in (6, 7):
        sink.write(LossRecord(step, 1.0, 0.1, 1.0, 0.0, 0.0))
    board.words(7, 1)
    expected = ["callback-step-6-1", "callback-step-7-1"][again == asked[0] :]
    assert [event.request for event in found] == expected


@pytest.mark.parametrize("settings", [{"accumulate_steps": 2, "chunk_batches": 4, "transport": "callback"}])
def test_a_request_after_the_last_pull_is_made_by_a_resume(tmp_path, settings):
    class Late(At):
        def on_step(self, record):
            if record.step == self.step:
                # The program reads no batches any more, whatever this callback asks for.
                assert has_ended.wait(60)
            super().on_step(record)

    has_ended = threading.Event()
    config = toy_config(steps=20, run_dir=str(tmp_path), **settings)
    notes: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        run_loop = Run._run_loop

        def run_and_tell(launch, *arguments):
            state = run_loop(launch, *arguments)
            has_ended.set()
            return state

        patch.setattr(Run, "_run_loop", run_and_tell)
        late = [Late(15, learning_rate_factor=0.25), Late(16, stop=True)]
        assert run(config, *late, evaluation=toy_batch(99), notify=notes.append).stopped_by == "steps"
    (event,) = lines(tmp_path / "control.jsonl")
    assert (event["request"], event["step"]) == ("callback-step-15-1", 21)
    assert "1 request of callbacks came after the last step: a run that is resumed from here applies it" in notes
    parts = {"evaluation": toy_batch(99)}
    assert replay_run(tmp_path, from_step=0, model=Linear(), batches=toy_batch, **parts).differences == ()
    run(replace(config, resume=True, steps=30), At(15, learning_rate_factor=0.25), **parts)
    assert lines(tmp_path / "control.jsonl") == [event]
    rates = [line["lr"] for line in lines(tmp_path / "loss.jsonl")]
    assert rates == pytest.approx([0.1] * 20 + [0.025] * 10)
    assert replay_run(tmp_path, from_step=0, model=Linear(), batches=toy_batch, **parts).differences == ()


@pytest.mark.parametrize("has_folder", [True, False])
def test_an_exception_stops_the_run_cleanly_and_is_raised(tmp_path, has_folder):
    class Failing(Log):
        def on_step(self, record):
            super().on_step(record)
            if record.step == 4:
                raise ZeroDivisionError("the callback failed")

    first, failing, last = Log(), Failing(), Log()
    with pytest.raises(ZeroDivisionError, match="the callback failed"):
        run(toy_config(steps=200_000, run_dir=tmp_path if has_folder else None), first, failing, last)
    assert first.of("step") == failing.of("step") == [(step,) for step in range(1, 5)]
    assert last.of("step") == [(step,) for step in range(1, 4)]
    assert first.of("end") == []
    if has_folder:
        end = json.loads((tmp_path / "result.json").read_text())
        assert end["stopped_by"] == "error"
        assert end["snapshot_step"] == end["steps_done"] == len(lines(tmp_path / "loss.jsonl")) >= 4


def test_exceptions_before_the_first_step_and_after_the_last_are_raised(tmp_path):
    class Failing(Callback):
        def __init__(self, name):
            def fail(_):
                raise ZeroDivisionError(name)

            setattr(self, name, fail)

    with pytest.raises(ZeroDivisionError, match="on_fit_begin"):
        run(toy_config(), Failing("on_fit_begin"))
    with pytest.raises(ZeroDivisionError, match="on_end"):
        run(toy_config(run_dir=tmp_path), Failing("on_end"))
    assert json.loads((tmp_path / "result.json").read_text())["stopped_by"] == "steps"


class Misspelt(Callback):
    """A callback with a method that is never called."""

    def on_eval(self, record: EvaluationRecord) -> None:
        raise AssertionError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"callbacks": [3]}, "a callback must be a loopfeed.Callback or a function of a record, got int"),
        ({"callbacks": [Misspelt()]}, r"on_snapshot, on_step, got Misspelt\.on_eval: did you mean on_evaluation\?$"),
        ({"callbacks": [Log]}, r"a callback must be an object, got the class Log: give Log\(\)"),
        (
            {"sinks": [3]},
            "a sink must be a function of a record, or have open, write, .*, close, got int",
        ),
        ({"sinks": [sys.stderr]}, "a sink must be .*, which has no open, write_evaluation: define what is missing"),
        ({"sinks": sys.stderr}, "sinks must be a list of sinks and functions, got .*: give sinks="),
        ({"sinks": print}, "sinks must be a list of sinks and functions, got builtin_function_or_method"),
        ({"callbacks": print}, "callbacks must be a list of callbacks and functions, got builtin_function_or_method"),
        ({"callbacks": At(1)}, "callbacks must be a list of callbacks and functions, got At"),
        ({"sinks": [Log]}, r"a sink must be an object, got the class Log: give Log\(\)"),
        ({"callbacks": [At(1)]}, "a request must ask for at least one action"),
        ({"callbacks": [At(1, stop=True, evaluate=True)]}, "a request to stop must not ask for anything else"),
        ({"callbacks": [At(1, snapshot=True)]}, "a request for a snapshot needs a run folder, got none"),
        ({"callbacks": [At(1, evaluate=True)]}, "a request for an evaluation needs images to evaluate on, got none"),
        ({"callbacks": [At(1, learning_rate_factor=-1)]}, "learning_rate_factor must be 0 or from"),
    ],
)
def test_an_unfit_callback_or_request_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        train(toy_config(), model=Linear(), batches=toy_batch, **arguments)
