"""Weights by name from the Hugging Face hub, and what timm's config says of them, from a server on this machine."""

import hashlib
import json
import logging
import math
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save

from loopfeed import TrainConfig, train
from loopfeed.engine.records import hub as hub_module
from loopfeed.engine.records.given_weights import Origin, read_given_weights
from loopfeed.engine.records.hub import HubError
from loopfeed.engine.records.imagenet import imagenet_classes
from loopfeed.engine.records.initial_weights import load_initial_weights
from loopfeed.engine.records.timm_config import MOST_BYTES, metadata_of_config
from loopfeed.engine.records.weights import name_tensors
from loopfeed.engine.records.weights_metadata import classes_of
from loopfeed.preprocess.shards.classes import ImageClass
from tests.fake_source import fake_source, pack
from tests.hub_server import REPOSITORY, serving
from tests.small_resnets import small_resnets
from tests.test_initial_weights import drawn

NAME = f"hf-hub:{REPOSITORY}"
CONFIG: dict[str, Any] = {
    "architecture": "resnet8",
    "num_classes": 1000,
    "pretrained_cfg": {
        "tag": "t_in1k",
        "input_size": [3, 16, 16],
        "interpolation": "bilinear",
        "crop_pct": 0.875,
        "mean": [0.5, 0.25, 0.125],
        "std": [0.5, 0.5, 0.25],
    },
}


def files_of(weights, config=CONFIG):
    content = {name: np.asarray(each, order="C") for name, each in name_tensors("resnet8", *weights).items()}
    return {"model.safetensors": save(content), "config.json": json.dumps(config).encode()}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with serving() as found, small_resnets():
        monkeypatch.setenv("HF_ENDPOINT", found.url)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setenv("HF_TOKEN", "hf_secret")
        monkeypatch.setattr(time, "sleep", lambda _: None)  # between the tries of the library
        yield found


def test_a_repository_is_read_with_its_config_and_again_from_the_cache_without_a_network(hub, monkeypatch):
    weights = drawn("resnet8", 1000)
    files = files_of(weights)
    old = hub.commit(files_of(drawn("resnet8", 1000, seed=1)), "v1")
    new = hub.commit(files)
    given = read_given_weights(NAME)
    assert given.origin == Origin(NAME, new, hashlib.sha256(files["model.safetensors"]).hexdigest())
    np.testing.assert_array_equal(given.stored.tensors["fc.bias"], weights[0]["fc"]["bias"])
    metadata = given.stored.metadata
    assert metadata["model"] == "resnet8"
    assert metadata["image_size"] == "16x16"
    assert (metadata["mean"], metadata["std"]) == ("0.5 0.25 0.125", "0.5 0.5 0.25")
    assert json.loads(metadata["preprocessing"]) == {"size": 16, "resize": 18, "resample": "bilinear"}
    assert classes_of(metadata, NAME) == imagenet_classes()
    # The token goes to the hub, not to where it redirects.
    asked = {(path.startswith("/cdn/"), token) for _, path, token in hub.asked if not path.startswith("/api/")}
    assert asked == {(False, "Bearer hf_secret"), (True, None)}
    for revision in (f"{NAME}@v1", f"{NAME}@{old}"):
        assert read_given_weights(revision).origin.revision == old
    assert read_given_weights(NAME, revision=old).origin.revision == old
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.fault, num_asked = 500, sum("/resolve/" in path for _, path, _ in hub.asked)
    assert read_given_weights(NAME)[1:] == given[1:]
    assert sum("/resolve/" in path for _, path, _ in hub.asked) == num_asked


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("gated", r"is gated: accept its terms at http.*\$HF_TOKEN"),
        ("private", "must be a repository that http.* shows you, but there is none"),
        (429, "not in the cache, and .* cannot be reached .*429"),
        (503, "not in the cache, and .* cannot be reached .*503"),
        ("broken", "not in the cache|could not be downloaded"),
        ("cut", "could not be downloaded from .*: try again later"),
        ("other", "is damaged .its digest must be [0-9a-f]{12}, but is .*: remove .*/blobs/[0-9a-f]{64} and try again"),
        ("silent", "was not downloaded within 0.5 s: try again"),
    ],
)
def test_what_goes_wrong_at_the_hub_is_one_line_with_a_remedy(hub, monkeypatch, caplog, fault, message):
    hub.commit(files_of(drawn("resnet8", 10)))
    hub.fault = fault
    if fault == "silent":
        monkeypatch.setattr(hub_module, "_DOWNLOAD_LIMIT_S", 0.5)
    logging.getLogger("huggingface_hub").addHandler(caplog.handler)
    with pytest.raises(HubError, match=message) as caught:
        read_given_weights(NAME)
    logging.getLogger("huggingface_hub").removeHandler(caplog.handler)
    assert "\n" not in str(caught.value)
    assert caplog.messages == []  # the hub's library tells of each try


