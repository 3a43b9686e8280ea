"""Classification of photographs: the decisions of an evaluation of their pack, and photographs that cannot be read."""

import csv
import io
import json
import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from loopfeed import Predictor, TrainConfig, evaluate, predict, train
from loopfeed.engine.commands import predict_cli
from loopfeed.engine.commands.eval_cli import main as run_eval
from loopfeed.engine.commands.predict_cli import main as predict_images
from loopfeed.engine.evaluation.photographs import PhotographDecoder
from loopfeed.engine.evaluation.predict import PredictionResult
from loopfeed.engine.evaluation.result import ImagePredictions, write_predictions
from loopfeed.engine.feed.feeder import FeederError
from loopfeed.engine.records.weights import read_weights
from loopfeed.preprocess.decoding.decode import ResizeRule, decode_image
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.sources.open_source import open_source
from tests.toy import Linear, toy_batch, toy_config

RULE = ResizeRule(size=10, resize=12, levels="0:4095")
DEEP = 4  # the number of a photograph with 12 bits in a 16-bit file
NUM_VAL = 11


pytestmark = pytest.mark.usefixtures("small_resnets")


@pytest.fixture(scope="module")
def place(small_resnets, tmp_path_factory):
    """Return a folder with photographs of odd sizes, their pack and a run on it, and the names of the packed images."""
    folder = tmp_path_factory.mktemp("predict")
    random = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", NUM_VAL)):
        for number in range(count):
            image = folder / "photos" / split / f"n{number % 3}" / f"{number:02}.{'jpg' if number % 2 else 'png'}"
            image.parent.mkdir(parents=True, exist_ok=True)
            rgb = random.integers(0, 256, (14 + number, 27 - number, 3), dtype=np.uint8) // 2 + 50 * (number % 3)
            deep = rgb[..., 0].astype(np.uint16) * 16
            Image.fromarray(deep if number == DEEP else rgb.astype(np.uint8)).save(image)
    (folder / "photos/classes.txt").write_text("n0 tench\nn1 a\x1b[2Jb\n")
    with open_source(folder / "photos") as source:
        for name, listed in source.splits.items():
            pack_split(listed, open_location(str(folder / "data")).child(name), PackSettings(rule=RULE, shard_images=4))
        names = [source.splits["val"].image(index).name for index in range(NUM_VAL)]
    config = TrainConfig(
        steps=3, batch=4, data=os.fspath(folder / "data"), model="resnet8", image_size=8, run_dir=folder / "run"
    )
    train(config)
    return folder, names


def invoke(command, monkeypatch, folder, *arguments):
    codes: list[int] = []
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "_exit", codes.append)
    result = CliRunner().invoke(command, list(map(str, arguments)))
    return (codes or [result.exit_code])[0], result.stdout, result.stderr


def test_photographs_are_decided_as_in_the_evaluation_of_their_pack(place):
    folder, names = place
    evaluated = evaluate(folder / "run", predictions=True)
    decided = evaluated.predictions
    assert decided is not None
    assert (decided.labels == decided.classes[:, 0]).sum() == evaluated.num_top1
    np.testing.assert_allclose(decided.losses.mean(), evaluated.record.loss, rtol=1e-6)
    found = predict(folder / "run", [folder / "photos/val"], top=2)
    assert list(found.images) == sorted(found.images)
    by_name = {os.path.relpath(image, folder / "photos"): index for index, image in enumerate(found.images)}
    rows = [by_name[name] for name in names]
    np.testing.assert_array_equal(found.labels[rows, 0], decided.classes[:, 0])
    # In another order, and so at other places in a batch: float32 sums may differ in their last digits.
    np.testing.assert_allclose(found.probabilities[rows, 0], decided.probabilities[:, 0], rtol=1e-5)
    assert found.class_of(0).name == "tench"
    assert (found.probabilities[:, 0] >= found.probabilities[:, 1]).all()


def test_images_in_memory_are_the_packed_ones(place):
    folder, names = place
    images = np.stack([decode_image((folder / "photos" / name).read_bytes(), RULE) for name in names])
    decided = evaluate(folder / "run", predictions=True).predictions
    assert decided is not None
    for given in (folder / "run", folder / "run/model.safetensors"):
        found = predict(given, images, top=9, settings={"batch": 4})
        np.testing.assert_array_equal(found.labels[:, 0], decided.classes[:, 0])
        # In the same order, with the same batches. Another program computes them: the last digit may be another.
        np.testing.assert_allclose(found.probabilities[:, 0], decided.probabilities[:, 0], rtol=1e-6)
        assert found.labels.shape == (NUM_VAL, 3)
        np.testing.assert_allclose(found.probabilities.sum(1), 1, rtol=1e-6)


