"""`--sampling`: what runs see, on any devices and after resumes; tables of weights; what is refused."""

import itertools
import re
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import replay_run, train
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.data.drawn_images import root_weights
from loopfeed.engine.data.weight_file import WeightFile, whole_weights_of
from loopfeed.engine.feed.draws import Arcs, DrawnOrder, EpochImages, most_weight
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack
from tests.process_runs import records, run
from tests.toy import SIZE, Linear, toy_batch, toy_config

NUM_IMAGES, BATCH = 24, 6
# A long tail: 16, 6 and 2 images; every image has a colour of its own.
LABELS = [0] * 16 + [1] * 6 + [2] * 2


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("balance")
    pack(long_tail(), folder)
    return folder


def long_tail(name="train"):
    source = fake_source(NUM_IMAGES, size=SIZE, name=name)
    source.images[:] = (10 * np.arange(NUM_IMAGES, dtype=np.uint8))[:, None, None, None]
    source.labels[:] = LABELS
    return source


def shows(first):
    """Return a metric: how often each of four images is in a batch, by their colours, in digits of base 32."""

    def count(outputs, _):
        place = jnp.round(outputs["colour"] / 10).astype(jnp.int32) - first
        return jnp.where((place >= 0) & (place < 4), 1 << 5 * jnp.clip(place, 0, 3), 0).astype(jnp.float32)

    return count


# A metric of its own for each image would be four times as much to compile.
METRICS = {f"images{first}": shows(first) for first in range(0, NUM_IMAGES, 4)}


def images_in(metrics, num_images) -> Counter[int]:
    """Return how often each image was among so many, of which these are the metrics: means of `shows`."""
    packed = {first: round(metrics[f"images{first}"] * num_images) for first in range(0, NUM_IMAGES, 4)}
    return +Counter({first + place: packed[first] >> 5 * place & 31 for first in packed for place in range(4)})


class Colours(Linear):
    """The linear model, which also returns the colour of each image on the scale 0 … 255."""

    def apply(self, params, batch_stats, images, train):
        logits, batch_stats = super().apply(params, batch_stats, images, train)
        return {"logits": logits, "colour": 255 * images.mean((1, 2, 3))}, batch_stats


def config(data, **values) -> TrainConfig:
    how = {"data": str(data), "eval_split": "off", "batch": BATCH, "num_classes": None, "mean": (0, 0, 0)}
    return toy_config(**({"steps": 8, "seed": 4, "std": (1, 1, 1)} | how | values))


def seen(config, **parts: Any) -> tuple[list[Counter[int]], Any]:
    """Return how often each image was seen in each epoch of a run, and its losses."""
    records: list[Any] = []
    result = train(config, model=Colours(), metrics=METRICS, sinks=[records.append], **parts)
    counts = [images_in(each.metrics, BATCH) for each in records if not hasattr(each, "num_images")]
    steps = NUM_IMAGES // BATCH
    return [sum(counts[at : at + steps], Counter()) for at in range(0, len(counts), steps)], result.losses


def by_class(epoch):
    found = [0, 0, 0]
    for index, count in epoch.items():
        found[LABELS[index]] += count
    return found


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        ("natural", {0: 16, 1: 6, 2: 2}),
        ("balanced", {0: 8, 1: 8, 2: 8}),
        # 24 · √n / (√16 + √6 + √2) is 12.21, 7.48 and 4.32.
        ("sqrt", {0: 12.21, 1: 7.48, 2: 4.32}),
        ("a table", None),
    ],
)
def test_each_class_and_image_is_seen_its_share_of_every_epoch(data, tmp_path, sampling, expected):
    if expected is None:
        path = tmp_path / "weights.csv"
        # As a spreadsheet writes it: 6 images of weight 1 and 2 of weight 2.5, of 11 together.
        path.write_bytes('\ufeffclass;weight\r\nn1;0\r\n"great white shark";2.5\r\n'.encode())
        sampling, expected = str(path), {0: 0, 1: 24 * 6 / 11, 2: 24 * 5 / 11}
    epochs, _ = seen(config(data, sampling=sampling))
    assert len(epochs) == 2
    for epoch in epochs:
        for label, mean in expected.items():
            assert abs(by_class(epoch)[label] - mean) < 1
            own = [epoch[index] for index in range(NUM_IMAGES) if LABELS[index] == label]
            assert max(own) - min(own) <= 1


