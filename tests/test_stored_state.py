"""A run folder in a store: the store holds a whole state after every single write, and its readers believe no other."""

import errno
import json
import math
import os
import shutil
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.engine.records.digests import sealed
from loopfeed.engine.records.file_errors import LostFileError
from loopfeed.engine.records.run_search import summarise_stored_runs
from loopfeed.engine.records.stored import capture as capture_module
from loopfeed.engine.records.stored import mirror as module
from loopfeed.engine.records.stored import state as state_module
from loopfeed.engine.records.stored.capture import FolderCapture
from loopfeed.engine.records.stored.following import followed_copy
from loopfeed.engine.records.stored.lease import LEASE, Lease, StoredRunInUseError
from loopfeed.engine.records.stored.mirror import Mirror
from loopfeed.engine.records.stored.reading import download, local_copy, with_weights
from loopfeed.engine.records.stored.state import MARKER, OBJECTS, Part, StoredRunError, StoredState, read_state
from loopfeed.engine.records.stored.working_copy import WorkingCopy
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from tests.fake_source import files_of


@dataclass(frozen=True)
class FaultyLocation(Location):
    """A location whose changes fail from a certain one on; the first that fails may take effect all the same."""

    left: list[int] = field(default_factory=list)
    takes_effect: bool = False

    def _change(self, change):
        self.left[0] -= 1
        if self.left[0] < 0:
            if self.takes_effect and self.left[0] == -1:
                change()
            raise ShardError("the store is gone")
        return change()

    def write(self, key, value, *, timeout_s=None):
        return self._change(lambda: super(FaultyLocation, self).write(key, value, timeout_s=timeout_s))

    def write_if(self, key, value, generation):
        return self._change(lambda: super(FaultyLocation, self).write_if(key, value, generation))

    def delete(self, key):
        return self._change(lambda: super(FaultyLocation, self).delete(key))

    def delete_keys(self, keys):
        for key in keys:
            self.delete(key)


def faulty(location, after, *, takes_effect=False):
    values = {name: getattr(location, name) for name in ("spec", "display", "context", "timeout_s", "is_conditional")}
    return FaultyLocation(**values, left=[after], takes_effect=takes_effect)


