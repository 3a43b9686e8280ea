"""The dense layout along the whole way of an image: bytes in a shard, words to the device, the same training."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageChops

from loopfeed import TrainConfig, evaluate, train
from loopfeed.engine.images.unpack import pack_dense
from loopfeed.preprocess.commands.cli import main
from loopfeed.preprocess.commands.contact_sheet import draw_contact_sheet
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.pixels import LAYOUTS, image_bytes, pack_rgb, to_rgb, to_words, words_of_row
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.shards.verify import verify_split
from tests.fake_source import fake_source, pack
from tests.toy import CLASSES, Linear

NUM_IMAGES, SHARD_IMAGES = 22, 8


@given(st.lists(st.integers(1, 4), max_size=2), st.integers(1, 5), st.integers(0, 99))
def test_words_hold_the_bytes_of_pixels_in_order(leading, quarters, seed):
    rgb = np.random.default_rng(seed).integers(256, size=(*leading, 4 * quarters, 3), dtype=np.uint8)
    words = to_words(rgb, "dense")
    assert words.shape == (*leading, 3 * quarters) == (*leading, words_of_row(4 * quarters, "dense"))
    assert words.astype("<u4").tobytes() == rgb.tobytes()
    np.testing.assert_array_equal(to_rgb(words, "dense"), rgb)
    np.testing.assert_array_equal(to_rgb(to_words(rgb, "packed"), "packed"), rgb)


@given(st.integers(1, 5), st.integers(1, 5), st.integers(0, 99))
def test_the_bytes_of_an_image_are_those_of_its_words(height, quarters, seed):
    rgb = np.random.default_rng(seed).integers(256, size=(height, 4 * quarters, 3), dtype=np.uint8)
    for layout in LAYOUTS:
        expected = to_words(rgb, layout).astype("<u4").tobytes()
        assert image_bytes(Image.fromarray(rgb), layout) == expected
    with pytest.raises(ValueError, match='takes an image of mode "RGB", got RGBA: convert the image'):
        image_bytes(Image.fromarray(rgb).convert("RGBA"), "packed")


def test_the_device_converts_dense_words_to_packed_ones():
    rgb = np.random.default_rng(0).integers(256, size=(5, 7, 36, 3), dtype=np.uint8)
    np.testing.assert_array_equal(jax.jit(pack_dense)(to_words(rgb, "dense")), pack_rgb(rgb))


@pytest.mark.parametrize("width", [1, 2, 3, 30])
def test_a_width_that_does_not_divide_is_refused(width):
    with pytest.raises(ValueError, match=f"a width that is a multiple of 4, got {width}; choose another size or"):
        to_words(np.zeros((2, width, 3), np.uint8), "dense")
    with pytest.raises(ValueError, match=f"a width that is a multiple of 4, got {width}; choose another size or"):
        image_bytes(Image.new("RGB", (width, 2)), "dense")
    with pytest.raises(ValueError, match=f"a width that is a multiple of 4, got {width}; choose another size or"):
        pack(fake_source(3, size=width), "memory://x", layout="dense")
    with pytest.raises(ValueError, match="layout must be one of packed, dense, got 'loose'"):
        PackSettings(layout="loose")  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [np.zeros(4, np.uint32), np.zeros(3, np.int64), np.uint32(3)])
def test_only_words_of_the_dense_layout_are_unpacked(bad):
    with pytest.raises(ValueError, match=r"to_rgb takes uint32 \[\.\.\., a multiple of 3\] in the dense layout, got "):
        to_rgb(np.asarray(bad), "dense")


@pytest.fixture(scope="module", params=["raw", "blosc"])
def packs(request, tmp_path_factory):
    """The same images in both layouts: small ones, which are gathered, and large ones, which are lent."""
    made = {}
    for size in (8, 64):
        source = fake_source(NUM_IMAGES, size=size, seed=size)
        for layout in LAYOUTS:
            made[size, layout] = tmp_path_factory.mktemp(f"{size}-{layout}")
            for name in ("train", "val"):
                pack(source.changed(name=name), made[size, layout], layout=layout, codec=request.param, shard_images=8)
    return made


def test_shard_files_hold_rgb_bytes(tmp_path):
    source = fake_source(5, size=8)
    pack(source, tmp_path, layout="dense", checksum=False)
    content = (tmp_path / "train/pixels/c/0/0/0").read_bytes()
    assert content[: 4 * 192] == source.images[:4].tobytes()
    assert len(content) == 4 * 192 + 4 * 16 + 4  # the index and its checksum


@pytest.mark.parametrize("size", [8, 64])
def test_images_are_read_lent_verified_and_shown(packs, size):
    words = {}
    for layout in LAYOUTS:
        with open_split(str(packs[size, layout]), "train") as split:
            assert (split.width, split.row_words) == (size, words_of_row(size, layout))
            assert split.manifest.image_bytes == 4 * size * split.row_words
            indices = np.random.default_rng(0).integers(NUM_IMAGES, size=30)
            words[layout] = np.zeros((30, size, split.row_words), np.uint32)
            split.read_into(indices, words[layout], np.zeros(30, np.int32), timeout_s=30)
            lent = split.lend(indices, np.zeros(30, np.int32), timeout_s=30)
            if lent is not None:
                np.testing.assert_array_equal(np.stack(lent.images), words[layout])
    np.testing.assert_array_equal(to_rgb(words["dense"], "dense"), to_rgb(words["packed"], "packed"))
    sheets = []
    for layout in LAYOUTS:
        assert verify_split(str(packs[size, layout]), "train") == ()
        with open_split(str(packs[size, layout]), "train") as split:
            sheets.append(draw_contact_sheet(split, title="both"))
    assert ImageChops.difference(*sheets).getbbox() is None


@dataclass
class LinearOf(Linear):
    """A linear classifier of images of another size: a weight of its own for every byte."""

    size: int = 8

    def init(self, key):
        params, batch_stats = super().init(key)
        weights = 0.01 * jax.random.normal(key, (self.size * self.size * 3, CLASSES))
        return params | {"weights": weights}, batch_stats


@pytest.mark.parametrize("size", [8])
def test_training_and_evaluation_are_the_same_to_the_bit(packs, size, tmp_path):
    results = {}
    for layout in LAYOUTS:
        data, run_dir = str(packs[size, layout]), str(tmp_path / layout)
        config = TrainConfig(steps=3, batch=4, data=data, run_dir=run_dir, crop="random", crop_padding=2, flip=0.5)
        losses = train(config, model=LinearOf(size=size)).losses.tolist()
        record = evaluate(tmp_path / layout, model=LinearOf(size=size)).record
        results[layout] = losses, record.loss, record.num_images, record.top1
    assert results["dense"] == results["packed"]


def test_a_changed_pixel_is_detected_without_checksums(tmp_path):
    pack(fake_source(5, size=8), tmp_path, layout="dense", checksum=False)
    file = tmp_path / "train/pixels/c/0/0/0"
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    (damage,) = verify_split(str(tmp_path), "train")
    assert str(damage) == "pixels/c/0/0/0: its images differ from those that were packed in this file"


def test_the_command_packs_and_names_the_layout(tmp_path):
    for label, name in enumerate(("n1", "n2")):
        (tmp_path / "images" / name).mkdir(parents=True)
        (tmp_path / "images" / name / "0.png").write_bytes(fake_source(2, size=8).read(label))
    arguments = [str(tmp_path / "images"), str(tmp_path / "data"), "--size", "8", "--layout", "dense"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    assert "dense layout, codec raw, with checksums" in result.output
    result = CliRunner().invoke(main, [*arguments[:3], "9", "--layout", "dense"])
    assert result.exit_code == 2
    assert "the dense layout needs a width that is a multiple of 4, got 9; choose another size" in result.output
