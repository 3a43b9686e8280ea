"""Packs with several classes or numbers per image: equal to an independent reading, resumed, verified, refused."""

import json
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest
import tensorstore as ts
from click.testing import CliRunner
from PIL import Image

from loopfeed.preprocess.commands.cli import main as preprocess_imagenet
from loopfeed.preprocess.commands.inspect_cli import main as inspect_shards
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.pixels import to_rgb
from loopfeed.preprocess.shards import arrays, split_arrays
from loopfeed.preprocess.shards.arrays import row_shards
from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.shards.targets import count_classes, pack_bits, unpack_bits
from loopfeed.preprocess.shards.verify import verify_split
from loopfeed.preprocess.sources import label_columns
from loopfeed.preprocess.sources.listing import SourceError
from loopfeed.preprocess.sources.open_source import open_source
from tests.fake_source import fake_source, files_of, pack
from tests.labelled_photographs import COLOURS, SIZE, draw_photographs, pack_labelled, read_independently, write_labels

NUM_IMAGES = 14
FORMS = [
    ("labels.csv", "classes", "raw"),
    ("labels.jsonl", "classes", "blosc"),
    ("labels.csv", "numbers", "blosc"),
    ("labels.jsonl", "numbers", "raw"),
]


@pytest.fixture
def photographs(tmp_path):
    root = tmp_path / "photographs"
    return root, draw_photographs(root, NUM_IMAGES)


@pytest.fixture
def packed(tmp_path, photographs):
    """A pack with classes."""
    root, paths = photographs
    pack_labelled(root, write_labels(tmp_path / "labels.csv", paths), tmp_path / "data")
    return tmp_path / "data"


def labels_by_pixels(data, split="train"):
    """Return the targets of each image by its pixels, as the reader returns them."""
    with open_split(str(data), split) as opened:
        indices = np.arange(opened.num_images)
        pixels = np.empty((len(indices), opened.height, opened.row_words), np.uint32)
        words = np.empty((len(indices), opened.target_words), np.int32)
        opened.read_into(indices, pixels, words, timeout_s=30)
        targets = opened.read_targets(indices)
        assert opened.manifest.targets is not None
        if opened.manifest.targets.kind == "numbers":
            assert np.array_equal(words.view(np.float32), targets)
        else:
            assert np.array_equal(unpack_bits(words.view(np.uint32), opened.num_classes), targets)
        rgb = to_rgb(pixels, opened.manifest.pixel_layout)
    return {image.tobytes(): row.tolist() for image, row in zip(rgb, targets, strict=True)}


@pytest.mark.parametrize(("name", "kind", "codec"), FORMS)
def test_every_image_has_the_labels_of_an_independent_reading(tmp_path, photographs, name, kind, codec):
    root, paths = photographs
    labels = write_labels(root / name, paths, kind=kind)
    (root / "notes.txt").write_text("not an image")
    pack_labelled(root, labels, tmp_path / "data", codec=codec)
    expected = read_independently(root, labels)
    assert len(expected) == NUM_IMAGES
    assert labels_by_pixels(tmp_path / "data") == expected
    assert verify_split(str(tmp_path / "data"), "train") == ()
    # Any Zarr reader finds the rows as the format says.
    with open_split(str(tmp_path / "data"), "train") as split:
        manifest = split.manifest
        stored = ts.open({"driver": "zarr3", "kvstore": f"file://{tmp_path}/data/train/targets/"}).result()
        rows = stored.read().result()
        values = split.read_targets(np.arange(NUM_IMAGES))
    if kind == "classes":
        assert rows.dtype == np.uint32
        assert [[(row[0] >> bit) & 1 for bit in range(3)] for row in rows] == values.tolist()
        assert tuple(each.id for each in manifest.classes) == COLOURS
        assert manifest.class_counts == tuple(values.sum(axis=0).astype(int).tolist())
    else:
        assert rows.dtype == np.float32
        assert manifest.targets is not None
        assert np.array_equal(rows, values)
        assert manifest.targets.minima == tuple(values.min(axis=0).tolist())
        assert manifest.targets.maxima == tuple(values.max(axis=0).tolist())


