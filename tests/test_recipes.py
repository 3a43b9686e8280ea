"""Recipes: every shipped one can be run as it says, and a file that is none is refused with its name and the remedy."""

import os
import re
import shlex
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner

from loopfeed.engine.commands.cli import main as run_train
from loopfeed.engine.commands.option_sources import OptionSource, command_line, merge_options
from loopfeed.engine.config import OWN_BATCHES, SETTINGS, ConfigError, TrainConfig
from loopfeed.engine.data.open_data import open_data
from loopfeed.engine.parts import UserParts
from loopfeed.engine.program.train_state import name_of_model
from loopfeed.engine.recipes import LoadedRecipe, RecipeError, load_recipe, recipe_names
from loopfeed.engine.recipes.expected import expected_accuracy
from loopfeed.engine.records.run_folder import RunFolder
from loopfeed.engine.run.descriptions import resolved_of
from loopfeed.engine.run.epochs import settle_epochs, steps_of_epochs
from loopfeed.engine.run.program_settings import compiled_settings, schedule_of
from loopfeed.engine.run.resolve import choose_model
from loopfeed.engine.run.train import set_up_run
from loopfeed.engine.settings import OnResume, Owner
from loopfeed.engine.updates.schedules import learning_rate_at
from loopfeed.preprocess.commands.cli import main as preprocess_imagenet
from loopfeed.preprocess.shards.manifest import Manifest
from tests.fake_source import fake_source, pack

NAMES = recipe_names()
FOLDER = Path(__file__).parents[1] / "engine/recipes"
COMMANDS = {"run-train": run_train, "preprocess-imagenet": preprocess_imagenet}
IMAGENET_IMAGES = 1_281_167
SOUND = """
summary = "s"
command = "c"
expected = "e"
source = "o"
hardware = "h"
[settings]
batch = 8
"""


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    """Ten images of 8 px to train on, three to evaluate on."""
    folder = tmp_path_factory.mktemp("packed")
    pack(fake_source(10, size=8), folder)
    pack(fake_source(3, size=8, name="val"), folder)
    return str(folder)


def contexts_of(recipe):
    """Return the commands of a recipe as click parses them, by command name."""
    lines = [shlex.split(line) for line in recipe.command.splitlines()]
    return {name: COMMANDS[name].make_context(name, arguments) for name, *arguments in lines}


def test_the_standard_recipes_exist():
    assert {"cifar-200", "cifar-cpu", "cifar-fast", "cifar-gpu", "demo"} <= set(NAMES)
    assert {"imagenet-16", "imagenet-90", "imagenet-large"} <= set(NAMES)
    assert list(NAMES) == sorted(path.stem for path in FOLDER.glob("*.toml"))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_is_named_and_run_by_the_command_that_it_states(name):
    recipe = load_recipe(name)
    contexts = contexts_of(recipe)
    assert list(contexts) == ["preprocess-imagenet", "run-train"]
    training, packing = contexts["run-train"].params, contexts["preprocess-imagenet"].params
    assert recipe.name == training["recipe"] == name
    stated = command_line(contexts["run-train"])
    assert set(stated.settings) - {"model", "init_from"} == {"data"}
    assert merge_options(OptionSource(name, recipe.settings), stated).overrides == ()
    # With --demo the one argument is the destination.
    assert (packing["source"] if packing["demo"] else packing["dest"]) == training["data"]
    assert packing["size"] >= recipe.settings.get("image_size", 0)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_a_packed_set_and_comes_to_a_program(name, packed):
    smaller = {"data": packed, "batch": 4, "model": "resnet8", "image_size": 8}
    settings = load_recipe(name).settings
    config = settle_epochs(TrainConfig.from_json(settings | smaller), 10)
    steps = settings.get("steps") or steps_of_epochs(settings["epochs"], num_images=10, images_per_step=4)
    assert config.steps == steps
    assert config.warmup_steps < config.steps
    with ExitStack() as stack:
        data = open_data(config, UserParts(), stack, lambda _: None)
        assert data.evaluation is not None
        assert (name_of_model(choose_model(config, UserParts(), data)), data.num_classes) == ("resnet8", 3)
    compiled_settings(config).augmentation.check_batch(4)
    assert int(schedule_of(config).total_steps) == steps