@pytest.fixture
def location():
    return open_location("memory://run", context=ts.Context())


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_run(run: Path, *, num_lines: int, snapshots: dict[int, int], result: bool = False, salt: str = "") -> Path:
    """Write files like those of a run; a snapshot is its step and the size of its largest file."""
    run.mkdir(exist_ok=True)
    (run / "config.json").write_text("{}")
    (run / "loss.jsonl").write_bytes(b"".join(b'{"step": %d%s}\n' % (n, salt.encode()) for n in range(num_lines)))
    for step, size in snapshots.items():
        folder = run / "snapshots" / str(step) / "state/d"
        folder.mkdir(parents=True)
        (folder / "data").write_bytes("".join(f"{step}{salt}:{number}." for number in range(size)).encode()[:size])
        (folder.parent / "empty").touch()
    if result:
        (run / "model.safetensors").write_bytes(b"weights" * 9)
        (run / "result.json").write_text("{}")
    # What belongs to one process or machine is not stored.
    for name in (".lock", "control/request.json", "snapshots/.unfinished/9/data"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_text("not stored")
    return run


def stored_files(run: Path) -> dict[str, bytes]:
    return {str(name): content for name, content in files_of(run).items() if content != b"not stored"}


def downloaded(location, place: Path) -> dict[str, bytes]:
    download(location, place)
    return {str(name): content for name, content in files_of(place).items()}


def state_of(location) -> StoredState:
    state = read_state(location)
    assert state is not None
    return state


def mirror_of(location, run, tmp_path, **values):
    lease = Lease(location)
    # A killed process leaves its lease behind.
    lease.acquire(lambda _: None) if location.read(LEASE) is None else setattr(
        lease, "launch", json.loads(location.read(LEASE))["launch"]
    )
    return Mirror(location, lease, run, location.read(MARKER), part_bytes=100, **values)


@pytest.mark.parametrize("takes_effect", [False, True])
def test_a_killed_upload_leaves_the_previous_state_or_the_next(tmp_path, takes_effect):
    before = write_run(tmp_path / "before", num_lines=30, snapshots={4: 250})
    # The logs were cut and went on differently, a snapshot was removed, and two are new.
    after = write_run(tmp_path / "after", num_lines=40, snapshots={6: 250, 8: 350}, result=True, salt="1")
    seen = []
    for num_changes in range(200):
        location = open_location("memory://run", context=ts.Context())
        mirror_of(location, before, tmp_path).upload_once()
        broken = mirror_of(faulty(location, num_changes, takes_effect=takes_effect), after, tmp_path)
        try:
            broken.upload_once()
            broken.upload_once()
        except ShardError:
            is_killed = True
        else:
            is_killed = False
        found = downloaded(location, tmp_path / f"copy-{num_changes}")
        assert found in (stored_files(before), stored_files(after))
        seen.append(found == stored_files(after))
        # The next process uploads the rest, and removes what the killed one left.
        mirror = mirror_of(location, after, tmp_path)
        mirror.upload_once()
        mirror._remove_unlisted()
        mirror._remove_unlisted()
        assert downloaded(location, tmp_path / f"next-{num_changes}") == stored_files(after)
        assert {key for key in location.list_keys() if key.startswith(OBJECTS)} == state_of(location).keys
        if not is_killed:
            break
    assert not is_killed
    assert len(seen) > 12
    assert seen == sorted(seen)
    assert set(seen) == {False, True}


def test_nothing_but_objects_is_removed(location, tmp_path):
    @dataclass(frozen=True)
    class Listing(Location):
        """A location that lists more than it is asked for, as some emulators do."""

        def list_keys(self, prefix=""):
            return super().list_keys()

    for key in ("objects/notes.txt", "notes.txt", f"objects/{'0' * 64}"):
        location.write(key, b"mine")
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror._location = Listing(**{name: getattr(location, name) for name in ("spec", "display", "context")})
    mirror.upload_once()
    mirror._remove_unlisted(at_end=True)
    kept = {"objects/notes.txt", "notes.txt", LEASE, MARKER}
    assert set(location.list_keys()) == kept | state_of(location).keys


def test_a_reader_in_the_middle_of_an_upload_gets_a_whole_state(location, tmp_path):
    run = write_run(tmp_path / "run", num_lines=30, snapshots={4: 3000})
    mirror = mirror_of(location, run, tmp_path)
    mirror.upload_once()

    @dataclass(frozen=True)
    class Moving(Location):
        """A location whose state is replaced, and whose old objects are removed, after a few reads."""

        reads: list[str] = field(default_factory=list)

        def read(self, key, **values):
            self.reads.append(key)
            if len(self.reads) == 10:
                (run / "snapshots/4").rename(tmp_path / "gone")
                write_run(run, num_lines=31, snapshots={8: 300})
                mirror.upload_once()
                mirror._remove_unlisted()
            return super().read(key, **values)

    moving = Moving(**{name: getattr(location, name) for name in ("spec", "display", "context")})
    assert downloaded(moving, tmp_path / "copy") == stored_files(run)
    assert moving.reads.count(MARKER) == 2
    # An empty folder would be a damaged snapshot.
    assert [path.name for path in (tmp_path / "copy/snapshots").iterdir()] == ["8"]


def test_an_object_that_is_gone_for_good_is_an_error(location, tmp_path):
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror_of(location, run, tmp_path).upload_once()
    location.delete(next(iter(state_of(location).keys)))
    with pytest.raises(StoredRunError, match=r"lacks objects/[0-9a-f]{64} although its state.json lists it: try again"):
        download(location, tmp_path / "copy")


def test_a_changed_object_is_an_error(location, tmp_path):
    run = write_run(tmp_path / "run", num_lines=3, snapshots={4: 50})
    mirror_of(location, run, tmp_path).upload_once()
    (part,) = state_of(location).files["snapshots/4/state/d/data"]
    location.write(part.key, b"other bytes")
    with pytest.raises(StoredRunError, match=rf"{part.key} has changed since the run wrote it .*: restore that object"):
        download(location, tmp_path / "copy")


def test_the_line_that_is_being_written_is_not_stored(tmp_path):
    run = write_run(tmp_path / "run", num_lines=0, snapshots={})
    capture = FolderCapture(run, None)
    sizes = []
    for more in (b'{"step"', b": 1}\n{", b"}", b"\n"):
        with (run / "loss.jsonl").open("ab") as log:
            log.write(more)
        sizes.append(sum(part.size for part in capture.take(Part.of)["loss.jsonl"]))
    assert sizes == [0, 12, 12, 15]


def test_what_is_read_later_contains_what_was_read_before(tmp_path):
    """A state must not have a snapshot without its lines, nor a result without the files that it describes."""
    run = write_run(tmp_path / "run", num_lines=3, snapshots={4: 10})
    contents: dict[Part, bytes] = {}

    def put(content):
        # Meanwhile the run goes on, and ends.
        if not contents:
            write_run(run, num_lines=9, snapshots={8: 10}, result=True)
        contents[Part.of(content)] = content
        return Part.of(content)

    capture = FolderCapture(run, None)
    files = capture.take(put)
    assert b"".join(contents[part] for part in files["loss.jsonl"]).count(b"\n") == 9
    assert {name.split("/")[1] for name in files if name.startswith("snapshots/")} == {"4"}
    assert "result.json" not in files
    assert {"result.json", "model.safetensors", "snapshots/8/state/d/data"} <= capture.take(put).keys()


@pytest.mark.parametrize(("call", "failing"), [("scandir", "d"), ("scandir", "tensorboard")])
def test_a_folder_that_cannot_be_listed_is_not_uploaded_as_an_empty_one(tmp_path, monkeypatch, call, failing):
    run, real = tmp_path / "run", getattr(os, call)
    for name in ("snapshots/8/state/d/data", "tensorboard/events"):
        (run / name).parent.mkdir(parents=True)
        (run / name).write_bytes(b"?")

    def fail(path, *arguments, **more):
        if isinstance(path, str | Path) and Path(path).name == failing:
            raise OSError(errno.EIO, "Input/output error", str(path))
        return real(path, *arguments, **more)

    monkeypatch.setattr(os, call, fail)
    with pytest.raises(OSError, match="Input/output error"):
        FolderCapture(run, None).take(Part.of, is_last=True)


@pytest.mark.parametrize("lost", ["config.json", "loss.jsonl", "snapshots"])
def test_a_folder_that_is_emptied_does_not_replace_what_is_stored(location, tmp_path, lost):
    run = write_run(tmp_path / "run", num_lines=30, snapshots={4: 50, 8: 50})
    mirror = mirror_of(location, run, tmp_path)
    mirror.upload_once()
    mirror.begin()
    mirror._upload()
    before = location.read(MARKER)
    path = run / lost
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    if lost != "snapshots":
        write_run(run, num_lines=40, snapshots={12: 50})
        path.unlink()
    with pytest.raises(LostFileError, match=rf"was removed or replaced in the run folder .*{run.name}"):
        mirror._upload()
    if lost == "loss.jsonl":
        path.write_text("{}\n")
        with pytest.raises(LostFileError, match=r"loss.jsonl was removed or replaced"):
            mirror._upload()
    if lost != "loss.jsonl":  # a resume checks its logs itself
        with pytest.raises(LostFileError):
            mirror.upload_once()
    assert location.read(MARKER) == before


def test_a_snapshot_that_is_removed_while_it_is_opened_is_left_out(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", num_lines=1, snapshots={4: 10, 8: 10})
    capture = FolderCapture(run, None)
    open_path, opened = Path.open, []

    def removing(path, *arguments, **values):
        opened.append(path)
        if len(opened) == 3:  # the first of two files of the second snapshot
            (run / "snapshots/4").rename(tmp_path / "gone")
            (tmp_path / "gone/state/d/data").unlink(missing_ok=True)
        return open_path(path, *arguments, **values)

    monkeypatch.setattr(Path, "open", removing)
    names = capture.take(Part.of)
    assert {name.split("/")[1] for name in names if name.startswith("snapshots/")} == {"8"}


def test_a_snapshot_that_is_replaced_after_it_was_listed_is_left_out(tmp_path, monkeypatch):
    run = write_run(tmp_path / "run", num_lines=1, snapshots={4: 10, 8: 10})
    list_files = capture_module._files_below

    def replacing(folder):
        paths = list_files(folder)
        if folder.name == "4":
            folder.rename(tmp_path / "gone")
            shutil.copytree(tmp_path / "gone", folder)
        return paths

    monkeypatch.setattr(capture_module, "_files_below", replacing)
    names = FolderCapture(run, None).take(Part.of)
    assert {name.split("/")[1] for name in names if name.startswith("snapshots/")} == {"8"}


def test_a_snapshot_that_is_removed_while_it_is_uploaded_is_stored_whole(tmp_path):
    run = write_run(tmp_path / "run", num_lines=1, snapshots={4: 10})
    before = {path.name: path.read_bytes() for path in (run / "snapshots/4").rglob("*") if path.is_file()}
    contents: dict[Part, bytes] = {}

    def put(content):
        if (run / "snapshots/4").exists():
            (run / "snapshots/4").rename(tmp_path / "gone")
            shutil.rmtree(tmp_path / "gone")
        contents[Part.of(content)] = content
        return Part.of(content)

    files = FolderCapture(run, None).take(put)
    found = {Path(name).name: b"".join(map(contents.__getitem__, files[name])) for name in files if "snapshots" in name}
    assert found == before


def marker_of(files, **others) -> bytes:
    return json.dumps(sealed({"format": 1, "launch": "launch", "time": 0.0, "files": files, **others})).encode()


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("../config.json", []),
        ("/etc/passwd", []),
        ("a/../../b", []),
        ("snapshots/four/data", []),
        ("config.json", [["../../secret", 3]]),
        ("config.json", [["0" * 64, -1]]),
        ("config.json", "text"),
        (".", []),
        ("\ud800", []),
        ("a" * 256, []),
        ("config.json/a", []),
        ("config.json", [["0" * 64, (8 << 20) + 1]]),
        ("runtime.json", [[f"{digit}" * 64, 8 << 20] for digit in range(3)]),
        ("model.safetensors", [["0" * 64, 1 << 20]] * 1281),
    ],
)
def test_a_marker_cannot_lead_out_of_the_run_or_fill_a_disk(location, name, parts):
    location.write(MARKER, marker_of({"config.json": [], name: parts}))
    with pytest.raises(StoredRunError, match=r"memory://run/state.json cannot be read \(.*\): restore that object"):
        read_state(location)


