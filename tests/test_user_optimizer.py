"""A user's optimizer and schedule, groups, freezing and clipping inside the program, against plain optax loops."""

import json
import math
import threading
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest

from loopfeed import Callback, replay_run, train
from loopfeed.engine.patterns import parse_freeze, parse_groups
from loopfeed.engine.records.control_log import read_events
from loopfeed.engine.records.snapshot import read_snapshot
from loopfeed.engine.run.run import NonFiniteError
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.skipping import clip_by_global_norm, clip_gradient
from tests.toy import Linear, toy_batch, toy_config

STEPS = 30
BARE = optax.chain(optax.clip_by_global_norm(1.0), optax.adabelief(optax.cosine_decay_schedule(0.001, STEPS)))
FAST_AND_SLOW = optax.lookahead(optax.sgd(0.01), sync_period=5, slow_step_size=0.5)
RATE = optax.warmup_cosine_decay_schedule(0.0, 0.002, 4, STEPS)


def config_of(**values):
    """Settings whose updates are all left to the optimizer."""
    return replace(toy_config(steps=STEPS), **({"learning_rate": None} | values))


def images_of(pixels):
    levels = np.stack([pixels >> shift & 255 for shift in (24, 16, 8)], axis=-1)
    return jnp.asarray((levels / 255 - 0.5) / 0.25, jnp.float32)


def plain(start, optimizer, *, steps=STEPS, factor_of=lambda _: 1.0):
    """Return the losses and the weights of a plain loop over the same batches; factors multiply the updates."""

    @jax.jit
    def step_of(params, state, pixels, labels, factor):
        def loss_of(params):
            logits, _ = Linear().apply(params, {"batches": 0}, pixels, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradients = jax.value_and_grad(loss_of)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, jax.tree.map(lambda leaf: leaf * factor, updates)), state, loss

    params, state, losses = start, optimizer.init(start), []
    for step in range(steps):
        pixels, labels = toy_batch(step)
        params, state, loss = step_of(params, state, images_of(pixels), jnp.asarray(labels), factor_of(step))
        losses.append(float(loss))
    return losses, params


@pytest.fixture(scope="module")
def start():
    return train(config_of(steps=0), model=Linear(), batches=toy_batch).params


def test_a_transformation_equals_a_plain_loop_in_one_trace(start):
    model, usual = Linear(), Linear()
    train(config_of(steps=0), model=usual, batches=toy_batch)
    result = train(config_of(), model=model, batches=toy_batch, optimizer=BARE)
    np.testing.assert_allclose(result.losses, plain(start, BARE)[0], rtol=1e-6)
    assert result.losses[-1] < result.losses[0]
    assert len(model.traces) == len(usual.traces)


def test_the_live_factor_multiplies_the_updates_of_a_transformation(start, tmp_path):
    is_requested = threading.Event()

    class Quarter(Callback):
        def on_fit_begin(self, run):
            self._run = run

        def on_step(self, record):
            if record.step == 4:
                self._run.request(learning_rate_factor=0.25)
                is_requested.set()

    def batches(step):
        if step == last:
            assert is_requested.wait(60)
        return toy_batch(step)

    own, steps, last = optax.sgd(0.01, 0.9), 60, 20
    config = config_of(steps=steps, run_dir=tmp_path)
    result = train(config, model=Linear(), batches=batches, optimizer=own, callbacks=[Quarter()])
    (event,) = read_events(tmp_path / "control.jsonl")
    # A pull takes its words before it waits for its batches. So the pull that takes batch 20, the last that waits, may
    # be too early for the request, but the next one, which begins at most a chunk later, is not.
    chunk = json.loads((tmp_path / "config.json").read_text())["resolved"]["chunk_batches"]
    assert 4 < event.step <= last + chunk + 1
    losses, params = plain(start, own, steps=steps, factor_of=lambda step: 0.25 if step + 1 >= event.step else 1.0)
    _, unscaled = plain(start, own, steps=steps)
    # Sixty steps of a few roundings each.
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.params["weights"], params["weights"], rtol=1e-4, atol=1e-6)
    assert not np.allclose(unscaled["weights"], params["weights"], rtol=1e-3, atol=1e-5)


