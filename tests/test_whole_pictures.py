"""Whole pictures: what is stored on a canvas, and what the network receives of it."""

import hashlib
import io
import math
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import zarr
from PIL import Image

from loopfeed import evaluate, open_split, predict, replay_run, run_settings, train
from loopfeed.engine.images.boxes import BLOCKS_OF_BOX, Boxes
from loopfeed.engine.images.crops import crop_pictures, draw_crop_boxes, read_extents, square_boxes
from loopfeed.engine.images.settings import Augmentation
from loopfeed.engine.settings import SettingError
from loopfeed.preprocess.decoding.decode import ResizeRule, decode_stored
from loopfeed.preprocess.decoding.notes import NOTHING, DecodeNotes
from loopfeed.preprocess.extents import Extent, Whole, are_outside, num_pixels, share_of_square, upright
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.packing.parts import finish_parts, pack_part
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.pixels import pack_rgb, unpack_rgb
from loopfeed.preprocess.shards.arrays import words_digest
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.manifest import FORMAT_VERSION, Manifest
from loopfeed.preprocess.shards.targets import SplitTargets, pack_bits
from loopfeed.preprocess.shards.verify import verify_split
from tests.fake_source import FakeSource, files_of
from tests.toy import toy_config

# A canvas of 8 × 4 pixels, a multiple of 4; evaluation crops 4 × 4. A picture whose shorter side is 4 is not resampled.
RULE = ResizeRule(4, 4, "bicubic", canvas="3:2")
SIZES = [(6, 4), (4, 6), (4, 4), (5, 4), (4, 5), (6, 4), (4, 6)]


def png(rgb):
    file = io.BytesIO()
    Image.fromarray(rgb).save(file, "PNG")
    return file.getvalue()


def drawn(width: int, height: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, width, height]).integers(0, 256, (height, width, 3), dtype=np.uint8)


@dataclass
class Pictures(FakeSource):
    """Pictures of different sizes."""

    def digest(self):
        return hashlib.sha256(b"".join(image.tobytes() for image in self.images)).hexdigest()


def pictures(sizes=SIZES, **values):
    images: Any = [drawn(width, height, seed) for seed, (width, height) in enumerate(sizes)]
    return Pictures(images, [index % 3 for index in range(len(images))], **values)


def settings(**values):
    return PackSettings(rule=RULE, **({"shard_images": 3} | values))


def pack(source, dest, **values):
    return pack_split(source, open_location(str(dest)).child(source.name), settings(**values))


@pytest.mark.parametrize(
    ("size", "stored"),
    [
        # As torchvision's Resize: the shorter side is 8, the longer is rounded down.
        ((32, 32), (8, 8, False)),
        ((40, 32), (8, 10, False)),
        ((32, 40), (8, 10, True)),
        ((48, 32), (8, 12, False)),
        ((49, 32), (8, 12, False)),
        ((3, 2), (8, 12, False)),
        # Longer than 3:2: the longer side is that of the canvas.
        ((64, 32), (6, 12, False)),
        ((32, 64), (6, 12, True)),
        ((500, 2), (1, 12, False)),
        ((1, 999), (1, 12, True)),
    ],
)
def test_a_picture_is_resized_and_never_cut(size, stored):
    rgb = drawn(*size)
    notes: list[DecodeNotes] = []
    rule = ResizeRule(7, 8, "bicubic", canvas="3:2")
    canvas, extent = decode_stored(png(rgb), rule, note=notes.append)
    assert extent
    assert (canvas.size, extent) == ((12, 8), Extent(*stored))
    shape = (extent.height, extent.width) if extent.is_transposed else (extent.width, extent.height)
    expected = np.asarray(Image.fromarray(rgb).resize(shape, Image.Resampling.BICUBIC))
    np.testing.assert_array_equal(upright(np.asarray(canvas), extent.to_word()), expected)
    beside = np.asarray(canvas).copy()
    beside[: extent.height, : extent.width] = 0
    assert not beside.any()
    assert sum(notes, NOTHING).num_fitted == (max(size) / min(size) > 12.999 / 8)


