"""Runs in notebooks: the display, the handle of a run in the background, and interruptions."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from loopfeed import BackgroundRun, RunInterrupted, open_run, train
from loopfeed.engine.run.notebook import NotebookDisplay
from loopfeed.engine.stream.sinks import EvaluationRecord, LossRecord, RunDescription
from tests.toy import CountedBatches, Linear, toy_batch, toy_config

HERE = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


@pytest.fixture
def shown(monkeypatch):
    """Pretend that this process is a notebook's kernel; return what it shows, an element for each message."""
    found: list[tuple[dict[str, str], str, bool]] = []

    def publish(content: dict[str, str], metadata: Any, transient: dict[str, str], update: bool) -> None:
        found.append((content, transient["display_id"], update))

    shell = SimpleNamespace(kernel=None, display_pub=SimpleNamespace(publish=publish), observe=lambda *_: None)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(get_ipython=lambda: shell))
    return found


@pytest.fixture
def _typed(monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)


class Slow(CountedBatches):
    """`toy_batch`, slowly."""

    def __call__(self, step):
        time.sleep(0.005)
        return super().__call__(step)


def test_one_thread_shows_a_run_at_a_time(monkeypatch):
    monkeypatch.setattr("loopfeed.engine.run.notebook._DRAWN_EVERY_S", 0.0)
    guard, shown = threading.Lock(), list[bool]()

    def publish(_, is_update):
        assert guard.acquire(blocking=False)
        time.sleep(0.01)
        shown.append(is_update)
        guard.release()

    display = NotebookDisplay(publish)
    failures: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", failures.append)
    talkers = [threading.Thread(target=display.say, args=("a",)) for _ in range(9)]
    for each in talkers:
        each.start()
    for step in range(1, 301):
        display.write(LossRecord(step, 1.0, 0.1, 1.0, 0.0, float(step)))
    for each in talkers:
        each.join(60)
    display.close()
    assert (failures, shown[0], all(shown[1:])) == ([], False, True)
    # The end waits for a thread that draws, longer than others do.
    ending, before = threading.Thread(target=display.end, args=(KeyboardInterrupt(),)), len(shown)
    with display._guard:
        ending.start()
        ending.join(1.5)
    ending.join(60)
    assert len(shown) == before + 1
    assert display._bins.part("count", "step").sum() == 300


def test_a_notebook_has_one_output_that_is_updated_in_place_and_little(shown, capfd):
    result = train(
        toy_config(steps=300, eval_every_steps=100), model=Linear(), batches=toy_batch, evaluation=toy_batch(9)
    )
    assert [update for _, _, update in shown] == [False] + [True] * (len(shown) - 1)
    assert len({display_id for _, display_id, _ in shown}) == 1
    assert len(shown) < 25
    last = shown[-1][0]
    assert last["text/plain"].startswith(str(result).partition("\n")[0])
    assert "<svg" in last["text/html"]
    assert sum(len(text) for text in last.values()) < 20_000
    assert capfd.readouterr() == ("", "")
    before = len(shown)
    train(toy_config(), model=Linear(), batches=toy_batch, progress=False)
    with pytest.raises(ValueError, match="batches of your own"):
        train(toy_config(data="none"), model=Linear(), batches=toy_batch)
    assert len(shown) == before


def test_the_display_says_what_the_run_does(monkeypatch):
    shown: list[str] = []
    display = NotebookDisplay(lambda content, _: shown.append(content["text/plain"]))
    monkeypatch.setattr("loopfeed.engine.run.notebook._DRAWN_EVERY_S", 0.0)
    display.describe_run(
        RunDescription({"steps": 1000, "keep_best": "loss"}, {}, None, 0, None, print, lambda step: step / 80)
    )
    for step in range(1, 101):
        display.write(LossRecord(step, 1 / step, 0.5, 80.0, 1.5, time=step / 10))
    display.write_evaluation(EvaluationRecord(100, 8, 0.75, float("nan"), 0.3, 10.0))
    assert shown[-1].splitlines() == [
        "training",
        "  step        100 of 1,000, epoch 1.2/12.5, 1 min 30 s left",
        "  loss        0.0138, learning rate 0.5",
        "  speed       80 images/s, waiting 1.5 ms a step",
        "  evaluation  loss 0.3000, best 0.3000 at step 100",
    ]
    display.end(KeyboardInterrupt())
    assert shown[-1].splitlines()[0] == "run ended by KeyboardInterrupt"


