"""Labels of any form as 32-bit words: what is packed on the host is unpacked in the program, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from loopfeed.engine.feed.label_form import LabelForm

DTYPES = ["bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "float16", "float32"]


@st.composite
def batches_of_labels(draw):
    """A batch's size, and a nested pytree of arrays for it."""
    num_images = draw(st.integers(1, 5))
    shapes = npst.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)

    def array():
        return npst.arrays(draw(st.sampled_from(DTYPES)), (num_images, *draw(shapes)))

    return num_images, {"a": draw(array()), "b": (draw(array()), [draw(array())])}


@settings(max_examples=40, deadline=None, derandomize=True)
@given(batches_of_labels())
def test_labels_and_weights_arrive_in_the_program_bit_for_bit(case):
    num_images, labels = case
    form = LabelForm.of(labels, num_images, "the test")
    weights = np.arange(num_images).astype(np.float32)
    words = np.full((num_images, form.num_words), -1, np.int32)
    form.pack(labels, weights, words, "the test")
    found, found_weights = jax.jit(form.unpack)(words)
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(labels))
    for read, given_leaf in zip(jax.tree.leaves(found), jax.tree.leaves(labels), strict=True):
        assert (read.dtype, read.shape) == (given_leaf.dtype, given_leaf.shape)
        assert np.asarray(read).tobytes() == given_leaf.tobytes()
    assert np.array_equal(found_weights, weights)


def test_wide_numbers_are_narrowed_if_they_fit():
    form = LabelForm.of((np.zeros(2), np.array([1, -2])), 2, "the test")
    assert form.describe() == ["labels[0]: float32 []", "labels[1]: int32 []"]
    words = np.zeros((2, form.num_words), np.int32)
    form.pack((np.array([0.5, 1e-3]), np.array([7, -8])), np.ones(2, np.float32), words, "the test")
    (floats, integers), _ = form.unpack(jnp.asarray(words))
    assert floats.tolist() == [0.5, np.float32(1e-3)]
    assert integers.tolist() == [7, -8]
    with pytest.raises(ValueError, match=r"labels\[1\] must fit into int32, but the test has numbers outside it"):
        form.pack((np.zeros(2), np.array([7, 2**40])), np.ones(2, np.float32), words, "the test")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ({}, "must contain at least one array, but the test has none"),
        ({"x": ["a", "b"]}, r"labels\['x'\]\[0\] must be booleans, integers or floats \[2, …\]"),
        (np.zeros((3, 2)), r"labels must be .* \[2, …\], one entry for each image, but the test has float64 \[3, 2\]"),
        (np.zeros((2, 2), np.complex64), "complex64"),
        (np.float32(1), r"float32 \[\]"),
    ],
)
def test_labels_that_are_no_arrays_of_a_batch_are_refused(labels, message):
    with pytest.raises(ValueError, match=message):
        LabelForm.of(labels, 2, "the test")


def test_labels_of_a_later_batch_must_have_the_form_of_the_first():
    form = LabelForm.of({"x": np.zeros((2, 3), np.float32)}, 2, "the first")
    words, weights = np.zeros((2, form.num_words), np.int32), np.ones(2, np.float32)
    with pytest.raises(ValueError, match="labels must have the structure of the first batch"):
        form.pack(np.zeros((2, 3), np.float32), weights, words, "batch 1")
    with pytest.raises(
        ValueError, match=r"labels\['x'\] must be float32 \[2, 3\], as in the first batch, but batch 1 has"
    ):
        form.pack({"x": np.zeros((2, 4), np.float32)}, weights, words, "batch 1")
    with pytest.raises(ValueError, match=r"but batch 1 has int32 \[2, 3\]"):
        form.pack({"x": np.zeros((2, 3), np.int32)}, weights, words, "batch 1")
