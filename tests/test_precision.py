"""`--precision bfloat16`: what is computed in it, what stays float32, and that it is as exact as eight bits allow."""

import json
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from loopfeed import TrainConfig, train
from loopfeed.engine.objective import objective
from loopfeed.engine.program import loop
from loopfeed.engine.program import train_step as step_module
from loopfeed.models.families import resnet
from loopfeed.models.layers.batch_norm import batch_norm
from loopfeed.models.layers.convolution import convolution
from loopfeed.models.layers.head import dense
from loopfeed.models.layers.platform_forms import tracing_for
from loopfeed.models.layers.pooling import max_pool
from loopfeed.models.registry import build_model
from tests.toy import Linear, toy_batch, toy_config

# Whole programs, or large networks. LLVM's optimiser moves no rounding to bfloat16, and would take half of the time.
pytestmark = pytest.mark.integration

BFLOAT16 = jnp.dtype(jnp.bfloat16)
# Half a unit in the last of eight bits: the largest relative error of rounding to bfloat16.
UNIT = 2.0**-8
PRODUCTS = {"dot_general", "conv_general_dilated"}
# What moves, compares or selects numbers rounds none. `max` is a ReLU's or a pool's.
EXACT = {"max", "gt", "lt", "eq", "ne", "select_n", "pad", "slice", "dynamic_slice", "reshape", "squeeze", "transpose"}
EXACT |= {"rev", "stack", "concatenate", "broadcast_in_dim", "copy", "stop_gradient", "optimization_barrier"}
# These only hold others, which are looked at themselves.
CALLS = {"jit", "pjit", "cond", "while", "scan", "custom_vjp_call", "custom_jvp_call"}


def test_a_model_of_your_own_determines_its_precision():
    with pytest.raises(ValueError, match=r"precision must be float32 with a model of your own, got 'bfloat16': leave"):
        train(toy_config(precision="bfloat16"), model=Linear(), batches=toy_batch)


# What the traced step computes in which type


@dataclass
class Step:
    """One traced training step: the whole of it, its update alone, and the types of what reached the loss."""

    jaxpr: Any
    update: Any
    logits: list[jnp.dtype]


class TracedError(Exception):
    """Stops a run after its step is traced, before compilation."""


def trace_step(monkeypatch, **settings):
    """Return the training step of a run with these settings, traced as in the run, but for all platforms."""
    found: list[Step] = []
    logits: list[jnp.dtype] = []
    updates: list[Any] = []
    homes = {"train_step": loop, "update_weights": step_module, "cross_entropy": objective}
    originals = {name: getattr(home, name) for name, home in homes.items()}

    def train_step(model, settings, *arguments):
        with tracing_for(None):
            jaxpr = jax.make_jaxpr(lambda *given: originals["train_step"](model, settings, *given))(*arguments)
        found.append(Step(jaxpr, updates[0], logits))
        raise TracedError

    def update_weights(settings, *traced):
        updates.append(jax.make_jaxpr(lambda *given: originals["update_weights"](settings, *given))(*traced))
        return originals["update_weights"](settings, *traced)

    def cross_entropy(given, targets):
        logits.extend((given.dtype, targets.dtype))
        return originals["cross_entropy"](given, targets)

    for replacement in (train_step, update_weights, cross_entropy):
        monkeypatch.setattr(homes[replacement.__name__], replacement.__name__, replacement)
    config = TrainConfig(steps=1, batch=4, synthetic=True, image_size=32, num_classes=10, kernels="xla", **settings)
    with pytest.raises(TracedError):
        train(config)
    return found[0]


def operations(jaxpr, platform):
    """Every operation of a jaxpr and of those inside it; of what depends on the platform, this one's branch alone.

    `lax.platform_dependent` is a `cond` on a `platform_index`.
    """
    choices = {}
    for operation in jaxpr.eqns:
        yield operation
        if operation.primitive.name == "platform_index":
            platforms = operation.params["platforms"]
            named = [place for place, names in enumerate(platforms) if names is not None and platform in names]
            choices[operation.outvars[0]] = named[0] if named else platforms.index(None)
        branch = choices.get(operation.invars[0]) if operation.primitive.name == "cond" else None
        inner = operation.params.values() if branch is None else [operation.params["branches"][branch]]
        for value in inner:
            for each in value if isinstance(value, (tuple, list)) else [value]:
                each = getattr(each, "jaxpr", each)
                if hasattr(each, "eqns"):
                    yield from operations(each, platform)