def test_what_is_not_at_the_hub_is_named(hub, monkeypatch):
    hub.commit({"README.md": b""})
    for name, message in {
        f"{NAME}@v9": "has no revision v9: give a branch",
        NAME: "must have model.safetensors or pytorch_model.bin, but has neither",
        "hf-hub:timm/none": "shows you, but there is none: check its name, such as hf-hub:timm/resnet18.a1_in1k",
        "hf-hub:a/b/c": "must be hf-hub:OWNER/NAME",
    }.items():
        with pytest.raises(HubError, match=message):
            read_given_weights(name)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(HubError, match=r"is not in the cache, and \$HF_HUB_OFFLINE is set: download it where"):
        read_given_weights(f"{NAME}@v9")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(HubError, match=r"is not installed: pip install 'loopfeed\[hub\]'"):
        read_given_weights(NAME)


@pytest.mark.parametrize("content", [b"[]", b"{", b'{"architecture": "x", "mean": 3}', b'{"pretrained_cfg": {}}'])
def test_a_config_that_is_not_of_timm_is_refused(hub, content):
    hub.commit(files_of(drawn("resnet8", 10)) | {"config.json": content})
    with pytest.raises(ValueError, match=r"config\.json of hf-hub:.* must be a config of timm"):
        read_given_weights(NAME)


def test_a_config_is_read_with_the_precedence_of_timm():
    def described(top, **inner):
        config = CONFIG | top | {"pretrained_cfg": CONFIG["pretrained_cfg"] | inner}
        return metadata_of_config(json.dumps(config).encode(), "X")

    # A network that was fine-tuned keeps what it began with in its pretrained_cfg.
    names = ["ant", "bee"]
    metadata, _ = described({"num_classes": 2, "label_names": names}, num_classes=1000, label_names=["z"] * 1000)
    assert metadata["num_classes"] == "2"
    assert [each.id for each in classes_of(metadata, "X")] == names
    flat = CONFIG["pretrained_cfg"] | {"architecture": "resnet8", "num_classes": 2, "labels": {"1": "bee", "0": "ant"}}
    metadata, _ = metadata_of_config(json.dumps(flat).encode(), "X")
    assert [each.id for each in classes_of(metadata, "X")] == names
    metadata, _ = described({"model_args": {"img_size": 24}}, fixed_input_size=True)
    assert (metadata["image_size"], json.loads(metadata["preprocessing"])["resize"]) == ("24x24", 27)
    for labels in (["ant"], ["ant", "ant"]):
        metadata, notes = described({"num_classes": 2, "label_names": labels})
        assert classes_of(metadata, "X") == ()
        assert notes == ("X has label_names that are not taken: they must be 2 different ones",)
    metadata, notes = described({}, crop_pct=1e-9)
    assert "preprocessing" not in metadata
    assert notes == ("X has a way to resize that is not taken: crop_pct 1e-09, bilinear",)


@pytest.mark.parametrize(
    "values",
    [
        {"input_size": [3, math.inf, 16]},
        {"input_size": [3, 10**400, 10**400]},
        {"crop_pct": 5e-324},
        {"num_classes": math.inf},
        {"architecture": ["resnet8"]},
        {"architecture": None},
    ],
)
def test_numbers_and_types_that_no_config_has_are_refused_in_one_line(values):
    with pytest.raises(ValueError, match="X must be a config of timm, with architecture") as caught:
        metadata_of_config(json.dumps(CONFIG["pretrained_cfg"] | {"architecture": "resnet8"} | values).encode(), "X")
    assert len(str(caught.value)) < 500


