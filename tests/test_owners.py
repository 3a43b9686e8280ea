"""Whose each setting is: what a stranger's record or recipe cannot decide, and what it still does."""

import json
import os
import shutil
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from loopfeed import (
    SettingError,
    TrainConfig,
    evaluate,
    explain_program,
    predict,
    replay_run,
    report_run,
    run_settings,
    train,
)
from loopfeed.engine.commands import cli, eval_cli, explain_cli, predict_cli
from loopfeed.engine.compilation.ahead_of_time import caching_compilations
from loopfeed.engine.compilation.cache_place import check_cache_place
from loopfeed.engine.config import SETTINGS
from loopfeed.engine.owners import OF_A_RECORD, take_recorded, with_given
from loopfeed.engine.recipes import RecipeError, load_recipe
from loopfeed.engine.records.recorded_run import read_record
from loopfeed.engine.records.run_folder import RunFolder
from loopfeed.engine.settings import Owner, setting
from loopfeed.preprocess.storage_options import as_text, parse_text, recorded_options
from tests.delayed_store import DelayedStore
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config

# A value that is not the default, for each setting of which nothing is taken from elsewhere.
FOREIGN: dict[str, Any] = {
    "compilation_cache": "gift/cache",
    "cache": "gift/shards",
    "cache_gb": 3.0,
    "wandb": "team",
    "on_event": "gift",
    "append_epochs": 2.0,
    "run_dir": "gift",
    "resume": True,
    "overwrite": True,
    "profile": True,
    "profile_steps": "3:5",
    "profile_format": "json",
    "runtime_report": True,
    "dump_hlo": "gift/hlo",
}
OF_DATA = {"data", "init_from", "storage_options", "sampling", "class_weights"}
# Texts are what names a place, an account or code. None of these does: names within the data or the program.
TEXTS_OF_A_RUN = {
    *("batch_norm_group", "model", "devices", "split", "eval_split", "keep_best", "clip_order", "freeze", "groups"),
    *("stop_metric", "fold"),
}


def test_each_setting_has_an_owner_and_a_new_one_needs_one():
    owners = {name: each.owner for name, each in SETTINGS.items()}
    assert {name for name in owners if owners[name] in (Owner.USER, Owner.LAUNCH)} == FOREIGN.keys()
    assert {name for name in owners if owners[name] is Owner.DATA} == OF_DATA
    texts = {name for name, each in SETTINGS.items() if each.kind is str and not each.choices}
    assert texts <= FOREIGN.keys() | OF_DATA | TEXTS_OF_A_RUN
    undeclared: Any = setting
    with pytest.raises(TypeError, match="missing 1 required positional argument"):
        undeclared(None, "Output", SETTINGS["data"].takes_effect, "Upload to this account.")


def record(folder: Path, config: TrainConfig, resolved: Any = (), **changes: Any) -> Path:
    """Write the sealed record that a run with these settings has, as a stranger can."""
    with RunFolder(folder) as run:
        run.clear()
        run.write_config(config, {"model": "resnet8", "device": "cpu", **dict(resolved)}, None, origins={}, **changes)
        run.launched()
    return folder / "config.json"


def test_nothing_of_a_user_or_a_launch_is_taken_from_a_record_and_a_line_names_the_option(tmp_path):
    given = TrainConfig(steps=7, kernels="onednn", devices="cpu:2", batch=6, tensorboard=True, prefetch=9, **FOREIGN)
    found = read_record(record(tmp_path / "run", given))
    # What determines the bits is kept.
    assert found.config == TrainConfig(
        steps=7, kernels="onednn", devices="cpu:2", batch=6, tensorboard=True, prefetch=9
    )
    assert {name: found.value_of(name) for name in FOREIGN} == FOREIGN
    line = found.describe_replaced(found.config, options=SETTINGS)
    assert line == (
        "not used from the run's record: --wandb team, --on-event gift, --compilation-cache gift/cache, --cache "
        "gift/shards, --cache-gb 3 (give --wandb, --on-event, --compilation-cache, --cache and --cache-gb again to use "
        "your own)"
    )
    # Not what the user gives, nor what has no effect in a command; no remedy where a command has no option.
    now = replace(found.config, wandb="mine", cache="off")
    assert found.describe_replaced(now, ("wandb", "compilation_cache")) == (
        "not used from the run's record: --compilation-cache gift/cache"
    )
    assert read_record(record(tmp_path / "plain", TrainConfig(run_dir="x"))).describe_replaced(TrainConfig()) is None