def test_a_photograph_that_cannot_be_decoded_is_listed_and_the_others_are_classified(place, monkeypatch):
    folder, names = place
    mixed = folder / "mixed"
    (mixed / "b").mkdir(parents=True)
    shutil.copy(folder / "photos" / names[0], mixed / "b/x.jpg")
    shutil.copy(folder / "photos" / names[1], mixed / "z.png")
    (mixed / "a\x1b[2J.jpg").write_bytes(b"no image")
    (mixed / "notes.txt").write_text("not an image by name")
    found = predict(folder / "run", [mixed])
    assert [os.path.relpath(each, mixed) for each in found.images] == ["a\x1b[2J.jpg", "b/x.jpg", "z.png"]
    assert list(found.failures) == [0]
    assert found.labels[0].tolist() == [-1] * 3
    alone = predict(folder / "run", [mixed / "b/x.jpg", mixed / "z.png"], logits=True)
    np.testing.assert_array_equal(alone.labels, found.labels[1:])
    assert alone.logits is not None
    ranked = np.take_along_axis(alone.logits, alone.labels, axis=1)
    shares = np.exp(ranked - np.log(np.exp(alone.logits.astype(np.float64)).sum(1, keepdims=True)))
    np.testing.assert_allclose(alone.probabilities, shares, rtol=1e-6)

    code, out, err = invoke(predict_images, monkeypatch, folder, "run", "mixed", "--top", 1)
    assert code == 1
    lines = out.splitlines()
    assert lines[0].startswith("'mixed/a\\x1b[2J.jpg': not classified: not an image that can be read: it is")
    assert (lines[1], lines[3]) == ("mixed/b/x.jpg", "mixed/z.png")
    assert "\x1b" not in out + err
    assert "mixed: 1 file left out, whose names are not those of images" in err
    assert "2 images classified in " in err
    code, out, _ = invoke(predict_images, monkeypatch, folder, "run", "mixed", "--json", "--logits")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, rows[0]["image"], rows[0]["error"]) == (1, "mixed/a\x1b[2J.jpg", found.failures[0])
    assert [each["label"] for each in rows[1]["predictions"]] == found.labels[1].tolist()
    assert [np.float32(each["probability"]) for each in rows[2]["predictions"]] == found.probabilities[2].tolist()
    assert rows[1]["logits"] == pytest.approx(alone.logits[0], rel=1e-5)
    code, out, _ = invoke(predict_images, monkeypatch, folder, "run", "mixed/z.png", "mixed/b", "--csv", "--top", 2)
    table = list(csv.DictReader(io.StringIO(out)))
    assert code == 0
    assert [(row["image"], row["rank"]) for row in table] == [
        (name, rank) for name in ("mixed/z.png", "mixed/b/x.jpg") for rank in "12"
    ]
    assert [int(row["label"]) for row in table[:2]] == found.labels[2, :2].tolist()


