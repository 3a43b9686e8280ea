"""Runs on a store with a cache: the results of a local pack, also for an evaluation, and messages about the cache."""

import json
from typing import Any

import pytest

from loopfeed import evaluate, replay_run, train
from loopfeed.engine.settings import SettingError
from tests.delayed_store import DelayedStore
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_config

NUM_IMAGES, STEPS = 29, 6


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stored")
    pack(fake_source(NUM_IMAGES), folder / "pack", shard_images=16)
    pack(fake_source(9, seed=1, name="val"), folder / "pack")
    with DelayedStore(folder) as running:
        yield running


def remote(store, **values) -> Any:
    options = f"endpoint={store.endpoint},credentials=anonymous"
    how = {"data": "s3://bucket/pack", "storage_options": options, "steps": STEPS, "batch": 4, "num_classes": None}
    return toy_config(**(how | values))


@pytest.mark.integration
@pytest.mark.parametrize("order", ["random", "windowed"])
def test_the_cache_does_not_change_results_and_serves_evaluations(store, tmp_path, order):
    cache = tmp_path / "cache"
    local = train(remote(store, data=str(store.folder / "pack"), storage_options=None, order=order), model=Linear())
    for number, steps in ((0, 4), (1, STEPS)):
        how = {"order": order, "cache": cache, "run_dir": tmp_path / "run", "steps": steps}
        said: list[str] = []
        found = train(remote(store, **how, resume=number > 0), model=Linear(), notify=said.append)
        assert any(each.startswith(f"cache: {cache} has room for 2 of 2 shards") for each in said)
    losses = [json.loads(line)["loss"] for line in (tmp_path / "run/loss.jsonl").read_text().splitlines()]
    assert losses == pytest.approx(local.losses.tolist(), rel=1e-6)
    assert found.evaluations[-1].loss == local.evaluations[-1].loss
    assert replay_run(tmp_path / "run", from_step=4, model=Linear()).is_same
    result = evaluate(tmp_path / "run", model=Linear(), notify=said.append)
    assert result.record.loss == local.evaluations[-1].loss
    recorded = json.loads((tmp_path / "run/config.json").read_text())["config"]
    assert recorded["cache"] == str(cache)


@pytest.mark.integration
def test_a_cache_that_cannot_be_used_is_refused(store, tmp_path):
    with pytest.raises(SettingError, match="cache_gb must be at least 2e-06, the size of one shard of s3://"):
        train(remote(store, cache=tmp_path / "cache", cache_gb=1e-6), model=Linear())
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingError, match=r"cache must be a folder that can be written, but .*file is not"):
        train(remote(store, cache=tmp_path / "file"), model=Linear())


def test_a_local_pack_needs_no_cache(tmp_path):
    pack(fake_source(NUM_IMAGES), tmp_path / "pack")
    said: list[str] = []
    config = toy_config(steps=1, data=str(tmp_path / "pack"), num_classes=None, cache=tmp_path / "cache", batch=4)
    train(config, model=Linear(), notify=said.append)
    assert f"cache: not used, because {tmp_path / 'pack'} is on this machine" in said
    assert not (tmp_path / "cache").exists()
    with pytest.raises(SettingError, match="cache must be a path on this machine, not the URL of a store"):
        toy_config(cache="s3://bucket/cache")
