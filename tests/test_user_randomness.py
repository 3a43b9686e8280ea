"""A user's augmentation and a model with random layers: keys by (seed, position), exact resume and replay."""

from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loopfeed import evaluate, replay_run, train
from tests.test_user_loss import images_of
from tests.threefry_reference import words_at
from tests.toy import BATCH, Linear, toy_batch, toy_config

KEEP, RATE = 0.75, 0.01
OWN_AUGMENTATION, MODEL = 12, 13


@dataclass
class Dropout(Linear):
    """A linear classifier with dropout of its inputs, drawn for each image by itself."""

    keys: list[Any] = field(default_factory=list)

    def apply(self, params, batch_stats, images, train, key=None):
        self.keys.append(key)
        if train:
            images = drop(images, key)
        return super().apply(params, batch_stats, images, train)


def drop(images, keys):
    kept = jax.vmap(lambda key: jax.random.bernoulli(key, KEEP, images.shape[1:]))(keys)
    return jnp.where(kept, images / KEEP, 0)


def shift_levels(images, keys):
    return images + 0.1 * jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)[:, None, None]


def keys_at(seed, start, num, purpose):
    """Keys by the reference cipher, one block for each position."""
    words = np.array([words_at(seed, number, purpose, 0) for number in range(start, start + num)], np.uint32)
    return jax.random.wrap_key_data(jnp.asarray(words), impl="threefry2x32")


def plain_losses(start, steps, seed, prepare):
    """The losses of plain gradient descent over the same batches, `prepare`d by step."""
    model, params, losses = Linear(), start, []

    @jax.jit
    @jax.value_and_grad
    def gradient_of(params, images, labels):
        logits, _ = model.apply(params, {"batches": 0}, images, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    for step in range(steps):
        pixels, labels = toy_batch(step)
        images = prepare(images_of(pixels), seed, step)
        loss, gradients = gradient_of(params, images, labels)
        params = jax.tree.map(lambda leaf, change: leaf - RATE * change, params, gradients)
        losses.append(loss)
    return losses


def plain_config(**values):
    return toy_config(
        **({"steps": 6, "momentum": 0.0, "weight_decay": 0.0, "learning_rate": RATE, "seed": 3 + 2**40} | values)
    )


@pytest.mark.parametrize(
    ("purpose", "function", "parts"),
    [
        (MODEL, drop, {"model": Dropout()}),
        (OWN_AUGMENTATION, shift_levels, {"model": Linear(), "augment": shift_levels}),
    ],
)
def test_losses_equal_a_plain_loop_with_the_keys_of_each_position(purpose, function, parts):
    config = plain_config()

    def prepare(images, seed, step):
        return jax.jit(function)(images, keys_at(seed, step * BATCH, BATCH, purpose))

    start = train(replace(config, steps=0), batches=toy_batch, **parts).params
    result = train(config, batches=toy_batch, **parts)
    np.testing.assert_allclose(result.losses, plain_losses(start, 6, config.seed, prepare), rtol=2e-6)
    assert not np.array_equal(result.losses, train(replace(config, seed=4), batches=toy_batch, **parts).losses)


def test_the_keys_of_an_image_depend_on_neither_its_row_nor_the_batch():
    """Four batches of 8 and one of 32 have the same positions; without an update between them, the same images."""

    def big_batch(step):
        batches = [toy_batch(4 * step + part) for part in range(4)]
        return tuple(np.concatenate(part) for part in zip(*batches, strict=True))

    seen: dict[int, Any] = {}
    for batch, batches, pulls in ((8, toy_batch, 4), (32, big_batch, 1)):
        config = plain_config(batch=batch, steps=1, accumulate_steps=pulls)
        seen[batch] = train(config, model=Dropout(), batches=batches, augment=shift_levels).losses
    np.testing.assert_allclose(seen[8], seen[32], rtol=1e-6)


def test_the_keys_are_given_in_training_and_none_in_evaluations(tmp_path):
    model = Dropout()
    evaluation = toy_batch(99, batch=16)
    config = plain_config(eval_every_steps=3, run_dir=tmp_path)
    result = train(config, model=model, batches=toy_batch, evaluation=evaluation)
    given = [key for key in model.keys if key is not None]
    assert len(given) < len(model.keys)
    assert {key.shape for key in given} == {(BATCH,)}
    assert all(jnp.issubdtype(key.dtype, jax.dtypes.prng_key) for key in given)
    again = evaluate(tmp_path, model=model, evaluation=evaluation)
    assert again.record.loss == result.evaluations[-1].loss


def test_an_interrupted_run_resumes_and_replays_to_the_same_bytes(tmp_path):
    config = plain_config(steps=7, snapshot_every_steps=2, accumulate_steps=2, flip=0.5)
    parts: dict[str, Any] = {"model": Dropout(), "augment": shift_levels}
    whole = train(replace(config, run_dir=str(tmp_path / "whole")), batches=toy_batch, **parts)

    def failing(step):
        if step == 11:
            raise ConnectionResetError("cut off")
        return toy_batch(step)

    broken = replace(config, run_dir=str(tmp_path / "broken"))
    with pytest.raises(ConnectionResetError):
        train(broken, batches=failing, **parts)
    resumed = train(replace(broken, resume=True), batches=toy_batch, **parts)
    for found, expected in zip(*map(jax.tree.leaves, (resumed.params, whole.params)), strict=True):
        np.testing.assert_array_equal(found, expected)
    report = replay_run(tmp_path / "broken", from_step=0, batches=toy_batch, **parts)
    assert (report.num_losses, report.differences) == (7, ())


def test_a_resume_and_a_replay_need_the_augmentation_again(tmp_path):
    config = plain_config(steps=2, run_dir=str(tmp_path))
    train(config, model=Linear(), batches=toy_batch, augment=shift_levels)
    longer = replace(config, steps=3, resume=True)
    with pytest.raises(ValueError, match=r"was trained with an augmentation .*of your own, which must be given"):
        train(longer, model=Linear(), batches=toy_batch)
    with pytest.raises(ValueError, match=r"must keep its own_parts, which was .*shift_levels"):
        train(longer, model=Linear(), batches=toy_batch, augment=drop)
    with pytest.raises(ValueError, match=r"an augmentation .*of your own, which must be given"):
        replay_run(tmp_path, model=Linear(), batches=toy_batch)


@pytest.mark.parametrize(
    ("augment", "message"),
    [
        ("flip", r"augment must be a function of \(images, keys\), got str"),
        (lambda images, keys: images[:, 1:], r"float32 \[8, 4, 4, 3\], but returned float32 \[8, 3, 4, 3\]"),
        (lambda images, keys: images.astype(jnp.bfloat16), r"but returned bfloat16 \[8, 4, 4, 3\]"),
        (lambda images, keys: (images, keys), "but returned a tuple of 2: change sizes"),
        (lambda images, keys: None, "but returned None"),
    ],
)
def test_an_unfit_augmentation_is_refused(augment, message):
    with pytest.raises(ValueError, match=message):
        train(toy_config(), model=Linear(), batches=toy_batch, augment=augment)