MARK = 0xFF000000
"""The first pixel of a batch whose images `nan_if_marked` replaces."""


def nan_if_marked(images, keys):
    # Level 255 is 2 after normalisation; the levels of `toy_batch` stay below 215.
    return jnp.where(images[0, 0, 0, 0] > 1.9, jnp.nan, images)


def marked(*steps):
    def batches(step):
        words, labels = toy_batch(step)
        if step in steps:
            words[0, 0, 0] = MARK
        return words, labels

    return batches


def test_adam_accumulates_clips_and_skips_as_a_plain_loop(start):
    updates, pulls, largest, rate = 12, 2, 0.6, 0.02
    # The updates of these pulls, 1, 4 and 5, are skipped: the first would be an early moment, the others are in a row.
    batches = marked(3, 8, 11)
    config = config_of(steps=updates, accumulate_steps=pulls, clip_norm=largest, skip_nonfinite=2)
    parts = {"optimizer": optax.adam, "schedule": lambda _: rate}
    result = train(config, model=Linear(), batches=batches, augment=nan_if_marked, **parts)
    params, adam = start, optax.adam(rate)
    state, norms = adam.init(params), []
    losses = np.full(updates, np.nan)

    @jax.jit
    @jax.value_and_grad
    def gradient_of(params, images, labels):
        logits, _ = Linear().apply(params, {"batches": 0}, images, train=True)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    for step in set(range(updates)) - {1, 4, 5}:
        pulled = [toy_batch(pulls * step + pull) for pull in range(pulls)]
        found = [gradient_of(params, images_of(pixels), labels) for pixels, labels in pulled]
        losses[step] = np.mean([loss for loss, _ in found])
        gradient = jax.tree.map(lambda *each: sum(each) / pulls, *(gradient for _, gradient in found))
        norms.append(float(optax.tree.norm(gradient)))
        gradient = jax.tree.map(lambda leaf, norm=norms[-1]: leaf * min(1, largest / norm), gradient)
        moves, state = jax.jit(adam.update)(gradient, state, params)
        params = optax.apply_updates(params, moves)
    assert min(norms) < largest < max(norms)
    assert result.num_skipped == 3
    # A dozen updates of a few roundings each, in another order of operations.
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(result.params["weights"], params["weights"], rtol=1e-4, atol=1e-6)


def test_a_transformation_gets_the_loss_as_value(start):
    own = optax.chain(optax.sgd(0.03), optax.contrib.reduce_on_plateau(factor=0.5, patience=2, rtol=0.02))
    result = train(config_of(), model=Linear(), batches=toy_batch, optimizer=own)
    params, state, losses, scales = start, own.init(start), [], []

    @jax.jit
    def step_of(params, state, images, labels):
        def loss_of(params):
            logits, _ = Linear().apply(params, {"batches": 0}, images, train=True)
            return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

        loss, gradient = jax.value_and_grad(loss_of)(params)
        moves, state = own.update(gradient, state, params, value=loss)
        return optax.apply_updates(params, moves), state, loss

    for step in range(STEPS):
        pixels, labels = toy_batch(step)
        params, state, loss = step_of(params, state, images_of(pixels), labels)
        losses.append(loss)
        scales.append(float(state[1].scale))
    assert len(set(scales)) > 2
    np.testing.assert_allclose(result.losses, losses, rtol=1e-5, atol=1e-6)


def _overflowing_at(count):
    """SGD with a state whose update number `count` is infinite."""

    def update(updates, state, params=None):
        factor = jnp.where(state == count, jnp.inf, -0.01)
        return jax.tree.map(lambda leaf: leaf * factor, updates), state + 1

    return optax.GradientTransformation(lambda _: jnp.zeros((), jnp.int32), update)


