"""The command preprocess-imagenet: its output, its files and its exit codes."""

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

import loopfeed
from loopfeed.preprocess.commands import cli
from loopfeed.preprocess.commands.cli import main
from loopfeed.preprocess.demo import demo_set
from loopfeed.preprocess.demo.demo_set import draw_demo
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.location import ShardError, open_location
from loopfeed.preprocess.shards.reader import list_splits, open_split
from loopfeed.preprocess.sources.open_source import open_source
from tests.fake_source import files_of


@pytest.fixture
def source(tmp_path):
    """Two classes of 6 images of 40 × 36 pixels; one more is no image."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for index in range(6):
            noise = rng.integers(0, 256, (36, 40, 3), dtype=np.uint8)
            Image.fromarray(noise).save(tmp_path / "images" / name / f"{index}.png")
    (tmp_path / "images/dog/broken.jpg").write_bytes(b"\xff\xd8\xff\xe0 cut short")
    return tmp_path / "images"


def run(*arguments):
    return CliRunner().invoke(main, [str(each) for each in arguments])


def test_python_packs_the_files_that_the_command_packs(tmp_path, source):
    options: dict[str, Any] = {
        "size": 32,
        "resize": 36,
        "resample": "lanczos",
        "holdout": 0.25,
        "shard_images": 5,
    }
    given = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", value)]
    assert run(source, tmp_path / "command", *given).exit_code == 0
    seen: list[tuple[str, int]] = []
    results = loopfeed.pack(
        source,
        tmp_path / "python",
        on_progress=lambda split, state: seen.append((split, state.done)),
        **options,
    )
    ours = files_of(tmp_path / "python")
    assert ours == files_of(tmp_path / "command")
    assert {name: result.manifest.num_images for name, result in results.items()} == {"train": 9, "val": 3}
    assert [failure.path for result in results.values() for failure in result.failures] == ["dog/broken.jpg"]
    assert {name for name, _ in seen} == {"train", "val"}
    again = loopfeed.pack(source, tmp_path / "python", **options)
    assert all(result.was_complete for result in again.values())
    with pytest.raises(ShardError, match="is inside SOURCE"):
        loopfeed.pack(source, source / "packed")
    with pytest.raises(ValueError, match="resize must be at least size"):
        loopfeed.pack(source, tmp_path / "other", size=32, resize=8)


def test_a_pack_is_kept_if_the_one_in_its_place_would_not_fit(tmp_path, source, monkeypatch):
    loopfeed.pack(source, tmp_path / "pack", size=16)
    before = files_of(tmp_path / "pack")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**6, 990_000, 10_000))
    with pytest.raises(
        ShardError, match=r"the new pack needs 1\.9 MB in .* and the pack that it replaces has 0\.\d MB"
    ):
        loopfeed.pack(source, tmp_path / "pack", size=192, overwrite=True)
    assert files_of(tmp_path / "pack") == before
    loopfeed.pack(source, tmp_path / "pack", size=16, overwrite=True)
    assert files_of(tmp_path / "pack") == before


def test_a_folder_is_packed_and_the_next_command_named(tmp_path, source):
    dest = tmp_path / "shards"
    result = run(
        source, dest, "--size", 32, "--resize", 36, "--resample", "lanczos", "--workers", 2, "--shard-images", 5
    )
    assert result.exit_code == 0, result.output
    assert "train: 13 images, 2 classes, 3 shard files" in result.stdout
    assert "train: 12 images of 2 classes packed." in result.stdout
    assert f"Left out: 1 (all listed in {dest}/train/failures.jsonl):\n    dog/broken.jpg: " in result.stdout
    assert f"run-train --data {dest}" in result.stdout
    with open_split(str(dest), "train") as split:
        assert split.manifest.resize_rule == {"size": 32, "resize": 36, "resample": "lanczos"}
        assert split.manifest.class_counts == (6, 6)
        assert split.manifest.shard_images == 5
    assert json.loads((dest / "train/failures.jsonl").read_text())["path"] == "dog/broken.jpg"


def test_a_folder_one_level_too_deep_is_one_class_and_causes_a_warning(tmp_path_factory, source):
    result = run(source.parent, tmp_path_factory.mktemp("packed"), "--size", 32)
    assert result.exit_code == 0, result.output
    assert "train: 12 images of 1 class packed." in result.stdout
    assert (
        "warning: all images of train belong to one class, images; if SOURCE has class folders, give the folder that"
        in result.stderr
    )
    assert "warning" not in run(source, tmp_path_factory.mktemp("others"), "--size", 32).stderr


def test_holdout_limit_split_codec_and_checksum_reach_the_pack(tmp_path, source):
    arguments = ["--size", 32, "--holdout", 0.3, "--limit", 4, "--codec", "blosc", "--no-checksum"]
    result = run(source, tmp_path / "shards", *arguments)
    assert result.exit_code == 0, result.output
    assert list_splits(str(tmp_path / "shards")) == ("train", "val")
    with open_split(str(tmp_path / "shards"), "train") as split:
        assert split.num_images + split.manifest.num_failures == 4
        assert (split.manifest.codec, split.manifest.checksum) == ("blosc", False)
    assert run(source, tmp_path / "one", *arguments, "--split", "val").exit_code == 0
    assert list_splits(str(tmp_path / "one")) == ("val",)


def test_a_dry_run_writes_nothing(tmp_path, source):
    result = run(source, tmp_path / "shards", "--dry-run")
    assert result.exit_code == 0
    assert "13 images, 2 classes, 1 shard file, 2.5 MiB" in result.stdout
    assert " free)." in result.stdout
    assert not (tmp_path / "shards").exists()


def test_a_split_that_was_held_out_and_is_not_made_anew_is_warned_of(tmp_path, source):
    dest = tmp_path / "shards"
    assert run(source, dest, "--size", 28, "--holdout", 0.5).exit_code == 0
    same = run(source, dest, "--size", 28, "--holdout", 0.5, "--overwrite")
    assert (same.exit_code, "warning" in same.stdout) == (0, False)
    for dry_run in ("--dry-run",), ():
        other = run(source, dest, "--size", 28, "--overwrite", *dry_run)
        assert other.exit_code == 0
        assert (
            "warning: this command leaves val at DEST unchanged. Images that were held out with --holdout"
            in other.stdout
        )


def test_a_pack_of_an_earlier_hold_out_rule_is_completed_by_that_rule(tmp_path, photographs, monkeypatch):
    from loopfeed.preprocess.sources import selection

    options = ["--size", 28, "--holdout", 0.1]
    with monkeypatch.context() as earlier:
        earlier.setattr("loopfeed.preprocess.packing.plan.HOLDOUT_RULE", 1)
        assert run(photographs, tmp_path / "old", *options, "--split", "train").exit_code == 0
    manifest = json.loads((tmp_path / "old" / "train" / "manifest.json").read_text(encoding="utf-8"))
    assert "holdout" not in manifest["tool_versions"]
    assert "(already complete)" in run(photographs, tmp_path / "old", *options, "--split", "train").stdout
    # Its val split is the rest of its train split, under --overwrite as well.
    for overwrite in ([], ["--overwrite"]):
        assert run(photographs, tmp_path / "old", *options, "--split", "val", *overwrite).exit_code == 0
        assert num_images(tmp_path / "old") == 32
    with open_source(photographs, holdout=0.1) as source:
        assert selection.HOLDOUT_RULE == 2
        assert source.splits["val"].digest() != open_split(str(tmp_path / "old"), "val").manifest.source_digest
    # Replaced as a whole, it follows the new rule, and records it.
    assert run(photographs, tmp_path / "old", *options, "--overwrite").exit_code == 0
    with open_split(str(tmp_path / "old"), "val") as split:
        assert split.manifest.class_counts == (2, 2)
        assert split.manifest.tool_versions["holdout"] == "2"


@pytest.fixture
def photographs(tmp_path):
    for name in ("cat", "dog"):
        (tmp_path / "photographs" / name).mkdir(parents=True)
        for k in range(16):
            Image.new("RGB", (30, 30), (k, 5 * k, 200)).save(tmp_path / "photographs" / name / f"{k}.png")
    return tmp_path / "photographs"


def num_images(shards):
    return sum(open_split(str(shards), name).num_images for name in ("train", "val"))


def test_a_link_that_leads_nowhere_is_left_out_or_stops_as_asked(tmp_path, source):
    (source / "cat" / "gone.png").symlink_to(tmp_path / "nowhere.png")
    result = run(source, tmp_path / "shards", "--size", 28)
    assert result.exit_code == 0, result.output
    assert "cat/gone.png: the symbolic link leads to a file or folder that does not exist" in result.stdout
    (source / "dog" / "broken.jpg").unlink()
    result = run(source, tmp_path / "strict", "--size", 28, "--on-error", "fail")
    assert result.exit_code == 2
    fault = "cat/gone.png: the symbolic link leads to a file or folder that does not exist; remove the image"
    assert fault in result.stderr
    # A file that was there when it was listed is an error in any case: its disk may be gone.
    with open_source(source) as listed:
        (source / "cat" / "0.png").unlink()
        (source / "cat" / "0.png").symlink_to(tmp_path / "nowhere.png")
        with pytest.raises(ShardError, match=r"cat/0\.png: No such file"):
            pack_split(listed.splits["train"], open_location(str(tmp_path / "lost")), PackSettings())


@pytest.mark.parametrize("below", ["snapshots", "new/data"])
def test_a_folder_inside_the_folder_of_a_run_is_refused(tmp_path, source, below):
    (tmp_path / "run").mkdir()
    for name in "config.json", "loss.jsonl":
        (tmp_path / "run" / name).touch()
    result = run(source, tmp_path / "run" / below, "--size", 28)
    assert result.exit_code == 2
    assert f"is inside {tmp_path}/run, the folder of a training run, which must contain only its run" in result.stderr
    assert sorted(each.name for each in (tmp_path / "run").iterdir()) == ["config.json", "loss.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["only-one"], "SOURCE and DEST are required"),
        (["nowhere", "dest"], "nowhere does not exist"),
        (["nowhere", "dest", "--size", "0"], "0 is not in the range 1<=x<=4096"),
        (["nowhere", "dest", "--size", "64", "--resize", "32"], "at least size (64) so that the crop fits"),
        (["nowhere", "nosuch://dest"], "not the URL of a supported store"),
        (["nowhere", "memory://dest"], "memory://dest/ would be lost when this process exits"),
        (["nowhere", "dest", "--shard-images", "1000000000"], "more than the 4 GiB allowed"),
        (["--demo"], "give only DEST"),
        (["--demo", "a", "b"], "give only DEST"),
        (["--demo", "a", "--size", "64"], "--size cannot be used with --demo"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr


def test_traceback_is_shown_on_demand(tmp_path):
    result = run(tmp_path / "nowhere", tmp_path / "shards", "--traceback")
    assert result.exit_code == 2
    assert "Traceback (most recent call last)" in result.stderr


def test_the_demo_set_needs_only_dest(tmp_path, monkeypatch):
    monkeypatch.setattr(demo_set, "draw_demo", lambda dest, **values: draw_demo(dest, **values | {"num_images": 20}))
    result = run("--demo", tmp_path / "demo")
    assert result.exit_code == 0, result.output
    assert "train: 20 images of 10 classes packed." in result.stdout
    assert f"run-train --data {tmp_path / 'demo'}" in result.stdout
    assert run("--demo", tmp_path / "elsewhere", "--dry-run").exit_code == 0
    assert not (tmp_path / "elsewhere").exists()


def test_piped_progress_is_plain_lines(tmp_path, source, monkeypatch):
    monkeypatch.setattr("loopfeed.preprocess.commands.progress.LINE_EVERY_S", 0.0)
    result = run(source, tmp_path / "shards", "--size", 100)
    assert "train: 13 of 13 images, " in result.stderr
    assert "\x1b" not in result.output


def command(*arguments):
    return [sys.executable, "-c", "from loopfeed.preprocess.commands.cli import main; main()", *map(str, arguments)]


def test_on_a_terminal_there_is_a_bar(tmp_path, source):
    control, terminal = pty.openpty()
    with subprocess.Popen(
        command(source, tmp_path / "shards", "--size", 32),
        stderr=terminal,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    ) as process:
        os.close(terminal)
        shown = b""
        try:
            while piece := os.read(control, 4096):
                shown += piece
        except OSError:  # Linux says EIO when the other end is closed
            pass
        assert process.wait(timeout=60) == 0
    os.close(control)
    assert b"13/13" in shown
    assert b"images/s" in shown


def test_an_interrupted_command_says_how_to_continue_and_does_so(tmp_path, source):
    run(source, tmp_path / "expected", "--size", 32, "--shard-images", 2)
    slow = (
        "import time\n"
        "from loopfeed.preprocess.packing import pipeline\n"
        "decode, pipeline._MAX_BLOCK_IMAGES = pipeline.decode_stored, 1\n"
        "def wait(encoded, rule, **shared):\n"
        "    time.sleep(0.3)\n"
        "    return decode(encoded, rule, **shared)\n"
        "pipeline.decode_stored = wait\n"
        "from loopfeed.preprocess.commands.cli import main\n"
        "main()\n"
    )
    dest = tmp_path / "shards"
    arguments = [str(source), str(dest), "--size", "32", "--shard-images", "2", "--workers", "1"]
    process = subprocess.Popen([sys.executable, "-c", slow, *arguments], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (dest / "train/journal/shards/00000000.json").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Stopped. Run the same command again to continue" in stderr
    assert "Traceback" not in stderr
    again = run(*arguments)
    assert again.exit_code == 0
    assert "(continued after image " in again.stdout
    assert files_of(dest) == files_of(tmp_path / "expected")


def test_every_option_is_in_one_group_of_the_help():
    grouped = [name for names in cli._GROUPS.values() for name in names]
    options = [param.name for param in main.params if param.param_type_name == "option"]
    assert sorted([*grouped, "version"]) == sorted(options)


@pytest.mark.parametrize("place", ["source", "dest", "above dest"])
def test_a_link_to_itself_causes_no_traceback(source, tmp_path, place):
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    dest = {"source": tmp_path / "shards", "dest": loop, "above dest": loop / ".." / "x" / ".." / "shards"}[place]
    result = run(loop if place == "source" else source, dest, "--size", 32)
    assert result.exit_code == (0 if place == "above dest" else 2)  # "loop/.." is the folder that the link lies in
    assert len(result.stderr.splitlines()) <= 3
    if place == "source":
        assert f"{loop} is a link that leads nowhere; give the folder or archive" in result.stderr


@pytest.mark.parametrize("below", ["", "shards", "cat/../shards", "link"])
def test_a_dest_inside_the_source_is_refused_before_any_work(source, below, tmp_path):
    (tmp_path / "outside").symlink_to(source)
    dest = tmp_path / "outside" if below == "link" else source / below
    before = files_of(source)
    result = run(source, dest)
    assert result.exit_code == 2
    assert "is inside SOURCE" in result.stderr
    assert "Listing" not in result.stderr
    assert files_of(source) == before
    assert run(source, tmp_path / "images-packed", "--size", "8", "--dry-run").exit_code == 0


def test_too_little_memory_is_one_message(tmp_path, source, monkeypatch):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 3 TiB")

    monkeypatch.setattr("loopfeed.preprocess.commands.pack_splits.pack_split", fail)
    result = run(source, tmp_path / "data", "--size", "8")
    assert result.exit_code == 2
    assert "not enough memory (Unable to allocate 3 TiB); use fewer --workers" in result.stderr
