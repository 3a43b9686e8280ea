"""PyTorch's files: read to the same bits as PyTorch wrote, and never a way to run code or to fill the memory.

Whatever reads a file to its end needs PyTorch, and is skipped without it. What is refused before PyTorch loads anything
is tested with a module in its place that fails when it is asked to load.
"""

import argparse
import builtins
import importlib.util
import os
import pickle
import shutil
import struct
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from loopfeed.engine.records import torch_file
from loopfeed.engine.records.given_weights import read_given_weights
from loopfeed.engine.records.initial_weights import load_initial_weights
from loopfeed.engine.records.torch_file import read_torch_file
from loopfeed.engine.records.weights import name_tensors
from tests.test_initial_weights import assert_same, drawn, shapes_of
from tests.torch_archive import (
    ORDERED_DICT,
    START,
    STOP,
    dictionary,
    integer,
    state_dict,
    storage,
    tensor,
    text,
    write_archive,
    write_state_dict,
)

# Written by PyTorch 2.13.0: a dictionary of the tensors below, and a checkpoint of a DataParallel network in training.
RECORDED = Path(__file__).parent / "recorded"
SEVENTHS = np.arange(6) / np.float64(7)
TENSORS: dict[str, np.ndarray] = {
    "plain": np.arange(24, dtype=np.float32).reshape(4, 6),
    "transposed": np.arange(24, dtype=np.float32).reshape(4, 6).T,
    "offset": np.array([5, 8, 11, 14], np.float32),
    "channels_last": np.arange(24, dtype=np.float32).reshape(2, 3, 2, 2),
    "parameter": np.array([-1, -0.5, 0, 0.5, 1], np.float32),
    "half": (np.arange(6, dtype=np.float32) / 7).astype(np.float16),
    "bfloat16": (np.arange(6, dtype=np.float32) / 7).astype(jnp.bfloat16),
    "double": SEVENTHS,
    **{name: np.arange(6).astype(name) for name in ("int64", "int32", "int16", "int8", "uint8")},
    "bool": np.array([True, False, True]),
    "scalar": np.array(3),
    "empty": np.zeros((0, 3), np.float32),
    "expanded": np.ones(4, np.float32),
}


needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="PyTorch is not installed here")


@pytest.fixture
def torch_that_must_not_load(monkeypatch):
    """A module `torch` that fails when it is asked to load."""
    torch = ModuleType("torch")
    torch.__version__ = "2.10.0+cpu"  # type: ignore[attr-defined]
    torch.load = pytest.fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)


@pytest.mark.parametrize(
    ("version", "found"),
    [(None, "import of torch halted"), ("2.9.1+cu128", r"found 2\.9\.1\+cu128"), ("2.10.0a0", r"found 2\.10\.0a0")],
)
def test_without_a_recent_pytorch_one_line_names_safetensors_and_the_conversion(tmp_path, monkeypatch, version, found):
    torch = None if version is None else ModuleType("torch")
    if torch is not None:
        torch.__version__, torch.load = version, pytest.fail  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "torch", torch)
    path = write_state_dict(tmp_path / "w.pt", {"w": np.zeros(2, np.float32)})
    with pytest.raises(
        ValueError,
        match=rf"PyTorch ≥ 2\.10\.0 \({found}.*\), those in safetensors do not: .*convert .*w\.pt.*save_file\(",
    ) as caught:
        read_given_weights(path)
    assert "\n" not in str(caught.value)


