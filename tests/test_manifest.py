"""The manifest: a strict round trip, and each broken rule by name."""

import json
from dataclasses import replace

import pytest

from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.shards.manifest import FORMAT_VERSION, Manifest, is_manifest

MANIFEST = Manifest(
    format_version=2,
    num_images=10,
    height=4,
    width=6,
    layout="R<<24 | G<<16 | B<<8",
    codec="raw",
    checksum=True,
    shard_images=4,
    classes=(ImageClass("n1", "tench"), ImageClass("n2", "Ära")),
    class_counts=(4, 6),
    channel_mean=(0.1, 0.2, 1 / 3),
    channel_std=(0.25, 0.5, 0.0),
    resize_rule={"size": 4, "resize": 5, "resample": "bicubic"},
    source_digest="ab" * 32,
    num_failures=2,
    tool_versions={"pillow": "13.0"},
    shard_digests=("0" * 64, "1" * 64, "2" * 64),
    labels_digest="3" * 64,
    failures_digest="4" * 64,
    label_digests=("3" * 64,),
    checksum_digests=("6" * 64,),
    metadata_digests={"pixels": "7" * 64, "labels": "8" * 64, "checksums": "9" * 64},
)


@pytest.mark.parametrize("checksum", [True, False])
def test_digests_of_the_second_version_are_kept(checksum):
    digests = dict(MANIFEST.metadata_digests)
    manifest = MANIFEST
    if not checksum:
        del digests["checksums"]
        manifest = replace(MANIFEST, checksum=False, checksum_digests=(), metadata_digests=digests)
    assert Manifest.from_json(manifest.to_json()) == manifest


def changed(**changes):
    return json.dumps(json.loads(MANIFEST.to_json()) | changes)


def test_a_newer_version_asks_for_a_newer_loopfeed():
    # Whatever else a newer version holds: its version is what the reader is told.
    with pytest.raises(ShardError, match=r"here/manifest.json: format version 6 is newer than 5.*install a newer"):
        Manifest.from_json(changed(format_version=FORMAT_VERSION + 1, colour="oklab"), where="here/manifest.json")


def test_an_unknown_and_a_missing_key_are_named():
    with pytest.raises(ShardError, match="unknown key num_image; restore"):
        Manifest.from_json(changed(num_image=3))
    document = json.loads(MANIFEST.to_json())
    del document["codec"]
    with pytest.raises(ShardError, match="missing key codec"):
        Manifest.from_json(json.dumps(document))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format_version": "1"}, "format_version must be 1, 2, 3, 4 or 5, found '1'"),
        ({"format_version": True}, "format_version must be 1, 2, 3, 4 or 5, found True"),
        ({"num_images": 0}, "num_images must be a whole number from 1 to 1,099,511,627,776, found 0"),
        (
            {"num_images": 2**64},
            "num_images must be a whole number from 1 to 1,099,511,627,776, found 1844674407370955",
        ),
        ({"height": 4097}, "height must be a whole number from 1 to 4,096, found 4097"),
        ({"width": 10**4000}, "width must be a whole number from 1 to 4,096, found an integer of 13,288 bits"),
        ({"shard_images": 1 << 31}, "shard_images must be a whole number from 1 to 1,073,741,824"),
        ({"num_images": 11}, "class_counts must add up to 11 images, found 10"),
        ({"height": 4.0}, "height must be a whole number"),
        ({"shard_images": True}, "shard_images must be a whole number"),
        ({"layout": "BGR"}, "layout must be 'R<<24 "),
        ({"codec": "zstd"}, "codec must be one of raw, blosc, found 'zstd'"),
        ({"codec": ["raw"]}, "codec must be a string"),
        ({"checksum": 1}, "checksum must be true or false"),
        ({"classes": {}}, "classes must be a list"),
        ({"classes": [{"id": "a"}, {"id": "b"}]}, "a class must have the keys id and name"),
        ({"classes": [{"id": "a", "name": 3}] * 2}, "a class must have the keys id and name"),
        ({"classes": []}, "there must be 1 to 65535 classes, found 0"),
        ({"class_counts": [10]}, "class_counts must have 2 entries, found 1"),
        ({"class_counts": [-1, 11]}, "class_counts must be ≥ 0"),
        ({"class_counts": [4.0, 6]}, "class_counts must be ≥ 0"),
        ({"channel_mean": [0.5, 0.5]}, "channel_mean must be three numbers"),
        ({"channel_std": [0.5, 0.5, 2.0]}, "channel_std must be three numbers"),
        ({"channel_std": [0.5, 0.5, float("nan")]}, "channel_std must be three numbers"),
        ({"resize_rule": [1]}, "resize_rule must be an object"),
        ({"source_digest": 3}, "source_digest must be a string"),
        ({"num_failures": -1}, "num_failures must be a whole number from 0 to"),
        ({"shard_digests": ["0" * 64]}, "shard_digests must have 3 entries, found 1"),
        ({"shard_digests": ["0" * 64, "1" * 64, "no"]}, "a digest must be a SHA-256, found 'no'"),
        ({"label_digests": []}, "label_digests must have 1 entry, found 0"),
        ({"checksum_digests": ["6" * 64] * 2}, "checksum_digests must have 1 entry, found 2"),
        ({"metadata_digests": {"pixels": "7" * 64}}, "the keys of metadata_digests must be checksums, labels, pixels"),
        ({"metadata_digests": []}, "metadata_digests must be an object"),
        ({"labels_digest": 3}, "a digest must be a SHA-256, found 3"),
    ],
)
def test_each_broken_rule_is_named(changes, message):
    with pytest.raises(ShardError, match=message):
        Manifest.from_json(changed(**changes))


@pytest.mark.parametrize(
    "changes",
    [
        {"codec": "blosc"},
        {"checksum": False, "checksum_digests": [], "metadata_digests": {"pixels": "7" * 64, "labels": "8" * 64}},
        {"label_digests": ["4" * 64]},
        {"classes": [{"id": "n2", "name": "Ära"}, {"id": "n1", "name": "tench"}]},
        {"class_counts": [6, 4]},
        {"channel_mean": [0.1, 0.2, 0.3]},
        {"resize_rule": {"size": 99}},
        {"source_digest": "cd" * 32},
        {"num_failures": 0},
        {"tool_versions": {}},
        {"shard_digests": ["1" * 64, "0" * 64, "2" * 64]},
        {"manifest_digest": "0" * 64},
    ],
)
def test_every_changed_value_is_detected(changes):
    with pytest.raises(ShardError, match=r"a value was changed after packing \(manifest_digest does not match\)"):
        Manifest.from_json(changed(**changes))


def test_what_counts_as_a_manifest():
    assert is_manifest(MANIFEST.to_json().encode())
    assert is_manifest(changed(format_version=2, num_images=-1).encode())
    for text in (b"", b"[]", b'{"name": "web app"}', b'{"format_version": 1}', b"\xff\xfe", b"[" * 100_000):
        assert not is_manifest(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", b"\xff\xfe", "[" * 100_000])
def test_a_manifest_that_is_not_a_json_object_is_refused(text):
    with pytest.raises(ShardError, match=r"x/manifest.json: (not valid JSON|a manifest must be a JSON object)"):
        Manifest.from_json(text, where="x/manifest.json")