@pytest.mark.parametrize("name", [name for name, each in SETTINGS.items() if each.owner is not Owner.RUN])
def test_an_earlier_launch_brings_in_nothing_but_settings_of_the_run(tmp_path, name):
    earlier = [{"until_step": 3, "settings": {name: FOREIGN.get(name, "x")}}]
    path = record(tmp_path / "run", TrainConfig(), earlier=earlier)
    with pytest.raises(ValueError, match=f"an earlier launch must differ only in settings of the run, but .*'{name}'"):
        read_record(path)


@pytest.mark.parametrize(("name", "value"), [*FOREIGN.items(), ("storage_options", "profile=work")])
def test_a_recipe_with_a_setting_of_a_user_or_a_launch_is_refused_by_name(tmp_path, name, value):
    path = tmp_path / "mine.toml"
    path.write_text(f"[settings]\nbatch = 8\n{name} = {json.dumps(value)}\n")
    whose = "a single run" if SETTINGS[name].owner is Owner.LAUNCH else "the user and the machine"
    with pytest.raises(RecipeError, match=f"{name} belongs to {whose}, not to a recipe: give it on the command line"):
        load_recipe(path)


def test_a_record_as_a_recipe_brings_no_cache_and_no_keys(tmp_path, monkeypatch):
    options = "endpoint=http://a.example:9,profile=work,timeout=7"
    path = record(tmp_path / "run", TrainConfig(data="s3://bucket/x", storage_options=options, **FOREIGN))
    recipe = load_recipe(path)
    assert not recipe.settings.keys() & FOREIGN.keys()
    without_keys = "credentials=anonymous,endpoint=http://a.example:9,timeout=7"
    assert recipe.settings["storage_options"] == without_keys
    configs = []
    monkeypatch.setattr(cli, "print_plan", lambda config, *_: configs.append(config))
    done = CliRunner().invoke(cli.main, ["--recipe", str(path), "--dry-run", "--cache", str(tmp_path / "mine")])
    assert done.exit_code == 0, done.output
    assert configs[0].cache == str(tmp_path / "mine")
    assert (configs[0].compilation_cache, configs[0].wandb) == (None, None)
    assert configs[0].storage_options == without_keys
    (line,) = done.stderr.splitlines()
    assert "--cache gift" not in line
    assert "--wandb team" in line
    assert "no keys are sent to http://a.example:9, which the run's record names" in line
    CliRunner().invoke(cli.main, ["--recipe", str(path), "--dry-run", "--run-dir", "s3://mine/run"])
    assert configs[1].storage_options is None
    # explain-program asks the same server: the bucket of the record is not looked for at another.
    explained = []
    monkeypatch.setattr(os, "_exit", lambda _: None)

    def explain(described, *_):
        explained.append(described.config)
        raise CompiledError

    monkeypatch.setattr(explain_cli, "_explain", explain)
    mine, like = ["--data", "s3://mine/x"], f"--recipe {path}"
    for arguments in (
        ["--recipe", str(path)],
        ["--recipe", str(path), *mine],
        ["--compare", like, like],
        ["--compare", like, like, *mine],
    ):
        CliRunner().invoke(explain_cli.main, arguments)
    assert [(each.data, each.storage_options) for each in explained] == [
        ("s3://bucket/x", without_keys),
        ("s3://mine/x", None),
    ] * 2