@pytest.mark.parametrize(("batch", "steps", "peak"), [(256, 450_411, 0.1), (1024, 112_603, 0.4), (8192, 14_076, 3.2)])
def test_the_classic_run_keeps_its_rates_at_every_batch(batch, steps, peak):
    """Goyal et al. (2017), arXiv:1706.02677, section 5.1: a tenth from epochs 30, 60 and 80 of 90 on, by their rule."""
    config = settle_epochs(
        TrainConfig.from_json(load_recipe("imagenet-90").settings | {"batch": batch}), IMAGENET_IMAGES
    )
    assert config.steps == steps
    assert config.warmup_steps == steps_of_epochs(5, num_images=IMAGENET_IMAGES, images_per_step=batch)
    values = schedule_of(config)
    for epoch, rate in [
        (2.5, peak / 2),
        (5.1, peak),
        (29.9, peak),
        (30.1, peak / 10),
        (60.1, peak / 100),
        (80.1, peak / 1000),
    ]:
        step = jnp.int32(epoch * IMAGENET_IMAGES / batch)
        # Half the warm-up is half the rate up to the one step that a half is rounded to.
        assert float(learning_rate_at(config.schedule, step, values)) == pytest.approx(rate, rel=3e-3)


@pytest.mark.parametrize(("batch", "every"), [(32768, 1), (4096, 8)])
def test_the_run_of_large_batches_has_the_rates_of_its_source(batch, every):
    """MLPerf training v0.7, Google's ResNet-50 in JAX: 29 after 18 of 64 epochs, then a square down to 0.0001."""
    settings = load_recipe("imagenet-large").settings | {"batch": batch, "accumulate_steps": every}
    config = settle_epochs(TrainConfig.from_json(settings), IMAGENET_IMAGES)
    assert config.steps == 2503
    values = schedule_of(config)
    for epoch, rate in [(9, 14.5), (18, 29), (41, 7.25), (64, 1e-4)]:
        step = jnp.int32(epoch * IMAGENET_IMAGES / 32768 + 1e-6)
        # Steps are whole; one is 0.14 % of the warm-up.
        assert float(learning_rate_at(config.schedule, step, values)) == pytest.approx(rate, rel=4e-3, abs=2e-5)


def test_a_recipe_takes_steps_in_epochs(tmp_path):
    (tmp_path / "mine.toml").write_text('[settings]\nsteps = "4e"\nwarmup_steps = "0.5e"\neval_every_steps = "1e"\n')
    found = load_recipe(tmp_path / "mine.toml").settings
    assert found == {"epochs": 4.0, "warmup_epochs": 0.5, "eval_every_epochs": 1.0}
    (tmp_path / "mine.toml").write_text('[settings]\nepochs = 4\nsteps = "4e"\n')
    with pytest.raises(RecipeError, match="epochs and steps must not both be given, got 4 and 4e: leave one out"):
        load_recipe(tmp_path / "mine.toml")


def test_a_recipe_file_of_your_own_is_accepted(tmp_path, monkeypatch):
    (tmp_path / "mine.toml").write_text(SOUND)
    (tmp_path / "other").write_text(SOUND)
    monkeypatch.chdir(tmp_path)
    for path in ("mine.toml", tmp_path / "mine.toml", "./mine.toml"):
        recipe = load_recipe(path)
        assert (recipe.name, recipe.summary, recipe.settings) == ("mine", "s", {"batch": 8})
    assert load_recipe("./other").name == "other"


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            'source = "o"',
            'source = "  "',
            r"source must be a non-empty string, got '  ' of type str: source = \"…\", where the accuracy",
        ),
        ('hardware = "h"', "hardware = 3", r"hardware must be a non-empty string, got 3 of type int"),
        ('command = "c"', 'comand = "c"', r"a recipe has no key 'comand': did you mean command\?$"),
        (
            'command = "c"',
            'command = "c"\nbatch = 4',
            r"a recipe has no key 'batch': move settings below \[settings\]$",
        ),
        (
            "[settings]\nbatch = 8",
            "",
            r"must have the table settings, got None: add \[settings\] and one setting per line$",
        ),
        ("[settings]\nbatch = 8", "settings = 3", r"must have the table settings, got 3"),
        ("batch = 8", "batchs = 8", r"a recipe has no setting 'batchs': did you mean batch\?$"),
        ("batch = 8", "lr = 8", r"a recipe has no setting 'lr': did you mean learning_rate\?$"),
        ("batch = 8", "frobnicate = 8", r"a recipe has no setting 'frobnicate': remove it$"),
        ("batch = 8", "batch = 8.0", r"batch must be of type int, got 8\.0 of type float$"),
        ("batch = 8", "batch = true", r"batch must be of type int, got True of type bool$"),
        ("batch = 8", "flip = 1.5", r"flip must lie in 0 … 1, got 1\.5$"),
        ("batch = 8", "flip = nan", r"flip must lie in 0 … 1, got nan$"),
        (
            "batch = 8",
            'schedule = "cosin"',
            r"schedule must be one of constant, .*, got 'cosin': did you mean cosine\?$",
        ),
        ("batch = 8", "seed = 2026-11-21", r"seed must be of type int, got datetime\.date"),
        (
            "batch = 8",
            'run_dir = "x"',
            r"run_dir belongs to a single run, not to a recipe: give it on the command line$",
        ),
        ("batch = 8", "epochs = 2\nsteps = 9", r"epochs and steps must not both be given, got 2 and 9: leave one out$"),
        ("batch = 8", 'synthetic = true\ndata = "x"', r"synthetic batches need no data set, got data 'x'"),
        ("batch = 8", "batch = ", r"a recipe must be TOML in UTF-8: Invalid value"),
        ("batch = 8", "batch = 8\nbatch = 9", r"a recipe must be TOML in UTF-8: Cannot overwrite"),
    ],
)
def test_an_invalid_recipe_file_is_refused(before, after, message, tmp_path):
    assert before in SOUND
    path = tmp_path / "mine.toml"
    path.write_text(SOUND.replace(before, after))
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}: .*{message}"):
        load_recipe(path)