def test_a_run_that_is_resumed_sees_the_same_images_and_is_replayed(data, tmp_path):
    given = config(data, sampling="balanced", run_dir=tmp_path / "whole")
    _, losses = seen(given)
    # In the first epoch, at its end, and in the second.
    for step in (2, 4, 5, 8):
        resumed = seen(replace(given, steps=step, run_dir=tmp_path / "parts", resume=step > 2))[1]
        np.testing.assert_array_equal(resumed[-1], losses[step - 1])
    assert replay_run(tmp_path / "parts", from_step=5, model=Colours(), metrics=METRICS).is_same
    with pytest.raises(ValueError, match="sampling was 'balanced', got 'sqrt'"):
        seen(replace(given, steps=9, run_dir=tmp_path / "parts", resume=True, sampling="sqrt"))


def test_processes_that_take_rows_of_a_batch_take_what_one_takes(data):
    """A stage may have another batch; each process asks for its own rows, in any order."""
    classes = np.array(LABELS, np.int32)
    images = EpochImages(arcs=Arcs.of_classes(classes, np.ones(3, np.int64)))
    order = DrawnOrder(NUM_IMAGES, 4, lambda _: images)
    with open_split(str(data), "train") as split:
        found = []
        for num_processes in (1, 2, 3):
            sources = [ShardBatches(split, batch=BATCH, seed=0, order=order) for _ in range(num_processes)]
            pixels, labels = np.zeros((20, BATCH, SIZE, SIZE), np.uint32), np.zeros((20, BATCH), np.int32)
            for number, step in itertools.product(range(num_processes), reversed(range(20))):
                rows = range(BATCH * number // num_processes, BATCH * (number + 1) // num_processes)
                part = slice(rows.start, rows.stop)
                sources[number].fill(step, rows, pixels[step, part], labels[step, part], timeout_s=60)
            found.append((pixels, labels))
    for pixels, labels in found[1:]:
        np.testing.assert_array_equal(pixels, found[0][0])
        np.testing.assert_array_equal(labels, found[0][1])
    assert np.bincount(found[0][1].reshape(-1)).tolist() == [40, 40, 40]


@pytest.mark.integration
def test_devices_and_processes_see_the_images_of_one(data, tmp_path):
    parts = ["--model", "tests.device_runs:Showing", "--metrics", "tests.device_runs:METRICS"]
    options = [*parts, "--data", str(data), "--batch", "6", "--steps", "9", "--sampling", "balanced"]
    found = []
    for name, more in {"one": [], "devices": ["--devices", "cpu:3"], "two": ["--spawn", "2"]}.items():
        run(*options, *more, "--run-dir", str(tmp_path / name), "--learning-rate", "0.05")
        found.append([each["metrics"] for each in records(tmp_path / name)])
    assert found[0] == found[1] == found[2]


def test_a_table_that_changed_is_refused_by_a_resume(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own.csv").write_text("label\tweight\nn3\t4\n")
    said: list[str] = []
    given = config(data, sampling="own.csv", steps=3, run_dir=tmp_path / "run")
    train(given, model=Linear(), notify=said.append)
    # 22 images of weight 1 and 2 of weight 4: 24 · 8 / 30 draws of the class.
    line = "sampling: own.csv: 24 draws an epoch, an image 0.8 to 3.2 times, a class 5 to 13 times"
    assert line in said
    again = replace(given, steps=5, resume=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    train(replace(again, sampling=str(tmp_path / "own.csv")), model=Linear())
    # It is the same table wherever it is, for instance on another machine.
    moved = str((tmp_path / "own.csv").rename(tmp_path / "moved.csv"))
    assert replay_run(tmp_path / "run", model=Linear(), sampling=moved).is_same
    with pytest.raises(ValueError, match=r"where the table of the run is now, but the run has '.*own.csv', got 'sqrt'"):
        replay_run(tmp_path / "run", model=Linear(), sampling="sqrt")
    with pytest.raises(ValueError, match=r"sampling was '.*own.csv', got 'sqrt'"):
        train(replace(again, steps=6, sampling="sqrt"), model=Linear())
    train(replace(again, steps=6, sampling=moved), model=Linear())
    assert replay_run(tmp_path / "run", model=Linear()).is_same
    (tmp_path / "own.csv").write_text("label\tweight\nn3\t5\n")
    with pytest.raises(ValueError, match=r"must keep the weights in the file of sampling, which have changed since"):
        train(replace(again, steps=7, sampling=str(tmp_path / "own.csv")), model=Linear())


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (
            None,
            "cannot be read (No such file or directory): give a table class,weight or name,weight, or one of natural,",
        ),
        ("class,count\nn1,2\n", "line 1: the header is 'class,count': begin with class,weight or name,weight"),
        ("class,weight\nn1,-2\n", "line 2: the weight is '-2': give a number of at least 0"),
        ("class,weight\nn1,nan\n", "line 2: the weight is 'nan': give a number of at least 0"),
        ("class,weight\nn1,2\nn1,2\n", "line 3: 'n1' has a weight already: remove one of the two lines"),
        (
            "class,weight\nn1,2\nn2\n",
            "line 3: there is 1 field where the header names 2: give one for each column, quote fields that contain",
        ),
        (
            "class,weight\ngoldfisch,2\n",
            "has a weight of 'goldfisch', which is not a class of DATA/train: did you mean",
        ),
        ("class,weight\nn1,2\ntench,2\n", "has a weight of 'tench', which is not another class than 'n1': correct"),
        ("class,weight\nn1,0\nn2,0\nn3,0\n", "must leave images to draw, but all of"),
        ("sep=;\n\nclass;weight\nn1;2,5\n", "line 4: the weight is '2,5': write 2.5"),
        ('class,weight\n"n1\n', "line 2: a quoted field does not end on its line: correct the line"),
        (bytes.fromhex("d0cf11e0a1b11ae1") + bytes(99), "it is a spreadsheet: save it as CSV"),
        (b"class,weight\nn\xff,0\n", "line 2: byte 2 of the line is not UTF-8: save the file as UTF-8"),
    ],
)
def test_a_faulty_table_is_refused_by_its_line(data, tmp_path, content, fault):
    path = tmp_path / "weights.csv"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=re.escape(fault.replace("DATA", str(data)))) as caught:
        train(config(data, sampling=str(path)), model=Linear())
    assert str(caught.value).startswith("sampling")


