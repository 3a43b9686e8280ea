"""Packs of format version 1, made by the release that wrote it: they are read, verified and finished.

`tests/recorded/packs_v1.zip` holds `fake_source(13, broken={2, 12})`, 4 images a shard: complete, and stopped after two
of its three shards.
"""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest

from loopfeed.preprocess.commands.inspect_cli import main
from loopfeed.preprocess.packing.plan import tool_versions
from loopfeed.preprocess.shards.reader import list_splits, open_split
from loopfeed.preprocess.shards.split_files import PLAN_KEY
from loopfeed.preprocess.shards.verify import verify_split
from tests.fake_source import fake_source, files_of, pack, packed_words

SOURCE = fake_source(13, broken=frozenset({2, 12}))


@pytest.fixture
def packs(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent / "recorded/packs_v1.zip") as recorded:
        recorded.extractall(tmp_path)
    return tmp_path


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


def test_undetectable_faults_of_old_packs_are_documented(packs):
    from click.testing import CliRunner

    result = CliRunner().invoke(main, [str(packs / "complete")])
    assert "format     version 1: only --verify detects swapped shard files" in result.stdout
