"""The metadata of the weights: what they say about images and classes, and what their digest covers."""

import json
import os
from dataclasses import replace

import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file, save_file

from loopfeed import TrainConfig, evaluate, train
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.commands.predict_cli import main as predict_images
from loopfeed.engine.records.weights import read_weights, with_digest
from loopfeed.engine.records.weights_metadata import check_metadata, classes_of, describe_weights, resize_rule_of
from loopfeed.preprocess.shards.classes import ImageClass
from tests.fake_source import CLASSES, fake_source, pack

pytestmark = pytest.mark.usefixtures("small_resnets")

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def run(small_resnets, tmp_path_factory):
    folder = tmp_path_factory.mktemp("metadata")
    odd = (ImageClass("n0", "caf\u00e9 \x1b[2J"), *CLASSES[1:])
    for name, count in (("train", 12), ("val", 5)):
        pack(replace(fake_source(count, size=8, name=name), classes=odd), folder / "data")
    config = TrainConfig(
        steps=1, batch=4, data=os.fspath(folder / "data"), model="resnet8", image_size=6, run_dir=folder / "run"
    )
    train(config)
    return folder / "run"


def test_weights_say_which_images_they_need_and_what_their_classes_are(run):
    metadata = read_weights(run / WEIGHTS).metadata
    assert metadata["image_size"] == "6x6"
    assert metadata["num_classes"] == "3"
    assert json.loads(metadata["preprocessing"]) == {"size": 8, "resize": 8, "resample": "bicubic"}
    assert [each.id for each in classes_of(metadata, "x")] == ["n0", "n2", "n3"]
    assert classes_of(metadata, "x")[0].name == "caf\u00e9 \x1b[2J"
    assert resize_rule_of(metadata, "x") == {"size": 8, "resize": 8, "resample": "bicubic"}
    recorded = json.loads((run / "config.json").read_text())["resolved"]["weights_metadata"]
    assert recorded == {key: text for key, text in metadata.items() if key not in ("steps_done", "digest", "sha256")}


@pytest.mark.parametrize("key", ["classes", "preprocessing", "num_classes", "mean"])
def test_the_digest_covers_every_entry(run, tmp_path, key):
    stored = read_weights(run / WEIGHTS)
    save_file(stored.tensors, tmp_path / WEIGHTS, stored.metadata | {key: stored.metadata[key] + " "})
    with pytest.raises(ValueError, match="has changed since it was written"):
        read_weights(tmp_path / WEIGHTS)


def test_weights_of_an_older_run_are_still_evaluated(run):
    found = evaluate(run).record
    content, result = (run / WEIGHTS).read_bytes(), (run / "result.json").read_bytes()
    tensors, metadata = load_file(run / WEIGHTS), read_weights(run / WEIGHTS).metadata
    old = {key: metadata[key] for key in ("model", "steps_done", "image_size", "mean", "std")}
    try:
        save_file(tensors, run / WEIGHTS, with_digest(tensors, old))
        (run / "result.json").unlink()  # it has the digest of the newer file
        again = evaluate(run).record
    finally:
        (run / WEIGHTS).write_bytes(content)
        (run / "result.json").write_bytes(result)
    assert (again.top1, again.loss) == (found.top1, found.loss)
    assert classes_of(old, "x") == ()
    assert resize_rule_of(old, "x") is None


@pytest.mark.parametrize("text", ["[", "{}", '[{"id": 1, "name": "x"}]', '[{"id": "x"}]', "[" * 100_000])
def test_malformed_classes_are_refused(text):
    with pytest.raises(ValueError, match=r"the metadata classes of some\.file must be .*, but are not: restore"):
        classes_of({"classes": text}, "some.file")
    with pytest.raises(ValueError, match=r"the metadata preprocessing of some\.file must be"):
        resize_rule_of({"preprocessing": text.replace("{}", "[]")}, "some.file")


IMPOSSIBLE = {
    "mean": [
        "",
        "nan 0 0",
        "0.5 0.5",
        "0.5 0.5 0.5 0.5",
        "0.5 0.5 x",
        "123 116 103",
        "-1 0 0",
        "inf 0 0",
        "0_1 0 0",
        "٠ ٠ ٠",
    ],
    "std": ["", "0 0 0", "-1 1 1", "nan 1 1", "58 57 57", "1e-30 1 1", "1 1", "1,1,1"],
    "image_size": [
        "",
        "x",
        "8",
        "8x",
        "x8",
        "0x0",
        "-8x8",
        "8x8x3",
        "8 x 8",
        "8.0x8.0",
        "٨x٨",
        "99999999x8",
        "70000x8",
    ],
    "num_classes": ["", "0", "-3", "3.0", "three", "4", "٣", "65537", "9" * 30],
    "classes": ["", "{}", '[{"id": 1, "name": "x"}]', json.dumps([{"id": "a", "name": "a"}] * 4)],
    "steps_done": ["", "-1", "1.5", "many", "١", "9" * 30],
    "loss": ["", "hinge", "Cross-Entropy"],
    "targets": ["", "boxes"],
}


@pytest.mark.parametrize(("key", "text"), [(key, text) for key, texts in IMPOSSIBLE.items() for text in texts])
def test_what_cannot_be_read_or_cannot_be_is_refused_with_its_rule_and_value(key, text):
    good = describe_weights(model="m", height=8, width=8, mean=(0.5,) * 3, std=(1 / 255, 0.2, 1), num_classes=3)
    check_metadata({**good, "steps_done": "5", "loss": "mean-squared-error", "targets": "numbers"}, "f", num_classes=3)
    with pytest.raises(
        ValueError, match=rf"^the metadata {key} of some\.file must be .+, but are .+: restore the file, or"
    ):
        check_metadata(good | {key: text}, "some.file", num_classes=3)


@pytest.mark.parametrize(
    ("key", "text"),
    [("mean", "124 116 104"), ("std", "0 0 0"), ("image_size", "6"), ("loss", "hinge"), ("num_classes", "4")],
)
def test_commands_refuse_them_and_go_on_with_what_is_given_instead(run, tmp_path, monkeypatch, key, text):
    stored = read_weights(run / WEIGHTS)
    metadata = {name: value for name, value in stored.metadata.items() if name not in ("digest", "sha256")}
    save_file(stored.tensors, tmp_path / WEIGHTS, metadata | {key: text})
    monkeypatch.setattr(os, "_exit", lambda _: None)
    (tmp_path / "image.png").write_bytes(b"no image")
    evaluate_file = ["--weights", str(tmp_path / WEIGHTS), "--data", str(run.parent / "data"), "--batch", "4"]
    for command, words in (
        (run_eval, evaluate_file),
        (predict_images, [str(tmp_path / WEIGHTS), str(tmp_path / "image.png")]),
    ):
        said = CliRunner().invoke(command, words).stderr
        assert f"the metadata {key} of {tmp_path / WEIGHTS} must be " in said, said
        assert repr(text) in said
    remedy = {
        "mean": ["--mean", "0.5", "0.5", "0.5"],
        "std": ["--std", "0.2", "0.2", "0.2"],
        "image_size": ["--image-size", "6"],
    }
    if key in remedy:
        result = CliRunner().invoke(run_eval, [*evaluate_file, *remedy[key]])
        assert "evaluation" in result.stdout, result.stderr