def test_all_errors_of_a_file_are_reported_at_once(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'expected = 3\nsumary = "s"\n[settings]\nbach = 8\nflip = 1.5\nschedule = "cosin"\nrun_dir = "x"\n'
        'epochs = 1\nsteps = 2\nsynthetic = true\ndata = "packed"\n'
    )
    with pytest.raises(RecipeError) as raised:
        load_recipe(path)
    assert str(raised.value).splitlines() == [
        f"{path}: 8 faults:",
        '  expected must be a non-empty string, got 3 of type int: expected = "…", the expected accuracy',
        "  a recipe has no key 'sumary': did you mean summary?",
        "  a recipe has no setting 'bach': did you mean batch?",
        "  flip must lie in 0 … 1, got 1.5",
        "  schedule must be one of constant, step, cosine, linear, one-cycle, polynomial, exponential, "
        "cosine-restarts, got 'cosin': did you mean cosine?",
        "  run_dir belongs to a single run, not to a recipe: give it on the command line",
        "  epochs and steps must not both be given, got 1 and 2: leave one out",
        "  synthetic batches need no data set, got data 'packed': leave out synthetic or data",
    ]


def record_run(folder, config, model="resnet8", manifest_digest=None, **resolved):
    """Return the config.json that a run with these settings writes."""
    with RunFolder(folder) as run:
        run.clear()
        run.write_config(config, {"model": model, "device": "cpu", **resolved}, manifest_digest, origins={})
        run.launched()
    return folder / "config.json"


def test_the_record_of_a_run_is_a_recipe(tmp_path):
    config = TrainConfig(
        steps=7, epochs=2, batch=4, learning_rate=0.5, decay_all=True, run_dir=str(tmp_path / "run"), dump_hlo="hlo"
    )
    path = record_run(tmp_path / "run", config)
    recipe = load_recipe(path)
    assert (recipe.name, recipe.source) == ("run", str(path))
    per_run = {name for name, each in SETTINGS.items() if each.owner in (Owner.USER, Owner.LAUNCH)}
    per_run |= {name for name, each in SETTINGS.items() if each.on_resume is OnResume.COMPUTED}
    assert recipe.settings == {name: value for name, value in config.to_json().items() if name not in per_run}
    # The steps were counted from the epochs, and so give way to them.
    merged = merge_options(OptionSource("recipe run", recipe.settings), OptionSource("command line", {"batch": 8}))
    assert TrainConfig.from_json(merged.settings) == TrainConfig(epochs=2, batch=8, learning_rate=0.5, decay_all=True)


def test_a_run_with_an_appended_cycle_is_no_recipe(tmp_path):
    path = record_run(tmp_path / "run", TrainConfig(cycle_start_steps=20, cycle_start_rate=0.01))
    with pytest.raises(RecipeError, match="a recipe must have one cycle, but the run had others appended"):
        load_recipe(path)


