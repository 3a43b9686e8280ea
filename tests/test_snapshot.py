"""Snapshots on disk: every bit comes back, any damage is named, and a crash leaves whole ones alone."""

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import NamedTuple

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from jax.experimental import buffer_callback

from loopfeed.engine.records import orbax_store, snapshot
from loopfeed.engine.records.snapshot import (
    SnapshotError,
    keep_newest,
    match_state,
    read_snapshot,
    remove_snapshot,
    snapshot_steps,
    write_snapshot,
)

# A bound on what must come, long enough for a loaded machine; never waited for where the code is right.
SOON_S = 60.0
REPOSITORY = Path(__file__).parents[1]


class State(NamedTuple):
    """Like the program's carry."""

    step: object
    params: object
    opt_state: object
    average: object = None


def small_state(seed=0):
    """A state as the program carries it, with arrays large enough for files of their own and small ones."""
    rng = np.random.default_rng(seed)
    params = {
        "conv1": {"kernel": rng.normal(size=(3, 3, 3, 64)).astype(np.float32)},
        "norm": {"scale": np.ones(3, ml_dtypes.bfloat16)},
    }
    opt_state = jax.tree.map(np.asarray, optax.sgd(0.1, momentum=0.9).init(params))
    return State(np.int32(7), params, opt_state)


def same_bits(one, other):
    one, other = np.asarray(one), np.asarray(other)
    return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()


def assert_same(tree, other):
    assert str(jax.tree.structure(tree)) == str(jax.tree.structure(other))
    assert all(same_bits(*pair) for pair in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True))


DTYPES = [np.bool_, np.int8, np.uint8, np.int32, np.uint32, np.int64, np.float16, np.float32, np.float64]
DTYPES += [ml_dtypes.bfloat16, np.complex64]


@st.composite
def arrays(draw):
    """Arrays of any bits: all NaN payloads, both zeros, subnormal numbers."""
    dtype = np.dtype(draw(st.sampled_from(DTYPES)))
    shape = tuple(draw(st.lists(st.integers(0, 5), max_size=3)))
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    content = np.frombuffer(draw(st.binary(min_size=num_bytes, max_size=num_bytes)), np.uint8)
    if dtype == np.bool_:
        content = content % 2
    return content.view(dtype).reshape(shape)


Pair = namedtuple("Pair", "first second")
KEYS = st.text(
    st.characters(codec="utf-8", exclude_characters="./\0", exclude_categories=["Cs"]), min_size=1, max_size=6
)
TREES = st.recursive(
    arrays() | st.none(),
    lambda inner: (
        st.dictionaries(KEYS, inner, max_size=3)
        | st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.tuples(inner, inner).map(lambda pair: Pair(*pair))
    ),
    max_leaves=6,
)


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(tree=st.dictionaries(KEYS, TREES, max_size=3), step=st.integers(0, 2**40))
def test_every_state_is_restored_bit_for_bit(tmp_path, tree, step):
    shutil.rmtree(tmp_path / "any", ignore_errors=True)
    write_snapshot(tmp_path / "any", step, 3 * step, tree)
    found = read_snapshot(tmp_path / "any", step)
    assert (found.step, found.batch_index) == (step, 3 * step)
    assert_same(match_state(found.leaves, tree), tree)


def test_a_state_of_the_optimiser_comes_back_into_what_is_only_described(tmp_path):
    state = small_state()
    write_snapshot(tmp_path, 7, 14, state)
    like = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, state))
    found = read_snapshot(tmp_path, 7)
    assert_same(match_state(found.leaves, like), jax.tree.map(np.asarray, state))
    assert "opt_state.0.trace.conv1.kernel" in found.leaves