def float_types(variables):
    return {each.aval.dtype for each in variables if jnp.issubdtype(getattr(each.aval, "dtype", int), jnp.floating)}


def test_products_take_bfloat16_and_sums_are_float32(monkeypatch):
    step = trace_step(monkeypatch, model="resnet8", precision="bfloat16")
    on_device = list(operations(step.jaxpr.jaxpr, "cuda"))
    products = [each for each in on_device if each.primitive.name in PRODUCTS]
    assert [each for each in products if float_types(each.invars) != {BFLOAT16}] == []
    assert products
    # The classifier's, whose results go to the loss and to float32 weights.
    wide = [each.primitive.name for each in products if float_types(each.outvars) != {BFLOAT16}]
    assert set(wide) == {"dot_general"}

    rounding = [
        each.primitive.name
        for each in on_device
        if BFLOAT16 in float_types(each.outvars) and each.primitive.name not in EXACT | CALLS | PRODUCTS
    ]
    # Where a shortcut joins, forward and backward: sums of two.
    assert {name for name in rounding if name != "convert_element_type"} == {"add", "add_any"}
    sums = [each for each in on_device if each.primitive.name.startswith(("reduce_", "cumsum", "scatter", "psum"))]
    assert sums
    assert all(BFLOAT16 not in float_types((*each.invars, *each.outvars)) for each in sums)


def test_on_a_cpu_convolutions_take_rounded_operands_and_sum_in_float32(monkeypatch):
    """Products of two bfloat16 numbers are exact in float32: no number differs from a product of narrow operands."""
    step = trace_step(monkeypatch, model="resnet8", precision="bfloat16")
    forms = [each for each in operations(step.jaxpr.jaxpr, "cpu") if each.primitive.name == "cond"]
    chosen = [(each, list(operations(each.params["branches"][0].jaxpr, "cpu"))) for each in forms]
    # The others are sums, and values that are stored.
    convolutions = [pair for pair in chosen if any(found.primitive.name in PRODUCTS for found in pair[1])]
    assert convolutions
    for each, inner in convolutions:
        assert float_types(each.invars) == float_types(each.outvars) == {BFLOAT16}
        assert {jnp.dtype(jnp.float32)} == set().union(
            *(float_types((*found.invars, *found.outvars)) for found in inner if found.primitive.name in PRODUCTS)
        )
        names = {found.primitive.name for found in inner if BFLOAT16 in float_types((*found.invars, *found.outvars))}
        assert names == {"convert_element_type"}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_statistics_sums_and_loss_are_float32(precision, monkeypatch):
    step = trace_step(
        monkeypatch, model="resnet8", precision=precision, optimizer="adamw", accumulate_steps=2, ema_decay=0.9
    )
    assert step.logits == [jnp.float32, jnp.float32]
    # What the update reads (gradients, moments, sums, average, statistics), computes and leaves.
    update = [step.update.jaxpr, *operations(step.update.jaxpr, "cpu")]
    assert set().union(*(float_types((*each.invars, *each.outvars)) for each in update)) == {jnp.dtype(jnp.float32)}
    whole = step.jaxpr.jaxpr
    assert float_types((*whole.invars, *whole.outvars)) == {jnp.dtype(jnp.float32)}
    everywhere = set().union(*(float_types(each.outvars) for each in operations(whole, "cpu")))
    assert (BFLOAT16 in everywhere) == (precision == "bfloat16")