def test_a_changed_marker_and_one_of_a_newer_version_are_refused():
    content = StoredState({"config.json": ()}, "launch", 0.0).to_bytes()
    assert StoredState.from_bytes(content, "").files == {"config.json": ()}
    with pytest.raises(StoredRunError, match="it has changed since it was written"):
        StoredState.from_bytes(content.replace(b"launch", b"lunch!", 1), "")
    newer = json.dumps(sealed({"format": 2, "files": {}})).encode()
    with pytest.raises(StoredRunError, match="its format is 2, and this version reads format 1"):
        StoredState.from_bytes(newer, "")


@pytest.mark.parametrize("time", [10**400, -1, math.nan, 1e308, "now"], ids=["huge", "negative", "nan", "late", "text"])
def test_a_marker_without_a_time_is_damaged(tmp_path, time):
    for name, content in ("bad", marker_of({}, time=time)), ("good", marker_of({"config.json": []})):
        (tmp_path / name).mkdir()
        (tmp_path / name / MARKER).write_bytes(content)
    bad, good = summarise_stored_runs(f"file://{tmp_path}", 0.0, {})
    assert (bad.state, f"{MARKER} cannot be read" in str(bad.fault)) == ("damaged", True)
    assert MARKER not in str(good.fault)


def test_too_many_files_are_refused_on_both_sides(monkeypatch):
    monkeypatch.setattr(state_module, "_MOST_FILES", 10)
    files: dict[str, tuple[Part, ...]] = {f"{number}": () for number in range(11)}
    with pytest.raises(StoredRunError, match=r"cannot be stored \(it has 11 files, more than 10\): keep fewer"):
        StoredState(files, "", 0.0).to_bytes()
    with pytest.raises(StoredRunError, match=r"state.json cannot be read \(it has 11 files"):
        StoredState.from_bytes(marker_of(files), "")


