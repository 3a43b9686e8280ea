"""Errors of the system: each message names the file, the reason and the remedy, and has no "[Errno"."""

import errno
import os
import re
import resource
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts
from click.testing import CliRunner
from PIL import Image

from loopfeed.engine.commands.command_end import describe_error
from loopfeed.engine.compilation.ahead_of_time import caching_compilations, compile_traced, trace_ahead
from loopfeed.engine.evaluation import photographs
from loopfeed.engine.records import orbax_store, recorded_run, snapshot
from loopfeed.engine.records.snapshot import SnapshotError, write_snapshot
from loopfeed.engine.records.whole_file import make_folder, write_whole
from loopfeed.engine.run.resume import find_start
from loopfeed.engine.runtime import runtime_file
from loopfeed.preprocess import regular_file
from loopfeed.preprocess.commands.guarded_output import GuardedStream
from loopfeed.preprocess.commands.inspect_cli import main as inspect_shards
from loopfeed.preprocess.shards import location as location_module
from loopfeed.preprocess.shards import split_arrays, stored_pixels, verify
from loopfeed.preprocess.shards.arrays import column_metadata, create_array, damage
from loopfeed.preprocess.shards.damages import Damage
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from loopfeed.preprocess.shards.mapped_images import MappedImages
from loopfeed.preprocess.shards.reader import open_split
from loopfeed.preprocess.sources import tree
from loopfeed.preprocess.sources.open_source import SourceError, open_source
from loopfeed.preprocess.system_errors import (
    Cause,
    cause_of,
    describe_system_error,
    naming_file,
    reading_remedy,
    remedy_of,
    status_of,
)
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
        (
            errno.EACCES,
            "a/b",
            "a/b cannot be read or written (Permission denied): grant permission to it and its folders",
        ),
        (
            errno.EMFILE,
            b"a/b",
            "a/b cannot be read or written (Too many open files): allow more open files (ulimit -n)",
        ),
        (errno.ENOENT, "a/b", "a/b does not exist (No such file or directory): check the path and its folder"),
        (
            errno.EIO,
            None,
            "a file cannot be read or written (Input/output error): try again; if it fails again, "
            "check the disk or the network",
        ),
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


def test_damaged_cache_entries_are_one_notice_and_are_replaced(tmp_path, recwarn):
    heard: list[str] = []
    multiply(tmp_path, heard)
    for entry in tmp_path.glob("*-cache"):
        os.truncate(entry, 50)
    assert not multiply(tmp_path, heard)
    (told,) = heard
    assert told.startswith(
        f"warning: the compilation cache {tmp_path} has entries that cannot be read, such as jit__lamb"
    )
    assert told.endswith("), which are compiled again, and replaced if they are damaged")
    assert multiply(tmp_path, heard)
    assert heard == [told]
    assert not [each for each in recwarn if "compilation cache" in str(each.message)]


def test_a_disk_that_takes_no_more_files_is_not_said_to_lack_room(monkeypatch):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "full/file")
    for left, expected in ((0, "remove files from its disk"), (1, "make room on its disk")):
        monkeypatch.setattr(os, "statvfs", lambda _, left=left: SimpleNamespace(f_files=6, f_favail=left))
        assert remedy_of(error).startswith(expected)


CAUSES = {
    Cause.PASSING: (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EHOSTUNREACH, errno.ECONNRESET),
    Cause.ROOM: (errno.ENOSPC,),
    Cause.QUOTA: (errno.EDQUOT,),
    Cause.MEMORY: (errno.ENOMEM,),
    Cause.RIGHTS: (errno.EACCES, errno.EPERM),
    Cause.READ_ONLY: (errno.EROFS,),
    Cause.NAME: (errno.ENAMETOOLONG, errno.EILSEQ),
    Cause.DESCRIPTORS: (errno.EMFILE, errno.ENFILE),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_the_number_of_an_error_tells_its_cause_in_python_and_in_tensorstore(cause):
    for number in CAUSES[cause]:
        assert cause_of(OSError(number, os.strerror(number))) == cause
        of_store = f"UNKNOWN: Failed to open: x [os_error_code='{number}'] [source locations='y']"
        assert cause_of(ValueError(of_store)) == cause


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (
            "ABORTED: All 32 retry attempts failed: Service Unavailable [HTTP code 503]",
            "PASSING",
        ),
        ("ABORTED: All 1 retry attempts failed: Too Many Requests [HTTP code 429]", "PASSING"),
        ("PERMISSION_DENIED: Forbidden [HTTP code 403]", "RIGHTS"),
        ("NOT_FOUND: Gone [HTTP code 410]", None),
        ("DEADLINE_EXCEEDED: no answer", "PASSING"),
        ('FAILED_PRECONDITION: Expected "shape" of [1] but received: [2]', None),
    ],
)
def test_the_answer_of_a_store_tells_its_cause(text, cause):
    found = cause_of(ValueError(text))
    assert (found and found.name) == cause
    if "[HTTP" in text:
        assert re.fullmatch(r"it can't be read \([A-Z][A-Za-z ]+, HTTP code \d+\)", damage(ValueError(text)))
    if cause is not None:
        assert "disk" not in reading_remedy(ValueError(text), "pack again")


