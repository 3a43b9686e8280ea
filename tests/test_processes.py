"""Several processes on this machine: the same inputs and losses, and how they end if one stops, dies or stalls."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
from click.testing import CliRunner

from loopfeed import join_processes, this_process
from loopfeed.engine.commands.cli import main
from loopfeed.engine.commands.supervisor import _PROGRAM, without_option
from loopfeed.engine.feed.batches import ArrayBatches, FunctionBatches, label_words
from loopfeed.engine.feed.resizable_batches import SyntheticBatches
from loopfeed.engine.records.machine import Topology, describe_promise
from tests.device_runs import rows_alone
from tests.process_runs import MODULE, OWN, ROOT, TOY, going, own_processes, records, run, words
from tests.toy import toy_batch

VERIFY = "from loopfeed.engine.commands.verify_cli import main; main(prog_name='verify-run')"
EVERYTHING = [
    *("--model", f"{MODULE}:Showing", "--metrics", f"{MODULE}:METRICS", "--evaluation", f"{MODULE}:evaluation"),
    *("--batch", "12", "--num-classes", "3", "--steps", "8", "--eval-every", "4", "--learning-rate", "0.05"),
    *("--crop", "random", "--crop-padding", "1", "--flip", "0.5", "--erasing", "0.3"),
    *("--accumulate-steps", "2", "--ema-decay", "0.9", "--snapshot-every", "4"),
]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The run of one process."""
    folder = tmp_path_factory.mktemp("processes") / "1"
    run(*EVERYTHING, "--batches", f"{MODULE}:rows_alone", "--run-dir", str(folder))
    return folder


