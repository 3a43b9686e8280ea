"""`--class-weights`: the weighted losses by PyTorch's numbers, and runs by the weights of their data."""

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import evaluate, replay_run, train
from loopfeed.engine.feed.label_form import LabelForm
from loopfeed.engine.images.mixing import WHOLE
from loopfeed.engine.objective.losses import binary_cross_entropy_loss, cross_entropy_loss
from loopfeed.engine.objective.objective import CROSS_ENTROPY, Objective
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import pack
from tests.labelled_photographs import draw_photographs, pack_labelled, write_labels
from tests.test_sampling import LABELS, config, long_tail
from tests.toy import Linear, toy_batch, toy_config

LOGITS = jnp.array([[1.0, -0.5, 2.0], [0.25, 0.75, -1.0], [-2.0, 0.0, 0.5]])
# scikit-learn's compute_class_weight("balanced") for 16, 6 and 2 images.
WEIGHTS = [0.5, 4 / 3, 4.0]
UNSMOOTHED = jnp.float32(0)


def weighted(objective, logits, words, mix_weight=None, smoothing=UNSMOOTHED):
    """Compile each call as one program."""
    loss = jax.jit(lambda *arrays: objective.training_loss(*arrays))
    return loss(logits, words, mix_weight, smoothing, jnp.array(WEIGHTS, jnp.float32))


def test_the_cross_entropy_is_multiplied_by_the_weight_of_the_class_and_averaged_over_the_images():
    """PyTorch 2.14's CrossEntropyLoss(weight, reduction="none"), in float64, and the gradient of its mean."""
    labels = jnp.array([2, 0, 1], jnp.int32)
    found, gradient = jax.value_and_grad(lambda logits: weighted(CROSS_ENTROPY, logits, labels))(LOGITS)
    np.testing.assert_allclose(found, np.mean([1.4861561274107313, 0.5383922375181167, 1.3652120749065437]), rtol=4e-7)
    expected = [
        [0.3382882421800336, 0.0754823096539617, -0.4137705518339952],
        [-0.10988512315673335, 0.09361693856801186, 0.016268184588721486],
        [0.021604810680578786, -0.28480528631887175, 0.2632004756382929],
    ]
    np.testing.assert_allclose(gradient, expected, rtol=1e-6, atol=1e-7)
    one_by_one = [float(weighted(CROSS_ENTROPY, LOGITS[at : at + 1], labels[at : at + 1])) for at in range(3)]
    assert np.mean(one_by_one) == pytest.approx(float(found), rel=4e-7)


def test_positive_weights_multiply_the_terms_of_true_labels():
    """PyTorch 2.14's BCEWithLogitsLoss(pos_weight), in float64."""
    form = LabelForm.of_targets(3, are_bits=False)
    labels, words = np.array([[1.0, 0, 1], [0, 1, 0], [0, 0.3, 1]], np.float32), np.zeros((3, form.num_words), np.int32)
    form.pack(labels, np.ones(3, np.float32), words, "here")
    objective = Objective(binary_cross_entropy_loss, form)
    found, gradient = jax.value_and_grad(lambda logits: weighted(objective, logits, jnp.asarray(words)))(LOGITS)
    np.testing.assert_allclose(found, 0.6199052037823015, rtol=4e-7)
    expected = [
        [-0.01494119007611084, 0.04194896319979394, -0.05297907645427453],
        [0.062464055653977564, -0.0475290816036455, 0.02988238015222168],
        [0.013244769113568616, 0.016666666666666663, -0.16779585279917575],
    ]
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-7)


