"""`preprocess-imagenet --part` and `--finish`: their output, and the bytes for every kind of source."""

import re
import subprocess
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from loopfeed.preprocess.commands import inspect_cli, pack_splits
from loopfeed.preprocess.commands.cli import main
from loopfeed.preprocess.packing.owner import BusyError, PartOwner
from loopfeed.preprocess.packing.part import Part
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.splits import read_manifest
from tests.fake_source import files_of
from tests.labelled_photographs import draw_photographs, write_labels

SIZE = ("--size", 8, "--resize", 8, "--shard-images", 2, "--workers", 2)


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two classes of 7 and 6 images, of which one is damaged."""
    root = tmp_path_factory.mktemp("source") / "images"
    rng = np.random.default_rng(0)
    for index in range(13):
        path = root / ("cat", "dog")[index % 2] / f"{index}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (9, 11, 3), dtype=np.uint8)).save(path)
    (root / "cat/4.png").write_bytes(b"\xff\xd8\xff\xe0 cut short")
    return root


@pytest.fixture(scope="module")
def sources(folder, tmp_path_factory):
    """Arguments of each kind of source."""
    root = tmp_path_factory.mktemp("sources")
    subprocess.run(["tar", "cf", root / "images.tar", "-C", folder.parent, "images"], check=True)
    (root / "split").mkdir()
    subprocess.run(["cp", "-r", folder, root / "split/train"], check=True)
    subprocess.run(["cp", "-r", folder, root / "split/val"], check=True)
    labels = write_labels(root / "labels.csv", draw_photographs(root / "photographs", 11))
    numbers = write_labels(root / "numbers.jsonl", draw_photographs(root / "others", 7), kind="numbers")
    return {
        "folder": (folder,),
        "holdout": (folder, "--holdout", 0.3),
        "tar": (root / "images.tar", "--limit", 9),
        "splits": (root / "split",),
        "labels": (root / "photographs", "--labels", labels, "--holdout", 0.3),
        "numbers": (root / "others", "--labels", numbers),
    }


@pytest.mark.parametrize("kind", ["folder", "holdout", "tar", "splits", "labels", "numbers"])
def test_every_kind_of_source_is_packed_in_parts(tmp_path, sources, kind):
    source, *options = sources[kind]
    assert run(source, tmp_path / "expected", *options, *SIZE).exit_code == 0
    for part in ("2/3", "3/3", "1/3"):
        result = run(source, tmp_path / "again", *options, *SIZE, "--part", part)
        assert result.exit_code == 0, result.output
    assert f"run-train --data {tmp_path / 'again'}" in result.output
    assert files_of(tmp_path / "again") == files_of(tmp_path / "expected")


def test_finish_names_what_is_missing_in_every_split_and_then_finishes(tmp_path, sources, monkeypatch):
    (source,) = sources["splits"]
    assert run(source, tmp_path / "expected", *SIZE).exit_code == 0
    run(source, tmp_path / "again", *SIZE, "--part", "1/2")
    run(source, tmp_path / "again", *SIZE, "--part", "2/2", "--split", "train")
    result = run(source, tmp_path / "again", *SIZE, "--finish")
    assert result.exit_code == 2
    assert "train: 12 images of 2 classes packed" in result.stdout
    assert re.search(r"val/: 3 of 7 shards are missing: part 2/2 \(shards 1, 3, 5\); start these", result.stderr)
    with PartOwner(open_location(str(tmp_path / "again")).child("val"), Part(2, 2)):
        refused = run(source, tmp_path / "again", *SIZE, "--part", "2/2")
    assert refused.exit_code == 2
    assert "val/: another preprocess-imagenet process is packing part 2/2 of the split" in refused.stderr
    # As if another process had been finishing the split when this part ended.
    monkeypatch.setattr(pack_splits, "pack_part", _without_finishing)
    unfinished = run(source, tmp_path / "again", *SIZE, "--part", "2/2")
    assert (
        "  All parts are packed; another process is finishing the split. If it was killed, use --finish.\n"
        in unfinished.stdout
    )
    result = run(source, tmp_path / "again", *SIZE, "--finish")
    assert result.exit_code == 0, result.output
    assert files_of(tmp_path / "again") == files_of(tmp_path / "expected")


@pytest.mark.parametrize(
    ("part", "shards"),
    [
        ((), ""),
        (("--part", "2/3"), "  train: part 2/3 (shards 1, 4).\n"),
        (("--part", "9/9"), "no shard for part 9/9.\n"),
    ],
)
def test_a_dry_run_says_so_and_names_the_shards_of_its_part(tmp_path, folder, part, shards):
    result = run(folder, tmp_path / "out", *SIZE, "--dry-run", *part)
    assert result.exit_code == 0
    assert result.stdout.endswith(f"{shards}This was a dry run: nothing was packed.\n")
    assert not (tmp_path / "out").exists()


def test_an_unfinished_pack_in_parts_is_continued_part_by_part(tmp_path, folder):
    data = tmp_path / "out"
    run(folder, data, *SIZE, "--part", "1/3")
    remedy = (
        "it is being packed in 3 parts; to see which of them are missing, run the preprocess-imagenet command of any "
        "part again with --finish instead of --part"
    )
    with pytest.raises(ShardError, match=rf"train/: the split is not complete and has no manifest.json; {remedy}$"):
        read_manifest(open_location(str(data)), "train")
    assert f"train: not finished; {remedy}\n" in CliRunner().invoke(inspect_cli.main, [str(data)]).stderr
    assert "part 2/3 (shards 1, 4), part 3/3 (shards 2, 5)" in run(folder, data, *SIZE, "--finish").stderr


def _without_finishing(source, location, settings, part, **values):
    from loopfeed.preprocess.packing import parts

    def is_busy(*_):
        raise BusyError("busy")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts, "finish_job", is_busy)
        return parts.pack_part(source, location, settings, part, **values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--part", "3"), "Invalid value for --part: part '3' is not of the form I/N; use 1/8 for the first of eight"),
        (("--part", "9/8"), "Invalid value for --part: part 9/8 does not exist; use a part from 1/8 to 8/8"),
        (("--part", "1/2", "--finish"), "--part cannot be used with --finish; remove one of them"),
        (("--finish", "--executor", "dask"), "--finish cannot be used with --executor dask; remove one of them"),
        (("--part", "1/2", "--overwrite"), "--overwrite cannot be used with --part, because other machines may be"),
        (("--executor", "dask"), "--executor dask needs --scheduler, the address of the Dask scheduler"),
        *(
            (
                ("--executor", "dask", "--scheduler", each),
                f"--scheduler must have a port, such as tcp://node1:8786, got '{each}': add it",
            )
            for each in ("127.0.0.1", "tcp://node1", "tls://[::1]", "node1:")
        ),
        (("--scheduler", "tcp://a:1"), "--scheduler tcp://a:1 has no effect without --executor dask; add that or remo"),
    ],
)
def test_options_that_contradict_each_other_are_refused(tmp_path, folder, options, message):
    result = run(folder, tmp_path / "out", *SIZE, *options)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert not (tmp_path / "out").exists()


def test_dask_is_named_where_it_is_not_installed(tmp_path, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "distributed", None)
    result = run(folder, tmp_path / "out", *SIZE, "--executor", "dask", "--scheduler", "tcp://127.0.0.1:9")
    assert result.exit_code == 2
    assert "needs the package distributed; install it with pip install 'loopfeed[distributed]'" in result.stderr