@pytest.mark.integration
@pytest.mark.parametrize(("number", "devices"), [(3, ()), (2, ("--devices", "cpu:2"))])
def test_processes_train_on_the_same_bits_to_the_same_losses(alone, tmp_path, number, devices):
    folder = tmp_path / "run"
    printed = run(
        *EVERYTHING, "--batches", f"{MODULE}:rows_alone", "--run-dir", str(folder), "--spawn", str(number), *devices
    )
    one, several = records(alone), records(folder)
    assert [each["metrics"] for each in several] == [each["metrics"] for each in one]
    # A loss is a difference of logits near 1, of which one rounding is 6e-8.
    losses, expected = ([each["loss"] for each in steps] for steps in (several, one))
    np.testing.assert_allclose(losses, expected, rtol=1e-6, atol=6e-8)
    evaluations = [[[each["loss"], each["top1"]] for each in records(where, "eval.jsonl")] for where in (alone, folder)]
    np.testing.assert_allclose(evaluations[1], evaluations[0], rtol=1e-5)
    assert len(re.findall(r"^step 1/8 ", printed, re.MULTILINE)) == 1
    if number == 2:
        return
    # The run of several processes goes on in one, and is replayed there.
    shutil.copytree(folder, tmp_path / "copy")
    parts = [*EVERYTHING[:6], "--batches", f"{MODULE}:rows_alone"]
    run(*parts, "--run-dir", str(tmp_path / "copy"), "--resume", "--steps", "10", "--devices", "1")
    assert [each["step"] for each in records(tmp_path / "copy")] == list(range(1, 11))
    done = subprocess.run(
        [sys.executable, "-c", VERIFY, *EVERYTHING[:6], "--batches", f"{MODULE}:rows_alone", str(tmp_path / "copy")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert "steps 5 … 8: recorded on 3 devices (cpu) in 3 processes, replayed in one process: sums" in done.stderr
    # Whether three devices change the rounding of one depends on the number of cores here.
    assert f"steps 9 … 10: {describe_promise(Topology('cpu'), 'cpu', 3)}" in done.stderr
    # Rounding alone, if anything: what the message promises.
    firsts = re.findall(r"recorded (\S+), replayed (\S+);", done.stdout)
    assert bool(firsts) == bool(done.returncode), done.stdout
    assert all(float(replayed) == pytest.approx(float(recorded), rel=1e-5) for recorded, replayed in firsts)
    assert all(float(largest) < 1e-5 for largest in re.findall(r"by at most (\S+) of", done.stdout))


@pytest.mark.integration
def test_sigterm_in_an_evaluation_stops_all_with_a_snapshot_and_a_resume_evaluates(tmp_path):
    folder, mark = tmp_path / "run", tmp_path / "mark"
    options = ["--evaluation", f"{MODULE}:MarkedEvaluation", "--eval-every", "9"]
    on_event = ["--on-event", f"echo $LOOPFEED_EVENT >> '{tmp_path}/told'"]
    with going(folder, *options, *on_event, EVALUATION_MARK=str(mark)) as (process, log):
        deadline = time.monotonic() + 60
        while not mark.exists():
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        (other,) = own_processes(folder, 1)
        os.kill(other, signal.SIGTERM)
        assert process.wait(60) == 130, log.read_text()
    result = json.loads((folder / "result.json").read_text())
    assert (result["steps_done"], result["snapshot_step"], result["stopped_by"]) == (9, 9, "another process")
    assert not (folder / "eval.jsonl").exists()
    run(*OWN, *options[:2], *on_event, "--run-dir", str(folder), "--resume", "--steps", "10")
    told = (tmp_path / "told").read_text().split()
    assert [event for event in told if event != "new-best"] == ["stopped", "done"]
    assert [each["step"] for each in records(folder, "eval.jsonl")] == [9, 10]


@pytest.mark.integration
def test_a_stalled_source_of_one_process_ends_the_run(tmp_path):
    with going(tmp_path / "run", "--infeed-timeout", "4", STALLED_PROCESS="1") as (process, log):
        assert process.wait(60) == 1, log.read_text()
    assert "process 1: run-train: the batch of step 11 did not arrive within 4 s" in log.read_text()
    assert "what was saved is intact" in log.read_text()
    assert json.loads((tmp_path / "run/result.json").read_text())["steps_done"] == 10


@pytest.mark.integration
def test_a_first_process_that_waits_for_the_others_in_vain_says_so(tmp_path):
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    own = ["--coordinator", f"localhost:{port}", "--num-processes", "2", "--process-id", "0", "--join-timeout", "3"]
    done = subprocess.run(words(*TOY, *own), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("run-train: not all processes have joined within --join-timeout: start all of them")


@pytest.mark.integration
def test_a_coordinator_that_cannot_be_reached_is_an_error(tmp_path):
    options = ["--coordinator", "localhost:9", "--num-processes", "2", "--process-id", "1", "--join-timeout", "5"]
    done = subprocess.run(
        words(*TOY, "--run-dir", str(tmp_path), *options),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "run-train: the coordinator localhost:9 cannot be reached" in done.stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-processes", "2"], "--num-processes needs --coordinator HOST:PORT"),
        (["--coordinator", "here:1", "--num-processes", "2"], "belong together, but --process-id is missing: give"),
        (["--coordinator", "here", "--num-processes", "2", "--process-id", "0"], "must be HOST:PORT, got 'here'"),
        (["--coordinator", "here:1", "--num-processes", "2", "--process-id", "2"], "must lie in 0 … 1, got 2"),
        (["--spawn", "2", "--coordinator", "here:1"], "--spawn starts processes that --coordinator joins, got both"),
    ],
)
def test_options_that_do_not_fit_are_refused(options, message, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.commands.cli.leave", lambda code, **_: sys.exit(code))
    done = CliRunner().invoke(main, ["--synthetic", *options])
    assert done.exit_code == 2
    assert message in done.output


def test_modules_of_the_working_directory_do_not_hide_those_of_python(tmp_path):
    (tmp_path / "pathlib.py").write_text("raise RuntimeError('the wrong one')")
    child = [sys.executable, "-c", _PROGRAM, "--version"]
    done = subprocess.run(child, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("run-train, version"), done.stderr


def test_an_option_is_left_out_with_its_value():
    assert without_option(["--a", "1", "--spawn", "2", "--b"], "--spawn") == ["--a", "1", "--b"]
    assert without_option(["--spawn=2", "--b"], "--spawn") == ["--b"]


def test_this_process_is_alone_and_a_wrong_address_is_refused():
    assert (this_process().index, this_process().count) == (0, 1)
    with pytest.raises(ValueError, match="belong together"):
        join_processes("localhost:1")


@pytest.mark.parametrize(
    "source",
    [
        FunctionBatches(toy_batch),
        FunctionBatches(lambda step: (toy_batch(step)[0], {"x": np.arange(8.0) + step}), kind="numbers"),
        SyntheticBatches(batch=8, height=4, width=4, num_classes=3, seed=5),
        ArrayBatches(*toy_batch(1, batch=21), batch=8),
    ],
    ids=["function", "labels of a function", "synthetic", "arrays"],
)
def test_the_rows_of_a_source_are_those_of_the_whole_batch(source):
    words = label_words(source)

    def filled(batch_index, rows):
        pixels = np.full((len(rows), 4, 4), 7, np.uint32)
        labels = np.full((len(rows), *([] if words is None else [words])), 7, np.int32)
        source.fill(batch_index, rows, pixels, labels, timeout_s=1)
        return pixels, labels

    for batch_index in (0, 2):
        for rows in (range(2), range(2, 6), range(6, 8)):
            for part, whole in zip(filled(batch_index, rows), filled(batch_index, range(8)), strict=True):
                np.testing.assert_array_equal(part, whole[rows.start : rows.stop])


def test_a_function_is_asked_for_the_rows_of_its_process():
    np.testing.assert_array_equal(rows_alone(3, range(2, 5))[1], toy_batch(3, batch=12)[1][2:5])
