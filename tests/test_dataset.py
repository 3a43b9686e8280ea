"""The data set that a run uses, and the creation of the demo set."""

import pytest

from engine.run.dataset import choose_data, make_demo
from preprocess.demo import demo_set
from preprocess.demo import drawing as demo
from preprocess.shards.reader import list_splits, open_split


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_named_data_set_takes_precedence(elsewhere, monkeypatch):
    monkeypatch.setenv("FEEDLOOP_DATA", "from-the-environment")
    (elsewhere / "data/shards").mkdir(parents=True)
    assert choose_data("named").data == "named"
    assert choose_data(None).data == "from-the-environment"
    monkeypatch.delenv("FEEDLOOP_DATA")
    assert choose_data(None).data == "data/shards"
    assert not choose_data(None).is_demo


def test_the_demo_set_is_the_default_and_the_reason_says_so(elsewhere, cache_folder):
    choice = choose_data(None)
    assert choice.is_demo
    assert choice.data == str(cache_folder / "demo")
    assert choice.reason == "no --data, no $FEEDLOOP_DATA and no data/shards: the demo set"


def test_the_demo_set_may_be_named_as_a_record_of_a_run_does(elsewhere):
    demo = choose_data(None).data
    assert choose_data(demo) == (demo, "as given", True)


def test_the_demo_set_is_made_once(tmp_path, monkeypatch):
    # 60 drawings instead of 6,000: the full set is made by the demo script.
    draw = demo.draw_demo
    monkeypatch.setattr(demo_set, "draw_demo", lambda dest, *, size: draw(dest, size=size, num_images=60))
    told: list[str] = []
    make_demo(tmp_path / "demo", told.append)
    assert set(list_splits(str(tmp_path / "demo"))) == {"train", "val"}
    with open_split(str(tmp_path / "demo"), "train") as split:
        assert (split.num_images, split.height, split.num_classes) == (60, 32, 10)
    make_demo(tmp_path / "demo", told.append)
    assert told == ["drawing and packing the demo set, which later runs reuse"]


def test_a_broken_demo_set_is_replaced_and_nothing_is_left_beside_it(tmp_path, monkeypatch):
    draw = demo.draw_demo
    monkeypatch.setattr(demo_set, "draw_demo", lambda dest, *, size: draw(dest, size=size, num_images=60))
    make_demo(tmp_path / "demo", lambda _: None)
    (tmp_path / "demo/val/manifest.json").unlink()
    make_demo(tmp_path / "demo", lambda _: None)
    assert set(list_splits(str(tmp_path / "demo"))) == {"train", "val"}
    assert [path.name for path in tmp_path.iterdir()] == ["demo"]
