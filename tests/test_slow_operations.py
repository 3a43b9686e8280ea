"""Operations without a fast kernel are found in the loops of compiled programs, by name."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from loopfeed.engine.runtime.slow_operations import find_slow_operations


def looped(step, *arrays):
    """Return the optimised text of a program that repeats `step`, a function of arrays to a number."""

    def program(*arrays):
        def body(_, total):
            return total + step(*(array + (total * 0).astype(array.dtype) for array in arrays))

        return lax.fori_loop(0, 3, body, jnp.zeros((), jnp.float32))

    return jax.jit(program).lower(*arrays).compile().as_text()


def product(left, right):
    with jax.named_scope("train"), jax.named_scope("forward"), jax.named_scope("head"):
        return (left @ right).sum().astype(jnp.float32)


def test_a_product_of_integers_is_named_and_one_of_floats_is_not():
    slow = looped(product, jnp.ones((64, 64), jnp.int8), jnp.ones((64, 64), jnp.int8))
    (found,) = find_slow_operations(slow, is_cpu=True)
    assert (found.kind, found.name, found.shape, found.count) == ("product", "train/forward/head", "s8[64,64]", 1)
    assert "s8" in found.why
    assert find_slow_operations(looped(product, jnp.ones((64, 64)), jnp.ones((64, 64))), is_cpu=True) == ()
    assert find_slow_operations(slow, is_cpu=False) == ()


def test_the_gradients_of_a_lax_convolution_are_named():
    def loss(images, kernel):
        with jax.named_scope("train"), jax.named_scope("forward"), jax.named_scope("conv1"):
            axes = ("NHWC", "HWIO", "NHWC")
            return (lax.conv_general_dilated(images, kernel, (2, 2), "SAME", dimension_numbers=axes) ** 2).sum()

    text = looped(lambda *arrays: sum(each.sum() for each in jax.grad(loss, (0, 1))(*arrays)),
                  jnp.ones((4, 16, 16, 8)), jnp.ones((3, 3, 8, 8)))  # fmt: skip
    found = find_slow_operations(text, is_cpu=True)
    assert {each.kind for each in found} == {"convolution"}
    assert {each.name for each in found} == {"train/backward/conv1"}
    assert any("loopfeed.convolution" in each.why for each in found)


# As XLA compiles a sort, and a copy to the host, for a card.
CARD = """HloModule jit_f, is_scheduled=true

%compare (a: f32[], b: f32[]) -> pred[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %lt = pred[] compare(%a, %b), direction=LT
}

%body (carry: (f32[8192], f32[16])) -> (f32[8192], f32[16]) {
  %carry = (f32[8192]{0}, f32[16]{0}) parameter(0)
  %large = f32[8192]{0} get-tuple-element(%carry), index=0
  %small = f32[16]{0} get-tuple-element(%carry), index=1
  %sort.1 = f32[8192]{0} sort(%large), to_apply=%compare, metadata={op_name="jit(f)/while/body/train/loss/sort"}
  %sort.2 = f32[16]{0} sort(%small), dimensions={0}, to_apply=%compare
  %copy-start.1 = (f32[8192]{0:S(5)}, f32[8192]{0}, u32[]) copy-start(%sort.1)
  ROOT %tuple = (f32[8192]{0}, f32[16]{0}) tuple(%sort.1, %sort.2)
}

%condition (carry: (f32[8192], f32[16])) -> pred[] {
  %carry.1 = (f32[8192]{0}, f32[16]{0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (x: (f32[8192], f32[16])) -> (f32[8192], f32[16]) {
  %x = (f32[8192]{0}, f32[16]{0}) parameter(0)
  ROOT %while = (f32[8192]{0}, f32[16]{0}) while(%x), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(("is_cpu", "kinds"), [(False, ["sort", "host copy"]), (True, [])])
def test_sorts_and_host_copies_on_a_card(is_cpu, kinds):
    found = find_slow_operations(CARD, is_cpu=is_cpu)
    assert [each.kind for each in found] == kinds
    if kinds:
        assert (found[0].name, found[0].shape) == ("train/loss", "f32[8192]")