def test_the_weights_of_a_pack_and_a_table_of_names_draw_images(data, tmp_path):
    weights = np.where(np.arange(NUM_IMAGES) % 2, 0.1, 0.3).astype(np.float32)
    weights[0] = 0
    pack(long_tail().changed(weights=weights), tmp_path)
    said: list[str] = []
    epochs, _ = seen(config(tmp_path, sampling="weights"), notify=said.append)
    # 12 of 0.1 and 11 of 0.3, of 4.5 together: 0.53 and 1.6 times an epoch.
    for epoch in epochs:
        assert epoch[0] == 0
        assert all(epoch[index] in ((0, 1) if index % 2 else (1, 2)) for index in range(1, NUM_IMAGES))
    assert "sampling: 1 image with the weight 0: never drawn" in said
    rows = "".join(f"n{LABELS[index] + 1}/{index}.png,0\n" for index in range(20))
    (tmp_path / "names.csv").write_text(f"filename,weight\n{rows}")
    epochs, _ = seen(config(tmp_path, sampling=str(tmp_path / "names.csv")))
    assert [sorted(epoch.items()) for epoch in epochs] == [[(index, 6) for index in range(20, NUM_IMAGES)]] * 2
    (tmp_path / "names.csv").write_text("filename,weight\nn1/99.png,2\n")
    with pytest.raises(
        ValueError, match=r"has a weight of 'n1/99.png', which is not the name of an image of .*: correct"
    ):
        train(config(tmp_path, sampling=str(tmp_path / "names.csv")), model=Linear())
    (tmp_path / "names.csv").write_text("filename,weight\nn1/3.pgn,2\n")
    with pytest.raises(ValueError, match=r"did you mean n1/3\.png\?"):
        train(config(tmp_path, sampling=str(tmp_path / "names.csv")), model=Linear())
    with pytest.raises(ValueError, match=r"sampling weights needs those of the pack, but .*/train has none: pack it"):
        train(config(data, sampling="weights"), model=Linear())