def test_an_archive_and_a_folder_are_packed_alike(tmp_path, photographs, packed):
    root, paths = photographs
    with tarfile.open(tmp_path / "all.tar", "w") as tar:
        tar.add(root, "outer")
    labels = write_labels(tmp_path / "outer.csv", [f"outer/{path}" for path in paths])
    pack_labelled(tmp_path / "all.tar", labels, tmp_path / "from_tar")
    ours, theirs = (files_of(folder / "train") for folder in (packed, tmp_path / "from_tar"))
    manifests = [json.loads(each.pop("manifest.json")) for each in (ours, theirs)]
    assert ours == theirs
    assert {key for key in manifests[0] if manifests[0][key] != manifests[1][key]} == {"targets", "manifest_digest"}


def test_held_out_images_are_a_fraction_of_all_and_no_image_is_in_both(tmp_path, photographs):
    root, paths = photographs
    labels = write_labels(tmp_path / "labels.csv", paths)
    results = pack_labelled(root, labels, tmp_path / "data", holdout=0.3)
    assert {name: result.manifest.num_images for name, result in results.items()} == {"train": 10, "val": 4}
    assert results["train"].manifest.classes == results["val"].manifest.classes
    train, val = labels_by_pixels(tmp_path / "data"), labels_by_pixels(tmp_path / "data", "val")
    assert not train.keys() & val.keys()
    assert train | val == read_independently(root, labels)
    # The choice depends on the paths alone.
    more = write_labels(tmp_path / "more.csv", paths, kind="numbers")
    pack_labelled(root, more, tmp_path / "again", holdout=0.3)
    assert labels_by_pixels(tmp_path / "again", "val").keys() == val.keys()


def test_a_pack_killed_three_times_ends_like_an_uninterrupted_one(tmp_path, photographs):
    root, paths = photographs
    labels = write_labels(tmp_path / "labels.csv", paths, kind="numbers")
    pack_labelled(root, labels, tmp_path / "whole")
    dest = tmp_path / "killed"
    for when in ("pixels/c/1/0/0$", "pixels/c/3/0/0$", "targets"):
        command = [sys.executable, "-m", "tests.labelled_photographs", root, labels, dest, when]
        done = subprocess.run(command, cwd=Path(__file__).parents[1], capture_output=True, timeout=60, check=False)
        assert done.returncode == -signal.SIGKILL, done.stderr
        assert not (dest / "train/manifest.json").exists()
    other = write_labels(tmp_path / "other.csv", paths, kind="classes")
    with pytest.raises(ShardError, match=r"with different settings: the file of labels changed \(--labels\)\. Use"):
        pack_labelled(root, other, dest)
    (result,) = pack_labelled(root, labels, dest).values()
    assert result.num_resumed == NUM_IMAGES
    assert files_of(dest) == files_of(tmp_path / "whole")


def test_packs_with_and_without_labels_do_not_continue_each_other(tmp_path, photographs, packed):
    source = fake_source(8)
    with pytest.raises(
        ShardError, match=r"was packed with any number of classes for each image, now there is one class\. Use"
    ):
        pack(source, packed)
    pack(source, tmp_path / "plain")
    root, _ = photographs
    with pytest.raises(
        ShardError, match=r"was packed with one class for each image, now there is any number of classes\. Use"
    ):
        pack_labelled(root, tmp_path / "labels.csv", tmp_path / "plain")
    pack(source, packed, overwrite=True)
    assert files_of(packed) == files_of(tmp_path / "plain")
    assert json.loads((packed / "train/manifest.json").read_text())["targets"] is None


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_a_flipped_bit_of_the_targets_is_found(tmp_path, photographs, kind):
    root, paths = photographs
    pack_labelled(root, write_labels(tmp_path / "labels.csv", paths, kind=kind), tmp_path / "data")
    file = tmp_path / "data/train/targets/c/0/0"
    sound = file.read_bytes()
    for at in (0, 5):
        file.write_bytes(sound[:at] + bytes([sound[at] ^ 4]) + sound[at + 1 :])
        (damage,) = verify_split(str(tmp_path / "data"), "train")
        assert str(damage) == "targets/c/0/0: the checksum does not match because the bytes have changed"
        with (
            pytest.raises(ShardError, match=r"targets/c/0/0: the checksum does not match"),
            open_split(str(tmp_path / "data"), "train") as split,
        ):
            split.load_numbers(timeout_s=10)
    file.unlink()
    (damage,) = verify_split(str(tmp_path / "data"), "train")
    assert damage.file == "targets/c/0/0"