@pytest.mark.parametrize(
    ("recorded", "environment", "kept"),
    [
        ("endpoint=http://a:9,region=eu", None, "credentials=anonymous,endpoint=http://a:9,region=eu"),
        ("endpoint=http://a:9,region=eu", "http://b:9", "credentials=anonymous,endpoint=http://a:9,region=eu"),
        # The user has named the same server.
        ("endpoint=http://a:9,region=eu", "http://a:9/", "endpoint=http://a:9,region=eu"),
        ("endpoint=http://a:9,credentials=environment", None, "credentials=anonymous,endpoint=http://a:9"),
        ("credentials=anonymous,endpoint=http://a:9", "http://a:9", "credentials=anonymous,endpoint=http://a:9"),
        ("endpoint=http://a:9,host-header=b", "http://a:9", "credentials=anonymous,endpoint=http://a:9,host-header=b"),
        ("profile=work,requester-pays=true,region=eu,retries=2", None, "region=eu,retries=2"),
        ("user-project=bill,concurrency=4,conditional-writes=false", None, "concurrency=4"),
        ("retries=2,concurrency=4", None, "retries=2,concurrency=4"),
    ],
)
def test_no_keys_for_a_server_that_only_a_record_names(monkeypatch, recorded, environment, kept):
    if environment is not None:
        monkeypatch.setenv("AWS_ENDPOINT_URL", environment)
    assert recorded_options(parse_text(recorded)) == parse_text(kept)
    config, replaced = take_recorded(TrainConfig(storage_options=recorded))
    assert parse_text(config.storage_options) == parse_text(kept)
    assert replaced == ({} if parse_text(kept) == parse_text(recorded) else {"storage_options": recorded})


def test_a_url_that_the_user_names_is_not_looked_for_at_a_server_of_the_record(monkeypatch):
    recorded, _ = take_recorded(TrainConfig(data="s3://theirs/x", storage_options="endpoint=http://a:9"))
    foreign = as_text({"endpoint": "http://a:9", "credentials": "anonymous"})
    for given in ({}, {"data": "here"}, {"batch": 4}):
        assert with_given(recorded, given).storage_options == foreign
    for name in ("data", "init_from", "run_dir"):
        assert with_given(recorded, {name: "s3://mine/x"}).storage_options is None
    own = {"data": "s3://mine/x", "storage_options": "endpoint=http://mine:9"}
    assert with_given(recorded, own).storage_options == "endpoint=http://mine:9"
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a:9")
    recorded, _ = take_recorded(TrainConfig(storage_options="endpoint=http://a:9,timeout=9"))
    assert with_given(recorded, {"data": "s3://mine/x"}).storage_options == "endpoint=http://a:9,timeout=9"