@pytest.mark.parametrize(
    ("parts", "num_skipped", "snapshot"),
    [
        ({"schedule": lambda step: jnp.where(step == 9, jnp.nan, 0.01), "optimizer": optax.adam}, 1, None),
        # Its state is not changed by an update that is skipped, so every later one is infinite too.
        ({"optimizer": _overflowing_at(9)}, 4, 9),
    ],
)
def test_updates_that_an_own_part_makes_infinite_are_skipped(tmp_path, parts, num_skipped, snapshot):
    config = config_of(run_dir=tmp_path, snapshot_every_steps=1, keep_snapshots=1, skip_nonfinite=3)
    if snapshot is None:
        result = train(config, model=Linear(), batches=toy_batch, **parts)
        assert result.num_skipped == num_skipped
        assert np.isfinite(result.losses).all()
        assert result.losses[-1] < result.losses[0]
        return
    with pytest.raises(NonFiniteError, match=r"a weight that your .* would make of it, was NaN or infinite at step 13"):
        train(config, model=Linear(), batches=toy_batch, **parts)
    end = json.loads((tmp_path / "result.json").read_text())
    assert end["num_skipped"] == num_skipped
    (path,) = (tmp_path / "snapshots").iterdir()
    leaves = read_snapshot(path.parent, int(path.name)).leaves
    assert len(leaves) > 5
    assert all(np.isfinite(leaf).all() for leaf in leaves.values())


class WithCounts(Linear):
    """A model one of whose parameters is an array of integers."""

    def init(self, key):
        params, batch_stats = super().init(key)
        return {**params, "table": {"counts": jnp.arange(3)}}, batch_stats


def test_a_parameter_of_integers_must_be_frozen():
    with pytest.raises(ValueError, match=r"floating-point to be trained, but table.counts is int32: .*freeze table"):
        train(config_of(steps=1), model=WithCounts(), batches=toy_batch)
    result = train(config_of(steps=1, freeze="table.counts"), model=WithCounts(), batches=toy_batch)
    assert result.params["table"]["counts"].tolist() == [0, 1, 2]


def test_an_interrupted_run_resumes_to_the_same_bytes_and_is_replayed(tmp_path):
    # Noise has a random key in its state, and schedule-free a copy of the parameters.
    own = optax.chain(optax.add_noise(0.01, 0.5, 7), optax.contrib.schedule_free_sgd(0.05))
    config = config_of(steps=8, snapshot_every_steps=3, accumulate_steps=2)

    def failing(step):
        if step == 11:
            raise ConnectionResetError("cut off")
        return toy_batch(step)

    whole, broken = (replace(config, run_dir=str(tmp_path / name)) for name in ("whole", "broken"))
    expected = train(whole, model=Linear(), batches=toy_batch, optimizer=own)
    with pytest.raises(ConnectionResetError):
        train(broken, model=Linear(), batches=failing, optimizer=own)
    with pytest.raises(
        ValueError, match=r"was trained with a model \(linear\), batches and an optimizer \(.*\) of your own"
    ):
        train(replace(broken, resume=True))
    found = train(replace(broken, resume=True), model=Linear(), batches=toy_batch, optimizer=own)
    assert np.array_equal(found.params["weights"], expected.params["weights"])
    report = replay_run(tmp_path / "broken", from_step=0, model=Linear(), batches=toy_batch, optimizer=own)
    assert (report.num_losses, report.differences) == (8, ())


def test_frozen_parameters_and_statistics_stay_and_have_no_moments(start, tmp_path):
    told: list[str] = []
    values: dict[str, Any] = {"freeze": "bi.s,batches", "learning_rate": 0.001, "ema_decay": 0.5, "run_dir": tmp_path}
    config = config_of(optimizer="adamw", weight_decay=0.1, beta2=0.875, decay_all=True, **values)
    result = train(config, model=Linear(), batches=toy_batch, notify=told.append)
    assert "frozen: 3 of 147 parameters, in 1 of 2 arrays, and 1 arrays of batch statistics" in told
    assert result.batch_stats["batches"] == 0
    assert np.array_equal(result.params["bias"], start["bias"])
    label = {"weights": "trained", "bias": "frozen"}
    optimizer = optax.partition(
        {"trained": optax.adamw(0.001, b2=0.875, weight_decay=0.1), "frozen": optax.set_to_zero()}, label
    )
    np.testing.assert_allclose(result.losses, plain(start, optimizer)[0], rtol=1e-6)
    names = {path.name for path in (tmp_path / "snapshots").rglob("*") if "opt_state" in path.name}
    assert not any("bias" in name for name in names)