def test_a_mixed_image_has_the_mean_weight_of_its_labels_and_smoothing_changes_no_weight():
    labels, share, smoothing = np.array([2, 0, 1, 1]), 0.75, 0.1
    logits = jnp.concatenate([LOGITS, LOGITS[:1]])
    found = weighted(
        CROSS_ENTROPY,
        logits,
        jnp.asarray(labels, jnp.int32),
        jnp.full(4, round(share * WHOLE), jnp.int32),
        jnp.float32(smoothing),
    )
    wide = np.asarray(logits, np.float64)
    log_probabilities = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    own, partners = np.eye(3)[labels], np.eye(3)[labels[[1, 0, 3, 2]]]
    targets = share * own + (1 - share) * partners
    weights = targets @ np.array(WEIGHTS)
    smoothed = (1 - smoothing) * targets + smoothing / 3
    expected = -(weights * (smoothed * log_probabilities).sum(axis=1)).mean()
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_model_with_other_outputs_than_classes_is_refused():
    with pytest.raises(ValueError, match=r"need one logit for each of the 3 classes, but the model returns \[2, 4\]"):
        weighted(CROSS_ENTROPY, jnp.zeros((2, 4)), jnp.zeros(2, jnp.int32))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weighted")
    pack(long_tail(), folder)
    pack(long_tail("val"), folder)
    return folder


def own_loss(logits, labels, weights):
    return cross_entropy_loss(logits, labels, weights) * jnp.array(WEIGHTS, jnp.float32)[labels]


def test_a_balanced_run_is_the_run_of_a_loss_of_ones_own_and_its_evaluations_have_no_weights(data, tmp_path):
    said: list[str] = []
    run = config(data, steps=6, eval_split="val", class_weights="balanced", run_dir=tmp_path / "run")
    found = train(run, model=Linear(), notify=said.append)
    assert "class weights: balanced: 0.5 (tench) to 4 (great white shark)" in said
    expected = train(config(data, steps=6, eval_split="val"), model=Linear(), loss=own_loss)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    plain = evaluate(tmp_path / "run", model=Linear(), per_class=True)
    assert plain.record.loss == found.evaluations[-1].loss
    assert plain.record.top1 == expected.evaluations[-1].top1
    assert plain.balanced_accuracy == pytest.approx(np.mean([each.top1 for each in plain.classes]))
    assert plain.record.loss != pytest.approx(expected.evaluations[-1].loss, rel=1e-3)
    assert replay_run(tmp_path / "run", model=Linear()).is_same
    with pytest.raises(ValueError, match="class_weights was 'balanced', got 'none'"):
        train(replace(run, steps=7, resume=True, class_weights="none"), model=Linear())


def test_balanced_weights_are_those_of_what_is_drawn(data):
    """Classes that are drawn equally often have the weight 1, and a part of the data has its own counts."""
    given = config(data, steps=3, sampling="balanced")
    plain, both = train(given, model=Linear()), train(replace(given, class_weights="balanced"), model=Linear())
    np.testing.assert_array_equal(both.losses, plain.losses)
    said: list[str] = []
    train(config(data, steps=1, class_weights="balanced"), model=Linear(), indices=[0, 1, 2, 16], notify=said.append)
    # N / (K · n) of the two classes that occur; the third has the weight 1, which nothing has.
    assert "class weights: balanced: 0.667 (tench) to 2 (goldfish)" in said


def test_the_weights_of_a_table_are_taken_as_they_are_and_kept(data, tmp_path):
    path = tmp_path / "weights.csv"
    path.write_text("class,weight\nn1,0.5\ngoldfish,1.3333333333\nn3,4\n")
    run = config(data, steps=3, class_weights=str(path), run_dir=tmp_path / "run")
    found = train(run, model=Linear())
    balanced = train(config(data, steps=3, class_weights="balanced"), model=Linear())
    np.testing.assert_allclose(found.losses, balanced.losses, rtol=1e-6)
    path.write_text("class,weight\nn1,0.5\n")
    with pytest.raises(ValueError, match="must keep the weights in the file of class_weights, which have changed"):
        train(replace(run, steps=4, resume=True), model=Linear())


