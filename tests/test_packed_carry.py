"""The values of a card's loop carry are unchanged by packing them together."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed.engine.program.pulls import LONGEST, MOST_TOGETHER, PackedForm

DTYPES = ("float32", "int32", "uint32", "bool", "bfloat16")


def random_tree(seed, num_leaves):
    """Dictionaries, lists and tuples of arrays of all sorts, empty ones among them."""
    random = np.random.default_rng(seed)
    shapes = [(), (0,), (1,), (16,), (33,), (LONGEST,), (LONGEST + 1,), (3, 5), (1, 1, 2)]

    def leaf():
        shape = shapes[random.integers(len(shapes))]
        return jnp.asarray(random.integers(0, 100, shape), str(random.choice(DTYPES)))

    leaves = [leaf() for _ in range(num_leaves)]
    third = num_leaves // 3
    return {"b": leaves[:third], "a": (tuple(leaves[third : 2 * third]), {"x": leaves[2 * third :], "none": None})}


@pytest.mark.parametrize(("seed", "num_leaves"), list(enumerate([0, 1, 7, 40, 5 * MOST_TOGETHER])))
def test_a_packed_tree_is_unpacked_unchanged(seed, num_leaves):
    tree = random_tree(seed, num_leaves)
    form = PackedForm.of(tree)
    packed = jax.jit(form.pack)(tree)
    found = jax.jit(form.unpack)(packed)
    assert str(jax.tree.structure(found)) == str(jax.tree.structure(tree))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(tree), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))


def test_short_vectors_of_one_dtype_are_put_together_and_nothing_else():
    short, other = jnp.arange(5.0), jnp.arange(3)
    alone = [jnp.zeros(()), jnp.zeros((2, 2)), jnp.zeros(LONGEST + 1)]
    form = PackedForm.of([short, *alone, other, short + 5])
    packed = form.pack([short, *alone, other, short + 5])
    assert [each.tolist() for each in packed[:2]] == [list(range(10)), [0, 1, 2]]
    assert [each.shape for each in packed[2:]] == [each.shape for each in alone]


def test_a_group_has_no_more_vectors_than_a_kernel_can_take():
    vectors = [jnp.full(2, number, jnp.float32) for number in range(2 * MOST_TOGETHER + 1)]
    packed = PackedForm.of(vectors).pack(vectors)
    assert [len(each) for each in packed] == [2 * MOST_TOGETHER, 2 * MOST_TOGETHER, 2]


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"a": jnp.zeros(4), "b": jnp.zeros(3), "c": jnp.zeros((2, 2))},
            r"\['a'\] changed from float32\[3\] to float32\[4\]",
        ),
        ({"a": jnp.zeros(3), "b": jnp.zeros(4, jnp.bfloat16), "c": jnp.zeros((2, 2))}, r"\['b'\] .* bfloat16\[4\]"),
        ({"a": jnp.zeros(3), "b": jnp.zeros(4), "c": jnp.zeros((2, 3))}, r"\['c'\] .* float32\[2, 3\]"),
    ],
)
def test_a_leaf_of_another_shape_or_dtype_is_named(other, message):
    form = PackedForm.of({"a": jnp.zeros(3), "b": jnp.zeros(4), "c": jnp.zeros((2, 2))})
    with pytest.raises(ValueError, match=message):
        form.pack(other)