def test_a_record_that_was_changed_or_has_a_model_of_your_own_is_refused(tmp_path):
    path = record_run(tmp_path / "run", TrainConfig(batch=4))
    path.write_text(path.read_text().replace('"batch": 4', '"batch": 5'))
    with pytest.raises(ValueError, match=r"config\.json has changed since run-train wrote it"):
        load_recipe(path)
    with pytest.raises(
        ValueError,
        match=r"a recipe must have a built-in model, but the run trained 'Linear': use another run or a TOML file$",
    ):
        load_recipe(record_run(tmp_path / "own", TrainConfig(), model="Linear"))
    with pytest.raises(
        ValueError,
        match=r"a recipe must not need user-defined batches, but the run had some: use another",
    ):
        load_recipe(record_run(tmp_path / "fed", TrainConfig(), data=OWN_BATCHES))
    own = {"num_eval_batches": 3, "eval_manifest_sha256": None}
    with pytest.raises(
        ValueError, match=r"a recipe must not need user-defined evaluation images, but the run had some"
    ):
        load_recipe(record_run(tmp_path / "evaluated", TrainConfig(), **own))
    for known in ({"eval_manifest_sha256": "abc"}, {"num_eval_batches": 0}):
        load_recipe(record_run(tmp_path / "-".join(known), TrainConfig(), **(own | known)))
    with pytest.raises(ValueError, match=r"none\.json: a recipe must be a readable file \(No such file"):
        load_recipe(tmp_path / "none.json")


def test_the_record_of_a_run_without_a_data_option_names_the_data_that_it_found(packed, tmp_path, monkeypatch):
    monkeypatch.chdir(packed)
    monkeypatch.setenv("LOOPFEED_DATA", ".")
    config = TrainConfig(batch=4)
    with set_up_run(config, UserParts(), lambda _: None, is_dry=True) as run:
        resolved = resolved_of(run)
    monkeypatch.setenv("LOOPFEED_DATA", "elsewhere")
    recipe = load_recipe(record_run(tmp_path / "run", config, manifest_digest="abc", **resolved))
    assert (recipe.settings["data"], recipe.unnamed_data) == (packed, "")
    # What was named stays, and so does what needs none.
    for config, location in ((TrainConfig(data=packed), "/elsewhere"), (TrainConfig(synthetic=True), None)):
        recipe = load_recipe(record_run(tmp_path / f"run-{config.synthetic}", config, data_location=location))
        assert (recipe.settings["data"], recipe.unnamed_data) == (config.data, "")


def test_an_older_record_that_does_not_say_where_its_data_were_needs_them_named(tmp_path, monkeypatch):
    path = record_run(tmp_path / "old", TrainConfig(batch=4), manifest_digest="abc", data="/x/train, 9 images")
    planned: list[TrainConfig] = []
    monkeypatch.setattr("loopfeed.engine.commands.cli.print_plan", lambda config, *_: planned.append(config))

    def plan(*options):
        result = CliRunner().invoke(run_train, ["--recipe", str(path), "--dry-run", "--traceback", *options])
        return result.exception

    refused = plan()
    assert isinstance(refused, ValueError)
    assert str(refused).endswith(f"but {path} does not contain the location of /x/train, 9 images: give --data")
    assert plan("--data", "shards") is plan("--synthetic") is None
    assert [(each.data, each.synthetic) for each in planned] == [("shards", False), (None, True)]


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none\.toml: a recipe must be a readable file \(No such file"):
        load_recipe(tmp_path / "none.toml")
    with pytest.raises(ValueError, match=r"a recipe must be a readable file \(it is a folder, not a file\)"):
        load_recipe(f"{tmp_path}/")
    (tmp_path / "latin.toml").write_bytes(SOUND.replace('"s"', '"é"').encode("latin-1"))
    with pytest.raises(ValueError, match=r"latin\.toml: a recipe must be TOML in UTF-8: 'utf-8' codec"):
        load_recipe(tmp_path / "latin.toml")


def test_an_unknown_name_lists_the_known_ones():
    known = ", ".join(NAMES)
    words = (
        rf"^a recipe must be one of {known}, or a file whose name ends in \.toml; "
        r"got 'imagnet': did you mean imagenet-90\?$"
    )
    with pytest.raises(ConfigError, match=words):
        load_recipe("imagnet")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("summary" + ".a" * 4000 + " = 1", "inside each other, more than 8 deep: remove them"),
        ("settings = " + "[" * 100 + "]" * 100, "more than 8 deep"),
        ("[settings]\nsteps" + ".a" * 4000 + " = 1", "more than 8 deep"),
        ("summary = {a = [0x" + "f" * 5000 + "]}", "an integer of 20,000 bits"),
        ("settings = 0x" + "f" * 5000, "an integer of 20,000 bits"),
        ("[settings]\nsteps = {a = 0x" + "f" * 5000 + "}", "an integer of 20,000 bits"),
        ("#" * 32768 + "\n", "readable file .the file is larger than the 32,768 bytes allowed"),
    ],
)
def test_what_no_message_can_show_is_named(tmp_path, text, message):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(RecipeError, match=rf"(?s)r\.toml: .*{message}"):
        load_recipe(tmp_path / "r.toml")


