"""A whole network by oneDNN's kernels has the gradients that it has by XLA's forms."""

import jax
import jax.numpy as jnp
import pytest

from loopfeed.models.kernels import ONEDNN, XLA, using_kernels
from loopfeed.models.registry import build_model
from tests.kernels import needs_onednn


@needs_onednn
@pytest.mark.integration
def test_gradients_of_a_deep_network_are_those_of_xlas_forms():
    """Its last stage has 64 values a channel, whose norms jaxlib 0.12.0 once computed in place of their input."""
    images, labels = jax.random.normal(jax.random.key(1), (16, 64, 64, 3)), jnp.arange(16) % 10
    model = build_model("resnet18", num_classes=10, image_size=64, dtype="float32")
    params, stats = jax.jit(model.init)(jax.random.key(0))
    found = {}
    for kernels in (XLA, ONEDNN):

        def loss(params):
            logits, _ = model.apply(params, stats, images, train=True)
            return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(16), labels])

        with using_kernels(kernels):
            found[kernels] = jax.jit(jax.value_and_grad(loss))(params)
    (expected, of_xla), (got, of_onednn) = found[XLA], found[ONEDNN]
    assert float(got) == pytest.approx(float(expected), rel=1e-6)
    # Rounding of float32 through 18 layers gave at most 7e-6 here.
    for one, other in zip(jax.tree.leaves(of_onednn), jax.tree.leaves(of_xla), strict=True):
        assert jnp.linalg.norm((one - other).ravel()) <= 1e-4 * jnp.linalg.norm(other.ravel())