def read_four(folder):
    with open_split(str(folder), "train") as split:
        split.read_into(np.arange(4), np.empty((4, 4, 4), np.uint32), np.empty(4, np.int32), timeout_s=9)


# What damages nothing must not be answered by packing anew, restoring files or a smaller batch.
NOT_DAMAGE = [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOMEM, errno.EACCES, errno.EMFILE]
WRONG = ("--overwrite", "restore", "inspect-shards", "--batch", "does not exist", "choose another")


@pytest.mark.parametrize("number", NOT_DAMAGE)
@pytest.mark.parametrize(
    "file", ["manifest.json", "pixels/zarr.json", "labels/zarr.json", "labels/c/0", "pixels/c/0/0/0"]
)
def test_a_fault_of_the_system_is_not_taken_for_damage(tmp_path, monkeypatch, file, number):
    pack(fake_source(4), tmp_path)
    words = f"UNKNOWN: Error reading x [os_error_code='{number}']"

    def refuse(*_, **__):
        raise OSError(number, os.strerror(number), str(tmp_path / "train" / file))

    class Refused:
        def result(self, timeout=None):
            raise ValueError(words)

    if file.endswith(".json"):
        before = regular_file.read_regular
        monkeypatch.setattr(
            location_module,
            "read_regular",
            lambda path, **more: refuse() if str(path).endswith(file) else before(path, **more),
        )
    elif file.startswith("labels"):
        monkeypatch.setattr(split_arrays, "read_array", lambda *_: {slice(0, 4): SimpleNamespace(read=Refused)})
    else:
        monkeypatch.setattr(stored_pixels, "open_pixels", lambda *_: {0: SimpleNamespace(read=Refused)})
        monkeypatch.setattr(stored_pixels, "start_reading", lambda *_: Refused())
        monkeypatch.setattr(MappedImages, "is_mappable", lambda _: False)
    with pytest.raises(ShardError) as caught:
        read_four(tmp_path)
    said = str(caught.value)
    assert os.strerror(number) in said
    assert not [words for words in WRONG if words in said], said
    assert describe_error(caught.value) == said


def test_an_array_that_cannot_be_written_is_not_to_be_packed_again(tmp_path):
    (tmp_path / "train/pixels").mkdir(parents=True)
    location = open_location(str(tmp_path)).child("train")
    with (
        file_limit(10),
        pytest.raises(ShardError, match=rf"train/pixels: can't be written: {TOO_LARGE}, then run") as it,
    ):
        create_array(location, "pixels", column_metadata("labels", 4))
    assert "--overwrite" not in str(it.value)


def test_only_the_memory_of_the_program_depends_on_the_batch(tmp_path):
    of_xla = RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nmore")
    assert describe_error(of_xla).endswith("the program needs more memory than is free; use a smaller --batch")
    for number in (errno.ENOMEM, errno.ENOSPC):
        of_store = RuntimeError(f"RESOURCE_EXHAUSTED: Failed to map {tmp_path} [os_error_code='{number}']")
        assert "--batch" not in describe_error(of_store)
    assert "--batch" not in describe_error(ShardError("RESOURCE_EXHAUSTED: Failed to map"))


def test_verification_does_not_call_damaged_what_it_could_not_read(tmp_path, monkeypatch):
    pack(fake_source(4), tmp_path)
    words = f"UNKNOWN: x [os_error_code='{errno.EIO}']"

    class Refusing:
        def __getitem__(self, _):
            return SimpleNamespace(read=lambda: SimpleNamespace(result=self._refuse))

        @staticmethod
        def _refuse(timeout):
            raise ValueError(words)

    monkeypatch.setattr(verify, "open_pixels", lambda *_: Refusing())
    (damage,) = verify.verify_split(str(tmp_path), "train")
    expected = "it can't be read (Input/output error); try again; if it fails again, check the disk or the network"
    assert str(damage) == f"pixels/c/0/0/0: images 0–3 (n1/0.png, n2/1.png, n3/2.png, …): {expected}"
    result = CliRunner().invoke(inspect_shards, [str(tmp_path), "--verify"])
    assert result.exit_code == 2
    assert "train: not read in 1 place, so these files may be intact:\n" in result.output
    assert "--overwrite" not in result.output