@needs_torch
def test_tensors_are_those_that_pytorch_wrote():
    read = read_torch_file(RECORDED / "torch_tensors.pt")
    assert (read.key, read.ignored) == (None, ())
    assert list(read.tensors) == list(TENSORS)
    for name, expected in TENSORS.items():
        found = read.tensors[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_array_equal(found, expected, name)
        assert not found.size or not found.flags.writeable
    assert np.shares_memory(read.tensors["plain"], read.tensors["transposed"])


@needs_torch
def test_a_checkpoint_gives_its_state_dictionary_without_prefixes():
    given, notes, _ = read_given_weights(RECORDED / "torch_checkpoint.pt")
    assert notes == (
        "the tensors are those under 'state_dict' in the file",
        "the prefix 'module.' of the tensors' names is left out",
    )
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert list(given.tensors) == ["0.weight", "0.bias", *(f"1.{name}" for name in norm)]
    assert given.tensors["0.weight"].shape == (2, 1, 1, 1)
    np.testing.assert_array_equal(given.tensors["1.bias"], np.array([-0.8, -0.8], np.float32))
    assert given.tensors["1.num_batches_tracked"] == 1


@needs_torch
@pytest.mark.parametrize(
    ("key", "dtype"),
    [(None, "float32"), (None, "bfloat16"), ("state_dict", "float32"), ("model", "float32"), ("ema", "bfloat16")],
)
def test_a_network_starts_from_a_pytorch_file_as_from_safetensors(tmp_path, key, dtype):
    weights = drawn("resnet8", 10)
    named = name_tensors("resnet8", *weights)
    named = {name: each.astype(dtype) if each.dtype == np.float32 else each for name, each in named.items()}
    save_file({name: np.asarray(each, order="C") for name, each in named.items()}, tmp_path / "w.safetensors")
    wanted = load_initial_weights(tmp_path / "w.safetensors", "resnet8", *weights)
    path = write_state_dict(tmp_path / "w.pth", named, key=key)
    found = load_initial_weights(path, "resnet8", *shapes_of("resnet8", 10))
    assert_same((found.params, found.batch_stats), (wanted.params, wanted.batch_stats))
    # The digest that a run records is of the tensors, not of the format.
    assert found.digest == wanted.digest
    told = () if key is None else (f"the tensors are those under {key!r} in the file",)
    assert found.notes == told + wanted.notes
    if dtype == "float32":
        assert_same((found.params, found.batch_stats), weights)


@needs_torch
def test_the_names_of_wrappers_and_of_timm_are_understood_in_both_formats(tmp_path):
    weights = drawn("resnet8", 10)
    named = name_tensors("resnet8", *weights)
    changed = {f"_orig_mod.module.{name.replace('fc.', 'head.fc.')}": each for name, each in named.items()}
    save_file({name: np.asarray(each, order="C") for name, each in changed.items()}, tmp_path / "w.safetensors")
    for path in (tmp_path / "w.safetensors", write_state_dict(tmp_path / "w.pt", changed)):
        found = load_initial_weights(path, "resnet8", *weights)
        assert_same((found.params, found.batch_stats), weights)
        # The order of the prefixes does not matter.
        assert found.notes == (
            "the prefix '_orig_mod.' of the tensors' names is left out",
            "the prefix 'module.' of the tensors' names is left out",
            "timm's classifier 'head.fc' is called 'fc'",
        )
    # A prefix that not every name has is a part of the names.
    some = {name if name.startswith("fc.") else f"module.{name}": each for name, each in named.items()}
    with pytest.raises(ValueError, match=r"missing .*; unexpected module\."):
        load_initial_weights(write_state_dict(tmp_path / "w.pt", some), "resnet8", *weights)


@needs_torch
def test_what_does_not_match_is_listed_ten_names_of_each_kind(tmp_path):
    weights = drawn("resnet8", 10)
    named = dict(name_tensors("resnet8", *weights))
    for name in [name for name in named if name.startswith("layer")][:13]:
        named[f"other.{name}"] = named.pop(name)
    named["bn1.weight"] = named["bn1.weight"][:3]
    path = write_state_dict(tmp_path / "w.pt", named)
    with pytest.raises(
        ValueError, match=r"missing .* and \d+ more; unexpected .* more; bn1\.weight is \(3,\)"
    ) as caught:
        load_initial_weights(path, "resnet8", *weights)
    assert str(caught.value).partition("unexpected")[2].count("other.") == 10


@needs_torch
def test_the_first_of_two_state_dictionaries_is_read_and_named(tmp_path):
    (first, storages), (second, _) = (state_dict({"w": np.full(2, value, np.float32)}) for value in (1, 2))
    path = write_archive(tmp_path / "w.pt", dictionary({"ema": second, "model": first}), storages)
    given, notes, _ = read_given_weights(path)
    assert notes == ("the tensors are those under 'model' in the file, not those under 'ema'",)
    np.testing.assert_array_equal(given.tensors["w"], [1, 1])


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def pickled(value, protocol=2):
    return pickle.dumps(value, protocol).removeprefix(bytes((0x80, protocol)))[:-1]


HERE = "touched"


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (pickled(Calls(os.system, f"touch {HERE}")), r"it names posix\.system"),
        (pickled(Calls(os.system, f"touch {HERE}"), 4), "another protocol than 2"),
        (pickled(Calls(getattr, Calls(__import__, "os"), "system")), r"it names __builtin__\.getattr"),
        (pickled({"w": Calls(builtins.exec, "raise SystemExit")}), r"it names __builtin__\.exec"),
        (b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n", r"it names torch\._utils\._rebuild_tensor_v2\.__glo"),
        (b"cnumpy.core.multiarray\nscalar\n", r"it names numpy\.core\.multiarray\.scalar"),
        # PyTorch would call it, and take a terabyte.
        (b"cbuiltins\nbytearray\n(" + integer(1 << 40) + b"tR", r"it names builtins\.bytearray"),
        (b"(" + text("touch " + HERE) + b"iposix\nsystem\n", r"it names posix\.system"),
        (pickled({"args": argparse.Namespace(lr=0.1)}), r"argparse\.Namespace, .*; save only .* torch\.save\(check"),
        (b"c\x1b]0;\nsystem\n", r"it names '\\x1b\]0;\.system'"),
        # Python ends if it hashes nested tuples.
        (b"}" + b")" + b"\x85" * 100_000 + b"Ns", "more than 1,000,000 instructions or 50,000 tuples"),
        (b"N" * 1_000_001, "more than 1,000,000 instructions"),
        (b"X" + struct.pack("<I", 1 << 23) + bytes(1 << 23), r"data\.pkl, of at most 8,388,608 bytes"),
    ],
)  # fmt: skip
def test_a_pickle_that_is_no_state_dictionary_is_refused_before_pytorch_sees_it(
    tmp_path, monkeypatch, torch_that_must_not_load, content, named
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError, match=named):
        read_given_weights(write_archive(tmp_path / "w.pt", content, {}))
    assert not (tmp_path / HERE).exists()