def test_exchanged_and_impossible_targets_with_correct_checksums_are_found(tmp_path, packed):
    array = ts.open({"driver": "zarr3", "kvstore": f"file://{packed}/train/targets/"}).result()
    rows = array.read().result()
    array[...].write(rows[::-1].copy()).result()
    (damage,) = verify_split(str(packed), "train")
    assert str(damage) == "targets: the targets differ from those that were packed"
    with open_split(str(packed), "train") as split, pytest.raises(ShardError, match="the targets differ from those"):
        split.read_targets(np.arange(3))
    rows[2] |= 8
    array[...].write(rows).result()
    (damage,) = verify_split(str(packed), "train")
    assert str(damage) == "targets/c/0/0: image 2 (006.png): bits of classes outside 0..2"


def test_an_earlier_release_refuses_the_pack_by_its_version(packed):
    text = (packed / "train/manifest.json").read_text()
    assert json.loads(text)["format_version"] == 5
    document = json.loads(text)
    del document["targets"]
    with pytest.raises(ShardError, match="missing key targets"):
        Manifest.from_json(json.dumps(document))
    for version, unknown in ((4, ""), (2, "extent_digests, name_bytes, num_groups, targets")):
        with pytest.raises(ShardError, match=f"unknown key column_digests, {unknown}"):
            Manifest.from_json(text.replace('"format_version": 5', f'"format_version": {version}'))


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        ("bits", "targets must be an object with kind"),
        ({"kind": "classes"}, "targets must be an object with kind"),
        ({"kind": "words"}, "the kind of targets must be classes or numbers, found 'words'"),
        ({"minima": [1.0]}, "minima of targets must be 0 finite numbers, found 1"),
        ({"labels_file": "abc"}, "a digest must be a SHA-256"),
    ],
)
def test_each_broken_rule_of_the_manifest_is_named(packed, targets, message):
    document = json.loads((packed / "train/manifest.json").read_text())
    is_part = isinstance(targets, dict) and len(targets) == 1 and "classes" not in targets.values()
    document["targets"] = document["targets"] | targets if is_part else targets
    with pytest.raises(ShardError, match=message):
        Manifest.from_json(json.dumps(document))