@pytest.mark.timeout(30)
@pytest.mark.parametrize("kind", ["pipe", "device", "nested"])
def test_an_endless_file_is_refused(tmp_path, kind):
    path = tmp_path / "recipe.toml"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_text("a = " + "[" * 100_000)
    with pytest.raises(ValueError, match=r"recipe\.toml: a recipe must be "):
        load_recipe(path)


RECIPE = LoadedRecipe("mine", {"steps": 9, "batch": 8, "flip": 0.5}, expected="12 % top-1", expected_data="a" * 64)


@pytest.mark.parametrize(
    ("settings", "is_shown"),
    [
        ({}, True),
        ({"data": "elsewhere", "prefetch": 7, "cache": "x", "snapshot_every_steps": 2, "eval_every_steps": 3}, True),
        ({"snapshot_every_steps": "0.5e", "eval_every_steps": "1e"}, True),
        ({"seed": 7, "kernels": "xla"}, True),  # the text says for which it holds
        ({"flip": 0.4}, False),
        ({"flip": 0.0}, False),
        ({"steps": 8}, False),
        ({"learning_rate": 0.02}, False),
        ({"model": "resnet8"}, False),
        ({"precision": "bfloat16"}, False),
        ({"eval_split": "test"}, False),
        ({"stop_at_top1": 0.5}, False),
        ({"init_from": "other.safetensors"}, False),
        ({"order": "windowed"}, False),
    ],
)
def test_an_expected_accuracy_is_for_the_settings_that_determine_the_result(settings, is_shown):
    config = TrainConfig(**RECIPE.settings | settings)
    assert expected_accuracy(RECIPE, config, "a" * 64) == ("expected: 12 % top-1",) * is_shown


def test_an_expected_accuracy_is_for_the_images_of_the_recipe():
    config = TrainConfig(**RECIPE.settings)
    assert expected_accuracy(RECIPE, config, None) == ()
    for recipe in (RECIPE, replace(RECIPE, expected_data="")):
        (line,) = expected_accuracy(recipe, config, "b" * 64)
        assert line.startswith("the expected accuracy of the recipe mine is for other images than these: ")
        assert f'expected_data = "{"b" * 64}"' in line
    for name in NAMES:
        loaded = load_recipe(name)
        own = TrainConfig.from_json(loaded.settings)
        assert expected_accuracy(loaded, own, "b" * 64) == ()
        if loaded.expected_data:
            assert expected_accuracy(loaded, own, loaded.expected_data) == (f"expected: {loaded.expected}",)


def test_the_digest_of_a_pack_is_that_of_its_images_and_labels(tmp_path):
    def digest(name):
        config = TrainConfig(steps=1, batch=2, data=str(tmp_path / name))
        with ExitStack() as stack:
            return open_data(config, UserParts(), stack, lambda _: None).contents_digest

    own: dict[str, dict[str, Any]] = {
        "weighted": {"weights": np.arange(6, dtype=np.float32)},
        "grouped": {"groups": np.arange(6, dtype=np.uint32)},
    }
    made = {
        "one": (6, 8, 3),
        "again": (6, 8, 3),
        "more": (7, 8, 3),
        "larger": (6, 12, 3),
        "evaluated on more": (6, 8, 4),
        # Which images are drawn, and which fold they belong to.
        **dict.fromkeys(own, (6, 8, 3)),
    }
    for name, (number, size, val) in made.items():
        pack(fake_source(number, size=size).changed(**own.get(name, {})), tmp_path / name)
        pack(fake_source(val, size=size, name="val"), tmp_path / name)
    found = {name: digest(name) for name in made}
    assert found["one"] == found["again"]
    assert len(set(found.values())) == 6
    manifest = tmp_path / "one/train/manifest.json"
    read = Manifest.from_json(manifest.read_text())
    manifest.write_text(replace(read, tool_versions={"numpy": "9"}).to_json())
    assert digest("one") == found["one"]