@pytest.mark.parametrize("own", [False, True])
def test_groups_have_rates_and_decays_of_their_own(start, own):
    def optimizer_of(rate, decay):
        return optax.chain(optax.add_decayed_weights(decay), optax.sgd(rate, 0.9))

    if own:
        config = config_of(groups="b.*=learning_rate:3x")
        found = train(config, model=Linear(), batches=toy_batch, optimizer=optimizer_of(0.001, 0.1)).losses
        groups = {"weights": optimizer_of(0.001, 0.1), "bias": optimizer_of(0.003, 0.1)}
    else:
        values: dict[str, Any] = {"weight_decay": 0.1, "decay_all": True, "learning_rate": 0.001}
        config = config_of(groups="b.*=learning_rate:3x,weight_decay:0; .*=weight_decay:2", **values)
        found = train(config, model=Linear(), batches=toy_batch).losses
        groups = {"weights": optimizer_of(0.001, 0.2), "bias": optimizer_of(0.003, 0.0)}
    partitioned = optax.partition(groups, {"weights": "weights", "bias": "bias"})
    np.testing.assert_allclose(found, plain(start, partitioned)[0], rtol=1e-6)


@pytest.mark.parametrize("order", [1.0, 2.0, 3.5, math.inf])
def test_clipping_bounds_the_norm_of_any_order(order):
    random = np.random.default_rng(3)
    gradients = {name: random.normal(size=shape).astype(np.float32) for name, shape in (("a", (3, 4)), ("b", (5,)))}
    norm = np.linalg.norm(np.concatenate([leaf.ravel() for leaf in gradients.values()]), order)
    for largest in (0.5 * norm, 2 * norm):
        clip = clip_by_global_norm(np.float32(largest), order)
        found, _ = clip.update(gradients, clip.init(gradients))
        for name, leaf in gradients.items():
            np.testing.assert_allclose(found[name], leaf * min(1, largest / norm), rtol=1e-6)
    zeros = jax.tree.map(np.zeros_like, gradients)
    clip = clip_gradient(np.float32(1), order, np.float32(0.1))
    assert not np.any(clip.update(zeros, clip.init(zeros))[0]["a"])
    found, _ = clip_gradient(np.float32(np.inf), order, np.float32(0.1)).update(gradients, optax.EmptyState())
    np.testing.assert_array_equal(found["a"], np.clip(gradients["a"], np.float32(-0.1), np.float32(0.1)))


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("(([a-z0-9_.])*)*!", "too many ways to match"),
        ("(?:a|a)*!", "too many ways"),
        ("(a?)*!", "too many ways"),
        ("(?=(a|aa)*!)b", "too many ways"),
        ("(a*)*" + "!", "too many ways"),
        ("a?" * 30 + "!", "too many ways"),
        (".*" * 6 + "!", "at most five repetitions"),
        (f"{'.*' * 5}!, {'.+' * 5}!, {'.?.*.*.*.*'}", "too many ways"),
        ("(" * 400 + "a" + ")" * 400, "not one|too many ways"),
        ("a{99999999999}", "is not one"),
        ("a" * 1001, "at most 1000 characters, but one has 1001"),
        ("a," * 501, "in 500 patterns"),
        ("a" * (1 << 20), "at most 65536 characters"),
    ],
)
def test_a_pattern_that_could_match_for_ever_is_refused(pattern, message):
    for setting, parse, text in (
        ("freeze", parse_freeze, pattern),
        ("groups", parse_groups, ";".join(f"{each}=weight_decay:0" for each in pattern.split(","))),
    ):
        with pytest.raises(SettingError, match=rf"(?s)^{setting} .*({message})"):
            parse(text)