def test_plain_orbax_reads_it(tmp_path):
    """With Orbax alone, a snapshot reads as nested dictionaries with the names of the program."""
    import orbax.checkpoint as ocp

    state = small_state()
    write_snapshot(tmp_path, 7, 14, state)
    state_folder = tmp_path / "7" / "state"
    with orbax_store._quiet():
        trees = [reader().restore(state_folder) for reader in (ocp.PyTreeCheckpointer, ocp.StandardCheckpointer)]
        with ocp.CheckpointManager(tmp_path) as manager:
            assert manager.all_steps() == [7]
            asked = ocp.args.Composite(state=ocp.args.PyTreeRestore(), facts=ocp.args.JsonRestore())
            restored = manager.restore(7, args=asked)
    assert restored["facts"]["pulls"] == 14
    for tree in [*trees, restored["state"]]:
        assert same_bits(tree["params"]["conv1"]["kernel"], state.params["conv1"]["kernel"])
        assert same_bits(tree["params"]["norm"]["scale"], state.params["norm"]["scale"])
        assert same_bits(tree["opt_state"]["0"]["trace"]["conv1"]["kernel"], np.zeros((3, 3, 3, 64), np.float32))
        assert same_bits(tree["step"], np.int32(7))


def test_the_facts_hold_a_digest_that_anyone_can_take(tmp_path):
    write_snapshot(tmp_path, 2, 4, {"params": {"bias": np.arange(3, dtype=np.float32)}})
    facts = json.loads((tmp_path / "2" / "facts" / "metadata").read_text())
    head = b'["params.bias", {"dtype": "float32", "shape": [3]}]'
    digest = hashlib.sha256(head + bytes.fromhex("00000000 0000803f 00000040")).hexdigest()
    assert facts["leaves"] == {"params.bias": {"dtype": "float32", "shape": [3], "sha256": digest}}
    assert (facts["format"], facts["step"], facts["pulls"]) == (1, 2, 4)
    assert sorted(facts["versions"]) == ["feedloop", "jax", "orbax-checkpoint"]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_key_of_a_generator_is_wrapped_again(tmp_path, impl):
    keys = jax.random.split(jax.random.key(5, impl=impl), 3)
    like = {"keys": keys, "count": np.int32(1)}
    write_snapshot(tmp_path, 1, 1, {"keys": np.asarray(jax.random.key_data(keys)), "count": np.int32(1)})
    leaves = read_snapshot(tmp_path, 1).leaves
    for described in (like, jax.eval_shape(lambda: jax.tree.map(jnp.asarray, like))):
        matched = match_state(leaves, described)
        assert matched["keys"].dtype == keys.dtype
        assert same_bits(jax.random.key_data(matched["keys"]), jax.random.key_data(keys))


TWO, THREE = np.zeros(2), np.zeros(3)


@pytest.mark.parametrize(
    ("leaves", "like", "match"),
    [
        ({}, {"a": {"w": TWO}}, r"lacks a\.w; resume with the model, optimiser and options"),
        ({"a.w": TWO}, {"a": {"w": TWO, "more": TWO}}, r"lacks a\.more;"),
        (dict.fromkeys("cdef", TWO), {}, "also contains c, d, e and 1 more;"),
        ({"a.w": TWO, "b": TWO}, {"a": {"w": TWO}, "b": None}, "also contains b;"),
        ({"a.w": TWO}, {"a": {"w": THREE}}, r"contains a\.w as float64 \[2\] instead of float64 \[3\];"),
        ({"w": TWO}, {"w": jax.ShapeDtypeStruct((2,), np.float32)}, r"float64 \[2\] instead of float32 \[2\];"),
        ({"w": np.zeros(())}, {"w": np.zeros(1)}, r"float64 \[\] instead of float64 \[1\];"),
        ({"w": TWO}, {"w": jax.ShapeDtypeStruct((), jax.random.key(0).dtype)}, r"instead of uint32 \[2\];"),
    ],
)
def test_a_state_of_another_program_is_refused_by_name(leaves, like, match):
    with pytest.raises(SnapshotError, match=match):
        match_state(leaves, like)


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"a": {"b": np.ones(1)}, "a.b": np.ones(1)}, r"two are called 'a\.b'"),
        (np.ones(1), r"one of \(\) is empty: rename it"),
        ({"a": {"": np.ones(1)}}, r"one of \('a', ''\) is empty: rename it"),
        ({"a": 1.0}, "a is a float"),
        ({"a": jnp.ones(1)}, "a is a ArrayImpl"),
        ({"a": np.array(["x"])}, "a is a ndarray"),
        ({"a": np.array([None])}, "a is a ndarray"),
    ],
)
def test_an_invalid_state_is_refused_before_anything_is_written(tmp_path, tree, match):
    with pytest.raises(SnapshotError, match=match):
        write_snapshot(tmp_path, 1, 1, tree)
    assert list(tmp_path.iterdir()) == []