def test_names_of_classes_are_neither_formulas_nor_escapes_in_csv():
    names = ("=HYPERLINK(1)", "a\x1b[2Jb\nc", "-1")
    classes = tuple(ImageClass(each, each) for each in names)
    result = PredictionResult(
        ("=1.png", "-2.png"),
        np.array([[0, 1, 2], [-1] * 3], np.int32),
        np.array([[0.5, 0.25, 0.25], [np.nan] * 3], np.float32),
        classes,
        {1: "@bad\x07"},
        0.0,
    )
    table = list(csv.DictReader(io.StringIO(predict_cli._csv(result), newline="")))
    expected = ["'=HYPERLINK(1)", "a\\x1b[2Jb\\nc", "-1"]
    assert [(row["class"], row["name"]) for row in table[:3]] == [(each, each) for each in expected]
    assert [row["image"] for row in table] == ["'=1.png"] * 3 + ["'-2.png"]
    assert table[3]["error"] == "'@bad\\x07"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nowhere"], "IMAGES must be files and folders, but nowhere does not exist"),
        (["run", "run/snapshots"], "IMAGES must contain images"),
        (["run", "data"], "data is a pack, which `run-eval RUN --data data` evaluates"),
        (["nowhere", "photos"], "weights must be a file, but nowhere does not exist: check the path"),
        (["run", "photos", "--json", "--csv"], "only one of --json and --csv can be given"),
        (["run", "photos", "--csv", "--logits"], "--logits can be given only with --json"),
        (["run/model.safetensors", "photos", "--snapshot", "best"], "a snapshot can be given only with a run"),
        (["run", "photos", "--snapshot", "2"], "choose another step (available: 3)"),
        (["run", "photos", "--size", "6"], "got 6 × 6 px: crop the photographs to that size (--size, and --resize"),
        (["run", "photos", "--size", "6"], "the images must have the size used in training, 8 × 8 px"),
        (
            ["run", "photos", "--image-size", "48"],
            "--image-size must be at most the size of the images, 10 × 10 px, got 48: leave it out, or crop the",
        ),
        (
            ["run/model.safetensors", "photos", "--image-size", "48"],
            "--image-size must be at most the size of the images, 10 × 10 px, got 48: leave it out, or crop the",
        ),
        *(
            (["run", "photos", *given], f"{given[0]} can be given only with a weights file, got the run run instead: ")
            for given in (
                ("--model", "resnet18"),
                ("--mean", "0.5", "0.5", "0.5"),
                ("--std", "0.5", "0.5", "0.5"),
            )
        ),
        (
            ["data/val/manifest.json", "photos"],
            "must be a safetensors file or a file of PyTorch 1.6 or newer, but data/val/manifest.json is JSON",
        ),
    ],
)
def test_wrong_usage_is_one_clear_error(place, monkeypatch, arguments, message):
    code, out, err = invoke(predict_images, monkeypatch, place[0], *arguments)
    assert (code, out) == (2, "")
    assert message in next(line for line in err.splitlines() if line.startswith("predict-images: "))


def test_a_loss_without_classes_and_a_model_of_your_own_are_refused_without_more(tmp_path):
    train(toy_config(steps=1, run_dir=tmp_path / "own"), model=Linear(), batches=toy_batch)
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    with pytest.raises(ValueError, match=r"a model \(linear\) of your own, which must be given again: model=…$"):
        predict(tmp_path / "own", pixels)
    with pytest.raises(ValueError, match="images must contain at least one image, got none: give paths or an array"):
        predict(tmp_path / "own", [], model=Linear())
    with pytest.raises(ValueError, match=r"used in training, 4 × 4 px.*, got 3 × 3 px: give arrays of that size"):
        predict(tmp_path / "own", pixels[:, 1:, 1:], model=Linear())
    assert predict(tmp_path / "own", pixels, model=Linear()).labels.shape == (3, 3)
    with pytest.raises(ValueError, match=r"an array uint8 \[N, H, W, 3\] of RGB, got float64 \[3, 4, 4, 3\]"):
        predict(tmp_path / "own", pixels / 255, model=Linear())
    with pytest.raises(ValueError, match="top must be a whole number"):
        predict(tmp_path / "own", pixels, top=0, model=Linear())


def squared(outputs, labels, weights):
    return jnp.square(outputs - (labels if labels.ndim == 2 else jnp.eye(3)[labels])).sum(axis=1)


def test_a_loss_of_your_own_is_one_of_classes_only_with_class_numbers(tmp_path):
    def distances(step):
        pixels, labels = toy_batch(step)
        return pixels, np.eye(3, dtype=np.float32)[labels]

    for name, batches in (("numbers", distances), ("classes", toy_batch)):
        train(toy_config(steps=1, run_dir=tmp_path / name), model=Linear(), batches=batches, loss=squared)
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    with pytest.raises(ValueError, match=r"a loss of your own, \S*squared, on labels that are not cla"):
        predict(tmp_path / "numbers", pixels, model=Linear())
    assert predict(tmp_path / "classes", pixels, model=Linear()).labels.shape == (3, 3)