def test_no_file_is_called_damaged_because_one_opening_failed(tmp_path, monkeypatch):
    pack(fake_source(4), tmp_path)
    opened: list[str] = []
    real = regular_file.open_regular

    def open_or_fail(failing, path):
        opened.append(str(path))
        if len(opened) == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path)

    monkeypatch.setattr(regular_file, "open_regular", partial(open_or_fail, 0))
    assert verify.verify_split(str(tmp_path), "train") == ()
    found: list[Damage] = []
    for failing in range(1, len(opened) + 1):
        opened.clear()
        monkeypatch.setattr(regular_file, "open_regular", partial(open_or_fail, failing))
        with suppress(ShardError):
            found += verify.verify_split(str(tmp_path), "train")
    assert any("labels/zarr.json: it can't be read (Input/output error); try again" in str(each) for each in found)
    assert [each for each in found if not each.remedy] == []


def test_a_size_that_the_system_does_not_tell_does_not_enter_the_plan(tmp_path, monkeypatch):
    def refuse(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO), path)

    Image.new("RGB", (8, 8)).save(make(tmp_path / "a") / "1.png")
    monkeypatch.setattr(tree, "status_of", refuse)
    with pytest.raises(SourceError, match=r"a/1\.png cannot be accessed: Input/output error; try again; if it fails"):
        open_source(tmp_path)


def make(folder):
    folder.mkdir()
    return folder


@pytest.mark.parametrize("number", NOT_DAMAGE)
def test_a_record_that_cannot_be_read_now_is_neither_to_be_restored_nor_removed(tmp_path, monkeypatch, number):
    def refuse(path, **_):
        raise OSError(number, os.strerror(number), str(path))

    for module, read in (
        ("loopfeed.engine.records.recorded_run", recorded_run.read_recorded),
        ("loopfeed.engine.records.recorded_run", recorded_run.read_result),
        ("loopfeed.engine.runtime.runtime_file", runtime_file.read_runtime),
    ):
        monkeypatch.setattr(f"{module}.read_regular", refuse)
        with pytest.raises(ValueError, match=rf"\.json cannot be read \({re.escape(os.strerror(number))}\): ") as it:
            read(tmp_path)
        assert not [words for words in (*WRONG, "remove") if words in str(it.value)], str(it.value)


def test_a_resume_does_not_give_up_a_snapshot_that_cannot_be_read_now(tmp_path, monkeypatch):
    for step in (1, 2):
        write_snapshot(tmp_path / "snapshots", step, step, {"num_evaluations": np.zeros((), np.int32)})
    restore = orbax_store.restore_facts

    def refuse(path):
        if path.name == "2":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return restore(path)

    monkeypatch.setattr(snapshot, "restore_facts", refuse)
    heard: list[str] = []
    with pytest.raises(ValueError, match=r"snapshots/2 cannot be read: .*; try again; if it fails again, check"):
        find_start(tmp_path, heard.append)
    monkeypatch.setattr(snapshot, "restore_facts", restore)
    assert find_start(tmp_path, heard.append).step == 2
    # One that is damaged is passed over, as before.
    next((tmp_path / "snapshots/2/facts").iterdir()).write_bytes(b"{}")
    assert find_start(tmp_path, heard.append).step == 1
    assert len(heard) == 1
    assert "is damaged and cannot be used" in heard[0]


@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EACCES])
def test_what_the_system_cannot_tell_is_not_said_to_be_missing(tmp_path, monkeypatch, number):
    def refuse(path, *_, **__):
        raise OSError(number, os.strerror(number), str(path))

    errors: list[Exception] = []
    for check in (lambda path: photographs.list_photographs([path], lambda _: None), open_source, status_of):
        with monkeypatch.context() as patch, suppress(OSError, ValueError):
            patch.setattr(os, "stat", refuse)
            try:
                check(tmp_path / "x")
            except Exception as caught:
                errors.append(caught)
                raise
    assert len(errors) == 3
    for error in errors:
        assert "does not exist" not in describe_error(error)
        assert os.strerror(number) in str(error)


def test_a_server_without_listings_is_not_asked_for_one():
    location = Location({"driver": "http", "path": "/pack/"}, "http://x/pack/", ts.Context())
    assert not location.can_list
    assert location.child("train").remedy.startswith("copy the pack from http://x/pack to a folder and run `inspect-")
