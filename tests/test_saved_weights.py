"""The weights of a run as nested dictionaries: the same bits as in training, and what is refused."""

import errno

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from loopfeed import evaluate, read_weights, train
from loopfeed.engine.export.export import export_model
from loopfeed.engine.records.recorded_run import read_recorded, recorded_user_parts
from loopfeed.engine.records.weights import name_tensors, with_digest
from tests.test_initial_weights import drawn
from tests.toy import Linear, toy_batch, toy_config


def test_the_weights_of_an_own_model_come_back_bit_for_bit(tmp_path):
    result = train(toy_config(steps=3, run_dir=tmp_path / "run"), model=Linear(), batches=toy_batch)
    saved = read_weights(tmp_path / "run/model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, saved[:2], (result.params, result.batch_stats))
    assert saved.metadata["model"] == "linear"
    assert {"image_size", "mean", "std"} <= saved.metadata.keys()


class Bare:
    """A linear classifier whose parameters and statistics are one array each."""

    def init(self, key):
        return 0.1 * jax.random.normal(key, (48, 3)), jnp.zeros(())

    def apply(self, params, batch_stats, images, train):
        return images.reshape(len(images), -1) @ params, batch_stats + 1


@pytest.mark.parametrize("average", [{}, {"ema_decay": 0.5}])
def test_a_model_of_two_arrays_is_exported_read_and_evaluated(tmp_path, average):
    run = tmp_path / "run"
    result = train(toy_config(steps=2, run_dir=run, **average), model=Bare(), batches=toy_batch)
    saved = read_weights(run / "model.safetensors")
    np.testing.assert_array_equal(saved.params, result.params)
    np.testing.assert_array_equal(saved.batch_stats, result.batch_stats)
    export_model(run, tmp_path / "out.safetensors", snapshot=2)
    jax.tree.map(np.testing.assert_array_equal, read_weights(tmp_path / "out.safetensors"), saved)
    with pytest.raises(ValueError, match=r"was trained with a model \(Bare\) of your own"):
        evaluate(run)
    assert evaluate(run, model=Bare(), evaluation=toy_batch(9)).record.num_images == 8


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"a.b": 0, "a": {"c": 0}}, r"\['params'\]\['a'\]\['c'\] and \['params'\]\['a.b'\] are both in params\.a when"),
        (
            {"a.b": {"c": 0}, "a": {"b": {"d": 0}}},
            r"\['a'\]\['b'\]\['d'\] and .*\['a.b'\]\['c'\] are both in params\.a",
        ),
        ({"a": 0, "a.b": 0}, r"\['a'\] and \['params'\]\['a.b'\] are both in params\.a"),
        ({"a": [0], "a.0": 0}, "two are called params.a.0: rename"),
    ],
)
def test_names_that_would_be_merged_are_refused_when_a_run_starts(params, named):
    model = Linear()
    params = jax.tree.map(lambda _: jnp.zeros(()), params)
    init, model.init = model.init, lambda key: ({**init(key)[0], **params}, init(key)[1])  # type: ignore[method-assign]
    with pytest.raises(ValueError, match=named):
        train(toy_config(steps=1), model=model, batches=toy_batch)


@pytest.mark.parametrize("name", ["resnet8", "linear"])
def test_a_model_with_the_name_of_a_built_in_one_is_recorded_as_own(tmp_path, name):
    run, model = tmp_path / "run", Linear(name=name)
    result = train(toy_config(steps=2, run_dir=run), model=model, batches=toy_batch)
    assert "model" in recorded_user_parts(read_recorded(run).resolved)
    with pytest.raises(ValueError, match=r"was trained with .*model.* of your own, which must be given"):
        train(toy_config(steps=3, run_dir=run, resume=True), batches=toy_batch)
    export_model(run, tmp_path / "out.safetensors", snapshot=2)
    np.testing.assert_array_equal(read_weights(tmp_path / "out.safetensors").params["bias"], result.params["bias"])
    assert train(toy_config(steps=3, run_dir=run, resume=True), model=model, batches=toy_batch).steps_done == 3


def test_the_records_of_older_versions_tell_own_models_by_their_names():
    assert recorded_user_parts({"model": "linear", "own_parts": {"loss": "f"}}) == ("model", "loss")
    assert recorded_user_parts({"model": "resnet8"}) == ()


def test_the_weights_of_a_registry_model_come_in_the_layouts_of_models(tmp_path):
    weights = drawn("resnet8", 10)
    named = {name: np.asarray(each, order="C") for name, each in name_tensors("resnet8", *weights).items()}
    save_file(named, tmp_path / "w.safetensors", with_digest(named, {"model": "resnet8"}))
    jax.tree.map(np.testing.assert_array_equal, read_weights(tmp_path / "w.safetensors")[:2], weights)


@pytest.mark.parametrize(
    ("names", "metadata", "message"),
    [
        (["params.a", "params.a.b"], {}, r"must not begin with that of another"),
        (["params.a.b", "params.a"], {}, r"must not begin with that of another"),
        (["params", "params.a"], {}, r"must not begin with that of another"),
        (["params.a", "other.b"], {}, r"must be a path from params or batch_stats, got other\.b"),
        (["params." + "a." * 200 + "b"], {}, "must be a path from params"),
        (["fc.bias"], {}, r"records the model none, and has no params"),
        (["fc.bias"], {"model": "resnet8"}, r"w\.safetensors: the tensors are not those of resnet8"),
        (["params.a"], {"digest": "sha256", "sha256": "0"}, "has changed since it was written"),
    ],
)
def test_other_files_are_refused(tmp_path, names, metadata, message):
    save_file({name: np.zeros(2, np.float32) for name in names}, tmp_path / "w.safetensors", metadata)
    with pytest.raises(ValueError, match=message):
        read_weights(tmp_path / "w.safetensors")


@pytest.mark.parametrize("error", [OSError(errno.ENODEV, "No such device"), MemoryError("Cannot allocate memory")])
def test_weights_that_cannot_be_mapped_are_read(tmp_path, monkeypatch, error):
    def refuse(*_args, **_more):
        raise error

    save_file({"params.weights": np.arange(6, dtype=np.float32)}, tmp_path / "w.safetensors")
    monkeypatch.setattr("loopfeed.engine.records.weights.safe_open", refuse)
    np.testing.assert_array_equal(read_weights(tmp_path / "w.safetensors").params["weights"], np.arange(6))
