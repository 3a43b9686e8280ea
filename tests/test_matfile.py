"""The MAT reader against scipy's writer, and against damage."""

import contextlib
import io
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed.preprocess.sources.matfile import MatFileError, read_matfile

scipy_io = pytest.importorskip("scipy.io")


def written(variables, *, compress=True):
    file = io.BytesIO()
    scipy_io.savemat(file, variables, do_compression=compress)
    return file.getvalue()


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("kind", ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f4", "f8"])
@pytest.mark.parametrize("shape", [(1, 1), (3, 4), (2, 3, 4), (0, 0), (1, 5)])
def test_numbers_keep_shape_and_type(kind, shape, compress):
    values = np.arange(np.prod(shape)).reshape(shape).astype(kind)
    found = read_matfile(written({"values": values}, compress=compress))["values"]
    np.testing.assert_array_equal(found, values)
    assert found.dtype == values.dtype


@pytest.mark.parametrize("compress", [True, False])
@pytest.mark.parametrize("text", ["", "x", "tench, Tinca tinca", "crème brûlée", "日本"])
def test_text(text, compress):
    assert read_matfile(written({"text": text}, compress=compress))["text"] == text


def test_rows_of_text():
    assert read_matfile(written({"text": np.array(["one", "two"])}))["text"] == "one\ntwo"


@pytest.mark.timeout(30)
def test_more_rows_than_characters_are_damage():
    content = written({"rows": np.array(["ab", "cd"])}, compress=False)
    shape = struct.pack("<2i", 2, 2)
    assert content.count(shape) == 1
    with pytest.raises(MatFileError, match=r"damaged: text of shape \(2147483647, 2\) has 4 characters"):
        read_matfile(content.replace(shape, struct.pack("<2i", 2**31 - 1, 2)))


@pytest.mark.parametrize("compress", [True, False])
def test_struct_arrays_cells_and_nesting(compress):
    kinds = [("ID", object), ("WNID", object), ("children", object)]
    rows = np.empty((3, 1), kinds)
    for row, (number, wnid, children) in enumerate([(1, "n1", [2.0, 3.0]), (2, "n2", []), (3, "n3", [7.0])]):
        rows[row, 0] = (np.uint8(number), wnid, np.array([children]))
    cells = np.empty((1, 2), object)
    cells[0, 0], cells[0, 1] = "left", np.array([[1.0, 2.0]])
    found = read_matfile(written({"rows": rows, "cells": cells, "one": {"field": "value"}}, compress=compress))
    assert [row["WNID"] for row in found["rows"]] == ["n1", "n2", "n3"]
    assert [int(row["ID"][0, 0]) for row in found["rows"]] == [1, 2, 3]
    assert [row["children"].ravel().tolist() for row in found["rows"]] == [[2.0, 3.0], [], [7.0]]
    assert found["cells"][0] == "left"
    assert found["cells"][1].tolist() == [[1.0, 2.0]]
    assert found["one"] == [{"field": "value"}]


def test_big_endian():
    # By hand: a file as a big-endian machine writes it, one int32 array [[1, 2]] called "ab".
    def element(kind, data):
        return struct.pack(">II", kind, len(data)) + data + bytes(-len(data) % 8)

    small_name = struct.pack(">HH", 2, 1) + b"ab\0\0"
    body = element(6, struct.pack(">II", 12, 0)) + element(5, struct.pack(">ii", 1, 2)) + small_name
    body += element(5, struct.pack(">ii", 1, 2))
    content = b"MATLAB 5.0".ljust(124) + struct.pack(">H", 0x0100) + b"MI" + element(14, body)
    assert read_matfile(content)["ab"].tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "a header of 128 bytes, but this file has 0"),
        (bytes(200), r"not a level-5 MAT file.*save it with -v7"),
        (b"MATLAB 7.3".ljust(124) + b"\x00\x02IM", "not a level-5"),
        (written({"a": np.arange(100.0)})[:-40], "truncated"),
        (written({"a": np.arange(100.0)}, compress=False)[:-40], "truncated"),
        (written({"a": np.array([1 + 2j])}), "complex arrays"),
    ],
)
def test_unreadable_content_is_refused_with_a_reason(content, message):
    with pytest.raises(MatFileError, match=message):
        read_matfile(content)


def test_a_variable_that_inflates_without_end_is_refused(monkeypatch):
    monkeypatch.setattr("loopfeed.preprocess.sources.matfile.MAX_BYTES", 1000)
    with pytest.raises(MatFileError, match="more than 1000 bytes"):
        read_matfile(written({"a": np.zeros(10000)}))


ROWS = np.empty((2, 1), [("a", object), ("b", object)])
ROWS[0, 0], ROWS[1, 0] = ("x", np.arange(3)), ("yy", np.arange(2))
PLAIN = written({"rows": ROWS, "cells": np.array([["p", 1]], object)}, compress=False)


@settings(max_examples=300)
@given(data=st.data())
def test_damage_ends_in_values_or_a_reason(data):
    content = bytearray(PLAIN)
    for place, value in data.draw(
        st.lists(st.tuples(st.integers(128, len(PLAIN) - 1), st.integers(0, 255)), max_size=4)
    ):
        content[place] = value
    with contextlib.suppress(MatFileError):  # any other exception fails
        assert isinstance(read_matfile(bytes(content[: data.draw(st.integers(0, len(content)))])), dict)


def element(kind, data):
    return struct.pack("<II", kind, len(data)) + data + bytes(-len(data) % 8)


def matrix(array_class, shape, *parts, name=b""):
    lengths = struct.pack(f"<{len(shape)}i", *shape)
    head = element(6, struct.pack("<II", array_class, 0)) + element(5, lengths) + element(1, name)
    return element(14, head + b"".join(parts))


def mat_file(*elements):
    return b"MATLAB 5.0".ljust(124) + b"\x00\x01IM" + b"".join(elements)


def nested(depth):
    inner = matrix(9, (1, 1), element(2, b"\x07"))
    for _ in range(depth):
        inner = matrix(1, (1, 1), inner)
    return inner


def bomb(num_bytes):
    packed = zlib.compress(bytes(num_bytes))
    return struct.pack("<II", 15, len(packed)) + packed


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (nested(17), "nested more than 16 deep"),
        (nested(400), "nested more than 16 deep"),
        (matrix(1, (1_100_000, 1), element(14, b"") * 1_100_000), "more than 1000000 elements"),
        (matrix(9, (2**31 - 1,) * 33, element(2, b"")), "an array has 33 dimensions"),
        (matrix(9, (1, 1), struct.pack("<II", 0x7FFF, 8) + bytes(8)), "numbers of unknown type 32767"),
        (
            matrix(2, (500_000_000, 1), element(5, struct.pack("<i", 4)), element(1, b"abc\0")),
            "has 0 structs",
        ),
        (matrix(9, (-1, -5), element(2, b"12345")), "damaged"),
        (matrix(4, (1, 1), element(1, b"\xff")), "damaged"),
        (matrix(2, (1, 1), element(5, struct.pack("<i", 1)), element(1, b"x" * 1001)), "more than 1000 fields"),
        (bomb(2**26 + 1), "more than 67108864 bytes"),
        (bomb(2**25) * 3, "more than"),
    ],
    ids=[
        "deep",
        "deeper",
        "elements",
        "dimensions",
        "type",
        "structs",
        "negative",
        "character",
        "fields",
        "bomb",
        "bombs",
    ],
)
def test_the_sizes_that_a_file_declares_are_limited(content, message):
    with pytest.raises(MatFileError, match=message):
        read_matfile(mat_file(content))