def test_weights_of_images_of_other_splits_are_left_aside(data, tmp_path):
    pack(long_tail(), tmp_path)
    pack(fake_source(4, size=SIZE, name="val"), tmp_path)
    said: list[str] = []
    (tmp_path / "names.csv").write_text("name,weight\nn3/2.png,7\nn1/0.png,0\nn2/1.png,7\n")
    epochs, _ = seen(config(tmp_path, sampling=str(tmp_path / "names.csv"), eval_split="off"), notify=said.append)
    assert all(0 not in epoch for epoch in epochs)
    assert "sampling: 2 weights of images of other splits: not used" in said


def test_a_name_of_two_classes_is_no_name():
    classes = [ImageClass("n1", "crane"), ImageClass("n2", "crane"), ImageClass("crane2", "n1")]
    file = WeightFile("own.csv", "", "class", {"n1": Fraction(2), "crane2": Fraction(3)})
    assert file.of_classes(classes, "sampling", "train") == [2, 1, 3]
    file = WeightFile("own.csv", "", "class", {"crane": Fraction(2)})
    with pytest.raises(ValueError, match="'crane', which is not the name of one class alone of train"):
        file.of_classes(classes, "sampling", "train")


def test_what_has_no_classes_or_no_windows_is_refused(data):
    with pytest.raises(ValueError, match=r"order windowed reads each image .* not be given with sampling balanced"):
        train(config(data, sampling="balanced", order="windowed"), model=Linear())
    with pytest.raises(ValueError, match="sampling needs the labels of a packed data set, got 'sqrt'"):
        train(toy_config(sampling="sqrt"), model=Linear(), batches=toy_batch)
    with pytest.raises(ValueError, match="sampling needs the labels of a packed data set, got 'sqrt'"):
        train(toy_config(sampling="sqrt", synthetic=True), model=Linear())


def test_a_misspelt_word_is_taken_for_a_file_and_answered_with_the_word(data):
    with pytest.raises(
        ValueError, match=r"balnced cannot be read .* natural, balanced, sqrt, weights: did you mean balanced\?"
    ):
        train(config(data, sampling="balnced"), model=Linear())


@pytest.mark.parametrize("weight", [np.nan, np.inf, -1])
def test_weights_of_a_pack_that_are_none_are_refused(tmp_path, weight):
    weights = np.ones(NUM_IMAGES, np.float32)
    weights[3] = weight
    pack(long_tail().changed(weights=weights), tmp_path)
    with pytest.raises(ValueError, match=rf"the weight of image 3 \(n1/3.png\) must be at least 0 .*found {weight}"):
        train(config(tmp_path, sampling="weights"), model=Linear())


def test_names_are_read_piece_by_piece():
    table = WeightFile("own.csv", "", "name", {"b.png": Fraction(2), "e.png": Fraction(0)})
    pieces = [["a.png", "b.png"], ["c.png", "d.png"], ["e.png"]]
    assert table.of_images(iter(pieces), "sampling", "train")[0].tolist() == [1, 2, 1, 1, 0]
    with pytest.raises(ValueError, match=r"'e.png', which is not the name of an image of train: correct"):
        table.of_images(iter(pieces[:2]), "sampling", "train")


def test_roots_of_many_classes_stay_within_the_exact_numbers():
    """10,000 classes of 100 million images: their roots with 16 bits behind the point would be too large together."""
    counts = np.full(10_000, 10_000)
    counts[0] = 39_999
    most = most_weight(100_000_000)
    weights = root_weights(counts, most)
    assert weights.sum() <= most
    np.testing.assert_allclose(weights / weights[-1], np.sqrt(counts / 10_000), rtol=1e-6)


def test_weights_count_as_their_decimals():
    weights = np.array([0.1, 0.3, 0, 0.2], np.float32)
    assert whole_weights_of(weights, 1 << 40).tolist() == [1, 3, 0, 2]
    tiny = np.array([1e-30, 1, 0], np.float32)
    assert whole_weights_of(tiny, 1 << 20).tolist() == [1, (3 << 18) - 1, 0]
    many = np.random.default_rng(0).uniform(size=70_000).astype(np.float32)
    whole = whole_weights_of(many, 1 << 45)
    assert whole.sum() <= 1 << 45
    assert np.abs(whole - many * (3 * 2**43 / many.astype(float).sum())).max() <= 1