@pytest.mark.parametrize(
    "pattern",
    [
        ".*",
        r"layer[12]\.\d+\.bn\d\..*",
        "(conv1|bn1|fc).*",
        "(?!fc).*",
        r"(.*)\.\1",
        "(conv|bn)+",
        ".*" * 5,
        "(?i)FC.*",
        "(ab)*",
    ],
)
def test_patterns_that_end_keep_their_meaning(pattern):
    assert parse_freeze(pattern) == (pattern,)


@pytest.mark.parametrize(
    ("values", "parts", "message"),
    [
        ({"momentum": 0.5}, {"optimizer": BARE}, "momentum has no effect with an optimizer of your own, got 0.5"),
        ({"learning_rate": 0.5}, {"optimizer": BARE}, "learning_rate has no effect with an optimizer .* its own"),
        ({"beta2": 0.5}, {"optimizer": optax.lion}, "beta2 has no effect with an optimizer of your own"),
        ({}, {"optimizer": BARE, "schedule": RATE}, "a schedule has no effect with an optimizer"),
        ({}, {"optimizer": "sgd"}, "must be an optax.GradientTransformation or a function .*, got str"),
        (
            {},
            {"optimizer": lambda: optax.sgd(0.1)},
            "but calling it failed with TypeError: .*1 was",
        ),
        ({}, {"optimizer": lambda rate: optax.sgd(float(rate))}, "failed with Concretization.* in jax only"),
        (
            {},
            {"optimizer": lambda rate: optax.inject_hyperparams(optax.adam)(learning_rate=rate)},
            r"stores the learning rate \(hyperparams.learning_rate\).* such as optax.adam itself",
        ),
        ({}, {"optimizer": FAST_AND_SLOW}, r"update failed with AttributeError.*\(optax.lookahead\) are not supported"),
        ({}, {"optimizer": optax.lbfgs()}, "update failed with TypeError.*line searches"),
        ({}, {"optimizer": lambda rate: 3}, "must return an optax.GradientTransformation .*, but returned int"),
        ({"groups": "b.*=weight_decay:0"}, {"optimizer": BARE}, "must not have factors on the weight decay"),
        ({"schedule": "cosine"}, {"schedule": RATE}, "schedule has no effect with a schedule of your own"),
        ({}, {"schedule": lambda step: 1.0 if step < 3 else 0.1}, "but tracing it failed: use jnp.where"),
        ({}, {"schedule": lambda step: jnp.zeros(2)}, r"but it returns float32 \[2\]"),
        ({}, {"schedule": lambda step: None}, "but it returns NoneType: return the rate"),
        ({}, {"schedule": lambda step: 1 / 0}, "but tracing it failed with ZeroDivisionError: division by zero"),
        ({}, {"schedule": lambda step: 1j * step}, r"but it returns complex64 \[\]: return one real number"),
        ({"freeze": "wieghts"}, {}, "freeze: the pattern 'wieghts' matches .* no parameter .* example, weights"),
        ({"groups": "bais=weight_decay:0"}, {}, "groups: the pattern 'bais' matches .* no parameter;.*bias"),
        ({"freeze": ".*"}, {}, "must leave parameters to train, but '.*' matches all"),
        ({"clip_order": "inf"}, {}, "clip_order is the order of the norm that clip_norm limits"),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused(values, parts, message):
    with pytest.raises(ValueError, match=message):
        train(config_of(**values), model=Linear(), batches=toy_batch, **parts)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("freeze", "a,,b", "freeze contains an empty pattern"),
        ("freeze", "(a", "freeze must consist of regular expressions, but '.a' is not one"),
        ("groups", "bias", "groups must have the form REGEX=learning_rate:10x"),
        ("groups", "bias=momentum:3", "groups sets the factors learning_rate and weight_decay"),
        ("groups", "bias=learning_rate:-1x", "the factor of learning_rate must be a number of at least 0"),
        ("clip_order", "0.5", "clip_order must be a number of at least 1, or inf, got '0.5'"),
    ],
)
def test_an_unreadable_setting_is_refused(name, value, message):
    with pytest.raises(ValueError, match=message):
        toy_config(**{name: value})