def names_in(folder):
    return [path.name for path in folder.iterdir()]


def every_file(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path, at):
    content = bytearray(path.read_bytes())
    content[at] ^= 0x10
    path.write_bytes(content)


def test_all_damage_is_detected_or_harmless(tmp_path, monkeypatch):
    """Each file is removed, cut and flipped in turn: what is read is right, or the error names the folder."""
    monkeypatch.setattr(orbax_store, "_LATE_S", 0.1)  # enough for small files that are in memory
    state = small_state()
    write_snapshot(tmp_path / "whole", 7, 14, state)
    rng = random.Random(0)
    outcomes = {}
    for path in every_file(tmp_path / "whole"):
        relative, size = path.relative_to(tmp_path / "whole"), path.stat().st_size
        damages = {"removed": Path.unlink, "cut": lambda path, size=size: os.truncate(path, size // 2)}
        for at in rng.sample(range(size), min(size, 2)):
            damages[f"flipped at {at}"] = lambda path, at=at: flip(path, at)
        for damage, do in damages.items():
            shutil.copytree(tmp_path / "whole", tmp_path / "damaged")
            do(tmp_path / "damaged" / relative)
            try:
                found = read_snapshot(tmp_path / "damaged", 7)
            except SnapshotError as error:
                outcomes[str(relative), damage] = str(error)
            else:
                assert found.batch_index == 14
                assert_same(match_state(found.leaves, state), jax.tree.map(np.asarray, state))
            shutil.rmtree(tmp_path / "damaged")
    assert all(f"{tmp_path}/damaged/7" in words for words in outcomes.values())
    # Files that hold arrays, wherever Orbax puts these, and the facts do not pass: the test would show nothing.
    assert ("7/facts/metadata", "removed") in outcomes
    assert sum("/d/" in name and damage == "removed" for name, damage in outcomes) >= 1
    assert sum("flipped" in damage for _, damage in outcomes) >= 2


def test_an_array_that_reads_well_but_is_another_one_is_named(tmp_path, monkeypatch):
    write_snapshot(tmp_path, 1, 1, {"a": np.zeros(2), "b": np.zeros(2)})
    monkeypatch.setattr(snapshot, "restore_arrays", lambda path: {"a": np.zeros(2), "b": -np.zeros(2)})
    with pytest.raises(SnapshotError, match="b has changed since it was written"):
        read_snapshot(tmp_path, 1)


def test_facts_that_were_edited_are_refused(tmp_path):
    write_snapshot(tmp_path, 1, 1, {"a": np.zeros(2)})
    path = tmp_path / "1" / "facts" / "metadata"
    path.write_text(path.read_text().replace('"pulls": 1', '"pulls": 2'))
    with pytest.raises(SnapshotError, match="its metadata has changed since it was written"):
        read_snapshot(tmp_path, 1)


def test_a_format_of_the_future_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(snapshot, "_FORMAT", 2)
    write_snapshot(tmp_path, 1, 1, {"a": np.zeros(2)})
    monkeypatch.undo()
    with pytest.raises(SnapshotError, match=r"must have format 1, but .*/1 has format 2: read it with loopfeed "):
        read_snapshot(tmp_path, 1)


@pytest.mark.parametrize(
    ("count", "up_to", "left"),
    [
        (0, None, [1, 2, 30, 40]),
        (1, None, [40]),
        (3, None, [2, 30, 40]),
        (9, None, [1, 2, 30, 40]),
        (1, 30, [30, 40]),
        (2, 30, [2, 30, 40]),
        (1, 0, [1, 2, 30, 40]),
    ],
)
def test_the_newest_snapshots_are_kept(tmp_path, count, up_to, left):
    for step in (1, 2, 30, 40):
        (tmp_path / str(step) / "state").mkdir(parents=True)
    keep_newest(tmp_path, count, up_to=up_to)
    assert snapshot_steps(tmp_path) == left
    assert not (tmp_path / ".unfinished").exists()


def test_the_same_again_writes_nothing_and_another_state_or_a_damaged_one_is_replaced(tmp_path, monkeypatch):
    first, second = small_state(1), small_state(2)
    write_snapshot(tmp_path, 5, 5, first)
    inode = (tmp_path / "5").stat().st_ino
    write_snapshot(tmp_path, 5, 5, first)
    assert (tmp_path / "5").stat().st_ino == inode
    write_snapshot(tmp_path, 5, 5, second)
    assert_same(match_state(read_snapshot(tmp_path, 5).leaves, second), jax.tree.map(np.asarray, second))
    os.truncate(max(every_file(tmp_path), key=lambda path: path.stat().st_size), 10)
    write_snapshot(tmp_path, 5, 5, second)
    assert read_snapshot(tmp_path, 5).batch_index == 5
    write_snapshot(tmp_path, 5, 6, second)
    assert read_snapshot(tmp_path, 5).batch_index == 6
    assert names_in(tmp_path) == ["5"]


def test_everything_is_synced_before_the_name_is_there(tmp_path, monkeypatch):
    synced, fsync = [], os.fsync

    def record(handle):
        synced.append((Path(f"/proc/self/fd/{handle}").readlink(), (tmp_path / "3").exists()))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", record)
    write_snapshot(tmp_path, 3, 3, small_state())
    *inner, (last, was_named) = synced
    assert (last, was_named) == (tmp_path, True)
    assert not any(was_named for _, was_named in inner)
    root = inner[-1][0]
    expected = {path.relative_to(tmp_path / "3") for path in (tmp_path / "3").rglob("*")} | {Path()}
    assert {path.relative_to(root) for path, _ in inner} == expected


@pytest.mark.parametrize("fails_in", ["save_items", "sync_tree", "_put_in_place"])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path, monkeypatch, fails_in):
    write_snapshot(tmp_path, 1, 1, {"a": np.zeros(2)})

    def fail(*_):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(snapshot, fails_in, fail)
    with pytest.raises(SnapshotError, match=r"^\S+ cannot be written \(.*Read-only file system"):
        write_snapshot(tmp_path, 2, 2, {"a": np.zeros(2)})
    assert names_in(tmp_path) == ["1"]
    assert read_snapshot(tmp_path, 1).step == 1


def test_a_disk_without_room_is_found_before_it_is_full(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 2_000_000))
    write_snapshot(tmp_path, 1, 1, {"a": np.zeros(100_000)})
    with pytest.raises(
        SnapshotError, match=r"needs 2\.\d MB of free disk space in .*, but only 2\.0 MB are free: make room there"
    ):
        write_snapshot(tmp_path, 2, 2, {"a": np.zeros(200_000)})
    assert names_in(tmp_path) == ["1"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(0, 0, 0))
    write_snapshot(tmp_path, 2, 2, {"a": np.zeros(200_000)})


