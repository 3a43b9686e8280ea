"""The command run-train: its output, exit codes, signals, and errors in one line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from loopfeed.engine.commands.cli import main
from loopfeed.engine.commands.setting_options import option_spelling
from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.engine.recipes import load_recipe, recipe_names
from loopfeed.engine.records.run_folder import RunFolder
from loopfeed.preprocess.stop_signals import BURST_S
from tests.fake_source import fake_source, pack
from tests.small_resnets import small_resnets

TINY = ["--synthetic", "--model", "resnet8", "--image-size", "8", "--num-classes", "3", "--batch", "4"]
# Compiles in a tenth of the time, for tests of what does not depend on the model.
TOY_MODEL = ["--model", "tests.toy:Linear", "--batch", "4"]
TOY = [*TOY_MODEL, "--synthetic", "--image-size", "4", "--num-classes", "3"]
# One program for the tests of which settings a later command uses: the second of them loads it from the cache.
CHANGED = [*TINY, "--seed", "3", "--flip", "0.5", "--ema-decay", "0.9"]

RECIPE = """
summary = "a summary"
command = "run-train --recipe mine.toml"
expected = "12 % top-1"
source = "the tests"
hardware = "any"
[settings]
epochs = 2
batch = 4
learning_rate = 0.01
model = "resnet8"
decay_all = true
"""

MAIN = "from loopfeed.engine.commands.cli import main; main()"


@pytest.fixture(autouse=True)
def _toy_on_the_path(monkeypatch):
    """Let commands that run in other folders import the toy model."""
    monkeypatch.setenv("PYTHONPATH", os.fspath(Path(__file__).parents[1]))


def run_train(*arguments, cwd, timeout=120):
    """Run the command in a separate process with piped output."""
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.fixture
def call(tmp_path, monkeypatch):
    """Return a function that runs the command in this process, in a folder of its own, with small networks."""
    monkeypatch.chdir(tmp_path)

    def call(*arguments) -> tuple[int, str, str]:
        codes: list[int] = []
        with monkeypatch.context() as patch, small_resnets():
            # The command exits at once after an error.
            patch.setattr(os, "_exit", codes.append)
            result = CliRunner().invoke(main, list(map(str, arguments)))
        assert result.exception is None, result.output
        return (codes or [0])[0], result.stdout, result.stderr

    return call


def start_train(*arguments, cwd):
    command = [sys.executable, "-c", MAIN, *map(str, arguments)]
    return subprocess.Popen(command, cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def wait_for_lines(path, count, process, limit_s=120):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and path.read_text().count("\n") >= count:
            return
        time.sleep(0.05)
    pytest.fail(f"{path} has not {count} lines: {process.communicate(timeout=10)}")


def test_a_piped_run_prints_its_settings_and_lines_of_steps_or_only_its_end(tmp_path, call):
    options = [*TOY, "--run-dir", "run", "--overwrite"]
    done = run_train(*options, "--steps", 3, "--learning-rate", "0.01", "--log-every", 1, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # Which kernels there are depends on the machine.
    lines = [line for line in done.stdout.splitlines() if not line.startswith(("kernels: ", "still compiling"))]
    assert lines[0].startswith("model: linear, 147 parameters, 3 classes")
    assert lines[1] == (
        "infeed: batches of 4 images of 4 × 4 px from synthetic batches; 64 batches read ahead; inplace transport"
    )
    assert lines[2] == "cadence: a snapshot every 10 minutes"
    assert lines[3] == "compiling the training program, or loading it from the cache"
    assert lines[4].startswith("compiled training program in ")
    assert [line.split("  ")[0] for line in lines[5:8]] == ["step 1/3", "step 2/3", "step 3/3"]
    assert lines[8].startswith("done: 3 steps in ")
    assert lines[9] == "run folder: run"
    assert lines[10].startswith("verdict: the run was too short to say what bound it: 3 steps in ")
    assert lines[11:] == []
    assert done.stderr == ""
    assert (tmp_path / "run/model.safetensors").exists()
    again = run_train(*options, "--steps", 5, "--seed", 3, cwd=tmp_path)
    assert "loaded from the cache" in again.stdout
    # The first step, and the last.
    assert [line[:8] for line in again.stdout.splitlines() if line.startswith("step ")] == ["step 1/5", "step 5/5"]
    code, stdout, stderr = call(*options, "--steps", 5, "--quiet")
    (line,) = stdout.splitlines()
    assert line.startswith("done: 5 steps in ")
    assert line.endswith("; run folder: run")
    assert (code, stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch", "0"], "--batch must lie in 1 … 1048576, got 0"),
        (["--seed", "-1"], "--seed must lie in 0 …"),
        (["--model", "resnet51", "--synthetic"], "resnet51"),
        (["--data", "nowhere"], "nowhere"),
        (["--data", "x", "--synthetic"], "synthetic batches need no data set, got data 'x'"),
        (["--split", "test", "--data", "packed"], "test"),
        (
            ["--num-classes", "2", "--data", "packed"],
            "--num-classes must be at least 3, the number of classes in packed/train, got 2",
        ),
        (
            ["--image-size", "9", "--data", "packed"],
            "--image-size must be at most the size of the images, 8 × 8 px, got 9",
        ),
        (["--run-dir", "file", "--data", "packed"], "/file is a file: choose another path"),
        (["--momentum", "nan"], "--momentum must lie in 0 … 1, got nan"),
        (["--recipe", "imagnet"], "a recipe must be one of cifar-200, "),
        (["--recipe", "mine.toml"], "mine.toml: a recipe has no setting 'bach': did you mean batch?"),
        (["--epochs", "2"], "epochs and steps must not both be given, got --epochs 2 and --steps 1: leave one out"),
        (["--warmup-epochs", "1", "--synthetic"], "endless, got --warmup-epochs 1: give --warmup-steps as a number of"),
        (["--eval-every", "1e", "--synthetic"], "endless, got --eval-every 1: give --eval-every as a number of"),
    ],
)
def test_wrong_usage_is_one_clear_error(arguments, message, tmp_path, call):
    pack(fake_source(8, size=8), tmp_path / "packed")
    (tmp_path / "file").write_text("")
    (tmp_path / "mine.toml").write_text(RECIPE.replace("batch", "bach"))
    code, _, stderr = call(*arguments, "--steps", "1")
    assert code == 2
    errors = stderr.strip().splitlines()
    assert message in " ".join(errors)
    assert len(errors) <= 2
    assert errors[0].startswith("run-train: ")
    assert not (tmp_path / "runs").exists()


def test_a_signal_ends_the_run_cleanly_at_the_next_step(tmp_path):
    process = start_train(*TOY, "--steps", 10**7, "--run-dir", "run", cwd=tmp_path)
    wait_for_lines(tmp_path / "run/loss.jsonl", 5, process)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130, err
    assert "SIGTERM: stopping at the next step" in out
    assert "stopped by SIGTERM: " in out
    end = json.loads((tmp_path / "run/result.json").read_text())
    steps = [json.loads(line)["step"] for line in (tmp_path / "run/loss.jsonl").read_text().splitlines()]
    assert steps == list(range(1, end["steps_done"] + 1))
    assert end["stopped_by"] == "SIGTERM"
    assert (tmp_path / "run/model.safetensors").exists()


STUCK_SOURCE = """
def batches(step):
    if step == 2: print("stuck", flush=True); time.sleep(600)
    return toy_batch(step)