def test_weights_do_not_lose_their_config_because_the_hub_fails(hub, monkeypatch, tmp_path):
    weights = files_of(drawn("resnet8", 10))
    commit = hub.commit(weights)
    hub.fault = "no config"
    with pytest.raises(HubError, match=r"is not in the cache, and .* cannot be reached .*503"):
        read_given_weights(NAME)
    hub.fault = None
    hub.commit({"model.safetensors": weights["model.safetensors"]}, "bare")
    note = "warning: no config.json says for what input and which classes they are"
    assert read_given_weights(f"{NAME}@bare").notes == (note,)
    hub.fault = 503  # that there is none is known
    assert read_given_weights(f"{NAME}@bare").notes == (note,)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert read_given_weights(f"{NAME}@{commit}").notes == (note,)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.fault = None
    (tmp_path / "file").touch()
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "file"))
    with pytest.raises(HubError, match=r"could not be kept in the cache .*file.*: set \$HF_HUB_CACHE to a folder"):
        read_given_weights(NAME)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "other"))
    hub.commit(weights | {"config.json": b" " * (MOST_BYTES + 1)})
    with pytest.raises(ValueError, match=r"config\.json is not .*larger than the 16,777,216 bytes allowed"):
        read_given_weights(NAME)


def test_a_run_records_the_commit_and_starts_again_from_it(hub, tmp_path):
    rows = [7, 3, 990]
    weights = drawn("resnet8", 1000)
    commit = hub.commit(files_of(weights))
    source = fake_source(8, size=16)
    classes = tuple(ImageClass(imagenet_classes()[row].id, "x") for row in rows)
    pack(source.changed(classes=classes), tmp_path / "data")
    paths: dict[str, Any] = {"data": tmp_path / "data", "run_dir": tmp_path / "run", "init_from": NAME}
    config = TrainConfig(**paths, model="resnet8", steps=0, batch=4, eval_split="off")
    said: list[str] = []
    result = train(config, notify=said.append)
    sha256 = hashlib.sha256(hub.commits[commit]["model.safetensors"]).hexdigest()
    lines = [each for each in said if each.startswith(("weights: ", "input: "))]
    assert lines == [
        f"weights: {NAME} (revision {commit}, sha256 {sha256[:12]}); the classifier has 3 of the 1,000 rows of the "
        "file, by identifier",
        "input: mean 0.5 0.25 0.125 of the weights, std 0.5 0.5 0.25 of the weights; the weights are for 16 × 16 px "
        "bilinear, the run has 16 × 16 px bicubic",
    ]
    np.testing.assert_array_equal(result.params["fc"]["bias"], weights[0]["fc"]["bias"][rows])
    recorded = json.loads((tmp_path / "run/config.json").read_text())["resolved"]
    assert recorded["init_from_origin"] == {"source": NAME, "revision": commit, "sha256": sha256}
    assert (recorded["mean"], recorded["std"]) == ([0.5, 0.25, 0.125], [0.5, 0.5, 0.25])
    given = load_initial_weights(NAME, "resnet8", *drawn("resnet8", 3), classes=classes)
    assert given.is_by_identifier

    # The branch has moved on; the run starts again from its own commit, with the input of that commit.
    hub.commit(files_of(drawn("resnet8", 1000, seed=1), CONFIG | {"pretrained_cfg": {"tag": "t_in1k"}}))
    again = train(replace(config, resume=True, steps=1), notify=said.append)
    assert again.steps_done == 1
    assert json.loads((tmp_path / "run/config.json").read_text())["resolved"]["mean"] == recorded["mean"]
    with pytest.raises(ValueError, match="init_from was"):
        train(replace(config, resume=True, steps=2, init_from=f"{NAME}@main"))
    train(replace(config, run_dir=tmp_path / "own", mean=(0.1, 0.2, 0.3)), notify=said.append)
    assert json.loads((tmp_path / "own/config.json").read_text())["resolved"]["mean"] == [0.1, 0.2, 0.3]
    assert any("mean 0.1 0.2 0.3 of the settings, that of the weights is 0.485 0.456 0.406" in each for each in said)


def test_the_table_of_imagenet_is_in_the_order_of_the_published_networks():
    found = imagenet_classes()
    assert len(found) == len({each.id for each in found}) == 1000
    assert [each.id for each in found] == sorted(each.id for each in found)
    assert {label: found[label].name.split(",")[0] for label in (0, 281, 999)} == {
        0: "tench",
        281: "tabby",
        999: "toilet tissue",
    }
