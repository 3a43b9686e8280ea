"""*Did you mean*: every command suggests the nearest option and choice, and none where none is near."""

import os
import tomllib
import unicodedata
from importlib import import_module
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from loopfeed.engine.commands.cli import main as run_train
from loopfeed.engine.commands.control_cli import main as control_run
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.commands.tail_cli import main as tail_run
from loopfeed.engine.config import SETTINGS, TrainConfig
from loopfeed.models.names import MODEL_NAMES
from loopfeed.models.registry import find_network, model_names, networks
from loopfeed.preprocess.commands.cli import main as preprocess_imagenet
from loopfeed.preprocess.commands.suggesting import SuggestingCommand
from loopfeed.preprocess.suggestions import did_you_mean, is_same_text, nearest

ROOT = Path(__file__).parents[1]
COMMANDS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["scripts"]


def command_of(name):
    module, _, function = COMMANDS[name].partition(":")
    return getattr(import_module(module), function)


def misspelt(option):
    """Return a misspelling with an additional letter."""
    return f"{option[:-1]}x{option[-1]}"


def test_the_nearest_word_is_found_whatever_its_case():
    assert nearest("CoSin", ["constant", "cosine"]) == "cosine"
    assert nearest("frobnicate", ["constant", "cosine"]) is None
    assert did_you_mean("adamW", ["sgd", "adamw"]) == ": did you mean adamw?"
    assert did_you_mean(3, ["sgd"]) == ""


@pytest.mark.parametrize(
    ("setting", "given", "ours"),
    [
        ("precision", "bf16", "bfloat16"),
        ("precision", "16-mixed", "bfloat16"),
        ("precision", "FP32", "float32"),
        ("loss", "ce", "cross-entropy"),
        ("loss", "BCEWithLogitsLoss", "binary-cross-entropy"),
        ("loss", "MSE", "mean-squared-error"),
        ("schedule", "CosineAnnealingLR", "cosine"),
        ("schedule", "poly", "polynomial"),
        ("crop", "RandomResizedCrop", "resized"),
        ("padding_mode", "constant", "zeros"),
    ],
)
def test_a_choice_is_found_by_the_name_that_other_programs_give_it(setting, given, ours):
    known = SETTINGS[setting]
    assert ours in known.choices
    with pytest.raises(ValueError, match=f"did you mean {ours}"):
        TrainConfig(**{setting: given})
    shown = CliRunner().invoke(run_train, [known.options[0], given])
    assert shown.exit_code == 2
    assert f"did you mean {ours}?" in shown.stderr


def test_a_word_that_is_a_choice_itself_is_not_taken_for_another():
    assert nearest("constant", ["zeros", "constant"]) == "constant"
    assert nearest("sgd", ["cosine"]) is None


@pytest.mark.parametrize(
    ("given", "known", "near"),
    [
        ("stesp", "steps", True),
        ("max_epochs", "epochs", True),
        ("patience", "stop_patience", True),
        ("weightdecay", "weight_decay", True),
        ("batchsize", "batch", True),
        ("resnet19", "resnet18", True),
        ("groupz", "groups", True),
        ("gpus", "groups", False),
        ("quiet", "hue", False),
        ("pretrained", "erasing", False),
        ("log_every", "eval_every_steps", False),
        ("n0153", "n9153", True),
    ],
)
def test_a_word_is_suggested_only_for_a_slip_or_for_a_part_of_it(given, known, near):
    assert (nearest(given, [known]) is not None) is near