@needs_torch
@pytest.mark.parametrize(
    "content",
    [
        b"(ccollections\nOrderedDict\no",
        b"ccollections\nOrderedDict\n)\x81b",
        b"\x82\x01",
        b"(" + text("collections") + text("OrderedDict") + b"t)R",
        b"h\x07",
    ],
)
def test_what_pytorch_refuses_is_refused_without_its_advice(tmp_path, content):
    with pytest.raises(ValueError, match="PyTorch does not load it") as caught:
        read_given_weights(write_archive(tmp_path / "w.pt", content, {}))
    assert "weights_only=False" not in str(caught.value)
    assert caught.value.__suppress_context__


@needs_torch
def test_values_that_contain_themselves_or_are_deep_do_not_recurse(tmp_path):
    selfish = ORDERED_DICT + b"q\x00(" + text("state_dict") + b"h\x00u"
    with pytest.raises(ValueError, match="its state dictionary has state_dict, not a named tensor"):
        read_given_weights(write_archive(tmp_path / "w.pt", selfish, {}))
    deep = b"]" * 100_000 + b"a" * 99_999
    for content in (deep, b")" + b"\x85" * 40_000, dictionary({"w": deep})):
        with pytest.raises(ValueError, match=r"not a dictionary|neither tensors alone"):
            read_given_weights(write_archive(tmp_path / "w.pt", content, {}))
    with pytest.raises(ValueError, match=r"a dictionary state_dict, .* but tuple"):
        read_given_weights(write_archive(tmp_path / "w.pt", b"})" + b"\x85" * 40_000 + b"Ns", {}))


FLOATS = storage("float32", "0", 4)


@needs_torch
@pytest.mark.parametrize(
    ("described", "message"),
    [
        (tensor(FLOATS, 1, (4,), (1,)), "does not load it"),
        (tensor(FLOATS, 0, (2, 2), (3, 1)), "does not load it"),
        (tensor(FLOATS, 0, (1 << 40,), (0,)), "its tensors are more than 4 times as large as the file"),
        (tensor(FLOATS, 0, (1 << 40, 1 << 40, 1 << 40), (0, 0, 0)), "does not load it|more than 4 times"),
        (tensor(FLOATS, 0, (0, 1 << 47, 1 << 47), (0, 0, 0)), r"empty tensor w has the shape|does not load it"),
        (tensor(FLOATS, -1, (4,), (1,)), "does not load it"),
        (tensor(FLOATS, 0, (-4,), (1,)), "does not load it"),
        (tensor(FLOATS, 0, (4,), (1, 1)), "does not load it"),
        (tensor(b"N", 0, (4,), (1,)), "does not load it"),
        (tensor(storage("float32", "0", 5), 0, (5,), (1,)), "does not load it"),
        (tensor(storage("float32", "1", 4), 0, (4,), (1,)), "does not load it"),
        (tensor(storage("float32", "../data.pkl", 4), 0, (4,), (1,)), "does not load it"),
        (integer(7), "neither tensors alone nor a dictionary .* but w"),
    ],
)
def test_a_tensor_that_its_numbers_do_not_hold_is_refused(tmp_path, described, message):
    path = write_archive(tmp_path / "w.pt", dictionary({"w": described}), {"0": bytes(16)})
    with pytest.raises(ValueError, match=message):
        read_given_weights(path)


