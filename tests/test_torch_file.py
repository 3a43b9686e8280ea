"""PyTorch's files: read to the same bits as PyTorch wrote, and never a way to run code or to fill the memory."""

import argparse
import builtins
import os
import pickle
import shutil
import struct
import tracemalloc
import zipfile
from contextlib import suppress
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save_file

from loopfeed.engine.records import stored_zip, tensor_pickle
from loopfeed.engine.records.given_weights import read_given_weights
from loopfeed.engine.records.tensor_pickle import TensorPickleError, read_tensor_pickle
from loopfeed.engine.records.torch_file import read_torch_file
from loopfeed.engine.records.weights import name_tensors
from loopfeed.engine.run.initial_weights import load_initial_weights
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


def test_tensors_are_those_that_pytorch_wrote():
    read = read_torch_file(RECORDED / "torch_tensors.pt")
    assert (read.key, read.ignored) == (None, ())
    assert list(read.tensors) == list(TENSORS)
    for name, expected in TENSORS.items():
        found = read.tensors[name]
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        np.testing.assert_array_equal(found, expected, name)
        assert not found.size or not found.flags.writeable or name == "bool"
    assert np.shares_memory(read.tensors["plain"], read.tensors["transposed"])


def test_a_checkpoint_gives_its_state_dictionary_without_prefixes():
    given, notes = read_given_weights(RECORDED / "torch_checkpoint.pt")
    assert notes == (
        "the tensors are those under 'state_dict' in the file",
        "the prefix 'module.' of the tensors' names is left out",
    )
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    assert list(given.tensors) == ["0.weight", "0.bias", *(f"1.{name}" for name in norm)]
    assert given.tensors["0.weight"].shape == (2, 1, 1, 1)
    np.testing.assert_array_equal(given.tensors["1.bias"], np.array([-0.8, -0.8], np.float32))
    assert given.tensors["1.num_batches_tracked"] == 1


@pytest.mark.parametrize("key", [None, "state_dict", "model", "model_state_dict", "ema"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
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


def test_the_first_of_two_state_dictionaries_is_read_and_named(tmp_path):
    (first, storages), (second, _) = (state_dict({"w": np.full(2, value, np.float32)}) for value in (1, 2))
    path = write_archive(tmp_path / "w.pt", dictionary({"ema": second, "model": first}), storages)
    given, notes = read_given_weights(path)
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
        (pickled(Calls(os.system, f"touch {HERE}"), 4), r"it names posix\.system"),
        (pickled(Calls(eval, f"open({HERE!r}, 'w')")), r"it names __builtin__\.eval"),
        (pickled(Calls(getattr, Calls(__import__, "os"), "system")), r"it names __builtin__\.getattr"),
        (pickled({"w": Calls(builtins.exec, "raise SystemExit")}), r"it names __builtin__\.exec"),
        (b"ctorch._utils\n_rebuild_tensor_v2.__globals__\n", r"it names torch\._utils\._rebuild_tensor_v2\.__glo"),
        (b"ctorch\nload\n" + b"(" + text("x") + b"tR", r"it names torch\.load"),
        (b"cnumpy.core.multiarray\nscalar\n", r"it names numpy\.core\.multiarray\.scalar"),
        (b"(" + text("touch " + HERE) + b"iposix\nsystem\n", "the pickle instruction 0x69"),
        (b"(cposix\nsystem\n" + text("true") + b"o", "names posix"),
        (b"(ccollections\nOrderedDict\no", "the pickle instruction 0x6f"),
        (b"ccollections\nOrderedDict\n)\x81", "the pickle instruction 0x81"),
        (b"\x82\x01", "the pickle instruction 0x82"),
        # A tuple that looks like a name is none.
        (b"(" + text("collections") + text("OrderedDict") + b"t)R", "truncated or damaged"),
        (b"c\x1b]0;\nsystem\n", r"it names '\\x1b\]0;\.system'"),
    ],
)  # fmt: skip
def test_a_pickle_that_names_code_is_refused_by_that_name(tmp_path, monkeypatch, content, named):
    monkeypatch.chdir(tmp_path)
    for path in (
        write_archive(tmp_path / "w.pt", content, {}),
        write_archive(tmp_path / "v.pt", dictionary({"state_dict": content}), {}),
    ):
        with pytest.raises(ValueError, match=named) as caught:
            read_given_weights(path)
        assert ("copy it again" in str(caught.value)) != ("it names " in str(caught.value))
    assert not (tmp_path / HERE).exists()


def test_a_checkpoint_with_its_arguments_says_how_to_save_it(tmp_path):
    path = write_archive(tmp_path / "w.pt", pickled({"args": argparse.Namespace(lr=0.1), "state_dict": {}}), {})
    remedy = (
        r'it names argparse\.Namespace, .*; save only the .* torch\.save\(checkpoint\["state_dict"\], "weights\.pt"\)'
    )
    with pytest.raises(ValueError, match=remedy):
        read_given_weights(path)


def whole(content):
    return START + content + STOP


