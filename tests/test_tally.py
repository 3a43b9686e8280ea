"""Evaluation in the loop: counts to the image, its cadence, and what it must not touch."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loopfeed import TrainConfig, train
from loopfeed.engine.feed.batches import PADDING_LABEL
from loopfeed.engine.objective.objective import CROSS_ENTROPY
from loopfeed.engine.objective.tally import count_top5, empty_tally, merge_tallies, tally_batch
from loopfeed.models.registry import build_model
from loopfeed.preprocess.pixels import unpack_rgb
from loopfeed.preprocess.shards.reader import ShardError, open_split
from tests.fake_source import fake_source, pack
from tests.small_resnets import small_resnets
from tests.toy import BATCH, CLASSES, CountedBatches, Linear, toy_batch, toy_config

# Places of a batch, and few numbers of classes: each shape is compiled anew.
PLACES = 12
tally_compiled = jax.jit(tally_batch)


def plain_count(logits, labels):
    """Top-1, top-5 and summed loss by a stable sort, in float64."""
    logits = np.asarray(logits, np.float64)
    ranks = [list(np.argsort(-row, kind="stable")).index(label) for row, label in zip(logits, labels, strict=True)]
    shifted = logits - logits.max(1, keepdims=True)
    losses = np.log(np.exp(shifted).sum(1)) - shifted[np.arange(len(labels)), labels]
    return sum(rank < 1 for rank in ranks), sum(rank < 5 for rank in ranks), losses.sum()


@settings(max_examples=40, derandomize=True)
@given(st.integers(1, PLACES), st.sampled_from([1, 2, 5, 6]), st.integers(0, 10**6))
def test_a_batch_is_counted_as_by_sorting_and_padding_is_not(num_images, num_classes, seed):
    padding = PLACES - num_images
    random = np.random.default_rng(seed)
    # Few distinct values, so that equal logits are common.
    logits = random.integers(-2, 3, (num_images, num_classes)).astype(np.float32)
    labels = random.integers(num_classes, size=num_images)
    top1, top5, loss = plain_count(logits, labels)
    padded = np.concatenate([logits, random.standard_normal((padding, num_classes))])
    tally = tally_compiled(empty_tally(), jnp.asarray(padded), jnp.array([*labels, *[PADDING_LABEL] * padding]))
    assert (int(tally.num_images), int(tally.top1)) == (num_images, top1)
    assert count_top5(int(tally.top5)) == (top5 if num_classes > 5 else None)
    np.testing.assert_allclose(tally.loss_sum, loss, rtol=1e-5)


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.integers(0, PLACES), min_size=1, max_size=3), st.sampled_from([1, 2, 5, 6]))
def test_classes_are_counted_as_by_a_loop_over_images(counts, num_classes):
    random = np.random.default_rng(0)
    tally = empty_tally(num_classes)
    num_images, top1 = np.zeros(num_classes, int), np.zeros(num_classes, int)
    for count in counts:
        padding = PLACES - count
        labels = random.integers(num_classes, size=count)
        logits = random.integers(-2, 3, (count + padding, num_classes)).astype(np.float32)
        for row, label in zip(logits, labels, strict=False):
            num_images[label] += 1
            top1[label] += np.argmax(row) == label
        padded = jnp.array([*labels, *[PADDING_LABEL] * padding], jnp.int32)
        tally = tally_compiled(tally, jnp.asarray(logits), padded)
    assert tally.classes is not None
    np.testing.assert_array_equal(tally.classes.num_images, num_images)
    np.testing.assert_array_equal(tally.classes.top1, top1)
    np.testing.assert_array_equal([tally.num_images, tally.top1], [num_images.sum(), top1.sum()])


def test_an_invalid_label_belongs_to_no_class_and_counts_as_wrong():
    tally = tally_batch(empty_tally(3), jnp.zeros((2, 3)), jnp.array([0, 3]))
    assert tally.classes is not None
    np.testing.assert_array_equal([tally.num_images, tally.top1], [2, 1])
    assert (tally.classes.num_images.tolist(), tally.classes.top1.tolist()) == ([1, 0, 0], [1, 0, 0])


def test_a_row_with_nan_is_wrong_and_shows_in_the_loss():
    tally = tally_batch(empty_tally(), jnp.array([[jnp.nan, 1.0, 0.0], [0.0, 1.0, 0.0]]), jnp.array([1, 1]))
    np.testing.assert_array_equal([tally.num_images, tally.top1], [2, 1])
    logits = jnp.zeros((2, 6)).at[0, 0].set(jnp.nan)
    tally_of_six = tally_batch(empty_tally(), logits, jnp.array([1, 1]))
    np.testing.assert_array_equal([tally_of_six.num_images, tally_of_six.top1, tally_of_six.top5], [2, 0, 1])
    assert np.isnan(tally.loss_sum)


def test_an_infinite_loss_makes_the_sum_infinite_however_the_images_are_divided():
    """Kahan's correction of an infinite sum would be NaN."""
    logits = np.zeros((8, 3), np.float32)
    logits[2, 1] = -np.inf
    labels = np.full(8, 1, np.int32)
    for size in (8, 4, 1):
        tally = empty_tally()
        for at in range(0, 8, size):
            tally = tally_batch(tally, jnp.asarray(logits[at : at + size]), jnp.asarray(labels[at : at + size]))
        assert float(tally.loss_sum) == np.inf
        merged = merge_tallies(CROSS_ENTROPY, tally, merge_tallies(CROSS_ENTROPY, empty_tally(), tally))
        assert float(merged.loss_sum) == np.inf