def test_a_canvas_that_is_too_wide_is_refused_before_anything_is_packed():
    with pytest.raises(ValueError, match=r"a canvas must be at most 4096 pixels wide, but 4:1 .* is 4400: lower"):
        ResizeRule(1024, 1100, canvas="4:1")


@pytest.mark.parametrize("canvas", ["2:3", "5:1", "3/2", "0:1", "3:2 ", "٣:٢", "", "wide"])
def test_a_canvas_that_is_none_is_refused(canvas):
    with pytest.raises(ValueError, match=r"canvas must be width:height from 1:1 to 4:1, such as 3:2, got"):
        ResizeRule(canvas=canvas)


def test_a_rule_says_its_canvas_in_lowest_terms_and_only_if_it_has_one():
    assert "canvas" not in ResizeRule().to_json()
    rule = ResizeRule(canvas="6:4")
    assert (rule.to_json()["canvas"], rule.stored_shape, rule.whole) == ("3:2", (256, 384), (224, 256))
    assert ResizeRule.from_json(rule.to_json()) == rule


def test_an_extent_is_one_word():
    for extent in (Extent(1, 1, False), Extent(256, 384, True), Extent(4096, 16384, True)):
        assert Extent.from_word(extent.to_word()) == extent
        assert 0 < extent.to_word() < 2**31
    words = np.array([Extent(4, 6, False).to_word(), Extent(2, 3, True).to_word()], np.uint32)
    assert num_pixels(words) == 30
    assert are_outside(words, 4, 6).tolist() == [False, False]
    assert are_outside(words, 3, 6).tolist() == [True, False]
    assert are_outside(np.array([0, 5, 2**31 | words[0]], np.uint32), 4, 6).all()