def test_csv_and_json_have_the_names_of_files_byte_by_byte(place, monkeypatch):
    folder, _ = place
    names = [b'odd/a\x1b[2J,"b\xff.jpg', b"odd/c\rd\ne.jpg", "odd/é.jpg".encode()]
    (folder / "odd").mkdir()
    for name in names:
        (folder / os.fsdecode(name)).write_bytes(b"no image")
    monkeypatch.chdir(folder)
    monkeypatch.setattr(os, "_exit", lambda _: None)
    written = CliRunner().invoke(predict_images, ["run", "odd", "--csv"]).stdout_bytes
    text = written.decode("utf-8", "surrogateescape")
    rows = list(csv.DictReader(io.StringIO(text, newline="")))
    assert [os.fsencode(row["image"]) for row in rows] == names
    assert all("not an image" in row["error"] for row in rows)
    lines = CliRunner().invoke(predict_images, ["run", "odd", "--json"]).stdout_bytes.splitlines()
    assert [os.fsencode(json.loads(line)["image"]) for line in lines] == names


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_an_evaluation_writes_each_decision(place, monkeypatch, suffix):
    folder, _ = place
    decided = evaluate(folder / "run", predictions=True).predictions
    assert decided is not None
    code, out, err = invoke(run_eval, monkeypatch, folder, "run", "--predictions", f"p.{suffix}")
    text = (folder / f"p.{suffix}").read_text()
    with open_split(str(folder / "data"), "val") as split:
        names = split.names(np.arange(NUM_VAL))
    rows = list(csv.DictReader(io.StringIO(text))) if suffix == "csv" else list(map(json.loads, text.splitlines()))
    assert (code, out.count("\n")) == (0, 1)
    assert f"predictions: p.{suffix}, {NUM_VAL} images" in err
    assert [int(row["index"]) for row in rows] == list(range(NUM_VAL))
    assert names is not None
    assert [row["name"] for row in rows] == names == list(decided.names or ())
    files = (folder / "photos/val").glob("*/*")
    assert sorted(names) == sorted(str(each.relative_to(folder / "photos/val")) for each in files)
    assert [int(row["label"]) for row in rows] == decided.labels.tolist()
    assert [int(row["predicted"]) for row in rows] == decided.classes[:, 0].tolist()
    assert [np.float32(row["probability"]) for row in rows] == decided.probabilities[:, 0].tolist()
    assert [np.float32(row["loss"]) for row in rows] == decided.losses.tolist()
    code, _, err = invoke(run_eval, monkeypatch, folder, "run", "--predictions", "p.txt")
    assert (code, "must end in .csv or .jsonl, got p.txt" in err) == (2, True)


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_the_file_of_predictions_has_names_as_they_are(tmp_path, suffix):
    names = ("a,b\n.jpg", "=1+1.png", os.fsdecode(b"c/\xff.jpg"))
    numbers = np.arange(3, dtype=np.int32)
    found = ImagePredictions(numbers, numbers[:, None], np.ones((3, 1), np.float32), np.zeros(3, np.float32), names)
    write_predictions(path := tmp_path / f"p.{suffix}", found)
    text = path.read_bytes().decode("utf-8", "surrogateescape")
    is_csv = suffix == "csv"
    rows = list(csv.DictReader(io.StringIO(text, newline=""))) if is_csv else list(map(json.loads, text.splitlines()))
    assert [row["name"] for row in rows] == [names[0], "'=1+1.png" if is_csv else names[1], names[2]]
    # Of images without names, the file is as it was.
    write_predictions(path, replace(found, names=None))
    assert b"name" not in path.read_bytes()


def test_weights_without_a_record_are_said_to_be_guessed(place, tmp_path):
    from safetensors.numpy import save_file

    folder, names = place
    stored = read_weights(folder / "run/model.safetensors")
    save_file(stored.tensors, tmp_path / "bare.safetensors", {"model": "resnet8", "image_size": "10x10"})
    told: list[str] = []
    found = predict(tmp_path / "bare.safetensors", folder / "photos" / names[0], notify=told.append)
    assert any("photographs are resized to 10 px (bicubic) and cropped to 10 px: give --size" in each for each in told)
    assert found.class_of(found.labels[0, 0]).id == str(found.labels[0, 0])