def test_one_object_cannot_be_copied_again_and_again(location, tmp_path, monkeypatch):
    # Objects that are not in the store let the marker claim any size of it, so that what arrives is counted.
    content = bytes(1 << 10)
    part = Part.of(content)
    location.write(part.key, content)
    monkeypatch.setattr(state_module, "FREE_BYTES", 1 << 20)
    lies = [Part(f"{number:064x}", 8 << 20) for number in range(3)]
    files = {"config.json": [], "a": [part] * 2048, "b": [part] * 2048, "model.safetensors": lies}
    location.write(MARKER, marker_of(files))
    with pytest.raises(
        StoredRunError, match=r"makes 2,09\d,\d+ bytes of objects of only 1,024 bytes\): choose another URL"
    ):
        download(location, tmp_path / "copy")


def test_a_copy_that_does_not_fit_is_not_begun(location, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=100, free=10))
    location.write(MARKER, marker_of({"config.json": [["0" * 64, 11]]}))
    with pytest.raises(StoredRunError, match=r"needs 0.0 MB of disk space in .*, but only 0.0 MB are free: make room"):
        download(location, tmp_path / "copy")


def test_a_marker_that_another_process_replaced_stops_the_uploads(location, tmp_path):
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror.upload_once()
    location.write(MARKER, StoredState({}, "another", 1.0).to_bytes())
    write_run(run, num_lines=4, snapshots={})
    with pytest.raises(StoredRunError, match=r"state.json was replaced during the run by another process: .* stop the"):
        mirror.upload_once()