def test_lines_and_images_that_do_not_match_are_errors(tmp_path, photographs):
    root, paths = photographs
    labels = tmp_path / "labels.csv"

    def fault(*given):
        write_labels(labels, list(given))
        with pytest.raises(SourceError) as raised:
            open_source(root, labels=labels)
        return str(raised.value)

    lacking = fault(*paths[:-2])
    assert lacking.startswith(f"{labels} has no line for 2 images of {root}, for example ")
    assert lacking.endswith(
        "; add a line for each image, remove the image, or leave such images out with --unlabelled skip"
    )
    # The lines are in the reverse order.
    assert fault(*paths, "z.png") == f"{labels}, line 2: {root} has no image z.png; correct or remove the line"
    wrong = ["x/" + path for path in paths]
    assert fault(*wrong).startswith(f"{labels}, line 2: {root} has no image x/{paths[-1]} (and 13 more lines without")
    assert fault(*wrong).endswith(f"did you mean {paths[-1]}?")
    assert "has no image '\\x1b[2J.png'" in fault(*paths, "\x1b[2J.png")
    with pytest.raises(SourceError, match="does not exist; give the folder or archive"):
        open_source(tmp_path / "nothing", labels=write_labels(labels, paths))
    (tmp_path / "set/train").mkdir(parents=True)
    shutil.copy(root / paths[0], tmp_path / "set/loose.png")
    with pytest.raises(SourceError, match=r"has 1 image outside the folders of its splits, for example loose\.png"):
        open_source(tmp_path / "set", labels=labels)
    (tmp_path / "one").mkdir()
    shutil.copy(root / paths[0], tmp_path / "one/a.png")
    with pytest.raises(SourceError, match=r"holds out no image of .*which has only one image"):
        open_source(tmp_path / "one", labels=write_labels(labels, ["a.png"], kind="numbers"), holdout=0.5)


def test_many_shard_files_of_targets_mapped_or_not_are_read_alike(tmp_path, photographs, monkeypatch):
    root, paths = photographs
    # 4 images per file, 2 per chunk.
    monkeypatch.setattr(arrays, "NUMBERS_PER_SHARD", 14)
    monkeypatch.setattr(arrays, "NUMBERS_PER_CHUNK", 7)
    assert (row_shards(3).per_shard, row_shards(3).per_chunk) == (4, 2)
    labels = write_labels(tmp_path / "labels.csv", paths, kind="numbers")
    pack_labelled(root, labels, tmp_path / "data")
    assert sorted(path.name for path in (tmp_path / "data/train/targets/c").iterdir()) == ["0", "1", "2", "3"]
    assert verify_split(str(tmp_path / "data"), "train") == ()
    expected = read_independently(root, labels)
    assert labels_by_pixels(tmp_path / "data") == expected
    monkeypatch.setattr(split_arrays, "HELD_NUMBERS", 1)
    assert labels_by_pixels(tmp_path / "data") == expected


def test_bits_survive_the_way_into_words_and_back():
    random = np.random.default_rng(0)
    for num_classes in (1, 31, 32, 33, 100):
        bits = random.random((50, num_classes)) < 0.4
        words = pack_bits(bits)
        assert words.tolist() == [
            [
                sum(int(bit) << at for at, bit in enumerate(row[start : start + 32]))
                for start in range(0, num_classes, 32)
            ]
            for row in bits
        ]
        assert np.array_equal(unpack_bits(words, num_classes), bits)
        assert count_classes(words, num_classes) == tuple(bits.sum(axis=0).tolist())


def test_the_commands_show_targets(tmp_path, photographs):
    root, paths = photographs
    for kind in ("classes", "numbers"):
        labels, data = write_labels(tmp_path / f"{kind}.csv", paths, kind=kind), tmp_path / f"of {kind}"
        options = ["--labels", labels, "--size", SIZE, "--workers", 1]
        done = CliRunner().invoke(preprocess_imagenet, [str(each) for each in (root, data, *options)])
        assert done.exit_code == 0, done.output
        assert ("any of 3 classes each" if kind == "classes" else "3 numbers each") in done.output
        assert f"--loss {'binary-cross-entropy' if kind == 'classes' else 'mean-squared-error'}\n" in done.output
        done = CliRunner().invoke(inspect_shards, [str(data), "--verify", "--grid", str(tmp_path / "grid.png")])
        assert done.exit_code == 0, done.output
        assert "every byte is as it was packed" in done.output
        assert ("    red    " if kind == "classes" else "    tiny  1.4013e-45 to 1.4013e-45") in done.output
        assert (tmp_path / "grid.png").stat().st_size > 1000
    wrong = CliRunner().invoke(
        preprocess_imagenet, [str(root), str(tmp_path / "x"), "--labels", str(tmp_path / "no.csv")]
    )
    assert wrong.exit_code == 2
    assert "no.csv cannot be read: No such file or directory; check --labels" in wrong.output