model = Linear()
"""
STUCK_STEP = """
class Endless(Linear):
    def apply(self, params, batch_stats, images, train):
        logits, stats = super().apply(params, batch_stats, images, train)
        turns = lax.while_loop(lambda turns: turns >= 0, lambda turns: (turns + 1) % 1000, jnp.int32(len(images)))
        return logits, {"batches": stats["batches"] + turns}
def batches(step):
    if step == 1: print("stuck", flush=True)  # it is read ahead: step 0 is being made, and never ends
    return toy_batch(step)
model = Endless()
"""


def train_in_process(prelude):
    source = f"""
import os, time
import jax.numpy as jnp
from jax import lax
from loopfeed import train
from tests.toy import Linear, toy_batch, toy_config
{prelude}
try:
    result = train(toy_config(steps=10), model=model, batches=batches, notify=lambda text: print(text, flush=True))
    print(result.stopped_by, result.steps_done, flush=True)
except KeyboardInterrupt:
    print("quit", flush=True)
os._exit(0)
"""
    return subprocess.Popen([sys.executable, "-c", source], stdout=subprocess.PIPE, text=True)


def read_until(process, text):
    while text not in (line := process.stdout.readline()):
        assert line, process.wait(timeout=10)


@pytest.mark.timeout(120)
def test_a_signal_ends_a_run_that_waits_for_a_stuck_source():
    process = train_in_process(STUCK_SOURCE)
    read_until(process, "stuck")
    time.sleep(0.5)  # for the program to come to its pull; earlier, the signal is seen before it
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out.splitlines()[-1] == "SIGINT 2"


@pytest.mark.timeout(120)
def test_a_second_signal_quits_at_once_even_in_a_long_step():
    process = train_in_process(STUCK_STEP)
    read_until(process, "stuck")
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    read_until(process, "stopping at the next step")
    time.sleep(2 * BURST_S)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert out.splitlines() == ["quit"]


def test_a_data_error_during_the_run_exits_with_2_and_names_the_shard(tmp_path, call):
    pack(fake_source(20, size=4), tmp_path / "packed")
    shards = sorted(path for path in (tmp_path / "packed/train/pixels").rglob("*") if path.is_file())
    shards = [path for path in shards if path.name != "zarr.json"]
    content = bytearray(shards[1].read_bytes())
    content[5] ^= 1
    shards[1].write_bytes(content)
    options = ["--data", "packed", *TOY_MODEL, "--steps", 50]
    code, _, stderr = call(*options)
    assert code == 2
    assert shards[1].relative_to(tmp_path / "packed/train").as_posix() in stderr
    assert len(stderr.strip().splitlines()) <= 2
    shown = run_train(*options, "--traceback", cwd=tmp_path)
    assert "Traceback (most recent call last)" in shown.stderr
    assert "read_into" in shown.stderr


def test_the_list_of_recipes_has_the_expected_result_of_each():
    result = CliRunner().invoke(main, ["--list-recipes", "--steps", "nonsense"])
    assert result.exit_code == 0
    recipes = [load_recipe(name) for name in recipe_names()]
    assert result.stdout.splitlines() == [
        line for each in recipes for line in (f"{each.name}: {each.summary}", f"    expected: {each.expected}")
    ]


WITH_OPTION = [name for name, declared in SETTINGS.items() if declared.options]


def test_every_setting_is_an_option_with_the_same_default():
    params = main.make_context("run-train", []).params
    with_option = {name: value for name, value in TrainConfig().to_json().items() if name in WITH_OPTION}
    assert {name: params.get(name, "no option") for name in with_option} == with_option
    assert all(each.in_place_of or each.set_by for each in SETTINGS.values() if not each.options)


@pytest.mark.parametrize("name", WITH_OPTION)
def test_the_help_of_an_option_is_that_of_its_setting(name):
    (option,) = (each for each in main.params if each.name == name)
    assert isinstance(option, click.Option)
    declared = SETTINGS[name]
    assert "/".join([*option.opts, *option.secondary_opts]) == "/".join(declared.options)
    assert option.help == declared.render_help(option_spelling)
    words = option.help.replace("REGEX=learning_rate:10x,weight_decay:0", "")  # the notation of --group
    assert not re.search(r"\b[a-z]+_[a-z_]+\b", words), "a setting named as in Python"


def test_a_run_is_evaluated_each_epoch_or_as_often_as_it_is_told(tmp_path, call):
    for name, count in (("train", 10), ("val", 4)):
        pack(fake_source(count, size=4, name=name), tmp_path / "packed")

    def evaluated(*arguments):
        code, stdout, stderr = call("--data", "packed", *TOY_MODEL, "--lr", 0.01, *arguments)
        assert code == 0, stderr
        lines = (tmp_path / arguments[1] / "eval.jsonl").read_text().splitlines()
        said = [line.removeprefix("cadence: ") for line in stdout.splitlines() if line.startswith("cadence: ")]
        return [json.loads(line)["step"] for line in lines], said

    by_clock = "a snapshot every 10 minutes"
    assert evaluated("--run-dir", "a", "--steps", 7) == (
        [3, 6, 7],
        [f"an evaluation every epoch (3 steps), {by_clock}"],
    )
    recorded = json.loads((tmp_path / "a/config.json").read_text())
    assert (recorded["config"]["eval_every_steps"], recorded["origins"]["eval_every_steps"]) == (3, "default")
    # A resume with more steps keeps the cadence; a run recorded by a version without the default keeps having none.
    assert evaluated("--run-dir", "a", "--resume", "--steps", 70)[0] == [3, 6, 7, *range(9, 70, 3), 70]
    assert evaluated("--run-dir", "b", "--steps", "4e", "--eval-every", "2e", "--snapshot-every", "0.5e") == (
        [5, 10],
        ["an evaluation every 2 epochs (5 steps), a snapshot every 0.5 epochs (2 steps)"],
    )
    assert evaluated("--run-dir", "c", "--steps", 7, "--eval-every", 0, "--snapshot-every", 0) == ([7], [])
    assert evaluated("--run-dir", "c", "--resume", "--steps", 9) == ([7, 9], [])


def test_a_recipe_sets_what_the_command_line_does_not(tmp_path, call):
    pack(fake_source(10, size=8), tmp_path / "packed")
    (tmp_path / "mine.toml").write_text(RECIPE)
    options = ["--run-dir", "run", "--lr", "default", "--batch", 5, "--recipe", "mine.toml", "--no-decay-all"]
    code, stdout, stderr = call(*options, "--data", "packed")
    assert code == 0, stderr
    lines = stdout.splitlines()
    assert lines[:4] == [
        "recipe mine: the command line overrides learning_rate 0.01 → default, batch 4 → 5, decay_all True → False",
        "data: packed (as given)",
        "packed has no val or test split, so the run will not be evaluated: pack the images with --holdout 0.1, or "
        "hide this message with --eval-split off",
        "epochs: 2 of 10 images each, 4 steps in total",
    ]
    assert [line.split("  ")[0] for line in lines if line.startswith("step ")] == ["step 1/4", "step 4/4"]
    settings = json.loads((tmp_path / "run/config.json").read_text())["config"]
    chosen = {name: settings[name] for name in ("epochs", "steps", "batch", "learning_rate", "model", "decay_all")}
    assert chosen == {
        "epochs": 2.0,
        "steps": 4,
        "batch": 5,
        "learning_rate": None,
        "model": "resnet8",
        "decay_all": False,
    }


@small_resnets()
def test_the_expected_accuracy_is_shown_for_the_images_of_the_recipe_only(tmp_path, call):
    for name, size in (("packed", 10), ("other", 11)):
        pack(fake_source(size, size=8), tmp_path / name)
        pack(fake_source(3, size=8, name="val"), tmp_path / name)

    def expected(*options, data="packed"):
        code, stdout, stderr = call("--recipe", "./mine.toml", "--data", data, *options)
        assert code == 0, stderr
        return [line for line in stdout.splitlines() if "expected" in line or "12 %" in line]

    (tmp_path / "mine.toml").write_text(RECIPE)
    (line,) = expected()
    found = re.fullmatch(
        r'the expected .* mine is for other images than these: .* write (expected_data = "\w{64}") .*', line
    )
    assert found is not None, line
    (tmp_path / "mine.toml").write_text(RECIPE.replace("[settings]", found[1] + "\n[settings]"))
    (tmp_path / "packed").rename(tmp_path / "elsewhere")
    assert expected(data="elsewhere") == ["expected: 12 % top-1"]
    (line,) = expected(data="other")
    assert line.startswith("the expected accuracy of the recipe mine is for other images than these: ")


def test_a_built_in_recipe_whose_image_size_does_not_fit_the_data_is_named_with_an_option(tmp_path, call):
    pack(fake_source(10, size=8), tmp_path / "packed")
    code, _, errors = call("--recipe", "imagenet-16", "--data", "packed", "--dry-run")
    assert code == 2
    assert (
        "run-train: image_size in the recipe imagenet-16 (--image-size default leaves it out) must be at most the size "
        "of the images, 8 × 8 px, got 224: leave it out"
    ) in errors


def test_a_dry_run_prints_a_plan_and_writes_nothing(tmp_path, call):
    code, stdout, stderr = call(*TOY, "--dry-run", "--run-dir", "run", "--rate", "50")
    assert code == 0, stderr
    memory = stdout.partition("memory of the host")[2].partition("fits: ")[0]
    found = re.findall(r"^  (\S.*?)  +([\d.]+) (MB|GB)$", memory, re.MULTILINE)
    sizes = {name: float(size) * {"MB": 1, "GB": 1000}[unit] for name, size, unit in found}
    total = sizes.pop("total")
    assert sizes.keys() == {
        "arguments",
        "results, in new memory",
        "temporaries",
        "code",
        "batches read ahead",
        "this process so far",
    }
    assert total == pytest.approx(sum(sizes.values()), abs=0.05 * 6 if "GB" not in memory else 10)
    assert "GFLOP" in stdout
    assert "  50 images/s, bound by: the devices\n" in stdout
    assert stdout.endswith("\ndry run: nothing was trained\n")
    assert "step 1/" not in stdout
    assert list(tmp_path.iterdir()) == []


def test_dump_hlo_belongs_to_one_launch_and_is_not_repeated_at_a_resume(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "run") as folder:
        recorded = TrainConfig(batch=4, dump_hlo=str(tmp_path / "hlo"))
        folder.write_config(recorded, {"device": "cpu"}, None, origins=dict.fromkeys(SETTINGS, "command line"))
        folder.launched()
    planned: list[TrainConfig] = []
    monkeypatch.setattr("loopfeed.engine.commands.cli.print_plan", lambda config, *_: planned.append(config))
    options = ["--resume", "--run-dir", str(tmp_path / "run"), "--dry-run", "--traceback"]
    for again in ([], ["--dump-hlo", "other"]):
        result = CliRunner().invoke(main, [*options, *again])
        assert result.exception is None, result.output
    assert [(each.batch, each.dump_hlo) for each in planned] == [(4, None), (4, "other")]


def test_help_shows_what_most_use_and_help_all_everything():
    first, everything = (CliRunner().invoke(main, [option]).output for option in ("--help", "--help-all"))
    assert [param.opts[0] for param in main.params if param.opts[0] not in everything] == []
    listed = [line.split()[0].rstrip(",") for line in first.splitlines() if line.startswith("  --")]
    assert {"--recipe", "--data", "--steps", "--help-all", "--version"} <= set(listed)
    assert len(listed) < 30


def test_a_program_that_needs_too_much_memory_is_reported_before_the_launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopfeed.engine.compilation.ahead_of_time.host_memory_bytes", lambda: 1000)
    result = CliRunner().invoke(main, [*TOY, "--steps", "1", "--run-dir", "run"])
    assert result.exit_code == 0
    assert "warning: the program needs about" in result.stdout
    assert "this machine has 0.0 GB: use a smaller --batch" in result.stdout


def test_a_run_is_resumed_with_its_own_settings_and_changes_are_reported(tmp_path, call):
    code, _, stderr = call(*CHANGED, "--steps", 3, "--run-dir", "run")
    assert code == 0, stderr
    code, stdout, stderr = call("--run-dir", "run", "--resume", "--steps", 5, "--learning-rate", 0.2)
    assert code == 0, stderr
    assert "resumed with steps 3 → 5, learning_rate default → 0.2" in stdout.splitlines()
    assert f"resuming {tmp_path / 'run'} from the snapshot of step 3" in stdout
    assert (tmp_path / "run/loss.jsonl").read_text().count("\n") == 5
    recorded = json.loads((tmp_path / "run/config.json").read_text())
    assert (recorded["config"]["seed"], recorded["config"]["steps"], recorded["config"]["batch"]) == (3, 5, 4)
    assert (recorded["origins"]["seed"], recorded["origins"]["split"]) == ("command line", "default")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--resume"], "--resume needs the folder of the run to continue, got none: give it with --run-dir"),
        (
            ["--resume", "--run-dir", "none"],
            "a run folder must contain config.json, but none does not exist: give",
        ),
        (["--resume", "--overwrite", "--run-dir", "none"], "got both: leave one out"),
        (["--snapshot-every", "-1"], "--snapshot-every must lie in 0 …"),
    ],
)
def test_an_impossible_resume_is_refused_in_one_line(tmp_path, options, message, call):
    code, _, stderr = call(*options)
    assert code == 2
    assert message in stderr
    assert list(tmp_path.iterdir()) == []