def test_who_lost_the_lease_does_not_replace_the_marker(location, tmp_path):
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror.upload_once()
    before = location.read(MARKER)
    write_run(run, num_lines=4, snapshots={})
    location.write(LEASE, (location.read(LEASE) or b"").replace(mirror._lease.launch.encode(), b"another"))
    with pytest.raises(StoredRunInUseError, match="is in use by process"):
        mirror.upload_once()
    assert location.read(MARKER) == before


def test_a_marker_whose_answer_was_lost_counts_as_written(location, tmp_path):
    @dataclass(frozen=True)
    class Losing(Location):
        """A location that retries a conditional write whose answer was lost, and so is refused."""

        def write_if(self, key, value, generation):
            super().write_if(key, value, generation)

    losing = Losing(**{name: getattr(location, name) for name in ("spec", "display", "context")})
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror._location = losing
    mirror.upload_once()
    assert downloaded(location, tmp_path / "copy") == stored_files(run)


@pytest.mark.timeout(60)
def test_the_thread_uploads_at_snapshots_and_at_the_end(location, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.01)
    monkeypatch.setattr(module, "UPLOAD_EVERY_S", 1e9)
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror.start()
    mirror.begin()
    write_run(run, num_lines=5, snapshots={4: 30})
    waiting = threading.Event()
    while (state := read_state(location)) is None or state.snapshot_steps != [4]:
        waiting.wait(0.01)
    write_run(run, num_lines=9, snapshots={}, result=True)
    mirror.finish()
    assert downloaded(location, tmp_path / "copy") == stored_files(run)
    assert {key for key in location.list_keys() if key.startswith(OBJECTS)} == state_of(location).keys
    mirror.release()
    assert location.read(LEASE) is None


