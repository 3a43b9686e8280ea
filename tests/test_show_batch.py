"""The first batch as pictures: what the model receives in training, its captions, and the file."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import loopfeed
from loopfeed.engine.commands import cli
from loopfeed.engine.inspection.show_batch import captions_of, names_of_first_batch
from loopfeed.engine.parts import take_parts
from loopfeed.engine.run.train import set_up_run
from loopfeed.preprocess.shards.classes import ImageClass
from tests.fake_source import fake_source, pack
from tests.toy import BATCH, CLASSES, SIZE, CountedBatches, Linear, toy_batch, toy_config

AUGMENTED: dict[str, Any] = {"crop": "random", "crop_padding": 1, "flip": 0.5, "cutmix": 0.4, "seed": 3}
# In each program the normalisation, (level / 255 - mean) / std, is fused with what follows, which may change its last
# bits; levels are exact.
ROUNDING = 2e-6
NAMES = tuple(ImageClass(f"n{number}", name) for number, name in enumerate(("cat", "dog", "owl")))


class Remembering(Linear):
    """The linear toy model, whose batch statistics are the images that it received last."""

    def init(self, key):
        params, _ = super().init(key)
        return params, {"images": jnp.zeros((BATCH, SIZE, SIZE, 3))}

    def apply(self, params, batch_stats, images, train):
        logits, _ = super().apply(params, {"batches": jnp.zeros(())}, images, train)
        return logits, {"images": images if train else batch_stats["images"]}


def noisy(images, keys):
    return images + 0.1 * jax.vmap(lambda key: jax.random.normal(key, images.shape[1:]))(keys)


def test_of_a_resume_it_is_the_batch_that_comes_next_and_the_run_is_untouched(tmp_path):
    config = toy_config(run_dir=str(tmp_path / "run"), steps=3, **AUGMENTED)
    parts: dict[str, Any] = {"model": Remembering(), "batches": toy_batch, "augment": noisy}
    third = loopfeed.train(config, **parts).batch_stats["images"]
    config = replace(config, resume=True, steps=4)
    before = files_of(tmp_path)
    shown = loopfeed.show_batch(config, **parts)
    assert files_of(tmp_path) == before
    assert shown.step == 4
    fourth = loopfeed.train(config, **parts).batch_stats["images"]
    np.testing.assert_allclose(shown.images, fourth, rtol=0, atol=ROUNDING)
    np.testing.assert_array_equal(shown.labels, toy_batch(3)[1])
    assert np.abs(shown.images - third).max() > 0.1


def files_of(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_without_augmentation_the_pictures_are_the_packed_pixels():
    shown = loopfeed.show_batch(
        toy_config(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.1)), model=Linear(), batches=toy_batch
    )
    words, labels = toy_batch(0)
    expected = np.stack([words >> 24, words >> 16 & 255, words >> 8 & 255], axis=-1)
    np.testing.assert_array_equal(shown.pictures, expected)
    assert shown.captions == tuple(f"class {label}" for label in labels)
    assert shown.mix_weight is None


def test_mixed_pictures_are_what_their_captions_say():
    plain = loopfeed.show_batch(toy_config(), model=Linear(), batches=toy_batch)
    mixed = loopfeed.show_batch(toy_config(mixup=1.0), model=Linear(), batches=toy_batch)
    assert mixed.mix_weight is not None
    own = mixed.mix_weight[:, None, None, None]
    partners = plain.pictures.reshape(-1, 2, SIZE, SIZE, 3)[:, ::-1].reshape(plain.pictures.shape)
    np.testing.assert_allclose(mixed.pictures, own * plain.pictures + (1 - own) * partners, rtol=0, atol=0.51)
    for row, caption in enumerate(mixed.captions):
        if plain.captions[row] != plain.captions[row ^ 1]:
            share = mixed.mix_weight[row]
            assert caption == f"{share:.2f} {plain.captions[row]}\n{1 - share:.2f} {plain.captions[row ^ 1]}"


@pytest.mark.parametrize("order", [{}, {"order": "windowed", "window_gb": 2 * 13 * (4 * 4 * 4 + 4) / 1e9}])
def test_pictures_of_a_pack_have_the_names_of_their_images(tmp_path, order):
    source = fake_source(29)
    pack(source, tmp_path)
    config = toy_config(data=str(tmp_path), eval_split="off", batch=6, num_classes=None, seed=4, **order)
    shown = loopfeed.show_batch(config, model=Linear())
    assert shown.names is not None
    indices = [int(Path(name).stem) for name in shown.names]
    assert list(shown.names) == [source.key(index) for index in indices]
    np.testing.assert_array_equal(shown.pictures, source.images[indices])
    with set_up_run(config, take_parts({"model": Linear()}), lambda _: None, is_dry=True) as run:
        assert names_of_first_batch(run) == shown.names  # which a step check reports
    # Each picture has a line more.
    assert shown.draw().height > replace(shown, names=None).draw().height


# --- captions


@pytest.mark.parametrize(
    ("labels", "targets", "captions"),
    [
        (np.array([[0.7, 0.3, 0], [0, 0, 1]], np.float32), None, ["cat 0.70, dog 0.30", "owl"]),
        (np.array([[1, 0, 1], [0, 0, 0]], np.float32), "classes", ["cat, owl", "-"]),
        (np.array([[1.5, -2], [0.123456, 3]], np.float32), "numbers", ["1.5, -2", "0.1235, 3"]),
        (np.array([[1.5, -2], [0.123456, 3]], np.float32), None, ["1.5, -2", "0.1235, 3"]),
        (
            {"boxes": np.zeros((2, 3, 4), np.float32), "age": np.array([41, 7], np.int32)},
            None,
            ["age: 41\nboxes: float32 [3, 4]", "age: 7\nboxes: float32 [3, 4]"],
        ),
    ],
)
def test_captions_of_other_labels(labels, targets, captions):
    assert captions_of(labels, None, NAMES, targets) == captions


def test_a_name_cannot_forge_a_caption():
    (caption,) = captions_of(np.array([0], np.int32), None, [ImageClass("n0", "a\nb\x1b[2J")], None)
    assert "\n" not in caption
    assert "\x1b" not in caption


# --- the file


def test_the_file_is_a_sheet_of_all_pictures(tmp_path):
    path = tmp_path / "batch.png"
    shown = loopfeed.show_batch(toy_config(batch=BATCH), path, model=Linear(), batches=toy_batch)
    sheet = np.asarray(Image.open(path))
    assert sheet.shape[2] == 3
    # Each of the 8 pictures is enlarged by a whole factor, so its middle pixel is there.
    for picture in shown.pictures:
        assert (sheet.reshape(-1, 3) == picture[2, 2]).all(axis=1).any()
    assert path.read_bytes() == shown._repr_png_()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("batch.jpg", "is written as PNG"),
        ("nowhere/batch.png", "must be in a folder that exists"),
        ("folder.png", "must be a file, but is a folder"),
    ],
)
def test_a_path_that_cannot_be_written_is_refused_before_anything_is_read(tmp_path, name, message):
    (tmp_path / "folder.png").mkdir()
    batches = CountedBatches()
    with pytest.raises(ValueError, match=message):
        loopfeed.show_batch(toy_config(), tmp_path / name, model=Linear(), batches=batches)
    assert not batches.calls


# --- the command


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        result = CliRunner().invoke(cli.main, list(map(str, arguments)))
        return (codes or [result.exit_code])[0], result.output

    return run


def test_the_command_writes_the_pictures_and_trains_nothing(invoke, tmp_path):
    code, output = invoke(
        *("--synthetic", "--image-size", 8, "--num-classes", CLASSES, "--batch", 4, "--model", "resnet8"),
        *("--show-batch", "batch.png", "--run-dir", "run"),
    )
    assert code == 0, output
    assert output.endswith("wrote batch.png: 4 images of 8 × 8 px of step 1\n")
    assert [path.name for path in tmp_path.iterdir()] == ["batch.png"]


_SHOWN_ON = """
import json, sys
import numpy as np
from loopfeed import show_batch
from tests.test_show_batch import AUGMENTED
from tests.toy import Linear, toy_batch, toy_config
shown = show_batch(toy_config(devices=sys.argv[1], **AUGMENTED), model=Linear(), batches=toy_batch)
print(json.dumps([shown.pictures.tolist(), shown.captions]))
"""


@pytest.mark.integration
def test_several_devices_show_the_same_pictures():
    found = []
    for devices in ("cpu:1", "cpu:2"):
        done = subprocess.run(
            [sys.executable, "-c", _SHOWN_ON, devices], capture_output=True, text=True, timeout=120, check=True
        )
        found.append(json.loads(done.stdout))
    assert found[0] == found[1]