@pytest.mark.parametrize(
    ("config", "resolved", "is_used"),
    [
        ({}, {}, False),
        ({}, {"data_location": "s3://theirs/x"}, True),
        ({"data": "s3://theirs/x"}, {}, True),
        ({"synthetic": True}, {}, True),
        ({}, {"data": "batches of your own"}, True),
    ],
)
def test_nor_is_a_url_that_the_environment_names(tmp_path, monkeypatch, config, resolved, is_used):
    made = TrainConfig(storage_options="endpoint=http://a:9", **config)
    path = record(tmp_path / "run", made, resolved=resolved)
    foreign = "credentials=anonymous,endpoint=http://a:9"
    for place in (None, "data/mine"):
        if place is not None:
            monkeypatch.setenv("LOOPFEED_DATA", place)
        assert read_record(path).config.storage_options == foreign
    monkeypatch.setenv("LOOPFEED_DATA", "s3://mine/x")
    found = read_record(path)
    assert found.config.storage_options == (foreign if is_used else None)
    line = found.describe_replaced(found.config)
    assert line == (
        "no keys are sent to http://a:9, which the run's record names"
        if is_used
        else "not used from the run's record: --storage-option endpoint=http://a:9"
    )


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with a pack, a photograph, and a run on the pack whose record names a cache."""
    folder = tmp_path_factory.mktemp("place")
    pack(fake_source(12), folder / "data")
    pack(fake_source(5, seed=1, name="val"), folder / "data")
    (folder / "photo.png").write_bytes(fake_source(1).read(0))
    gift = os.fspath(folder / "gift")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("loopfeed.engine.run.compiling.caching_compilations", lambda *_, **__: nullcontext())
        train(local(folder, run_dir=folder / "run", compilation_cache=gift), model=Linear())
    assert json.loads((folder / "run/config.json").read_text())["config"]["compilation_cache"] == gift
    return folder


def local(folder, **values) -> Any:
    return toy_config(**({"steps": 1, "batch": 4, "num_classes": None, "data": str(folder / "data")} | values))


class CompiledError(Exception):
    """A program is about to be compiled, or loaded from the cache."""


@pytest.fixture
def caches(monkeypatch):
    """Return a list of the caches that commands name when they compile, at which they end."""
    found: list[str | None] = []

    def note(_name, folder):
        found.append(folder)
        raise CompiledError

    monkeypatch.setattr("loopfeed.engine.compilation.ahead_of_time.check_cache_place", note)
    return found


@pytest.mark.usefixtures("uncached_replays")
def test_no_command_loads_programs_from_a_cache_that_the_record_names(place, monkeypatch, caches):
    run, photo, said = place / "run", place / "photo.png", list[str]()
    how: dict[str, Any] = {"notify": said.append, "model": Linear()}
    for command in (
        lambda: evaluate(run, **how),
        lambda: predict(run, [photo], top=1, **how),
        lambda: replay_run(run, **how),
        lambda: explain_program(run_settings(run, notify=said.append), model=Linear()),
        lambda: train(replace(run_settings(run), resume=True, steps=2), model=Linear(), notify=said.append),
    ):
        with pytest.raises(CompiledError):
            command()
    report_run(run, place / "page.html", **how)
    assert caches == [None, None, "off", None, None, None]
    line, remedy = f"not used from the run's record: compilation_cache={place / 'gift'}", "again to use your own)"
    told = [each for each in said if each.startswith("not used")]
    assert told == [
        *[f"{line} (give compilation_cache {remedy}"] * 2,
        line,
        line,
        f"{line} (give compilation_cache {remedy}",
        line,
    ]


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (eval_cli.main, ["run"]),
        (cli.main, ["--run-dir", "run", "--resume", "--steps", "3"]),
        (explain_cli.main, ["run"]),
        (predict_cli.main, ["run", "photo.png"]),
    ],
)
def test_a_command_says_once_which_option_to_give_again(place, monkeypatch, caches, command, arguments):
    monkeypatch.setattr(os, "_exit", lambda _: None)
    monkeypatch.chdir(place)
    arguments = [*arguments, "--model", "tests.toy:Linear"]
    done = CliRunner().invoke(command, arguments)
    (told,) = [each for each in done.output.splitlines() if each.startswith("not used")]
    remedy = "(give --compilation-cache again to use your own)"
    assert told == f"not used from the run's record: --compilation-cache {place / 'gift'} {remedy}"
    done = CliRunner().invoke(command, [*arguments, "--compilation-cache", "own"])
    assert "not used" not in done.output
    assert caches == [None, "own"]


def test_no_request_to_a_server_that_only_the_record_names_is_signed(place, tmp_path, monkeypatch, caches):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.chdir(tmp_path)
    run, said = tmp_path / "run", list[str]()
    with DelayedStore(place) as store:
        remote = {"data": "s3://bucket/data", "storage_options": f"endpoint={store.endpoint}"}
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("loopfeed.engine.run.compiling.caching_compilations", lambda *_, **__: nullcontext())
            train(local(place, run_dir=run, cache=tmp_path / "cache", **remote), model=Linear())
        # The user names this server, so that keys are sent.
        assert store.num_signed
        shutil.rmtree(tmp_path / "cache")

        def num_signed_by(command) -> int:
            signed, count = store.num_signed, len(store.requests)
            with pytest.raises(CompiledError):
                command()
            assert len(store.requests) > count
            return store.num_signed - signed

        how: dict[str, Any] = {"model": Linear(), "notify": said.append}
        for command in (
            lambda: evaluate(run, **how),
            lambda: replay_run(run, **how),
            lambda: train(replace(run_settings(run, notify=said.append), resume=True, steps=2), model=Linear()),
            lambda: train(replace(run_settings(run), run_dir=str(tmp_path / "new")), model=Linear()),
        ):
            assert num_signed_by(command) == 0
        signed = store.num_signed
        report_run(run, tmp_path / "page.html", **how)
        assert store.num_signed == signed
        told = f"no keys are sent to {store.endpoint}, which the run's record names"
        assert [told in each for each in said if each.startswith("not used")] == [True] * 4
        # Nor is anything written to the folder that the record names.
        assert not (tmp_path / "cache").exists()
        # The user's own option, or variable, is followed.
        options = {"endpoint": store.endpoint}
        assert num_signed_by(lambda: replay_run(run, model=Linear(), storage_options=options))
        assert num_signed_by(lambda: evaluate(run_settings(run, storage_options=options), model=Linear()))
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.endpoint)
        assert num_signed_by(lambda: evaluate(run, model=Linear()))


def test_a_cache_in_a_run_or_a_pack_is_refused(tmp_path, monkeypatch):
    record(tmp_path / "runs/gift", TrainConfig())
    (tmp_path / "runs/gift/loss.jsonl").touch()
    pack(fake_source(4), tmp_path / "packs/small")
    record(tmp_path / "runs/bare", TrainConfig())
    (tmp_path / "runs/config.json").write_text('{"model_type": "of another program"}')
    for number in range(150):
        (tmp_path / f"packs/small/{number}").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "runs/gift/cache")
    (tmp_path / "runs/gift/out").symlink_to(tmp_path)
    monkeypatch.chdir(tmp_path / "runs/gift")
    refused = "must not be in the folder of a run or of packed data, .*: choose a folder elsewhere, or off$"
    for place in (
        *("runs/gift", "runs/gift/a/b", "packs/small/cache", "packs/small/train", "link", "runs/gift/out/cache"),
        *("runs/../packs/small/x", "runs/bare/cache"),
    ):
        for name in ("cache", "compilation_cache"):
            with pytest.raises(SettingError, match=f"^{name} {refused}"):
                check_cache_place(name, str(tmp_path / place))
            with pytest.raises(SettingError, match=refused):
                check_cache_place(name, f"file://{str(tmp_path / place).replace('a', '%61')}")
    with pytest.raises(SettingError, match=refused):
        check_cache_place("cache", "cache")
    for place in ("runs/cache", "packs/cache", "runs/gift/../cache", "cache"):
        check_cache_place("cache", str(tmp_path / place))
    for text in (None, "off", "gs://bucket/cache"):
        check_cache_place("compilation_cache", text)
    # The folder of a run that is about to begin, and what the environment names.
    for name in ("cache", "compilation_cache"):
        config = toy_config(steps=1, run_dir=tmp_path / "new", **{name: tmp_path / "new/cache"})
        with pytest.raises(SettingError, match=refused):
            train(config, model=Linear(), batches=toy_batch)
    assert not (tmp_path / "new").exists()
    with pytest.raises(SettingError, match=refused), caching_compilations(str(tmp_path / "runs/gift/cache")):
        pass


def test_the_settings_of_a_record_are_those_of_the_run_and_its_data():
    assert {*OF_A_RECORD} | FOREIGN.keys() == {*SETTINGS}