@dataclass(frozen=True)
class Refusing(Location):
    """A location that refuses each change once or, if `takes_effect`, reports an error although it took effect."""

    refused: set[object] = field(default_factory=set)
    takes_effect: bool = False

    def _change(self, call, change):
        if call in self.refused:
            return change()
        self.refused.add(call)
        if self.takes_effect:
            change()
        raise ShardError("too many requests")

    def write(self, key, value, *, timeout_s=None):
        return self._change((key, "write"), lambda: super(Refusing, self).write(key, value, timeout_s=timeout_s))

    def write_if(self, key, value, generation):
        return self._change((key, "write_if"), lambda: super(Refusing, self).write_if(key, value, generation))

    def delete_keys(self, keys):
        return self._change(tuple(keys), lambda: super(Refusing, self).delete_keys(keys))


@pytest.mark.timeout(60)
@pytest.mark.parametrize("takes_effect", [False, True])
def test_a_store_that_refuses_for_a_moment_is_asked_again(location, tmp_path, monkeypatch, takes_effect):
    monkeypatch.setattr(module, "_RETRY_EVERY_S", 0.0)
    monkeypatch.setattr(module, "_LOOK_EVERY_S", 0.001)
    run = write_run(tmp_path / "run", num_lines=30, snapshots={4: 450})
    mirror = mirror_of(location, run, tmp_path)
    values = {name: getattr(location, name) for name in ("spec", "display", "context")}
    mirror._location = Refusing(**values, takes_effect=takes_effect)
    mirror.start()
    mirror.begin()
    while read_state(location) is None:
        time.sleep(0.001)
    write_run(run, num_lines=50, snapshots={8: 450})
    mirror.finish()
    assert downloaded(location, tmp_path / "copy") == stored_files(run)
    assert {key for key in location.list_keys() if key.startswith(OBJECTS)} == state_of(location).keys


def test_a_process_that_dies_after_failed_writes_of_the_marker_leaves_a_copy_that_continues(location, tmp_path, cache):
    """Each attempt has another marker, and nobody knows which of them took effect."""
    copy = WorkingCopy(location)
    copy.prepare()
    write_run(copy.run, num_lines=3, snapshots={})
    copy.note_markers([None])
    mirror = mirror_of(location, copy.run, tmp_path, on_marker=copy.note_markers)
    mirror.upload_once()
    markers = [location.read(MARKER)]

    @dataclass(frozen=True)
    class WithoutMarker(Location):
        def write_if(self, key, value, generation):
            if key == MARKER:
                markers.append(value)
                raise ShardError("too many requests")
            return super().write_if(key, value, generation)

    mirror._location = WithoutMarker(**{name: getattr(location, name) for name in ("spec", "display", "context")})
    for num_lines in (4, 5, 6):
        write_run(copy.run, num_lines=num_lines, snapshots={})
        with pytest.raises(ShardError, match="too many requests"):
            mirror.upload_once()
    assert len({*markers}) == 4
    assert [copy.continues(marker) for marker in markers] == [True] * 4
    assert not copy.continues(None)
    # One of the attempts took effect after all.
    assert markers[2] is not None
    location.write(MARKER, markers[2])
    mirror._location = location
    mirror.upload_once()
    assert copy.continues(location.read(MARKER))
    assert downloaded(location, tmp_path / "copy") == stored_files(copy.run)