WRITE_FOR_EVER = """
import sys
import numpy as np
from pathlib import Path
from loopfeed.engine.records.snapshot import keep_newest, write_snapshot
folder, rng = Path(sys.argv[1]), np.random.default_rng(0)
for step in range(int(sys.argv[2]), 10**6):
    state = {"params": {str(i): rng.normal(size=20_000) for i in range(8)}, "step": np.int32(step)}
    write_snapshot(folder, step - step % 2, 2 * step, state)  # every other one replaces
    keep_newest(folder, 2)
    print(step, flush=True)
"""


def run_python(program, *arguments, **options):
    environment = {**os.environ, "PYTHONPATH": f"{REPOSITORY}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, **options)


def test_a_killed_process_leaves_only_complete_snapshots(tmp_path):
    rng, last, unfinished = random.Random(0), 0, 0
    for _ in range(4):
        with run_python(WRITE_FOR_EVER, tmp_path, last) as process:
            assert process.stdout is not None
            last = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.3))
            process.kill()
            last = max([last, *map(int, process.stdout.read().split())])
        unfinished += (tmp_path / ".unfinished").exists()
        steps = snapshot_steps(tmp_path)
        assert steps
        for step in steps:
            found = read_snapshot(tmp_path, step)
            assert found.batch_index // 2 - step in (0, 1)
            assert found.leaves["step"] == found.batch_index // 2
        # A replacement that was cut between its two renames takes one step along, no more.
        assert steps[-1] >= last - last % 2 - 2
    assert unfinished, "no process was killed in the middle of its work: the test shows nothing"
    write_snapshot(tmp_path, 10**6, 1, {"a": np.zeros(2)})
    assert not (tmp_path / ".unfinished").exists()


