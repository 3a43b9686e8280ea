"""The command inspect-shards: words, JSON, verification and the contact sheet."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner

from loopfeed.preprocess.commands.inspect_cli import main
from loopfeed.preprocess.shards.classes import ImageClass
from tests.fake_source import fake_source, pack


@pytest.fixture
def data(tmp_path):
    pack(fake_source(11, broken=frozenset({3})), tmp_path / "data")
    pack(fake_source(4, name="val", seed=1), tmp_path / "data")
    return tmp_path / "data"


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_the_manifest_is_described(data):
    result = run(data)
    assert result.exit_code == 0, result.output
    for words in (
        "images     10 of 4 x 4 pixels, 3 classes",
        "shards     3 files of up to 4 images, layout packed, codec raw, with checksums",
        "resizing   size 4, resize 4, resample bicubic",
        "left out   1, see failures.jsonl",
        "balance    3 to 4 images per class, median 3",
        "great white shark          3  ",
    ):
        assert words in result.stdout
    assert result.stdout.index("train") < result.stdout.index("val")


@pytest.mark.parametrize(
    ("of_val", "said"),
    [([7, 7, 8, 9], "No group is in two splits."), ([3, 5, 8, 3], "warning: 2 groups are in both train and val")],
)
def test_groups_are_counted_and_compared(tmp_path, of_val, said):
    of_train = np.array([0, 1, 1, 3, 5, 5], np.uint32)
    pack(fake_source(6).changed(groups=of_train), tmp_path / "data")
    pack(fake_source(4, name="val", seed=1).changed(groups=np.array(of_val, np.uint32)), tmp_path / "data")
    result = run(tmp_path / "data")
    assert result.exit_code == 0, result.output
    num_of_val = len(set(of_val))
    assert result.stdout.index("also       4 groups of the") < result.stdout.index(f"also       {num_of_val} groups of")
    assert said in result.stdout
    splits = json.loads(run(tmp_path / "data", "--json").stdout)["splits"]
    shared = len({0, 1, 3, 5} & set(of_val))
    assert (splits["train"]["num_groups"], splits["val"]["num_groups"]) == (4, num_of_val)
    assert (splits["train"]["shared_groups"], splits["val"]["shared_groups"]) == ({"val": shared}, {"train": shared})


def test_verify_names_what_is_damaged_and_exits_2(data):
    (data / "train/pixels/c/0/0/0").unlink()
    (data / "val/labels/c/0").unlink()
    result = run(data, "--verify")
    assert result.exit_code == 2
    images = "images 0–3 (n1/0.png, n2/1.png, n3/2.png, …)"
    assert f"train/pixels/c/0/0/0: {images}: the shard file, or the image in it, is missing" in result.stdout
    assert "val/labels/c/0: the shard file, or the image in it, is missing" in result.stdout
    lines = result.stdout[result.stdout.index("train: damaged") :].splitlines()
    assert [line.partition(". Restore")[0].partition(": images")[0] for line in lines] == [
        *("train: damaged in 1 place", "  train/pixels/c/0/0/0", "val: damaged in 1 place"),
        "  val/labels/c/0: the shard file, or the image in it, is missing",
    ]
    assert run(data, "--verify", "--split", "val").exit_code == 2


def test_json_holds_manifests_and_damages(data):
    (data / "train/pixels/c/0/0/0").unlink()
    result = run(data, "--json", "--verify")
    assert result.exit_code == 2
    document = json.loads(result.stdout)
    assert set(document["splits"]) == {"train", "val"}
    assert document["splits"]["train"]["manifest"]["num_images"] == 10
    assert document["splits"]["train"]["damages"][0]["images"] == [0, 1, 2, 3]
    assert document["splits"]["val"]["damages"] == []
    assert "damages" not in json.loads(run(data, "--json").stdout)["splits"]["train"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--split", "test"], "there is no split 'test'; choose one of train, val"),
        (["--grid", "sheet.gif"], "got sheet.gif: give a name that ends with .png"),
        (["--grid", "nowhere/sheet.png", "--verify"], "nowhere does not: create it first"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(data, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run(data, *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_an_empty_folder_and_an_unfinished_pack_are_told_apart(tmp_path):
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "contains no pack; make one with `preprocess-imagenet SOURCE" in result.stderr
    with pytest.raises(KeyboardInterrupt):
        pack(fake_source(9, raising={8: KeyboardInterrupt()}), tmp_path)
    result = run(tmp_path)
    assert result.exit_code == 2
    assert "train: not finished; run the same preprocess-imagenet command again" in result.stderr
    assert "has no finished split yet" in result.stderr


def test_traceback_is_shown_on_demand(tmp_path):
    assert "Traceback (most recent call last)" in run(tmp_path, "--traceback").stderr


def test_a_closed_pipe_ends_the_output_quietly(data):
    command = [sys.executable, "-c", "from loopfeed.preprocess.commands.inspect_cli import main; main()", str(data)]
    reader, writer = os.pipe()
    os.close(reader)
    try:
        ended = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, timeout=60, check=False)
    finally:
        os.close(writer)
    assert ended.stderr == b""
    assert ended.returncode == 1


def test_names_with_control_characters_are_quoted(tmp_path):
    classes = (ImageClass("a", "\x1b[31mred"), ImageClass("b", "caf\udce9"), ImageClass("c", "fine"))
    pack(fake_source(6, classes=classes), tmp_path)
    result = run(tmp_path, "--grid", tmp_path / "sheet.png")
    assert result.exit_code == 0, result.output
    assert r"'\x1b[31mred'" in result.stdout
    assert "\x1b" not in result.stdout
    document = json.loads(run(tmp_path, "--json").stdout)
    assert document["splits"]["train"]["manifest"]["classes"][1]["name"] == "caf\udce9"


def test_lost_files_are_named_without_verify(data):
    (data / "train/pixels/c/1/0/0").unlink()
    os.truncate(data / "train/labels/c/0", 10)
    result = run(data)
    assert result.exit_code == 2
    assert result.stderr.splitlines() == [
        "train: 2 files are missing or damaged. Restore the files below, or run the command again that packed the "
        "split, which packs them again",
        "  train/labels/c/0: the shard file is truncated",
        "  train/pixels/c/1/0/0: the file is missing",
    ]
    assert run(data, "--split", "val").exit_code == 0
    assert run(data, "--json").exit_code == 2