def test_a_predictor_takes_photographs_in_any_form_from_any_thread_in_batches_of_any_size(place):
    folder, names = place
    paths = [folder / "photos" / name for name in names if not name.endswith(f"{DEEP:02}.png")]
    told: list[str] = []
    predictor = Predictor(folder / "run", settings={"batch": 5}, notify=told.append)
    predictor.warm_up(1, 3)
    assert [line.partition(" in ")[0] for line in told if "compiled" in line] == [
        "compiled the program for 1 images",
        "compiled the program for 4 images",
    ]
    expected = predictor.predict(paths, logits=True)
    assert expected.logits is not None
    with Image.open(paths[1]) as opened:
        opened.load()
        forms = [paths[0].read_bytes(), opened, np.asarray(Image.open(paths[2])), paths[3]]
        found = predictor.predict(forms, logits=True)
        assert found.images == ("0", "1", "2", str(paths[3]))
        np.testing.assert_array_equal(found.logits, expected.logits[:4])
        assert predictor.predict(opened, top=1).labels.tolist() == [[expected.labels[1, 0]]]
    with ThreadPoolExecutor(4) as pool:
        sizes = [1, 2, 3, len(paths)] * 4
        each_found = pool.map(lambda size: predictor.predict(paths[:size], logits=True), sizes)
        for size, each in zip(sizes, each_found, strict=True):
            np.testing.assert_allclose(np.asarray(each.logits), expected.logits[:size], rtol=1e-4, atol=1e-5)
    # Programs are those of powers of two below the batch, and of the batch, also for the smaller rest of a call.
    assert [len(part.images) for part in predictor.stream(paths[:7])] == [5, 2]
    assert sorted(line.split()[4] for line in told if "compiled" in line) == ["1", "2", "4", "5"]
    calls: list[Callable[..., object]] = [Predictor, partial(predict, images=paths)]
    for call in calls:
        with pytest.raises(TypeError, match=r"unexpected keyword argument 'snapshots': did you mean snapshot\?"):
            call(folder / "run", snapshots=3)


def test_a_photograph_that_never_comes_ends_the_wait(place, monkeypatch):
    folder, names = place
    never = threading.Event()
    monkeypatch.setattr(PhotographDecoder, "decode", lambda *_: never.wait(60))
    predictor = Predictor(folder / "run", settings={"infeed_timeout_s": 0.1})
    assert repr(predictor).startswith(f"Predictor('{folder / 'run'}', ")
    with pytest.raises(FeederError, match=r"was not read and decoded within 0\.1 s: check where it is stored"):
        predictor.predict(folder / "photos" / names[0])
    never.set()


def test_the_weights_file_of_a_model_of_your_own_needs_the_model_and_no_run(tmp_path, monkeypatch):
    train(toy_config(steps=2, run_dir=tmp_path / "own"), model=Linear(), batches=toy_batch)
    shutil.copy(tmp_path / "own/model.safetensors", tmp_path / "own.safetensors")
    pixels = np.arange(3 * 4 * 4 * 3, dtype=np.uint8).reshape(3, 4, 4, 3)
    found = predict(tmp_path / "own.safetensors", pixels, model=Linear(), logits=True)
    expected = predict(tmp_path / "own", pixels, model=Linear(), logits=True)
    assert expected.logits is not None
    np.testing.assert_array_equal(np.asarray(found.logits), expected.logits)
    with pytest.raises(ValueError, match="weights of a model of your own, 'linear', which must be given too"):
        predict(tmp_path / "own.safetensors", pixels)
    (tmp_path / "photos").mkdir()
    Image.fromarray(pixels[0]).save(tmp_path / "photos/a.png")
    arguments = ["own.safetensors", "photos", "--model", "tests.toy:Linear", "--json", "--logits", "--size", 4]
    code, out, err = invoke(predict_images, monkeypatch, tmp_path, *arguments)
    assert code == 0, err
    assert json.loads(out)["logits"] == pytest.approx(expected.logits[0].tolist(), rel=1e-5)


def test_an_image_of_pillow_has_the_pixels_of_its_file():
    random = np.random.default_rng(0)
    pixels = Image.fromarray(random.integers(0, 256, (9, 13, 3), dtype=np.uint8))
    veiled = pixels.copy()
    veiled.putalpha(Image.fromarray(random.integers(0, 256, (9, 13), dtype=np.uint8)))
    turned = Image.Exif()
    turned[0x0112] = 6
    decoder = PhotographDecoder(ResizeRule(size=4, resize=5), 60.0)
    files = []
    for image, options in (
        (pixels, {"exif": turned}),
        (veiled, {}),
        (veiled.convert("LA"), {}),
        (pixels.quantize(16), {"transparency": 3}),
        (Image.fromarray(random.integers(0, 1 << 16, (9, 13), dtype=np.uint16)), {}),
    ):
        image.save(file := io.BytesIO(), "PNG", **options)
        files.append(file)
    for file in files:
        expected, _ = decoder.decode(file.getvalue())
        np.testing.assert_array_equal(decoder.decode(Image.open(file))[0], expected)
    for mode in ("I", "F"):
        with pytest.raises(ValueError, match=f"Pillow's mode {mode} does not say which values are black and white"):
            decoder.decode(Image.new(mode, (5, 5)))
    with pytest.raises(OSError, match=r"truncated|broken"):
        decoder.decode(Image.open(io.BytesIO(files[1].getvalue()[:60])))
