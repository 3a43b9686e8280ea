"""Packs of format versions 1 to 4, made by releases that wrote them: they are read, verified, finished and repaired.

`tests/recorded/packs_v1.zip` holds `fake_source(13, broken={2, 12})`, 4 images a shard: complete, and stopped after two
of its three shards. `packs_v2_to_v4.zip` holds the same of versions 2, 3 (with `TARGETS`) and 4 (on a canvas), and the
first of two parts.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from loopfeed.preprocess.commands.inspect_cli import main
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.packing.parts import pack_part
from loopfeed.preprocess.packing.plan import PackSettings, tool_versions
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.reader import list_splits, open_split
from loopfeed.preprocess.shards.split_files import PLAN_KEY
from loopfeed.preprocess.shards.targets import SplitTargets
from loopfeed.preprocess.shards.verify import verify_split
from tests.fake_source import fake_source, files_of, pack, packed_words

SOURCE = fake_source(13, broken=frozenset({2, 12}))
TARGETS = SplitTargets("classes", "ab" * 32, (np.arange(13, dtype=np.uint32) % 8)[:, None])
SQUARE, WHOLE = ResizeRule(4, 4), ResizeRule(4, 4, "bicubic", canvas="3:2")
FORMS = {"v2": (SQUARE, None), "v3": (SQUARE, TARGETS), "v4": (WHOLE, None)}


def extract(name, folder):
    with zipfile.ZipFile(Path(__file__).parent / "recorded" / name) as recorded:
        recorded.extractall(folder)
    return folder


@pytest.fixture
def packs(tmp_path):
    return extract("packs_v1.zip", tmp_path)


@pytest.fixture(params=FORMS)
def later(request, tmp_path):
    """The folder of the packs of a version, and how they are packed on: settings and targets."""
    rule, targets = FORMS[request.param]
    folder = extract("packs_v2_to_v4.zip", tmp_path) / request.param
    # The plan and the manifest then have the versions of the libraries that are installed.
    for path in (folder / "part/train" / PLAN_KEY, folder / "unfinished/train" / PLAN_KEY):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"tool_versions": tool_versions()}))
    return folder, PackSettings(rule=rule, shard_images=4), targets


def without_versions(folder):
    """Return the files of a pack, and its manifest without the versions of libraries."""
    files = files_of(folder)
    manifest = json.loads(files.pop("train/manifest.json"))
    del manifest["tool_versions"], manifest["manifest_digest"]
    return files, manifest


def read(data):
    with open_split(str(data), "train") as split:
        pixels, labels = np.zeros((split.num_images, 4, 4), np.uint32), np.zeros(split.num_images, np.int32)
        split.read_into(np.arange(split.num_images), pixels, labels, timeout_s=30)
    return pixels, labels


def test_a_complete_old_pack_is_read_and_verified(packs):
    for found, expected in zip(read(packs / "complete"), packed_words(SOURCE), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert verify_split(str(packs / "complete"), "train") == ()


def test_packing_an_old_pack_again_changes_nothing(packs):
    before = files_of(packs / "complete")
    assert pack(SOURCE.changed(), packs / "complete").was_complete
    assert files_of(packs / "complete") == before


def test_an_unfinished_old_pack_is_completed_in_its_own_version(packs):
    path = packs / "unfinished/train" / PLAN_KEY
    plan = json.loads(path.read_text())
    path.write_text(json.dumps(plan | {"tool_versions": tool_versions()}))
    source = SOURCE.changed()
    result = pack(source, packs / "unfinished")
    assert (result.num_resumed, min(source.reads)) == (9, 9)
    found, expected = files_of(packs / "unfinished"), files_of(packs / "complete")
    manifests = [json.loads(files.pop("train/manifest.json")) for files in (found, expected)]
    failures = [files.pop("train/failures.jsonl").splitlines() for files in (found, expected)]
    assert found == expected
    # This version gives the same images up with other reasons.
    images = [[json.loads(line) | {"reason": None} for line in lines] for lines in failures]
    assert images[0] == images[1]
    for manifest in manifests:
        del manifest["tool_versions"], manifest["manifest_digest"], manifest["failures_digest"]
    assert manifests[0] == manifests[1]
    assert manifests[0]["format_version"] == 1
    assert list_splits(str(packs / "unfinished")) == ("train",)


def test_a_complete_pack_of_a_later_version_is_read_repaired_and_has_no_names(later):
    folder, settings, targets = later
    assert verify_split(str(folder / "complete"), "train") == ()
    before = files_of(folder / "complete")
    location = open_location(str(folder / "complete")).child("train")
    assert pack_split(SOURCE.changed(), location, settings, targets=targets).was_complete
    with open_split(str(folder / "complete"), "train") as split:
        assert split.manifest.format_version == int(folder.name[1:])
        indices = np.arange(split.num_images)
        pixels = np.zeros((11, split.height, split.row_words), np.uint32)
        labels = np.zeros((11, *split.label_row), np.int32)
        split.read_into(indices, pixels, labels, timeout_s=30)
        assert (split.names(indices), split.weights(), split.groups()) == (None, None, None)
    words, classes = packed_words(SOURCE)
    np.testing.assert_array_equal(pixels[:, :, :4], words)
    expected = {"v2": classes, "v3": np.delete(TARGETS.values, [2, 12], axis=0)}.get(folder.name, classes)
    np.testing.assert_array_equal(labels[:, 1] if folder.name == "v4" else labels, expected)
    for key in [each for each in before if each.endswith(("c/0", "0/0", "zarr.json"))]:
        (folder / "complete" / key).unlink()
    repaired = pack_split(SOURCE.changed(), location, settings, targets=targets).repaired
    assert {"checksums/c/0", "pixels/c/0/0/0", "pixels/zarr.json"} <= {*repaired}
    assert files_of(folder / "complete") == before


@pytest.mark.parametrize("parts", [False, True])
def test_an_unfinished_pack_of_a_later_version_is_finished_in_its_version(later, parts):
    folder, settings, targets = later
    dest = folder / ("part" if parts else "unfinished")
    location, source = open_location(str(dest)).child("train"), SOURCE.changed()
    if parts:
        finished = pack_part(source, location, settings, Part(2, 2), targets=targets).finished
        assert finished is not None
        assert min(source.reads) == 4
    else:
        assert pack_split(source, location, settings, targets=targets).num_resumed == min(source.reads) == 9
    assert without_versions(dest) == without_versions(folder / "complete")
    assert verify_split(str(dest), "train") == ()


def test_a_pack_of_a_later_version_packed_anew_has_the_same_bytes_and_names(later):
    folder, settings, targets = later
    before = files_of(folder / "complete")
    location = open_location(str(folder / "complete")).child("train")
    pack_split(SOURCE.changed(), location, settings, targets=targets, overwrite=True)
    after = files_of(folder / "complete")
    manifests = [json.loads(files.pop("train/manifest.json")) for files in (before, after)]
    assert {key.split("/")[1] for key in after.keys() - before.keys()} == {"names", "name_offsets"}
    assert {key: after[key] for key in before} == before
    old, new = manifests
    assert new["format_version"] == 5
    changed = ("format_version", "tool_versions", "manifest_digest", "metadata_digests")
    assert {key: new[key] for key in old if key not in changed} == {key: old[key] for key in old if key not in changed}


def test_undetectable_faults_of_old_packs_are_documented(packs):
    from click.testing import CliRunner

    result = CliRunner().invoke(main, [str(packs / "complete")])
    assert "format     version 1: only --verify detects swapped shard files" in result.stdout