def test_a_busy_device_is_not_waited_for(tmp_path):
    """The training program occupies the device from the first step to the last, and snapshots come in between."""
    entered, released = threading.Event(), threading.Event()

    def block(_context, out):
        entered.set()
        assert released.wait(SOON_S)
        np.asarray(out)[...] = 1

    pull = buffer_callback.buffer_callback(block, jax.ShapeDtypeStruct((), jnp.int32))
    program = jax.jit(lambda n: jax.lax.while_loop(lambda i: i < n, lambda i: i + pull(), 0)).lower(2).compile()
    state = small_state()
    found = []
    count = jnp.int32(2)
    runner = threading.Thread(target=lambda: program(count).block_until_ready(), daemon=True)
    runner.start()
    try:
        assert entered.wait(SOON_S)

        def work():
            write_snapshot(tmp_path, 1, 1, state)
            found.append(read_snapshot(tmp_path, 1))

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(SOON_S / 2)
        assert not worker.is_alive(), "it waits for the device"
        assert runner.is_alive()
    finally:
        released.set()
        runner.join(SOON_S)
    assert_same(match_state(found[0].leaves, state), jax.tree.map(np.asarray, state))


def test_neither_writing_nor_reading_moves_an_array_to_or_from_a_device(tmp_path):
    state, before = small_state(), jax.config.jax_transfer_guard
    jax.config.update("jax_transfer_guard", "disallow_explicit")  # not the context manager, which is of one thread
    try:
        with pytest.raises(Exception, match="Disallowed host-to-device transfer"):
            jax.device_put(np.zeros(1)).block_until_ready()
        write_snapshot(tmp_path, 1, 1, state)
        leaves = read_snapshot(tmp_path, 1).leaves
    finally:
        jax.config.update("jax_transfer_guard", before)
    assert all(type(leaf) is np.ndarray for leaf in leaves.values())


QUIET = """
import logging, resource, signal, sys, warnings
warnings.simplefilter("error")
import numpy as np
from pathlib import Path
from loopfeed.engine.records.snapshot import SnapshotError, read_snapshot, write_snapshot
assert not any(name.startswith("orbax") for name in sys.modules), "imported early"
folder, hook = Path(sys.argv[1]), sys.unraisablehook
write_snapshot(folder, 1, 1, {"a": np.zeros(2)})
read_snapshot(folder, 1)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
rng = np.random.default_rng(0)
try:
    write_snapshot(folder, 2, 2, {str(i): rng.normal(size=100_000) for i in range(20)})
except SnapshotError as error:
    print(error)
assert not logging.root.handlers and not logging.getLogger("absl").filters and sys.unraisablehook is hook
logging.getLogger("absl").warning("heard again")
"""


def test_the_terminal_stays_clean_even_where_the_disk_fails_midway(tmp_path):
    with run_python(QUIET, tmp_path, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=SOON_S)
    assert err.splitlines()[-1].endswith("heard again")
    assert len(err.splitlines()) == 1
    assert " cannot be written (" in out
    assert "too large" in out
    assert names_in(tmp_path) == ["1"]


def test_a_removed_snapshot_disappears_before_its_files_are_deleted(tmp_path, monkeypatch):
    write_snapshot(tmp_path, 1, 1, {"a": np.zeros(2)})
    monkeypatch.setattr(shutil, "rmtree", lambda path, **options: (_ for _ in ()).throw(OSError("it hangs")))
    with pytest.raises(OSError, match="it hangs"):
        remove_snapshot(tmp_path, 1)
    assert snapshot_steps(tmp_path) == []
    monkeypatch.undo()
    remove_snapshot(tmp_path, 1)
    write_snapshot(tmp_path, 2, 2, {"a": np.zeros(2)})
    assert names_in(tmp_path) == ["2"]


def test_steps_are_sorted_as_numbers_and_unrelated_entries_ignored(tmp_path):
    for name in ("100", "9", "0", ".unfinished", "007", "٣", "5.orbax-checkpoint-tmp", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "8").touch()
    assert snapshot_steps(tmp_path) == [0, 9, 100]
    assert snapshot_steps(tmp_path / "nowhere") == []
