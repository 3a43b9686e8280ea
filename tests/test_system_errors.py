"""Errors of the system: each message names the file, the reason and the remedy, and has no "[Errno"."""

import errno
import os
import resource
from contextlib import contextmanager
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from engine.commands.command_end import describe_error
from engine.records.snapshot import SnapshotError, write_snapshot
from engine.records.whole_file import make_folder, write_whole
from engine.run.compilation import caching_compilations, compile_traced, trace_ahead
from preprocess.commands.guarded_output import GuardedStream
from preprocess.shards.location import ShardError, open_location
from preprocess.system_errors import describe_system_error, naming_file
from tests.fake_source import fake_source, pack

TOO_LARGE = r"File too large\)?[;:] raise the limit on the size of a file \(ulimit -f\), or use another disk"


@contextmanager
def file_limit(num_bytes: int):
    """Limit the size of files that this process writes, as `ulimit -f` does; Python ignores the signal (SIGXFSZ)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("codec", ["raw", "blosc"])
@pytest.mark.parametrize(
    ("limit", "file"), [(0, "train/: can't write journal/owner: "), (3_000, "train/pixels/c/0/0/0 can't be written: ")]
)
def test_a_pack_whose_files_are_too_large_names_file_and_remedy(tmp_path, codec, limit, file):
    source = fake_source(8, size=24)
    with (
        file_limit(limit),
        pytest.raises(ShardError, match=f"^{tmp_path}/{file}{TOO_LARGE}.*run the same command") as it,
    ):
        pack(source, tmp_path, codec=codec)
    assert "\n" not in str(it.value)
    pack(source, tmp_path, codec=codec)


def test_labels_that_are_too_large_name_the_array(tmp_path):
    source = fake_source(4, size=2)
    with file_limit(1_900), pytest.raises(ShardError, match=f"^{tmp_path}/train/labels can't be written: {TOO_LARGE}"):
        pack(source, tmp_path, checksum=False)


def test_a_snapshot_that_is_too_large_is_one_line_without_internal_paths(tmp_path):
    state = {name: np.random.default_rng(0).normal(size=5_000) for name in "ab"}
    with (
        file_limit(20_000),
        pytest.raises(SnapshotError, match=f"^{tmp_path} cannot be written \\({TOO_LARGE}$") as caught,
    ):
        write_snapshot(tmp_path, 1, 1, state)
    assert "ocdbt" not in str(caught.value)


def test_a_file_that_is_too_large_is_one_line_of_a_command(tmp_path):
    with file_limit(10), pytest.raises(OSError, match="File too large") as caught:
        write_whole(tmp_path / "model.safetensors", bytes(11))
    line = describe_error(caught.value)
    assert line == (
        f"{tmp_path}/model.safetensors cannot be written (File too large): "
        "raise the limit on the size of a file (ulimit -f), or use another disk"
    )


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="Not a directory") as caught:
        make_folder(tmp_path / "file" / "hlo")
    expected = (
        f"{tmp_path}/file/hlo cannot be written (Not a directory): choose another path, or move away what is there"
    )
    assert describe_error(caught.value) == expected


@pytest.mark.parametrize(
    ("number", "name", "expected"),
    [
        (errno.ENOSPC, "a/b", "a/b cannot be read or written (No space left on device): make room on its disk"),
        (errno.EACCES, "a/b", "a/b cannot be read or written (Permission denied): grant write permission"),
        (
            errno.EMFILE,
            b"a/b",
            "a/b cannot be read or written (Too many open files): allow more open files (ulimit -n)",
        ),
        (errno.ENOENT, "a/b", "a/b does not exist (No such file or directory): check the path and its folder"),
        (errno.EIO, None, "a file cannot be read or written (Input/output error): check its folder and its disk"),
    ],
)
def test_an_error_of_the_system_is_a_sentence(number, name, expected):
    error = OSError(number, os.strerror(number), name)
    assert describe_system_error(error) == describe_error(error) == expected


def test_a_folder_for_temporary_files_is_asked_for():
    text = "No usable temporary directory found in ['/tmp']"
    said = describe_error(FileNotFoundError(errno.ENOENT, text))
    assert said == f"{text}: make room there, or name a folder that can be written in $TMPDIR"


def test_a_removed_working_folder_is_named_as_the_cause(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(FileNotFoundError) as caught:
        open_location("data")
    assert describe_error(caught.value) == "the current folder was removed: change to another folder (cd)"


def test_a_full_output_is_named():
    with Path("/dev/full").open("w") as full:
        stream = GuardedStream(full)
        stream.write("text")
        with pytest.raises(OSError, match="No space left") as caught:
            stream.flush()
        with pytest.raises(OSError, match="No space left"):
            full.close()
    expected = "/dev/full cannot be read or written (No space left on device): make room on its disk"
    assert describe_error(caught.value) == expected


def test_an_error_of_an_image_encoder_gets_the_name_of_the_file():
    with pytest.raises(OSError, match=r"^x\.png cannot be written \(encoder error -2\): check its folder"):  # noqa: SIM117
        with naming_file("x.png"):
            raise OSError("encoder error -2")


def multiply(folder, heard):
    with caching_compilations(str(folder), heard.append):
        return compile_traced(trace_ahead(lambda x: jnp.tan(x) @ x, jnp.ones((22, 22)), platform="cpu")).from_cache


def test_a_cache_entry_that_cannot_be_written_is_one_notice_and_leaves_no_part(tmp_path, recwarn):
    heard: list[str] = []
    with file_limit(100):
        assert not multiply(tmp_path, heard)
    (told,) = heard
    assert told == (
        f"warning: the compilation cache {tmp_path} cannot be written (File too large), so the next launch compiles "
        "again: make room there, or give another folder with --compilation-cache"
    )
    assert [multiply(tmp_path, heard), multiply(tmp_path, heard)] == [False, True]
    assert heard == [told]
    assert not [each for each in recwarn if "compilation cache" in str(each.message)]


def test_a_damaged_cache_entry_is_one_notice_with_the_file_to_delete(tmp_path, recwarn):
    heard: list[str] = []
    multiply(tmp_path, heard)
    for entry in tmp_path.glob("*-cache"):
        os.truncate(entry, 50)
    assert not multiply(tmp_path, heard)
    (told,) = heard
    assert told.startswith(f"warning: the compilation cache {tmp_path} cannot be read (")
    assert told.endswith(f"so each launch compiles again: delete {tmp_path}/jit__lambda-*")
    assert not [each for each in recwarn if "compilation cache" in str(each.message)]