@pytest.mark.parametrize(("weights", "largest"), [((1e39, 1, 1), "1e+39"), ((0, 0, 0), "0"), ((0, 1e-60, 0), "1e-60")])
def test_weights_that_no_loss_can_have_are_refused(data, tmp_path, weights, largest):
    rows = "".join(f"n{number},{weight}\n" for number, weight in enumerate(weights, 1))
    (tmp_path / "weights.csv").write_text(f"class,weight\n{rows}")
    rule = f"must have weights that are finite in float32 and not all 0, but the largest is {largest}: correct"
    with pytest.raises(ValueError, match=re.escape(rule)):
        train(config(data, class_weights=str(tmp_path / "weights.csv")), model=Linear())


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """Packs with several classes, and with numbers, of each image."""
    root = tmp_path_factory.mktemp("labelled")
    names = draw_photographs(root / "photographs", 24)
    for kind in ("classes", "numbers"):
        pack_labelled(
            root / "photographs", write_labels(root / f"{kind}.csv", names, kind=kind), root / kind, holdout=0.2
        )
    return root


@pytest.mark.parametrize("sampled", [False, True])
def test_positive_weights_of_several_classes_are_those_without_to_those_with(labelled, tmp_path, sampled):
    with open_split(str(labelled / "classes"), "train") as split:
        targets = split.read_targets(np.arange(split.num_images))
        names = split.names(np.arange(split.num_images)) or []
    drawn = np.ones(len(targets))
    values: dict[str, Any] = {}
    if sampled:
        drawn[:3] = 4
        (tmp_path / "names.csv").write_text("name,weight\n" + "".join(f"{name},4\n" for name in names[:3]))
        values = {"sampling": str(tmp_path / "names.csv")}
    share = drawn @ targets / drawn.sum()
    positive = jnp.array(np.clip((1 - share) / np.maximum(share, 1e-9), 0.01, 100), jnp.float32)

    def own(logits, labels, weights):
        return binary_cross_entropy_loss(logits, labels, weights, positive)

    common = {"data": str(labelled / "classes"), "steps": 3, "num_classes": None, "eval_split": "off", **values}
    model = Outputs(targets.shape[1])
    found = train(toy_config(**common, loss="binary-cross-entropy", class_weights="balanced"), model=model)
    expected = train(toy_config(**common), model=model, loss=own)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)


class Outputs:
    """A linear model of any number of outputs."""

    name = "outputs"

    def __init__(self, num_outputs):
        self.num_outputs = num_outputs

    def init(self, key):
        return {"weights": 0.1 * jax.random.normal(key, (3, self.num_outputs))}, {}

    def apply(self, params, batch_stats, images, train):
        return images.mean((1, 2)) @ params["weights"], batch_stats


WEIGHED = "class_weights weighs the ready-made cross-entropy and binary-cross-entropy"


@pytest.mark.parametrize(
    ("values", "parts", "fault"),
    [
        ({"loss": "mean-squared-error"}, {}, WEIGHED),
        ({}, {"loss": own_loss}, WEIGHED),
        ({"data": None}, {"batches": toy_batch}, "class_weights needs the labels of a packed data set, got 'balanced'"),
        ({"class_weights": "balance"}, {}, "one of none, balanced: did you mean balanced?"),
    ],
)
def test_what_weights_do_not_go_with_is_refused(data, values, parts, fault):
    given = replace(config(data), **({"class_weights": "balanced"} | values))
    with pytest.raises(ValueError, match=re.escape(fault)):
        train(given, **({"model": Linear()} | parts))


def test_labels_without_classes_are_refused_by_sampling_and_weights(labelled):
    def fails(kind, fault, **values):
        given = toy_config(data=str(labelled / kind), num_classes=None, eval_split="off", **values)
        with pytest.raises(ValueError, match=fault):
            train(given, model=Outputs(3))

    several, numbers = {"loss": "binary-cross-entropy"}, {"loss": "mean-squared-error"}
    fails(
        "classes",
        r"have any number of classes each, which balanced does not fit.*class_weights",
        sampling="balanced",
        **several,
    )
    fails(
        "numbers",
        r"have numbers, not classes, which sqrt does not fit: give weights of images",
        sampling="sqrt",
        **numbers,
    )


def test_each_label_of_the_tests_is_its_class(data):
    with open_split(str(data), "train") as split:
        assert split.read_classes().tolist() == LABELS