def test_names_of_other_trainers_lead_to_the_setting_and_say_what_it_takes():
    result = CliRunner().invoke(run_train, ["--weights"])
    assert result.stderr.endswith(
        "No such option: --weights. Did you mean --init-from? Weights to start from: a safetensors file, a PyTorch "
        "state dict, a run, or hf-hub:timm/NAME.\n"
    )
    for given in ("--log-interval", "--logging-steps", "--print-freq"):
        for command in (run_train, tail_run):
            assert "Did you mean --log-every? Print a " in CliRunner().invoke(command, [given, "5"]).stderr
    assert (
        "Did you mean --learning-rate-factor? Multiply" in CliRunner().invoke(control_run, ["run", "--lr", "3"]).stderr
    )
    for given, option in {"--val-split": "--holdout", "--image-size": "--size", "--num-workers": "--workers"}.items():
        assert f"Did you mean {option}?" in CliRunner().invoke(preprocess_imagenet, [given, "5"]).stderr
    refused = CliRunner().invoke(preprocess_imagenet, ["--size", "32x32"])
    assert "'32x32' is neither a whole number nor auto." in refused.stderr
    for command, others in ((run_train, ["packed"]), (run_eval, ["run", "packed"])):
        refused = CliRunner().invoke(command, others)
        assert refused.exit_code == 2
        assert "extra argument (packed): a data set is given with its option, as --data DIR" in refused.stderr
    for given, setting in {
        "gpus": "devices",
        "early_stopping": "stop_patience",
        "num_workers": "reader_threads",
    }.items():
        with pytest.raises(TypeError, match=rf"has no setting '{given}': did you mean {setting}\?$"):
            TrainConfig.from_json({given: 3})
    with pytest.raises(TypeError, match=rf"'frobnicate': none of the {len(SETTINGS)} is near to it; help\(loopfeed"):
        TrainConfig.from_json({"frobnicate": 3})
    spellings = [each for setting in SETTINGS.values() for each in setting.also_called]
    assert len(spellings) == len(set(spellings))
    assert not set(spellings) & set(SETTINGS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_suggests_the_nearest_of_its_options(name):
    command = command_of(name)
    assert isinstance(command, SuggestingCommand)
    for param in command.params:
        if isinstance(param, click.Option):
            for option in (each for each in param.opts if each.startswith("--")):
                result = CliRunner().invoke(command, [misspelt(option)])
                assert result.exit_code == 2
                assert f"No such option: {misspelt(option)}. Did you mean --" in result.stderr
    result = CliRunner().invoke(command, ["--qqqqq"])
    assert result.exit_code == 2
    assert result.stderr.endswith("No such option: --qqqqq\n")


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("--snapshot-every-steps", "--snapshot-every"),
        ("--keep-snapshots", "--keep"),
        ("--chunk-batches", "--chunk"),
        ("--label_smoothing", "--label-smoothing"),
        ("--no-decay-al", "--no-decay-all"),
        ("--learning-rat=0.1", "--learning-rate"),
    ],
)
def test_a_settings_name_in_python_leads_to_its_option(given, meant):
    result = CliRunner().invoke(run_train, [given])
    assert result.exit_code == 2
    assert result.stderr.strip().endswith(f" Did you mean {meant}?")


@pytest.mark.parametrize(
    ("command", "arguments", "message"),
    [
        (
            "run-train",
            ["--crop", "center"],
            "'center' is not one of 'centre', 'random', 'resized': did you mean centre?",
        ),
        ("run-eval", ["--precision", "bfloat61"], "is not one of 'float32', 'bfloat16': did you mean bfloat16?"),
        ("preprocess-imagenet", ["--codec", "blocs"], "'blocs' is not one of 'raw', 'blosc': did you mean blosc?"),
        ("preprocess-imagenet", ["--codec", "zstd"], "'zstd' is not one of 'raw', 'blosc'."),
    ],
)
def test_a_misspelt_choice_is_refused_with_the_nearest(command, arguments, message):
    result = CliRunner().invoke(command_of(command), arguments)
    assert result.exit_code == 2
    assert result.stderr.endswith(f"{message}\n")


def test_a_misspelt_model_is_refused_with_the_nearest(tmp_path, monkeypatch):
    words = r"^model must be auto or a name .*, got 'ConvNet8Wide': did you mean convnet8-wide or "
    with pytest.raises(ValueError, match=words):
        find_network("ConvNet8Wide")
    monkeypatch.chdir(tmp_path)
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    tiny = ["--synthetic", "--image-size", "8", "--num-classes", "3", "--batch", "4", "--steps", "1"]
    result = CliRunner().invoke(run_train, [*tiny, "--model", "resnet-110"])
    assert codes == [2]
    assert result.stderr.startswith("run-train: --model must be auto or a name that loopfeed.model_names() returns ")
    assert result.stderr.endswith("got 'resnet-110': did you mean resnet110 or resnet101 or resnet50?\n")


def test_the_names_of_the_networks_are_those_of_the_registry():
    assert tuple(networks()) == MODEL_NAMES == model_names()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_number_of_a_command_is_in_the_digits_0_to_9(name):
    command, checked = command_of(name), 0
    for param in command.params:
        kinds = [param.type, getattr(param.type, "_kind", None)]
        kinds.append(getattr(kinds[1], "_kind", None))
        numbers = [each for each in kinds if isinstance(each, (click.types.IntParamType, click.types.FloatParamType))]
        for kind in numbers:
            with pytest.raises(click.BadParameter, match=r"'١٢' is not a number in the digits 0 to 9"):
                kind.convert("١٢", param, None)  # type: ignore[arg-type]
            checked += 1
    assert checked or name in (
        "export-model",
        "explain-program",
        "inspect-shards",
        "list-runs",
        "loopfeed",
        "report-run",
    )


def test_a_word_in_another_unicode_form_is_not_suggested_for_itself():
    composed, decomposed = (unicodedata.normalize(form, "Küche") for form in ("NFC", "NFD"))
    assert composed != decomposed
    assert did_you_mean(composed, [decomposed]) == f": it is {decomposed} in another Unicode form (NFD, not NFC)"
    assert did_you_mean("Kuche", [composed]) == f": did you mean {composed}?"
    assert nearest(unicodedata.normalize("NFD", "Tür"), [unicodedata.normalize("NFC", "Tür")]) is not None


@pytest.mark.timeout(20)
def test_thousands_of_marks_on_a_letter_take_no_time():
    word = "a" + "\u0301\u0323" * 500_000  # composing them takes hours, and no signal ends it
    assert is_same_text(word, word)
    assert not is_same_text(word, "a")