def test_a_run_in_the_background_can_be_read_and_stopped_and_is_alone(tmp_path):
    config = toy_config(steps=10_000, run_dir=tmp_path / "run")
    run = train(config, model=Linear(), batches=Slow(), background=True)
    with pytest.raises(RuntimeError, match=r"one run may train in a process at a time.*run\.result\(\).*run\.stop\(\)"):
        train(toy_config(), model=Linear(), batches=toy_batch)
    with pytest.raises(TimeoutError, match="has not ended within 0 s and goes on"):
        run.result(0)
    while len(run.losses) < 5:
        time.sleep(0.01)
    seen = run.losses
    assert (run.status, run.done, str(seen.dtype)) == ("training", False, "float32")
    run.stop()
    result = run.result(60)
    assert (run.status, result.stopped_by, result.snapshot_step) == ("stopped", "run.stop()", result.steps_done)
    np.testing.assert_array_equal(run.losses, result.losses)
    np.testing.assert_array_equal(seen, result.losses[: len(seen)])
    whole = train(replace(config, steps=len(result.losses), run_dir=None), model=Linear(), batches=toy_batch)
    np.testing.assert_array_equal(whole.losses, result.losses)


def test_a_run_in_the_background_raises_in_result_and_keeps_its_losses():
    run = train(toy_config(steps=9), model=Linear(), batches=CountedBatches(raise_at=4), background=True)
    assert isinstance(run, BackgroundRun)
    for _ in range(2):
        with pytest.raises(ConnectionResetError, match="the camera went away at step 4"):
            run.result(60)
    assert (run.status, len(run.losses)) == ("failed", 4)
    assert "ConnectionResetError: the camera went away" in repr(run)