def test_an_object_that_may_be_gone_is_uploaded_again(location, tmp_path, monkeypatch):
    """A removal that failed may have taken effect, and a list may show objects that were removed."""
    monkeypatch.setattr(module, "_RETRY_EVERY_S", 0.0)
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror.upload_once()
    (part,) = state_of(location).files["loss.jsonl"]

    @dataclass(frozen=True)
    class Forgetful(Location):
        """A location that removes objects but reports an error, and still lists them."""

        failed: list[str] = field(default_factory=list)

        def delete_keys(self, keys):
            super().delete_keys(keys)
            if not self.failed:
                self.failed.extend(keys)
                raise ShardError("too many requests")

        def list_keys(self, prefix=""):
            return sorted({*super().list_keys(prefix), *self.failed})

    mirror._location = forgetful = Forgetful(
        **{name: getattr(location, name) for name in ("spec", "display", "context")}
    )
    for salt in "12":  # an object that is in neither of two states is removed
        write_run(run, num_lines=3, snapshots={}, salt=salt)
        mirror._capture = mirror._new_capture()
        mirror._persist(mirror._upload)
    assert part.key in forgetful.failed
    assert location.read(part.key) is None
    for salt in ("", "3", "4", ""):
        write_run(run, num_lines=3, snapshots={}, salt=salt)
        mirror._capture = mirror._new_capture()
        mirror._persist(mirror._upload)
        assert downloaded(location, tmp_path / f"copy-{time.monotonic_ns()}") == stored_files(run)
    mirror._remove_unlisted(at_end=True)
    assert {key for key in location.list_keys() if key.startswith(OBJECTS)} == state_of(location).keys


