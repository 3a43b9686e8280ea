"""The command run-eval: its output, its exit codes, and errors in one line."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from loopfeed import TrainConfig, train
from loopfeed.engine.commands.eval_cli import main
from loopfeed.engine.stream.sinks import evaluation_words
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config

pytestmark = pytest.mark.usefixtures("small_resnets")

SMALL = f"""
import sys
sys.path.insert(0, {os.fspath(Path(__file__).parents[1])!r})
from loopfeed.engine.commands.eval_cli import main
from tests.small_resnets import small_resnets
with small_resnets(): main()
"""


@pytest.fixture(scope="module")
def place(small_resnets, tmp_path_factory):
    """Return a folder with a data set, a run on it and a run with a model of the user."""
    folder = tmp_path_factory.mktemp("place")
    pack(fake_source(20, size=8), folder / "data")
    pack(fake_source(11, size=8, seed=1, name="val"), folder / "data")
    config = TrainConfig(
        steps=2, batch=4, data=os.fspath(folder / "data"), model="resnet8", run_dir=os.fspath(folder / "run")
    )
    result = train(config)
    train(toy_config(steps=1, run_dir=folder / "own"), model=Linear(), batches=toy_batch)
    return folder, result.evaluations[-1]


def run_eval(*arguments, cwd):
    return subprocess.run(
        [sys.executable, "-c", SMALL, *map(str, arguments)],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def invoke(monkeypatch, place, *arguments):
    """Run the command in this process in the folder, and capture the exit code."""
    codes: list[int] = []
    monkeypatch.chdir(place)
    monkeypatch.setattr(os, "_exit", codes.append)
    result = CliRunner().invoke(main, list(map(str, arguments)))
    return (codes or [result.exit_code])[0], result.stdout, result.stderr


def test_the_result_goes_to_stdout_and_messages_to_stderr(place):
    folder, found = place
    done = run_eval("run", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout == evaluation_words(found) + "\n"
    told = done.stderr.splitlines()
    assert told[0] == "weights: run, resnet8 after 2 steps"
    assert told[1].endswith("data/val, 11 images")
    assert told[2].startswith("compiled the evaluation program in ")
    assert told[3].startswith("11 images in ")


def test_mirror_images_are_evaluated_if_the_run_or_the_command_requests_it(place, monkeypatch, tmp_path):
    folder, found = place
    config = TrainConfig(
        steps=2, batch=4, data=os.fspath(folder / "data"), model="resnet8", eval_mirror=True, run_dir=tmp_path / "run"
    )
    (mirrored,) = train(config).evaluations
    assert mirrored.loss != found.loss
    told = evaluation_words(mirrored).removesuffix(")") + ", and their mirror images)"
    for run, option, wanted in (("run", "--no-eval-mirror", evaluation_words(found)), ("run", None, told)):
        code, out, _ = invoke(monkeypatch, tmp_path, run, *([option] if option else []))
        assert (code, out) == (0, wanted + "\n")
    code, out, _ = invoke(monkeypatch, folder, "run", "--per-class")
    shares = [float(share) for share in re.findall(r"^ .* ([0-9.]+) %$", out, re.MULTILINE)]
    assert (code, len(shares)) == (0, 3)
    balanced = re.search(r"^balanced accuracy: ([0-9.]+) % \(mean over 3 classes\)$", out, re.MULTILINE)
    assert balanced is not None
    assert abs(float(balanced[1]) - sum(shares) / 3) < 0.01
    code, out, _ = invoke(monkeypatch, folder, "run", "--eval-mirror")
    assert (code, out) == (0, told + "\n")


def test_weights_of_no_run(place, monkeypatch):
    folder, found = place
    arguments = ["--weights", "run/model.safetensors", "--data", "data", "--batch", 4]
    code, out, _ = invoke(monkeypatch, folder, *arguments)
    assert (code, out) == (0, evaluation_words(found) + "\n")
    scale = ["--mean", 0.5, 0.5, 0.5, "--std", 0.25, 0.25, 0.25]
    code, out, err = invoke(monkeypatch, folder, *arguments, *scale, "--model", "resnet8", "--split", "train")
    assert code == 0
    assert "20 images" in out
    assert "ImageNet" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "exactly one of RUN and --weights FILE must be given, got neither"),
        (["run", "--weights", "x"], "got run and --weights x: give one of the two"),
        (["run", "--mean", "0", "0", "0"], "--mean can be given only with --weights FILE, got RUN run instead"),
        (["nowhere"], "RUN must be a run folder, but nowhere does not exist"),
        (["."], "RUN must be a run folder, but . contains 2 run folders"),
        (["own"], "own was trained with a model (linear)"),
        (["run", "--data", "nowhere"], "the data of the run must be in nowhere, which does not exist"),
        (["run", "--split", "test"], "there is no split 'test'; choose one of train, val"),
        (["run", "--batch", "0"], "--batch must lie in 1 … 1048576, got 0"),
        (["run", "--image-size", "9"], "must be at most the size of the images, 8 × 8 px, got 9: leave"),
        (["--weights", "nowhere.safetensors"], "nowhere.safetensors does not exist"),
        (["--weights", "data/val/manifest.json"], "weights must be a safetensors file or a file of PyTorch"),
    ],
)
def test_wrong_usage_is_one_clear_error(place, monkeypatch, arguments, message):
    code, out, err = invoke(monkeypatch, place[0], *arguments)
    assert (code, out) == (2, "")
    errors = [line for line in err.splitlines() if line.startswith("run-eval: ")]
    assert len(errors) == 1
    assert message in errors[0]


STUCK = (
    """
import os, time
from loopfeed.preprocess.shards.reader import ShardSplit
def wait(*_, **__):
    os.write(1, b"stuck\\n")  # whole, as several threads may be stuck
    time.sleep(600)
ShardSplit.read_into = wait
"""
    + SMALL
)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_an_evaluation_with_a_stuck_source(place, number):
    with subprocess.Popen(
        [sys.executable, "-c", STUCK, "run"], cwd=place[0], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "stuck\n"
            process.send_signal(number)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "run-eval: stopped before there was a result"