def test_a_plain_pack_has_no_targets(tmp_path):
    pack(fake_source(8), tmp_path)
    with open_split(str(tmp_path), "train") as split, pytest.raises(ShardError, match="one class each, not targets"):
        split.read_targets(np.arange(2))
    assert PackSettings().holdout_rule is None


def test_a_class_that_an_earlier_version_took_for_a_number_opens_and_is_named_when_continued(
    tmp_path, photographs, monkeypatch
):
    root, paths = photographs
    labels = tmp_path / "labels.csv"
    labels.write_text("path,label\n" + "".join(f"{path},{index % 3}\n" for index, path in enumerate(paths)))
    with monkeypatch.context() as earlier:
        earlier.setattr(label_columns, "CLASS_NAMES", ())
        pack_labelled(root, labels, tmp_path / "data")
    with open_split(str(tmp_path / "data"), "train") as split:
        assert sorted(split.read_targets(np.arange(NUM_IMAGES)).ravel().tolist()) == sorted(
            float(index % 3) for index in range(NUM_IMAGES)
        )
    with pytest.raises(
        ShardError, match=r"packed with numbers to predict for each image, now there is one class \(a col"
    ):
        pack_labelled(root, labels, tmp_path / "data")
    pack_labelled(root, labels, tmp_path / "data", overwrite=True)
    with open_split(str(tmp_path / "data"), "train") as split:
        assert [each.id for each in split.manifest.classes] == ["0", "1", "2"]
        assert split.manifest.class_counts == (5, 5, 4)


def test_the_command_packs_a_spreadsheet_of_classes_with_groups_and_weights(tmp_path, photographs):
    root, paths = photographs
    rows = [
        (Path(path).stem, "dog" if index % 2 else "cat", f"p{index // 2}", index) for index, path in enumerate(paths)
    ]
    text = "ID;Breed;Patient;Draws\r\n" + "".join(";".join(map(str, row)) + "\r\n" for row in rows)
    (tmp_path / "labels.csv").write_bytes(text.encode("utf-16"))
    options = ["--labels", tmp_path / "labels.csv", "--class-column", "breed", "--group-by", "patient"]
    options += ["--weight-column", "draws", "--holdout", 0.3, "--size", SIZE]
    result = CliRunner().invoke(preprocess_imagenet, [str(each) for each in (root, tmp_path / "data", *options)])
    assert result.exit_code == 0, result.output
    assert "labels.csv: one class per image from column Breed, paths from ID, groups from Patient" in result.output
    of_image: dict[bytes, tuple[str, str, float]] = {}
    groups: dict[str, set[int]] = {}
    for name, count in (("train", 10), ("val", 4)):
        with open_split(str(tmp_path / "data"), name) as split:
            assert (split.num_images, split.manifest.class_counts) == (count, (count // 2, count // 2))
            every = np.arange(count)
            names, weights, group_of = split.names(every), split.weights(), split.groups()
            assert names is not None
            assert weights is not None
            assert group_of is not None
            groups[name] = set(group_of.tolist())
            pixels = np.empty((count, split.height, split.row_words), np.uint32)
            labels = np.empty(count, np.int32)
            split.read_into(every, pixels, labels, timeout_s=30)
            rgb = to_rgb(pixels, split.manifest.pixel_layout)
            classes = [split.manifest.classes[label].id for label in labels]
            of_image |= {
                each.tobytes(): (path, breed, float(weight))
                for each, path, breed, weight in zip(rgb, names, classes, weights, strict=True)
            }
    assert of_image == {
        np.asarray(Image.open(root / path)).tobytes(): (path, breed, float(draws))
        for path, (_, breed, _, draws) in zip(paths, rows, strict=True)
    }
    assert len(groups["train"] | groups["val"]) == 7
    assert not groups["train"] & groups["val"]