@pytest.mark.timeout(60)
def test_an_error_of_the_thread_is_kept(location, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PATIENCE_S", 0.0)
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror._location = faulty(location, 0)
    mirror.start()
    mirror.begin()
    with pytest.raises(ShardError, match="the store is gone"):
        mirror.finish()
    with pytest.raises(ShardError, match="the store is gone"):
        mirror.check()


def test_only_the_files_that_are_needed_are_downloaded():
    names = ["config.json", "loss.jsonl", "snapshots/4/a", "snapshots/8/a"]
    assert list(with_weights(None)(names)) == ["config.json", "loss.jsonl", "snapshots/8/a"]
    assert list(with_weights(4)(names)) == ["config.json", "loss.jsonl", "snapshots/4/a"]
    ended = [*names, "model.safetensors", "result.json"]
    assert list(with_weights(None)(ended)) == ["config.json", "loss.jsonl", "model.safetensors", "result.json"]
    with pytest.raises(
        StoredRunError, match=r"there is no snapshot of step 5: choose another step \(available: 4, 8\)"
    ):
        with_weights(5)(names)


def test_messages_name_the_url(tmp_path):
    url = f"file://{tmp_path}/store"
    location = open_location(url)
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror_of(location, run, tmp_path).upload_once()

    def fail(folder):
        error = ValueError(f"{folder}/loss.jsonl is wrong")
        error.add_note(f"look at {folder}")
        raise error

    with pytest.raises(ValueError, match=r"^file://.*/store/loss.jsonl is wrong") as caught, local_copy(url) as folder:
        fail(folder)
    assert caught.value.__notes__ == [f"look at {url}"]
    assert not folder.exists()
    expected = r"there is no run at file://.*/none/, which contains no state.json: give the URL of a run$"
    with pytest.raises(StoredRunError, match=expected):
        local_copy(f"file://{tmp_path}/none").__enter__()
    with pytest.raises(StoredRunError, match=f"a run is in this folder itself: give its path, {run}"):
        local_copy(f"file://{run}").__enter__()


def test_a_followed_run_grows_as_the_run_does(tmp_path, monkeypatch):
    monkeypatch.setattr("loopfeed.engine.records.stored.following._REFRESH_EVERY_S", 0.0)
    url = f"file://{tmp_path}/store"
    location = open_location(url)
    run = tmp_path / "run"
    with followed_copy(url) as (folder, refresh):
        refresh()
        assert not folder.exists()
        mirror = mirror_of(location, run, tmp_path)
        for num_lines in (2, 9, 60):
            write_run(run, num_lines=num_lines, snapshots={})
            mirror.upload_once()
            inode = folder.exists() and (folder / "loss.jsonl").stat().st_ino
            refresh()
            assert stored_files(folder) == stored_files(run)
            assert inode in (False, (folder / "loss.jsonl").stat().st_ino)  # appended to, not replaced
        write_run(run, num_lines=5, snapshots={}, salt="2", result=True)
        mirror.upload_once()
        refresh()
        (run / "model.safetensors").unlink()
        assert stored_files(folder) == stored_files(run)
        (run / "result.json").unlink()
        mirror.upload_once()
        refresh()
        assert stored_files(folder) == stored_files(run)
        (run / "wandb").mkdir()
        (run / "wandb/run-id").write_text("a")
        mirror.upload_once()
        refresh()
        assert not (folder / "wandb").exists()  # of no use to who reads the logs


@settings(max_examples=60)
@given(st.lists(st.integers(0, 300), min_size=1, max_size=60))
def test_a_log_is_stored_in_few_parts_that_join_to_it(tmp_path_factory, increments):
    run = tmp_path_factory.mktemp("run")
    (run / "config.json").touch()
    contents: dict[str, bytes] = {}

    def put(content):
        assert 0 < len(content) <= 1 << 20
        part = Part.of(content)
        contents[part.sha256] = content
        return part

    capture = FolderCapture(run, None, part_bytes=1 << 20)
    with (run / "loss.jsonl").open("wb", buffering=0) as log:
        for kilobytes in increments:
            log.write(b"x" * (kilobytes << 10) + b"\n")
            parts = capture.take(put)["loss.jsonl"]
    whole = (run / "loss.jsonl").read_bytes()
    assert b"".join(contents[part.sha256] for part in parts) == whole
    # Full parts, and below them sizes that fall like those of a binary counter from 1 MiB to 64 KiB.
    assert len(parts) <= 2 * len(whole) // (1 << 20) + 6


def test_only_what_is_new_is_read(location, tmp_path):
    run = write_run(tmp_path / "run", num_lines=500, snapshots={4: 500})
    mirror_of(location, run, tmp_path).upload_once()
    read: list[bytes] = []

    def put(content):
        read.append(content)
        return Part.of(content)

    capture = FolderCapture(run, read_state(location), part_bytes=100)
    capture.take(put)
    with (run / "loss.jsonl").open("ab") as log:
        log.write(b'{"step": "new"}\n')
    read.clear()
    capture.take(put)
    # The last part, which was not full, and what follows it.
    assert b"".join(read).endswith(b'{"step": "new"}\n')
    assert sum(map(len, read)) <= 99 + 16


def test_files_that_the_run_does_not_write_are_stored_at_its_end(location, tmp_path):
    run = write_run(tmp_path / "run", num_lines=3, snapshots={})
    mirror = mirror_of(location, run, tmp_path)
    mirror.begin()
    for name in ("plots/deep/a.png", ".b.png.0123abcd", "notes.jsonl"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).write_bytes(b"other")
    mirror._upload()
    assert {"plots/deep/a.png", "notes.jsonl"}.isdisjoint(state_of(location).files)
    mirror._upload(is_last=True)
    copy = downloaded(location, tmp_path / "copy")
    assert copy == {name: content for name, content in stored_files(run).items() if not name.startswith(".b")}
    assert copy["plots/deep/a.png"] == copy["notes.jsonl"] == b"other"
    # A resume keeps them before its own end too.
    resumed = mirror_of(location, tmp_path / "copy", tmp_path)
    (tmp_path / "copy/notes.jsonl").unlink()
    resumed.begin()
    resumed._upload()
    assert "plots/deep/a.png" in state_of(location).files
    assert "notes.jsonl" not in state_of(location).files
