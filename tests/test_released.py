"""What a process keeps of a run after its end: nothing, however many runs there were before."""

import gc
import weakref

import jax
import jax.numpy as jnp
import pytest

from loopfeed import RunningStats, batch_norm, convolution
from loopfeed.models.layers.platform_forms import tracing_for


def num_objects():
    """Return the number of objects that Python's collector knows, but for weak references: jax leaves dead ones."""
    gc.collect()
    return sum(type(each) is not weakref.ref for each in gc.get_objects())


@pytest.mark.parametrize("platform", ["cpu", "cuda", None])
def test_tracing_again_keeps_nothing_of_the_time_before(platform):
    x, running = jnp.ones((2, 4, 4, 3)), RunningStats(jnp.zeros(3), jnp.ones(3))

    def outputs(x, kernel):
        x = convolution(x, kernel, padding=((1, 1), (1, 1)), groups=3)
        return batch_norm(x, jnp.ones(3), jnp.zeros(3), running, train=True)[0].sum()

    def trace():
        with tracing_for(platform):
            jax.jit(jax.grad(lambda *arguments: outputs(*arguments), (0, 1))).trace(x, jnp.ones((3, 3, 1, 3)))
        return num_objects()

    *_, before, after = trace(), trace(), trace(), trace()
    assert after == before
