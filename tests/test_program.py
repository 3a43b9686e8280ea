"""The program against a plain loop of `lax` steps, and exact counts of what crosses."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import train
from loopfeed.models import registry
from loopfeed.models.families.resnet import ResNet
from tests.lax_resnet8 import step as lax_step
from tests.toy import SIZE, CountedBatches, Linear, toy_batch, toy_config


def coloured_batch(step, batch=16, size=16):
    random = np.random.default_rng(step)
    labels = random.integers(10, size=batch)
    pixels = random.integers(0, 256, (batch, size, size, 3)).astype(np.uint32)
    pixels[..., 0] = pixels[..., 0] // 8 + 20 * labels[:, None, None].astype(np.uint32)
    return pixels[..., 0] << 24 | pixels[..., 1] << 16 | pixels[..., 2] << 8, labels


COLOURED = toy_config(
    steps=12, batch=16, num_classes=10, model="resnet8", learning_rate=0.005, momentum=0.9, weight_decay=0.01
)


def plain_loop():
    """Return the losses and the last state (params, stats, velocity) of a plain loop of `lax` steps."""
    start = train(replace(COLOURED, steps=0), batches=coloured_batch)
    state = start.params, start.batch_stats, jax.tree.map(jnp.zeros_like, start.params)
    losses = []
    for number in range(COLOURED.steps):
        pixels, labels = coloured_batch(number)
        state, loss = lax_step(state, pixels, labels, 0.5, 0.25, 0.005, 0.9, 0.01)
        losses.append(float(loss))
    return losses, state


def test_losses_equal_a_plain_loop_of_lax_steps(monkeypatch):
    # Two stages of 8 and 16 channels: the second has strides and a shortcut of its own, as the third would.
    monkeypatch.setattr(registry, "_cifar", lambda _: ResNet(stages=(1, 1), width=8, block="basic", stem="cifar"))
    result = train(COLOURED, batches=coloured_batch)
    expected, state = plain_loop()
    # Seen: 1e-7. At larger rates the plain loop itself is 3e-4 off one in float64 after 12 steps: where rounding turns
    # the sign of one activation before its ReLU, an unstable rate amplifies it.
    np.testing.assert_allclose(result.losses, expected, rtol=1e-4)
    assert expected[-1] < expected[0] - 0.1  # it learns: the comparison is not one of standing still
    for ours, theirs in zip(jax.tree.leaves(result.batch_stats), jax.tree.leaves(state[1]), strict=True):
        # Absolute, because running means pass through zero; their size is about 0.1.
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("steps", [0, 1, 2, 9])
def test_each_batch_is_pulled_once_in_order_and_each_loss_pushed_once(steps, tmp_path):
    batches, model = CountedBatches(), Linear()
    result = train(toy_config(steps=steps, run_dir=tmp_path), model=model, batches=batches)
    # With no step at all the first batch is still asked for: its shape is part of the program.
    assert batches.calls == list(range(max(steps, 1)))
    assert result.losses.shape == (steps,)
    assert result.steps_done == steps
    assert float(result.batch_stats["batches"]) == steps
    assert (tmp_path / "loss.jsonl").read_text().count("\n") == steps


def test_a_run_is_traced_once():
    model = Linear()
    train(toy_config(steps=3), model=model, batches=toy_batch)
    assert model.traces == [True]


def test_the_model_is_traced_under_the_callers_jax_settings():
    seen = []

    class Watching(Linear):
        def apply(self, params, batch_stats, images, train):
            seen.append(jax.config.jax_default_matmul_precision)
            return super().apply(params, batch_stats, images, train)

    with jax.default_matmul_precision("float32"):
        train(toy_config(steps=1), model=Watching(), batches=toy_batch)
    assert seen == ["float32"]


def test_the_runtime_values_take_effect():
    def losses(**values):
        return train(toy_config(steps=6, **values), model=Linear(), batches=toy_batch).losses

    base = losses()
    assert np.array_equal(base, losses())
    for values in ({"learning_rate": 0.2}, {"momentum": 0.5}, {"weight_decay": 0.5}):
        changed = losses(**values)
        assert changed[0] == base[0]  # before any update
        assert changed[-1] != base[-1]
    assert losses(seed=1)[0] != base[0]


def test_the_loss_falls():
    losses = train(toy_config(steps=60), model=Linear(), batches=toy_batch).losses
    assert losses[0] > 0.9
    assert losses[-10:].mean() < 0.2


def test_both_transports_give_the_same_bits():
    results = [
        train(toy_config(transport=transport), model=Linear(), batches=toy_batch)
        for transport in ("inplace", "callback")
    ]
    assert np.array_equal(results[0].losses, results[1].losses)
    for first, second in zip(jax.tree.leaves(results[0].params), jax.tree.leaves(results[1].params), strict=True):
        assert np.array_equal(first, second)


def test_prefetch_and_threads_do_not_change_a_bit():
    losses = [
        train(
            toy_config(steps=40, synthetic=True, image_size=SIZE, prefetch=ahead, reader_threads=threads),
            model=Linear(),
        ).losses.tobytes()
        for ahead, threads in ((1, 1), (7, 3))
    ]
    assert losses[0] == losses[1]