def test_images_are_augmented_in_float32_and_rounded_once(monkeypatch):
    step = trace_step(monkeypatch, model="resnet8", precision="bfloat16", flip=0.5, mixup=0.2, erasing=0.5)
    rounded = [
        each
        for each in operations(step.jaxpr.jaxpr, "cuda")
        if each.outvars[0].aval.shape == (4, 32, 32, 3) and BFLOAT16 in float_types(each.outvars)
        if float_types(each.invars) != {BFLOAT16}
    ]
    assert [each.primitive.name for each in rounded] == ["convert_element_type"]


# How exact it is


def normal(seed, shape, dtype=np.float32):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def rounded(array):
    return np.asarray(jnp.asarray(array).astype(jnp.bfloat16), np.float64)


def assert_product(found, left, right, added=0.0, units=0.0):
    """Equal to left @ right + added but for float32's rounding of each sum, and for `units` of the result."""
    exact, size = left @ right + added, np.abs(left) @ np.abs(right) + np.abs(added)
    most = (left.shape[1] + 1) * 2**-24 * size + units * np.abs(exact)
    assert (np.abs(np.asarray(found, np.float64) - exact) <= most).all()


def test_the_dense_layers_products_are_those_of_rounded_operands():
    x, kernel, bias, gradient = normal(0, (6, 40), jnp.bfloat16), normal(1, (40, 5)), normal(2, (5,)), normal(3, (6, 5))
    y, pullback = jax.vjp(dense, x, kernel, bias)
    of_x, of_kernel, of_bias = pullback(gradient)
    assert [each.dtype for each in (y, of_x, of_kernel, of_bias)] == [jnp.float32, BFLOAT16, jnp.float32, jnp.float32]
    x, kernel = rounded(x), rounded(kernel)
    assert_product(y, x, kernel, np.asarray(bias, np.float64))
    assert_product(of_x, rounded(gradient), kernel.T, units=UNIT)
    assert_product(of_kernel, x.T, rounded(gradient))
    assert_product(of_bias, np.ones((1, 6)), np.asarray(gradient, np.float64))


def test_a_bias_gathers_its_gradient_in_float32():
    """In bfloat16 a sum of ones stays at 256: 257 is no such number."""
    x, kernel = jnp.ones((2, 40, 40, 1), jnp.bfloat16), jnp.ones((1, 1, 1, 1), jnp.bfloat16)
    y, pullback = jax.vjp(lambda bias: convolution(x, kernel, bias=bias), jnp.full(1, UNIT * (1 + UNIT / 2)))
    assert pullback(jnp.ones_like(y))[0] == 2 * 40 * 40
    # Numbers above 1 are 2 units apart. Rounded first, the bias is a whole unit, and the sum ties back to 1.
    assert y[0, 0, 0, 0] == 1 + 2 * UNIT


def test_overlapping_windows_add_up_before_they_are_rounded():
    x = jnp.zeros((1, 5, 5, 1), jnp.bfloat16).at[0, 1, 1].set(1)
    y, pullback = jax.vjp(max_pool, x)
    gradient = jnp.zeros_like(y).at[0, :2, :2, 0].set(jnp.array([[256, 1], [1, 1]]))
    # 259 lies between 258 and 260; adding the ones one by one gives 256.
    assert pullback(gradient)[0][0, 1, 1, 0] == 260


def relative_error(found, wanted):
    """Of all leaves together, in the Euclidean norm."""
    pairs = list(zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True))
    total = sum(float(jnp.square(ours - theirs).sum()) for ours, theirs in pairs)
    return (total / sum(float(jnp.square(theirs).sum()) for _, theirs in pairs)) ** 0.5


# Roundings on the way of an image through resnet8: its own; of each of 7 convolutions the kernel, the result and the
# normalised result; 3 joined shortcuts; the pool's result; the classifier's kernel. A gradient's way back has as many.
NUM_ROUNDINGS = 1 + 7 * 3 + 3 + 1 + 1
# They are independent, so their squares add up, and none is above UNIT; batch norm keeps errors from growing.
FORWARD_ERROR = NUM_ROUNDINGS**0.5 * UNIT
BACKWARD_ERROR = (2 * NUM_ROUNDINGS) ** 0.5 * UNIT
# A ReLU lets the wrong gradients through where an error of this size turns the sign of its input. With a normal input
# and a normal error that happens to a share of error · √(2/π) / √(2π) = error / π; half of the gradients pass at all.
FLIPPED_ERROR = (7 * 2 / np.pi * FORWARD_ERROR) ** 0.5