def test_a_process_that_ends_stops_its_run_in_the_background(tmp_path):
    program = (
        "import time\nfrom loopfeed import train\nfrom tests.test_notebook import Slow\n"
        "from tests.toy import Linear, toy_config\n"
        f"run = train(toy_config(steps=10**6, run_dir={str(tmp_path / 'run')!r}), model=Linear(), batches=Slow(), "
        "background=True)\nwhile len(run.losses) < 3: time.sleep(0.01)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=HERE, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"stopped_by": "the end of the process"' in (tmp_path / "run/result.json").read_text()
    assert (tmp_path / "run/model.safetensors").exists()


def interrupt(record):
    """Send this process a SIGINT at step 3."""
    if record.step == 3:
        os.kill(os.getpid(), signal.SIGINT)


def interrupted(config, **parts):
    return train(config, model=Linear(), batches=Slow(), callbacks=[interrupt], **parts)


@pytest.mark.usefixtures("_typed")
def test_an_interrupted_cell_stops_cleanly_and_raises_and_can_be_run_again(tmp_path):
    config = toy_config(steps=400, run_dir=tmp_path / "run")
    given: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    with pytest.raises(
        RunInterrupted, match=r"SIGINT after step \d+; its weights and a snapshot are in .*resume=True"
    ) as it:
        interrupted(config)
    done = it.value.result
    assert isinstance(it.value, KeyboardInterrupt)
    assert done.snapshot_step == done.steps_done < 400
    again = train(replace(config, resume=True), model=Linear(), batches=toy_batch)
    assert again.history.step.tolist() == list(range(1, 401))
    np.testing.assert_array_equal(again.history.loss[done.steps_done :], again.losses)
    whole = train(replace(config, run_dir=None), **given)
    np.testing.assert_array_equal(whole.losses, again.history.loss)
    with pytest.raises(RunInterrupted, match="nothing of it is on the disk"):
        interrupted(replace(config, run_dir=None))


def test_a_script_that_is_interrupted_gets_its_result():
    assert interrupted(toy_config(steps=400)).stopped_by == "SIGINT"


@pytest.mark.usefixtures("_typed")
def test_a_second_interrupt_ends_the_cell_at_once():
    def batches(step):
        # Prefetched batches come before the launch, when the first signal would end the run, and the second the tests.
        if step == 10:
            for wait_s in (0.0, 0.7):
                time.sleep(wait_s)
                os.kill(os.getpid(), signal.SIGINT)
            has_ended.wait(60)
        return toy_batch(step)

    config = toy_config(steps=50, prefetch=2)
    has_ended = threading.Event()
    with pytest.raises(KeyboardInterrupt, match="stopped at once, without a last snapshot") as it:
        train(config, model=Linear(), batches=batches)
    has_ended.set()
    assert not isinstance(it.value, RunInterrupted)


def test_a_result_is_a_short_card_and_has_the_history_of_all_launches(tmp_path):
    config = toy_config(steps=3, run_dir=tmp_path / "run", eval_every_steps=3, keep_best="loss")
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch, "evaluation": toy_batch(9)}
    train(config, **parts)
    result = train(replace(config, steps=8, resume=True), **parts)
    assert repr(result).splitlines()[0].startswith("run done: 8 steps, 5 of them in ")
    assert re.search(r"evaluation  loss \S+, best \S+ at step [68] of this launch\n", repr(result))
    assert re.search(r"evaluation  loss \S+, best \S+ at step 8\n", repr(open_run(tmp_path / "run")))
    assert str(tmp_path / "run") in repr(result)
    assert len(repr(result)) < 1000
    assert "<script" not in result._repr_html_()
    history = result.history
    assert (history.step.tolist(), history.loss.dtype) == (list(range(1, 9)), np.float32)
    np.testing.assert_array_equal(history.loss[3:], result.losses)
    assert history.evaluated["step"].tolist() == [3, 6, 8]
    assert history.evaluated["top1"][-1] == result.evaluations[-1].top1
    assert (history.learning_rate > 0).all()
    plain = train(replace(config, run_dir=None, keep_best=None), **parts)
    np.testing.assert_array_equal(plain.history.loss, plain.losses)


def test_a_plot_is_one_picture_with_nothing_from_elsewhere(tmp_path):
    result = train(toy_config(steps=40), model=Linear(), batches=toy_batch)
    figure = result.plot()
    assert repr(figure) == "Figure(Loss of the training)"
    figure.save(tmp_path / "loss.svg")
    root = ET.parse(tmp_path / "loss.svg").getroot()
    assert not [each for each in root.iter() if each.tag.endswith(("style", "script", "image")) or each.get("style")]
    # The strokes of the loss have a point for each of the 40 steps.
    paths = [each.get("d", "") for each in root.iter() if each.tag.endswith("path")]
    assert max(path.count("L") for path in paths) == 39
    with pytest.raises(ValueError, match=r"a name that ends in \.svg"):
        figure.save(tmp_path / "loss.png")


def test_a_data_frame_needs_pandas_and_says_so(monkeypatch):
    history = train(toy_config(), model=Linear(), batches=toy_batch).history
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ModuleNotFoundError, match="pip install pandas, or use the arrays"):
        history.frame()
    taken = list[dict[str, Any]]()

    def data_frame(columns):
        taken.append(columns)
        return SimpleNamespace(set_index=lambda name: name)

    monkeypatch.setitem(sys.modules, "pandas", SimpleNamespace(DataFrame=data_frame))
    assert history.frame() == "step"
    assert [*taken[0]] == ["step", "loss", "learning_rate", "images_per_s", "wait_ms", "time"]