def small_archive(path):
    return write_state_dict(path, {"a": np.arange(3, dtype=np.float32), "b": np.arange(4, dtype=np.int64)})


def test_a_file_that_ends_anywhere_is_refused(tmp_path, torch_that_must_not_load):
    content = small_archive(tmp_path / "w.pt").read_bytes()
    for length in range(0, len(content), 5):
        (tmp_path / "w.pt").write_bytes(content[:length])
        with pytest.raises(ValueError, match="copy it again"):
            read_given_weights(tmp_path / "w.pt")


@needs_torch
def test_a_flipped_bit_is_an_error_or_changes_nothing(tmp_path):
    """What a flip may leave as it is: times and other fields of the zip format that are not used."""
    path = small_archive(tmp_path / "w.pt")
    content = path.read_bytes()
    wanted = read_torch_file(path).tensors
    num_refused = 0
    for place in range(4, len(content), 3):
        path.write_bytes(content[:place] + bytes((content[place] ^ 1 << place % 8,)) + content[place + 1 :])
        try:
            found = read_torch_file(path).tensors
        except ValueError:
            num_refused += 1
        else:
            assert_same(found, wanted)
    assert num_refused > len(content) / 3 / 2


def test_compressed_overlapping_and_repeated_entries_are_refused(tmp_path, monkeypatch, torch_that_must_not_load):
    with zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", START + b"}" + STOP)
        archive.writestr("archive/data/0", bytes(1 << 24))
    with pytest.raises(ValueError, match="entries are compressed or encrypted"):
        read_given_weights(tmp_path / "w.pt")
    # Many storages that are the same bytes of the file.
    path = write_archive(tmp_path / "o.pt", b"}", {"0": bytes(4000)})
    content = path.read_bytes()
    first, last = content.index(b"PK\x01\x02"), content.rindex(b"PK\x01\x02")
    end, listed = content.rindex(b"PK\x05\x06"), content[last : content.rindex(b"PK\x05\x06")]

    def written(keys):
        directory = content[first:last] + b"".join(listed[:-1] + key for key in keys)
        count = 2 + len(keys)
        ending = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, count, count, len(directory), first, 0)
        path.write_bytes(content[:first] + directory + ending)
        assert content[end:].startswith(b"PK\x05\x06")
        return path

    with pytest.raises(ValueError, match="its entries overlap"):
        read_given_weights(written([b"0", b"1", b"2"]))
    with pytest.raises(ValueError, match="or two of the same name"):
        read_given_weights(written([b"0", b"0"]))
    monkeypatch.setattr(torch_file, "_MAX_ENTRIES", 10)
    with pytest.raises(ValueError, match="it has more than 10 entries"):
        read_given_weights(written([bytes((48 + number,)) for number in range(9)]))


def test_pipes_folders_and_other_formats_are_refused(tmp_path, torch_that_must_not_load):
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(ValueError, match="it is a pipe, not a file"):
        read_given_weights(tmp_path / "pipe.pt")
    with pytest.raises(ValueError, match=r"is a folder without config\.json: give a file or a run"):
        read_given_weights(tmp_path)
    with pytest.raises(ValueError, match="does not exist: check the path"):
        read_given_weights(tmp_path / "none.pt")
    # How PyTorch < 1.6 began a file.
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
    with pytest.raises(ValueError, match=r"old\.pt is an older PyTorch file or another pickle: load it in PyTorch"):
        read_given_weights(tmp_path / "old.pt")
    shutil.make_archive(os.fspath(tmp_path / "other"), "zip", RECORDED)
    with pytest.raises(ValueError, match=r"compressed or encrypted|it must have one entry"):
        read_given_weights(tmp_path / "other.zip")