class SixLogits(Linear):
    """A network of six logits: no label has the last three, which are the largest."""

    def apply(self, params, batch_stats, images, train):
        logits, batch_stats = super().apply(params, batch_stats, images, train)
        return jnp.concatenate([logits, jnp.full_like(logits, 100)], axis=1), batch_stats


def test_top5_is_recorded_from_six_classes_on(tmp_path):
    pixels, labels = evaluation_set(20)
    config = toy_config(steps=1, learning_rate=1e-6, run_dir=tmp_path)
    (found,) = (result := train(config, model=SixLogits(), batches=toy_batch, evaluation=(pixels, labels))).evaluations
    images = (unpack_rgb(pixels).astype(np.float32) / 255 - 0.5) / 0.25
    logits, _ = SixLogits().apply(result.params, result.batch_stats, images, train=False)
    assert (found.top1, found.top5) == tuple(count / 20 for count in plain_count(logits, labels)[:2])
    assert found.top1 == 0 < found.top5 < 1
    assert json.loads((tmp_path / "eval.jsonl").read_text())["top5"] == found.top5


def evaluation_set(num_images, seed=5):
    batches = [toy_batch(step, seed=seed) for step in range(-(-num_images // BATCH))]
    pixels, labels = (np.concatenate(part)[:num_images] for part in zip(*batches, strict=True))
    return pixels, labels


def plain_evaluation(result, pixels, labels, *, eval_mirror=False):
    images = (unpack_rgb(pixels).astype(np.float32) / 255 - 0.5) / 0.25
    logits, _ = Linear().apply(result.params, result.batch_stats, images, train=False)
    if eval_mirror:
        mirrored, _ = Linear().apply(result.params, result.batch_stats, images[:, :, ::-1], train=False)
        assert not np.allclose(mirrored, logits, atol=0.01)
        logits = (logits + mirrored) / 2
    return plain_count(logits, labels)


@pytest.mark.parametrize(("num_images", "eval_mirror"), [(1, True), (BATCH, False), (2 * BATCH + 3, True)])
def test_an_evaluation_in_the_loop_is_one_in_a_plain_loop_to_the_image(num_images, eval_mirror, tmp_path):
    pixels, labels = evaluation_set(num_images)
    config = toy_config(steps=7, learning_rate=0.02, eval_mirror=eval_mirror, run_dir=tmp_path)
    result = train(config, model=Linear(), batches=toy_batch, evaluation=(pixels, labels))
    (found,) = result.evaluations
    top1, _, loss = plain_evaluation(result, pixels, labels, eval_mirror=eval_mirror)
    assert (found.step, found.num_images) == (7, num_images)
    assert found.top1 == top1 / num_images
    np.testing.assert_allclose(found.loss, loss / num_images, rtol=1e-5)
    (line,) = (tmp_path / "eval.jsonl").read_text().splitlines()
    assert json.loads(line)["top1"] == found.top1
    assert json.loads(line)["top5"] is None  # of three classes


@pytest.mark.parametrize(
    ("steps", "every", "expected"),
    [(6, 2, [2, 4, 6]), (7, 3, [3, 6, 7]), (3, 0, [3]), (2, 5, [2]), (3, 1, [1, 2, 3]), (0, 1, [])],
)
def test_evaluations_come_at_multiples_and_at_the_end_once(steps, every, expected):
    batches, model = CountedBatches(), Linear()
    result = train(
        toy_config(steps=steps, eval_every_steps=every),
        model=model,
        batches=batches,
        evaluation=evaluation_set(2 * BATCH + 1),
    )
    assert [evaluation.step for evaluation in result.evaluations] == expected
    assert len(result.losses) == steps
    assert batches.calls == list(range(max(steps, 1)))
    assert model.traces == [True, False]


@small_resnets()
def test_a_packed_validation_split_is_evaluated_with_the_running_statistics(tmp_path):
    pack(fake_source(20, size=8), tmp_path)
    pack(fake_source(11, size=8, seed=1, name="val"), tmp_path)
    result = train(TrainConfig(steps=3, batch=4, data=tmp_path, model="resnet8"))
    (found,) = result.evaluations
    with open_split(str(tmp_path), "val") as split, open_split(str(tmp_path), "train") as trained:
        pixels, labels = np.empty((11, 8, 8), np.uint32), np.empty(11, np.int32)
        split.read_into(np.arange(11), pixels, labels, timeout_s=10)
        mean, std = (
            np.array(part, np.float32) for part in (trained.manifest.channel_mean, trained.manifest.channel_std)
        )
    images = jnp.asarray((unpack_rgb(pixels).astype(np.float32) / 255 - mean) / std)
    model = build_model("resnet8", num_classes=3, image_size=8)
    logits, _ = model.apply(result.params, result.batch_stats, images, train=False)
    top1, _, loss = plain_count(logits, labels)
    assert (found.num_images, found.top1) == (11, top1 / 11)
    np.testing.assert_allclose(found.loss, loss / 11, rtol=1e-4)  # float32 through a network, in another order


@small_resnets()
def test_splits_of_other_classes_or_sizes_are_refused_and_off_is_off(tmp_path):
    pack(fake_source(20, size=8), tmp_path)
    pack(fake_source(11, size=4, name="val"), tmp_path)
    config = {"steps": 1, "batch": 4, "data": tmp_path, "model": "resnet8"}
    with pytest.raises(ValueError, match=r"shaped like training batches, .* \(4, 8, 8\), got \(4, 4, 4\)"):
        train(TrainConfig(**config))
    with pytest.raises(ShardError, match="test"):
        train(TrainConfig(**config, eval_split="test"))
    assert train(TrainConfig(**config, eval_split="off")).evaluations == ()
    other = fake_source(11, size=8, name="val")
    pack(other.changed(classes=tuple(reversed(other.classes))), tmp_path, overwrite=True)
    with pytest.raises(ValueError, match="the classes of the training split, but the classes of val differ"):
        train(TrainConfig(**config))


def test_a_failing_evaluation_source_ends_the_run_and_no_partial_evaluation_is_reported():
    class Failing:
        batch, height, width, thread_safe, num_batches = BATCH, 4, 4, True, 3

        def fill(self, step, rows, pixels, labels, *, timeout_s):
            if step == 4:
                raise ConnectionResetError("the validation disk went away")
            pixels[...], labels[...] = 0, 0

    seen = []

    class Sink:
        def open(self): ...

        def write(self, record): ...

        def write_evaluation(self, record):
            seen.append(record.step)

        def close(self): ...

    with pytest.raises(ConnectionResetError, match="the validation disk went away"):
        train(
            toy_config(steps=6, eval_every_steps=2),
            model=Linear(),
            batches=toy_batch,
            evaluation=Failing(),
            sinks=[Sink()],
        )
    assert seen == [2]


def test_labels_of_an_evaluation_set_are_checked():
    pixels, labels = evaluation_set(9)
    with pytest.raises(ValueError, match=r"labels must lie in 0 … 2, but the evaluation set has .* … 3"):
        train(toy_config(), model=Linear(), batches=toy_batch, evaluation=(pixels, np.full(9, CLASSES)))
    with pytest.raises(ValueError, match=r"pixels must be uint32 .* the evaluation set has float64"):
        train(toy_config(), model=Linear(), batches=toy_batch, evaluation=(pixels / 2, labels))
