"""The data set that a run uses, and the creation of the demo set."""

import errno
import os
import re
from dataclasses import replace
from unittest.mock import Mock

import pytest

from loopfeed import TrainConfig, evaluate, replay_run, run_settings, train
from loopfeed.engine.data.dataset import choose_data, data_of_record, make_demo
from loopfeed.engine.owners import DATA_VARIABLE
from loopfeed.preprocess.demo import demo_set
from loopfeed.preprocess.demo import demo_set as demo
from loopfeed.preprocess.shards.reader import list_splits, open_split
from tests.fake_source import fake_source, pack
from tests.toy import Linear


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_named_data_set_takes_precedence(elsewhere, monkeypatch):
    monkeypatch.setenv("LOOPFEED_DATA", "from-the-environment")
    (elsewhere / "data/shards").mkdir(parents=True)
    assert choose_data("named").data == "named"
    assert choose_data(None).data == "from-the-environment"
    monkeypatch.delenv("LOOPFEED_DATA")
    assert choose_data(None).data == "data/shards"
    assert not choose_data(None).is_demo


def test_the_demo_set_is_the_default_and_the_reason_says_so(elsewhere, cache_folder):
    choice = choose_data(None)
    assert choice.is_demo
    assert choice.data == str(cache_folder / "demo")
    assert choice.reason == "no --data, no $LOOPFEED_DATA and no data/shards: the demo set"


def test_the_demo_set_is_made_once(tmp_path, monkeypatch):
    # 60 drawings instead of 6,000: the full set is made by the demo script.
    draw = demo.draw_demo
    monkeypatch.setattr(demo_set, "draw_demo", lambda dest, *, num_images, size: draw(dest, size=size, num_images=60))
    told: list[str] = []
    make_demo(tmp_path / "demo", told.append)
    assert set(list_splits(str(tmp_path / "demo"))) == {"train", "val"}
    with open_split(str(tmp_path / "demo"), "train") as split:
        assert (split.num_images, split.height, split.num_classes) == (60, 32, 10)
    make_demo(tmp_path / "demo", told.append)
    assert told == ["drawing and packing the demo set, which later runs reuse"]


def test_a_broken_demo_set_is_replaced_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    draw = demo.draw_demo
    monkeypatch.setattr(demo_set, "draw_demo", lambda dest, *, num_images, size: draw(dest, size=size, num_images=60))
    make_demo(tmp_path / "demo", lambda _: None)
    (tmp_path / "demo/val/manifest.json").unlink()
    make_demo(tmp_path / "demo", lambda _: None)
    assert set(list_splits(str(tmp_path / "demo"))) == {"train", "val"}
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_run_uses_the_data_that_it_found_wherever_it_goes_on(tmp_path, monkeypatch):
    home, elsewhere, run = tmp_path / "home", tmp_path / "elsewhere", tmp_path / "run"
    for name in ("train", "val"):
        pack(fake_source(12, name=name), home / "data/shards")
    pack(fake_source(9, seed=3), elsewhere / "data/shards")  # other data in the usual place
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(home)
    config = TrainConfig(steps=1, batch=4, run_dir=run)
    train(config, model=Linear())
    monkeypatch.chdir(elsewhere)
    told: list[str] = []
    result = train(replace(config, steps=2, resume=True), model=Linear(), notify=told.append)
    assert result.steps_done == 2
    assert f"data: {home / 'data/shards'}" in told
    assert not any("data default" in each for each in told)
    assert evaluate(run, model=Linear()).record.num_images == 12
    assert replay_run(run, from_step=0, model=Linear()).differences == ()
    assert not (tmp_path / "cache/loopfeed/demo").exists()

    monkeypatch.setenv("HOME", str(home))
    assert data_of_record("~/data/shards", None) == "~/data/shards"
    (home / "data/shards").rename(tmp_path / "moved")
    gone = re.escape(f"must be in {home / 'data/shards'}, which does not exist: give the folder where they are now")
    for go_on in (
        lambda **values: evaluate(replace(run_settings(run), **values), model=Linear()),
        lambda **values: replay_run(run, from_step=0, model=Linear(), **values),
        lambda **values: train(TrainConfig(steps=3, batch=4, run_dir=run, resume=True, **values), model=Linear()),
    ):
        with pytest.raises(ValueError, match=gone):
            go_on()
        go_on(data=str(tmp_path / "moved"))


def test_data_of_a_run_on_a_disk_that_fails_are_not_said_to_be_missing(monkeypatch, tmp_path):
    fails = Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO), str(tmp_path)))
    with monkeypatch.context() as disk:
        disk.setattr(os, "stat", fails)
        disk.setattr(os, "lstat", fails)
        with pytest.raises(OSError, match="Input/output error"):
            data_of_record(None, str(tmp_path))


def test_data_in_the_home_of_somebody_else_are_those_that_are_here(monkeypatch, tmp_path):
    stat = os.stat

    def refuse(path, **how):
        if os.fspath(path).startswith("/home/a/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, **how)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    monkeypatch.setattr(os, "stat", refuse)
    assert data_of_record(None, "/home/a/.cache/loopfeed/demo") == str(tmp_path / "loopfeed/demo")
    with pytest.raises(ValueError, match=r"/home/a/shards, which does not exist: .* \(--data\)"):
        data_of_record(None, "/home/a/shards")


def test_a_demo_set_of_another_machine_is_that_of_this_one(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(DATA_VARIABLE, "where-they-are-now")
    assert data_of_record(None, "/moved/away") is None
    assert data_of_record(None, "/home/other/.cache/loopfeed/demo") == str(tmp_path / "loopfeed/demo")
    assert data_of_record(None, "gs://bucket/data") == "gs://bucket/data"
    assert data_of_record(None, None) is None