def test_a_memo_place_of_four_billion_takes_one_entry():
    assert read_tensor_pickle(whole(b"}r\xff\xff\xff\xff0"[:-1] + b"j\xff\xff\xff\xff\x86")) == ({}, {})


def test_values_that_contain_themselves_or_are_deep_do_not_recurse(tmp_path):
    selfish = ORDERED_DICT + b"q\x00(" + text("state_dict") + b"h\x00u"
    with pytest.raises(ValueError, match="its state dictionary has state_dict, not a named tensor"):
        read_given_weights(write_archive(tmp_path / "w.pt", selfish, {}))
    deep = b"]" * 100_000 + b"a" * 99_999
    for content in (deep, b")" + b"\x85" * 100_000, dictionary({"w": deep})):
        with pytest.raises(ValueError, match=r"not a dictionary|neither tensors alone"):
            read_given_weights(write_archive(tmp_path / "w.pt", content, {}))
    with pytest.raises(TensorPickleError, match="a key that is neither text nor an integer"):
        read_tensor_pickle(whole(b"}" + b")" + b"\x85" * 100_000 + b"Ns"))


def test_size_and_number_of_instructions_are_bounded(monkeypatch):
    with pytest.raises(TensorPickleError, match="has 8,388,609 bytes, of at most 8,388,608"):
        read_tensor_pickle(bytes((1 << 23) + 1))
    monkeypatch.setattr(tensor_pickle, "MAX_INSTRUCTIONS", 1000)
    with pytest.raises(TensorPickleError, match="more than 1,000 instructions"):
        read_tensor_pickle(START + b"N" * 2000)


FLOATS = storage("float32", "0", 4)


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (tensor(FLOATS, 1, (4,), (1,)), "its tensor w reaches beyond its numbers"),
        (tensor(FLOATS, 0, (2, 2), (3, 1)), "its tensor w reaches beyond its numbers"),
        (tensor(FLOATS, 0, (1 << 40,), (0,)), "its tensors are more than 4 times as large as the file"),
        (tensor(FLOATS, 0, (1 << 40, 1 << 40, 1 << 40), (0, 0, 0)), "more than 4 times as large"),
        (
            tensor(FLOATS, 0, (0, 1 << 47, 1 << 47), (0, 0, 0)),
            r"w\.pt cannot be used: its empty tensor w has the shape",
        ),
        (tensor(FLOATS, -1, (4,), (1,)), "truncated or damaged"),
        (tensor(FLOATS, 0, (4,), (-1,)), "truncated or damaged"),
        (tensor(FLOATS, 0, (-4,), (1,)), "truncated or damaged"),
        (tensor(FLOATS, 0, (4,), (1, 1)), "truncated or damaged"),
        (tensor(FLOATS, 0, (1,) * 17, (1,) * 17), "truncated or damaged"),
        (tensor(FLOATS, 0, (1 << 60,), (1,)), "truncated or damaged"),
        (tensor(b"N", 0, (4,), (1,)), "truncated or damaged"),
        (tensor(storage("float32", "0", 5), 0, (4,), (1,)), "archive/data/0 has 16 bytes, not those of its tensors"),
        (tensor(storage("float64", "0", 4), 0, (4,), (1,)), "archive/data/0 has 16 bytes, not those of its tensors"),
        (tensor(storage("float32", "1", 4), 0, (4,), (1,)), "it has no entry archive/data/1"),
        (tensor(storage("float32", "../data.pkl", 4), 0, (4,), (1,)), "no entry archive/data/../data.pkl"),
        (integer(7), "neither tensors alone nor a dictionary .* but w"),
    ],
)
def test_a_tensor_that_its_numbers_do_not_hold_is_refused(tmp_path, described, message):
    path = write_archive(tmp_path / "w.pt", dictionary({"w": described}), {"0": bytes(16)})
    with pytest.raises(ValueError, match=message):
        read_given_weights(path)


def test_long_names_are_refused(tmp_path):
    path = write_state_dict(tmp_path / "w.pt", {"module." * 100: np.zeros(2, np.float32)})
    with pytest.raises(ValueError, match="names of more than 500 characters"):
        read_given_weights(path)


def small_archive(path):
    return write_state_dict(path, {"a": np.arange(3, dtype=np.float32), "b": np.arange(4, dtype=np.int64)})


def test_a_file_that_ends_anywhere_is_refused(tmp_path):
    content = small_archive(tmp_path / "w.pt").read_bytes()
    for length in range(0, len(content), 5):
        (tmp_path / "w.pt").write_bytes(content[:length])
        with pytest.raises(ValueError, match="copy it again"):
            read_given_weights(tmp_path / "w.pt")


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


VALID = whole(state_dict({"a": np.arange(3, dtype=np.float32), "b": np.zeros((2, 2), np.int64)})[0])
PIECES = [
    *(
        b"(",
        b")",
        b"}",
        b"]",
        b"t",
        b"u",
        b"s",
        b"a",
        b"e",
        b"R",
        b"b",
        b"Q",
        b"q\0",
        b"h\0",
        b"\x94",
        b"\x85",
        b"\x93",
    ),
    *(b"K\1", integer(-9), text("a"), FLOATS, ORDERED_DICT, b"ctorch\nFloatStorage\n"),
    b"ctorch._utils\n_rebuild_parameter\n",
]


