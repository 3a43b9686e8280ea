"""Pickles: what plain ones contain, and those that attack their reader."""

import os
import pickle
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.preprocess.sources.plain_pickle import UnsafePickleError, load_plain

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(min_size=1),
    lambda each: st.lists(each) | st.tuples(each, each) | st.dictionaries(st.text() | st.integers(), each),
)


@given(PLAIN, st.integers(0, 5))
def test_plain_values_are_read_as_pickle_reads_them(value, protocol):
    assert load_plain(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize("dtype", ["u1", "<i8", ">f4", "?", "U3", "S2"])
def test_arrays(protocol, dtype):
    array = np.arange(24).reshape(2, 3, 4).astype(dtype)
    shared = {"c": array, "f": np.asfortranarray(array), "again": array, "scalar": array[1, 1, 1]}
    found = load_plain(pickle.dumps(shared, protocol))
    for name in ("c", "f", "again"):
        np.testing.assert_array_equal(found[name], array)
    assert found["scalar"] == array[1, 1, 1]
    assert found["again"] is found["c"]


def test_a_pickle_of_python_2():
    # cPickle.dumps({"data": numpy.zeros((1, 2), "uint8"), "labels": [6]}, 2) of Python 2.7 and NumPy 1.16.
    content = (
        b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b"
        b"\x87Rq\x05(K\x01K\x01K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xff"
        b"J\xff\xff\xff\xffK\x00tb\x89U\x02\x07\xffq\x08tbU\x06labelsq\x09]q\x0aK\x06au."
    )
    found = load_plain(content)
    assert found.keys() == {b"data", b"labels"}
    assert found[b"data"].tolist() == [[7, 255]]
    assert found[b"labels"] == [6]


class Calls:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def reconstructed(shape: bytes, raw: bytes, code: bytes = b"u1") -> bytes:
    """Return a pickle of an array of any shape and elements."""
    return (
        b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nK\x00\x85U\x01btR(K\x01(" + shape
        + b"tcnumpy\ndtype\nU" + bytes([len(code)]) + code + b"K\x00K\x01\x87R\x89" + raw + b"tb."
    )  # fmt: skip


BIG = b"\x8a\x08" + struct.pack("<q", 2**45)
ATTACKS = {
    "os.system": (pickle.dumps(Calls(os.system, "touch SHOT")), "it builds an object (posix.system)"),
    "eval": (pickle.dumps(Calls(eval, "1")), "it builds an object (builtins.eval)"),
    "numpy.load": (pickle.dumps(Calls(np.load, "x")), "it builds an object (numpy.load)"),
    "line feed": (b"\x8c\x03a\nb\x8c\x01c\x93.", r"it builds an object (a\nb.c)"),
    "numpy attribute": (b"cnumpy\nndarray.dump\n.", "it builds an object (numpy.ndarray.dump)"),
    "instance": (b"(iposix\nsystem\n.", "it builds an object (opcode INST)"),
    "object": (b"(cposix\nsystem\no.", "it builds an object (posix.system)"),
    "new object": (b"cnumpy\nndarray\n)\x81.", "it builds an object (opcode NEWOBJ)"),
    "extension": (b"\x82\x01.", "it builds an object (opcode EXT1)"),
    "persistent": (b"Px\n.", "it builds an object (opcode PERSID)"),
    "buffer": (b"\x97.", "it builds an object (opcode NEXT_BUFFER)"),
    "set": (pickle.dumps({1}), "it builds an object"),
    "huge ndarray": (b"cnumpy\nndarray\n(" + BIG + b"tR.", "it builds an object (numpy.ndarray)"),
    "huge shape": (reconstructed(BIG, b"U\x01x"), "an array with 1 instead of 35184372088832 bytes"),
    "huge dimensions": (reconstructed(BIG * 9, b"U\x01x"), "an array of an implausible shape"),
    "negative shape": (reconstructed(b"J\xff\xff\xff\xff", b"U\x01x"), "an array of an implausible shape"),
    "shape of text": (reconstructed(b"U\x01x", b"U\x01x"), "an array of no plain shape or type"),
    "objects": (pickle.dumps(np.array([None, 1], object)), "it contains an array of Python objects"),
    "object type": (reconstructed(b"K\x01", b"U\x08" + b"x" * 8, b"O8"), "it contains an array of Python objects"),
    "structure": (pickle.dumps(np.zeros(1, [("a", "u1")])), "it contains an array of the type V1"),
    "times": (pickle.dumps(np.zeros(1, "M8[s]")), "it contains an array of the type M8"),
    "no bytes": (reconstructed(b"K\x01", b"(lK\x01a"), "it contains an array of Python objects"),
    "long bytes": (b"\x8e" + struct.pack("<Q", 2**62) + b"x.", "it is damaged"),
    "long text": (b"X\xff\xff\xff\x7fx.", "it is damaged"),
    "long number": (b"L" + b"9" * 5000 + b"L\n.", "it is damaged"),
    "memo": (b"Nr\xff\xff\xff\x7fj\xff\xff\xff\xff.", "it is damaged"),
    "no memo": (b"h\x07.", "it is damaged"),
    "deep key": (b"K\x01" + b"2\x86" * 200 + b"q\x00}h\x00K\x01s.", "a dict with a key of the type tuple"),
    "list as key": (b"}]K\x01s.", "a dict with a key of the type list"),
    "opcodes": (b"N0" * 5_001 + b"N.", "it has more than 10,000 opcodes"),
    "encode": (b"c_codecs\nencode\n(X\x01\0\0\0aX\x05\0\0\0rot13tR.", "it encodes text otherwise than as Latin-1"),
    "encode again and again": (
        b"c_codecs\nencode\nq\x00X\x88\x13\0\0"
        + b"a" * 5_000
        + b"X\x06\0\0\0latin1\x86q\x01("
        + b"h\0h\x01R" * 3_300
        + b"l.",
        "it encodes more text than it contains",
    ),
    "type of nested tuples": (b"cnumpy\ndtype\n)" + b"2\x86" * 22 + b"\x85R.", "an array of no plain shape or type"),
    "state": (b"]}b.", "it builds an object (the state of one)"),
    "append": (b"}K\x01a.", "it builds an object (items of no list)"),
    "unfinished": (b"cnumpy.core.multiarray\n_reconstruct\n(K\x00tR.", "it contains an unfinished array"),
    "mark": (b"(.", "it is damaged (a mark in the place of a value)"),
    "nothing": (b"", "it is damaged"),
    "early end": (pickle.dumps([1, 2])[:-1], "it is damaged"),
    "empty stack": (b"0.", "it is damaged"),
    "odd items": (b"}(K\x01u.", "it is damaged"),
}


@pytest.mark.parametrize("case", ATTACKS)
def test_an_attack_is_one_error_and_takes_no_memory(tmp_path, monkeypatch, case):
    content, message = ATTACKS[case]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("loopfeed.preprocess.sources.plain_pickle.MAX_OPCODES", 10_000)
    tracemalloc.start()
    try:
        with pytest.raises(UnsafePickleError) as caught:
            load_plain(content)
        assert tracemalloc.get_traced_memory()[1] < 2**24
    finally:
        tracemalloc.stop()
    assert str(caught.value).startswith(message) or message in str(caught.value)
    assert not Path("SHOT").exists()


def test_a_list_that_contains_itself_and_nesting_beyond_any_recursion():
    value: list[object] = []
    value.append(value)
    found = load_plain(pickle.dumps(value))
    assert found[0] is found
    assert isinstance(load_plain(b"]" + b"\x85" * 100_000 + b"."), tuple)


def test_many_arrays_and_a_large_memo_take_no_time_together():
    empty = reconstructed(b"K\x00", b"U\x00")
    array = empty[2:-1].replace(b"R(", b"R\x94(", 1)
    content = b"\x80\x04N" + b"\x94" * 100_000 + b"0(" + array * 900 + b"l."
    found = load_plain(content)
    assert [each.shape for each in found] == [(0,)] * 900
    assert load_plain(b"\x80\x04(" + array + b"h\x00l.")[1].shape == (0,)