def outcome(dtype):
    """Logits, statistics and gradients of a fresh resnet8 by one batch of noise."""
    images, labels = normal(0, (16, 16, 16, 3)), jax.nn.one_hot(np.arange(16) % 10, 10)
    model = build_model("resnet8", num_classes=10, image_size=16, dtype=dtype)
    params, batch_stats = jax.jit(model.init)(jax.random.key(0))

    def loss(params):
        logits, stats = model.apply(params, batch_stats, images, train=True)
        return -(labels * jax.nn.log_softmax(logits)).sum(1).mean(), (logits, stats)

    (_, (logits, stats)), gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    return logits, stats, gradients


@pytest.mark.parametrize(
    ("has_relu", "gradient_error"), [(True, FLIPPED_ERROR + BACKWARD_ERROR), (False, BACKWARD_ERROR)]
)
@pytest.mark.usefixtures("untraced_blocks")
def test_a_whole_networks_error_is_that_of_its_roundings(has_relu, gradient_error, monkeypatch):
    if not has_relu:
        monkeypatch.setattr(resnet, "stored_relu", lambda x, shortcut: x + shortcut)
        monkeypatch.setattr(resnet, "batch_norm", lambda *args, relu, **settings: batch_norm(*args, **settings))
    errors = [relative_error(*pair) for pair in zip(outcome(jnp.bfloat16), outcome(jnp.float32), strict=True)]
    for error, most in zip(errors, (FORWARD_ERROR, FORWARD_ERROR, gradient_error), strict=True):
        assert 0 < error < most
    # It is not float32 under another name: a single rounding is off by about a quarter of a unit in the mean.
    assert errors[0] > UNIT / 4


# Whole runs


def run(**settings):
    settings = {"model": "resnet8", "learning_rate": 0.02, "seed": 3} | settings
    return train(toy_config(**settings), batches=toy_batch, evaluation=toy_batch(99, batch=20))


def test_losses_stay_near_those_of_float32_and_weights_are_written_in_it(tmp_path):
    settings = {"steps": 12, "learning_rate": 0.005}
    narrow = run(precision="bfloat16", run_dir=tmp_path, **settings).losses
    wide = run(**settings).losses
    assert wide[-1] < wide[0] - 0.3
    # The loss moves by at most twice what a logit does. Fresh logits are sums of 64 features of about 1 by weights
    # within 1/8: their deviation is 0.6, and none is above 2. Steps that are off by a share of the gradient leave the
    # loss off by that share of what was learned.
    largest_logit = 2
    learned = np.abs(wide - wide[0])
    allowed = 2 * FORWARD_ERROR * largest_logit + (FLIPPED_ERROR + BACKWARD_ERROR) * learned
    assert (np.abs(narrow - wide) < allowed).all()
    assert not np.array_equal(narrow, wide)
    tensors = load_file(tmp_path / "model.safetensors").values()
    assert {each.dtype for each in tensors if each.ndim} == {np.dtype(np.float32)}
    assert TrainConfig.from_json(json.loads((tmp_path / "config.json").read_text())["config"]).precision == "bfloat16"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_run_learns_in_both_precisions(precision):
    result = run(steps=60, precision=precision)
    assert result.losses[0] > 1
    assert result.losses[-10:].mean() < 0.05
    assert result.evaluations[-1].top1 == 1
    assert result.evaluations[-1].loss < 0.05


def test_transports_agree_and_runtime_values_compile_nothing():
    settings = {"steps": 5, "precision": "bfloat16"}
    first, other = run(**settings), run(transport="callback", **settings)
    assert np.array_equal(first.losses, other.losses)
    jax.tree.map(np.testing.assert_array_equal, first.params, other.params)
    values = {"steps": 2, "learning_rate": 0.3, "weight_decay": 0.1, "seed": 9, "momentum": 0.5}
    assert run(**(settings | values)).from_cache