@given(st.lists(st.sampled_from(PIECES), max_size=30).map(b"".join) | st.binary(max_size=60))
def test_any_other_pickle_is_refused_with_a_reason(content):
    for pickled in (whole(content), VALID[:-1] + content + STOP, content):
        with suppress(TensorPickleError):  # anything else is a fault
            read_tensor_pickle(pickled)


def test_compressed_and_overlapping_entries_are_refused(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "w.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", whole(b"}"))
        archive.writestr("archive/data/0", bytes(1 << 24))
    with pytest.raises(ValueError, match=r"data\.pkl is compressed or encrypted"):
        read_given_weights(tmp_path / "w.pt")
    # Many storages that are the same bytes of the file, of which each tensor needs only the first number.
    storages = {str(number): bytes(4000) for number in range(9)}
    views = {key: tensor(storage("float32", key, 1000), 0, (1,), (1,)) for key in storages}
    path = write_archive(tmp_path / "o.pt", dictionary(views), {"0": storages["0"]})
    content = path.read_bytes()
    start, offset = content.rindex(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    listed = content[start:offset]
    directory = content[content.index(b"PK\x01\x02") : start] + b"".join(listed[:-1] + key.encode() for key in storages)
    end = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 11, 11, len(directory), content.index(b"PK\x01\x02"), 0)
    path.write_bytes(content[: content.index(b"PK\x01\x02")] + directory + end)
    with pytest.raises(ValueError, match=r"its entries archive/data/0 and archive/data/1 overlap"):
        read_given_weights(path)
    monkeypatch.setattr(stored_zip, "MAX_ENTRIES", 10)
    with pytest.raises(ValueError, match="it lists 11 entries"):
        read_given_weights(path)


def test_views_of_one_storage_share_its_memory(tmp_path):
    """Booleans are converted, once for all views."""
    views = {str(number): tensor(storage("bool", "0", 1 << 20), number, (2,), (1,)) for number in range(50)}
    path = write_archive(tmp_path / "w.pt", dictionary(views), {"0": bytes((0, 1, 2, 0)) * (1 << 18)})
    tracemalloc.start()
    try:
        tensors = read_given_weights(path).stored.tensors
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 4 << 20
    assert tensors["1"].tolist() == [True, True]
    assert np.shares_memory(tensors["1"], tensors["2"])


def test_a_large_archive_in_zip64_is_read(tmp_path):
    """The forms of large files, in a small one: sizes in the extra field, and a second end of the directory."""
    path = small_archive(tmp_path / "w.pt")
    wanted, content = read_torch_file(path).tensors, path.read_bytes()
    start, end = content.index(b"PK\x01\x02"), content.rindex(b"PK\x05\x06")
    directory = b""
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            extra = struct.pack("<2H3Q", 1, 24, info.file_size, info.file_size, info.header_offset)
            name, wide = info.filename.encode(), (1 << 32) - 1
            directory += struct.pack("<4s6H3L5H2L", b"PK\x01\x02", 45, 45, 0, 0, 0, 0, info.CRC, wide, wide, len(name),
                                     len(extra), 0, 0, 0, 0, wide) + name + extra  # fmt: skip
        count = len(archive.infolist())
    end64 = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, len(directory), start)
    locator = struct.pack("<4sLQL", b"PK\x06\x07", 0, start + len(directory), 1)
    last = struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, (1 << 32) - 1, (1 << 32) - 1, 0)
    assert content[end:].startswith(b"PK\x05\x06")
    path.write_bytes(content[:start] + directory + end64 + locator + last)
    assert_same(read_torch_file(path).tensors, wanted)
    assert zipfile.ZipFile(path).testzip() is None


def test_pipes_folders_and_other_formats_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(ValueError, match="it is a pipe, not a file"):
        read_given_weights(tmp_path / "pipe.pt")
    with pytest.raises(ValueError, match="is a folder: give a file"):
        read_given_weights(tmp_path)
    with pytest.raises(ValueError, match="does not exist: check the path"):
        read_given_weights(tmp_path / "none.pt")
    # How PyTorch < 1.6 began a file.
    (tmp_path / "old.pt").write_bytes(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.\x80\x02M\xe9\x03.")
    with pytest.raises(ValueError, match=r"old\.pt is an older PyTorch file or another pickle: load it in PyTorch"):
        read_given_weights(tmp_path / "old.pt")
    big = write_archive(tmp_path / "big.pt", b"}", {}, order=b"big")
    with pytest.raises(ValueError, match="its numbers are not little-endian"):
        read_given_weights(big)
    shutil.make_archive(os.fspath(tmp_path / "other"), "zip", RECORDED)
    with pytest.raises(ValueError, match=r"compressed or encrypted|it has no entries"):
        read_given_weights(tmp_path / "other.zip")