@pytest.mark.parametrize("values", [{}, {"codec": "blosc"}, {"layout": "dense", "checksum": False}], ids=str)
def test_a_pack_of_whole_pictures_has_their_words_places_and_mean(tmp_path, values):
    source = pictures(broken=frozenset({2}))
    manifest = pack(source, tmp_path, **values).manifest
    images = [image for index, image in enumerate(source.images) if index != 2]
    assert (manifest.format_version, manifest.height, manifest.width) == (FORMAT_VERSION, 4, 8)
    together = np.concatenate([image.reshape(-1, 3) for image in images]) / 255
    np.testing.assert_allclose(manifest.channel_mean, together.mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(manifest.channel_std, together.std(axis=0), rtol=1e-12)
    assert verify_split(str(tmp_path), "train") == ()
    with open_split(str(tmp_path), "train") as split:
        words, labels = np.zeros((6, 4, split.row_words), np.uint32), np.zeros((6, 2), np.int32)
        split.read_into(np.arange(6), words, labels, timeout_s=60)
    assert labels[:, 1].tolist() == [0, 1, 0, 1, 2, 0]
    if "layout" not in values:
        for image, canvas, word in zip(images, words, labels[:, 0].tolist(), strict=True):
            np.testing.assert_array_equal(upright(unpack_rgb(canvas), word), image)


@pytest.mark.parametrize("rule", [{"canvas": "3:2"}, {"size": 0}, {"size": "a"}, {"size": 5}, {"resize": 400}], ids=str)
def test_a_manifest_whose_rule_is_not_that_of_its_canvas_is_refused(tmp_path, rule):
    manifest = pack(pictures(), tmp_path).manifest
    assert Manifest.from_json(manifest.to_json()) == manifest
    given = rule if "canvas" in rule else dict(manifest.resize_rule) | rule
    with pytest.raises(ShardError, match="size of resize_rule must be from 1 to resize, the height of the canvas"):
        replace(manifest, resize_rule=given)


def test_an_interrupted_pack_and_one_in_parts_have_the_same_bytes(tmp_path):
    source = pictures(broken=frozenset({1}))
    pack(source, tmp_path / "whole")
    expected = files_of(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        pack(source.changed(raising={4: KeyboardInterrupt()}), tmp_path / "cut")
    pack(source.changed(), tmp_path / "cut")
    location = open_location(str(tmp_path / "parts")).child("train")
    for index in (1, 2):
        pack_part(source.changed(), location, settings(), Part(index, 2))
    finish_parts(source.changed(), location, settings())
    assert files_of(tmp_path / "cut") == files_of(tmp_path / "parts") == expected


def test_another_pack_in_its_place_leaves_none_of_its_files_and_follows_no_link(tmp_path):
    location, squares = open_location(str(tmp_path)).child("train"), PackSettings(rule=ResizeRule(4, 4))
    pack(pictures(), tmp_path)
    pack_split(pictures(), location, squares, overwrite=True)
    assert verify_split(str(tmp_path), "train") == ()
    assert not (tmp_path / "train/extents").exists()
    (tmp_path / "train/extents").symlink_to(tmp_path)
    with pytest.raises(ShardError, match="train/extents is a link, and nothing is written through links"):
        pack_split(pictures(), location, squares, overwrite=True)


def changed_place(path):
    """Move the first picture's place with a valid checksum, as another program may."""
    array = zarr.open_array(str(path), mode="r+")
    array[0] = int(np.asarray(array[0])) ^ 1


DAMAGES: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: (path / "c/0").unlink(),
    "truncated": lambda path: (path / "c/0").write_bytes((path / "c/0").read_bytes()[:-9]),
    "longer": lambda path: (path / "c/0").write_bytes((path / "c/0").read_bytes() + bytes(9)),
    "wrong bit": lambda path: (path / "c/0").write_bytes(flipped((path / "c/0").read_bytes())),
    "wrong words": changed_place,
    "no metadata": lambda path: (path / "zarr.json").unlink(),
    "other metadata": lambda path: (path / "zarr.json").write_text("{}"),
    "no metadata, wrong bit": lambda path: (DAMAGES["wrong bit"](path), DAMAGES["no metadata"](path)),
    "nothing left": shutil.rmtree,
}


def flipped(content):
    return bytes([content[0] ^ 1, *content[1:]])


@pytest.mark.parametrize("damage", DAMAGES)
def test_lost_places_are_packed_again_to_the_same_bytes(tmp_path, damage):
    source = pictures(broken=frozenset({2}))
    pack(source, tmp_path)
    expected = files_of(tmp_path)
    DAMAGES[damage](tmp_path / "train/extents")
    assert verify_split(str(tmp_path), "train") != ()
    repaired = pack(source.changed(), tmp_path).repaired
    assert {each.split("/")[0] for each in repaired} == {"extents"}
    assert files_of(tmp_path) == expected
    assert pack(source.changed(), tmp_path).repaired == ()


def test_lost_places_pixels_and_failures_are_packed_again_at_once(tmp_path):
    source = pictures(broken=frozenset({2}))
    pack(source, tmp_path)
    expected = files_of(tmp_path)
    for file in ("extents/c/0", "pixels/c/1/0/0", "labels/c/0", "failures.jsonl"):
        (tmp_path / "train" / file).unlink()
    assert len(pack(source.changed(), tmp_path).repaired) == 4
    assert files_of(tmp_path) == expected


def test_places_of_a_source_that_has_changed_are_not_written(tmp_path, monkeypatch):
    source = pictures(broken=frozenset({2}))
    pack(source, tmp_path)
    lost = tmp_path / "train/extents/c/0"
    lost.unlink()
    digest, turned = source.digest(), source.changed(images=[image.swapaxes(0, 1) for image in source.images])
    monkeypatch.setattr(Pictures, "digest", lambda _: digest)
    for other, reason in (
        (turned, "the pictures of the source now have other sizes"),
        (source.changed(broken=frozenset({1, 2})), "other images of the source fail now, or for other reasons"),
    ):
        with pytest.raises(ShardError, match=f"extents is missing or damaged and can't be packed again: {reason}; "):
            pack(other, tmp_path)
    assert not lost.exists()


def test_a_changed_place_is_no_place_to_a_reader(tmp_path):
    pack(pictures(), tmp_path)
    DAMAGES["wrong bit"](tmp_path / "train/extents")
    with open_split(str(tmp_path), "train") as split, pytest.raises(ShardError, match="extents/c/0"):
        split.load_numbers(timeout_s=60)


@pytest.mark.parametrize("word", [0, 5 << 15 | 8, 4 << 15 | 9, 1 << 31 | 4 << 15 | 4], ids=hex)
def test_a_place_outside_the_canvas_is_refused_whatever_the_digests_say(tmp_path, word):
    manifest = pack(pictures(), tmp_path).manifest
    array: Any = zarr.open_array(str(tmp_path / "train/extents"), mode="r+")
    array[3] = word
    forged = replace(manifest, extent_digests=(words_digest([np.asarray(array[:])]),))
    (tmp_path / "train/manifest.json").write_text(forged.to_json())
    with (
        open_split(str(tmp_path), "train") as split,
        pytest.raises(
            ShardError,
            match=r"extents: image 3 \(n1/3.png\) is not within its canvas of 8 × 4 pixels; run `inspect-shards",
        ),
    ):
        split.read_into(np.arange(7), np.zeros((7, 4, 8), np.uint32), np.zeros((7, 2), np.int32), timeout_s=60)


@pytest.mark.parametrize(("was", "now"), [(RULE, replace(RULE, canvas=None)), (replace(RULE, canvas=None), RULE)])
def test_a_pack_begun_on_another_canvas_is_not_continued(tmp_path, was, now):
    source, location = pictures(), open_location(str(tmp_path)).child("train")
    with pytest.raises(KeyboardInterrupt):
        pack_split(source.changed(raising={5: KeyboardInterrupt()}), location, PackSettings(rule=was, shard_images=3))
    shown = ["square" if rule.canvas is None else "3:2" for rule in (was, now)]
    for _ in range(2):  # unfinished, then finished
        with pytest.raises(ShardError, match=f"--canvas was {shown[0]}, is now {shown[1]}. Use the same source and op"):
            pack_split(source.changed(), location, PackSettings(rule=now, shard_images=3))
        pack_split(source.changed(), location, PackSettings(rule=was, shard_images=3))


def on_canvas(images, height, width, noise=None):
    """Return the words and the extents of pictures on canvases, what is beside them black or noise."""
    words = np.zeros((len(images), height, width), np.uint32) if noise is None else noise.copy()
    extents = np.zeros(len(images), np.int32)
    for index, image in enumerate(images):
        is_transposed = image.shape[0] > image.shape[1]
        stored = image.swapaxes(0, 1) if is_transposed else image
        words[index, : stored.shape[0], : stored.shape[1]] = pack_rgb(np.ascontiguousarray(stored))
        extents[index] = Extent(stored.shape[0], stored.shape[1], is_transposed).to_word()
    return jnp.asarray(words), jnp.asarray(extents)


IMAGES = [drawn(*size, seed) for seed, size in enumerate([(36, 24), (24, 36), (30, 24), (24, 24), (36, 11), (9, 36)])]


def test_a_box_of_a_picture_is_what_pillow_makes_of_it():
    random = np.random.default_rng(0)
    noise = random.integers(0, 2**32, (len(IMAGES), 24, 36), dtype=np.uint32)
    boxes = []
    for image in IMAGES:
        height, width = (int(random.integers(1, side + 1)) for side in image.shape[:2])
        top, left = (
            int(random.integers(0, side - length + 1))
            for side, length in zip(image.shape, (height, width), strict=False)
        )
        boxes.append((top, left, height, width))
    columns = Boxes(*(jnp.asarray(column, jnp.int32) for column in zip(*boxes, strict=True)))
    found = []
    for beside in (None, noise):
        words, extents = on_canvas(IMAGES, 24, 36, beside)
        found.append(np.asarray(crop_pictures(words, read_extents(extents), columns, 13)))
    np.testing.assert_array_equal(found[0], found[1])  # what is beside a picture has no effect
    for image, square, (top, left, height, width) in zip(IMAGES, found[0], boxes, strict=True):
        cropped = Image.fromarray(image).crop((left, top, left + width, top + height))
        expected = np.asarray(cropped.resize((13, 13), Image.Resampling.BILINEAR)).astype(int)
        # A transposed picture is resampled along its columns first, and rounded to levels in between.
        assert np.abs(unpack_rgb(square).astype(int) - expected).max() <= 1


def test_the_centre_is_that_of_resize_and_centre_crop():
    words, extents = on_canvas(IMAGES, 24, 36)
    places = read_extents(extents)
    found = unpack_rgb(np.asarray(crop_pictures(words, places, square_boxes(places, Whole(21, 24)), 21)))
    for image, square in list(zip(IMAGES, found, strict=True))[:4]:
        # torchvision's CenterCrop, whose offset is rounded half to even.
        top, left = (round((side - 21) / 2) for side in image.shape[:2])
        np.testing.assert_array_equal(square, image[top : top + 21, left : left + 21])
    # Pictures that were made smaller to fit: 21/24 of their shorter side, resized.
    boxes = square_boxes(places, Whole(21, 24))
    assert np.asarray(boxes.height)[4:].tolist() == [10, 8]
    assert np.asarray(boxes.top)[4:].tolist() == [0, 14]


def test_a_random_square_lies_in_its_picture_at_any_place():
    words = jax.random.bits(jax.random.key(0), (4000, 2))
    extents = jnp.full(4000, Extent(24, 30, is_transposed=True).to_word(), jnp.int32)
    boxes = square_boxes(read_extents(extents), Whole(21, 24), words)
    assert set(np.asarray(boxes.top).tolist()) == set(range(10))
    assert set(np.asarray(boxes.left).tolist()) == set(range(4))
    assert set(np.asarray(boxes.height).tolist()) == {21}


def torchvisions_box(random, shape, area_range, ratio_range):
    """Draw a box as torchvision's RandomResizedCrop does, from its description."""
    height, width = shape
    for _ in range(10):
        area = height * width * random.uniform(*area_range)
        ratio = math.exp(random.uniform(*map(math.log, ratio_range)))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return random.integers(0, height - h + 1), random.integers(0, width - w + 1), h, w
    w, h = width, height
    if width / height < ratio_range[0]:
        h = round(width / ratio_range[0])
    elif width / height > ratio_range[1]:
        w = round(height * ratio_range[1])
    return (height - h) // 2, (width - w) // 2, h, w


@pytest.mark.parametrize("shape", [(256, 384), (384, 256), (256, 256), (60, 384)], ids=str)
def test_boxes_are_distributed_as_torchvisions(shape):
    count, ranges = 20000, ((0.08, 1.0), (3 / 4, 4 / 3))
    words = jax.random.bits(jax.random.key(1), (count, BLOCKS_OF_BOX, 2))
    height, width = (jnp.full(count, side, jnp.int32) for side in shape)
    found: Any = np.stack(draw_crop_boxes(words, height, width, *ranges), axis=1).astype(float)
    random = np.random.default_rng(2)
    expected: Any = np.array([torchvisions_box(random, shape, *ranges) for _ in range(count)], float)
    for values in (found, expected):
        assert (values[:, :2] >= 0).all()
        assert (values[:, :2] + values[:, 2:] <= shape).all()
    for column in range(4):
        for quantile in (0.05, 0.25, 0.5, 0.75, 0.95):
            left, right = (np.quantile(values[:, column], quantile) for values in (found, expected))
            assert abs(left - right) <= 0.02 * max(shape) + 1, (column, quantile)
    areas = [(values[:, 2] * values[:, 3]).mean() / math.prod(shape) for values in (found, expected)]
    assert areas[0] == pytest.approx(areas[1], abs=0.01)


def test_the_size_of_whole_pictures_and_what_does_not_fit_them():
    assert Augmentation(whole=Whole(224, 256)).output_shape(256, 384) == (224, 224)
    assert Augmentation(whole=Whole(224, 256), size=96, crop="random").output_shape(256, 384) == (96, 96)
    with pytest.raises(SettingError, match="must be 0 for whole pictures, whose random crops lie within them, got 4"):
        Augmentation(whole=Whole(224, 256), crop="random", crop_padding=4)


class Flat:
    """A linear classifier of images of any size."""

    def init(self, key):
        return {"weights": 0.1 * jax.random.normal(key, (3, 3))}, {}

    def apply(self, params, batch_stats, images, train):
        weights = jnp.arange(1, images.shape[1] * images.shape[2] + 1, dtype=jnp.float32) / 16
        means = jnp.einsum("bpc,p->bc", images.reshape(len(images), -1, 3), weights)
        return means @ params["weights"], batch_stats


@pytest.fixture
def packs(tmp_path, monkeypatch):
    """Whole pictures of 6 × 4 px or 4 × 6 px, which are not resampled, and their central squares."""
    monkeypatch.chdir(tmp_path)
    for name, seed in (("train", 0), ("val", 100)):
        images: Any = [drawn(*size, seed + number) for number, size in enumerate(SIZES * 2)]
        source = Pictures(images, [index % 3 for index in range(len(images))], name=name)
        for dest, rule in (("whole", RULE), ("square", replace(RULE, canvas=None))):
            pack_split(source, open_location(dest).child(name), PackSettings(rule=rule, shard_images=3))
    return tmp_path


def run_of(data, **values):
    notify = values.pop("notify", lambda _: None)
    settings = {"data": data, "steps": 7, "batch": 4, "run_dir": f"run-{data}"} | values
    return train(toy_config(**settings), model=Flat(), notify=notify)


def test_centres_of_whole_pictures_train_and_evaluate_as_squares(packs):
    """With 14 images, an evaluation ends with a batch that is not full. The programs may round differently."""
    scale = {"mean": (0.5,) * 3, "std": (0.25,) * 3}
    whole, square = run_of("whole", **scale), run_of("square", **scale)
    np.testing.assert_allclose(whole.losses, square.losses, rtol=1e-5)
    config = run_settings("run-whole")
    results = [evaluate(replace(config, data=data), model=Flat()).record for data in ("whole", "square")]
    assert results[0].loss == pytest.approx(results[1].loss, rel=1e-5)
    assert (results[0].num_images, results[0].top1) == (14, results[1].top1)


def test_a_run_on_whole_pictures_resumes_and_replays_to_the_bit(packs):
    values = {"crop": "resized", "flip": 0.5, "image_size": 4, "eval_split": "off"}
    losses = run_of("whole", **values).losses
    assert replay_run("run-whole", model=Flat()).is_same
    run_of("whole", **values, steps=3, overwrite=True)
    said: list[str] = []
    again = run_of("whole", **values, resume=True, notify=said.append)
    assert any("from the snapshot of step 3" in line or "step 3" in line for line in said), said
    np.testing.assert_array_equal(again.losses[-4:], losses[3:])


def test_targets_and_windows_and_the_dense_layout_of_whole_pictures(packs):
    """Which words cross beside the pixels, and in which order images come, changes no loss."""
    images: Any = [drawn(*size, number) for number, size in enumerate(SIZES * 2)]
    source = Pictures(images, [index % 3 for index in range(len(images))])
    pack_split(source, open_location("dense").child("train"), PackSettings(rule=RULE, shard_images=3, layout="dense"))
    losses = run_of("whole", eval_split="off").losses
    np.testing.assert_array_equal(run_of("dense", eval_split="off").losses, losses)
    bits = pack_bits(np.eye(3, dtype=np.bool)[[index % 3 for index in range(len(images))]])
    targets = SplitTargets("classes", "0" * 64, bits)
    location = open_location("targets").child("train")
    manifest = pack_split(source, location, PackSettings(rule=RULE, shard_images=3), targets=targets).manifest
    assert (manifest.format_version, manifest.label_array) == (FORMAT_VERSION, "targets")
    with open_split("targets", "train") as split:
        words = np.zeros((14, *split.label_row), np.int32)
        split.read_into(np.arange(14), np.zeros((14, 4, 8), np.uint32), words, timeout_s=60)
        np.testing.assert_array_equal(split.read_targets(np.arange(14)), np.eye(3)[np.arange(14) % 3])
    assert words[:, 1].tolist() == [1 << index % 3 for index in range(14)]
    windowed = run_of("targets", eval_split="off", loss="binary-cross-entropy", window_gb=1e-6, image_size=4)
    assert np.isfinite(windowed.losses).all()


def test_weights_of_squares_are_evaluated_on_whole_pictures_with_a_warning(packs):
    run_of("square", crop="random", crop_padding=1, image_size=3, eval_split="off")
    said: list[str] = []
    config = replace(run_settings("run-square"), data="whole", eval_split="val")
    assert evaluate(config, model=Flat(), notify=said.append).record.num_images == 14
    (line,) = (each for each in said if "trained on squares" in each)
    assert "these are whole pictures, of which another part becomes 3 × 3 px" in line


def test_whole_pictures_are_evaluated_at_another_size(packs):
    """Up to the stored shorter side; the square is the same, resized to more pixels."""
    small, large = run_of("whole", image_size=3), run_of("whole", image_size=3, eval_image_size=4, run_dir="run-large")
    np.testing.assert_array_equal(small.losses, large.losses)
    found = evaluate(replace(run_settings("run-whole"), image_size=4), model=Flat()).record
    assert found.loss == evaluate("run-large", model=Flat()).record.loss == large.evaluations[-1].loss
    assert found.loss == pytest.approx(
        evaluate(replace(run_settings("run-large"), data="square"), model=Flat()).record.loss
    )
    with pytest.raises(SettingError, match="eval_image_size must be at most the shorter side of the stored"):
        run_of("whole", eval_image_size=5, run_dir="run-larger")


def test_crops_of_squares_with_a_margin_say_what_they_leave_out(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pack_split(pictures(), open_location("margin").child("train"), PackSettings(rule=ResizeRule(3, 4)))
    said: list[str] = []
    run_of("margin", steps=1, crop="resized", image_size=3, eval_split="off", notify=said.append)
    (line,) = (each for each in said if each.startswith("crops:"))
    assert "from packed squares, which keep 42 % of a 4:3 photograph; published accuracies crop whole pictures" in line
    assert share_of_square(ResizeRule(224, 256).to_json()) == pytest.approx(0.574, abs=5e-4)
    for rule in (ResizeRule(4, 4).to_json(), RULE.to_json(), ResizeRule(3, 4, canvas="3:2").to_json(), {"size": "4"}):
        assert share_of_square(rule) is None


def test_a_photograph_is_classified_as_its_stored_picture(packs):
    """The network receives 4 × 4 px of the central 7 × 7 px."""
    rule = ResizeRule(7, 8, "bicubic", canvas="3:2")
    sizes = [(12, 8), (8, 12), (60, 45), (30, 5)]
    images: Any = [drawn(*size) for size in sizes]
    for name in ("train", "val"):
        source = Pictures(images, [0, 1, 2, 0], name=name)
        pack_split(source, open_location("small").child(name), PackSettings(rule=rule))
    run_of("small", image_size=4)
    files = [f"{number}.png" for number in range(4)]
    for file, image in zip(files, images, strict=True):
        (packs / file).write_bytes(png(image))
    found = predict("run-small", files, model=Flat(), top=1)
    stored = evaluate("run-small", model=Flat(), predictions=True).predictions
    assert stored
    np.testing.assert_array_equal(found.labels[:, 0], stored.classes[:, 0])
    np.testing.assert_array_equal(found.probabilities[:, 0], stored.probabilities[:, 0])
