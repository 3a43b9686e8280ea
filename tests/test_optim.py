"""Optimisers: PyTorch's and optax's formulas, their numbers free to change without another compilation."""

import math
from functools import partial
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from jax import lax

from loopfeed.engine.config import OptimizerName
from loopfeed.engine.patterns import Group
from loopfeed.engine.updates.optim import (
    Hyperparams,
    every_leaf,
    init_optimizer,
    kernels_only,
    make_optimizer,
)

NAMES = get_args(OptimizerName)
SHAPES = {"kernel": (3, 4), "bias": (4,), "scale": ()}
sgd = partial(make_optimizer, "sgd", decay_mask=every_leaf)  # PyTorch decays every parameter


def hyperparams(learning_rate, momentum, weight_decay):
    return Hyperparams(*(jnp.float32(value) for value in (learning_rate, momentum, weight_decay)))


def step(params, opt_state, gradients, values):
    optimizer = sgd(values)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def drawn(seed):
    random = np.random.default_rng(seed)
    return {name: np.asarray(random.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def reference(params, gradients_of_steps, values_of_steps, *, nesterov=False):
    """Return the result of the loop in torch.optim.SGD's documentation, dampening 0, in float64."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    buffers: dict[str, np.ndarray] = {}
    for gradients, (learning_rate, momentum, weight_decay) in zip(gradients_of_steps, values_of_steps, strict=True):
        for name, param in params.items():
            gradient = gradients[name].astype(np.float64) + weight_decay * param
            buffers[name] = momentum * buffers[name] + gradient if name in buffers else gradient
            direction = gradient + momentum * buffers[name] if nesterov else buffers[name]
            params[name] = param - learning_rate * direction
    return params


@pytest.mark.parametrize(
    "values",
    [
        [(0.1, 0.9, 1e-4)] * 8,
        [(0.1, 0.0, 0.0)] * 8,
        [(0.5, 0.99, 0.1)] * 8,
        [(0.0, 0.9, 0.0)] * 8,
        # A schedule: the rate of each update multiplies the momentum gathered under the earlier ones.
        [(0.1 / (1 + number), 0.9, 1e-3) for number in range(8)],
    ],
)
def test_equals_the_loop_of_pytorch(values):
    params, gradients = drawn(0), [drawn(1 + number) for number in range(8)]
    expected = reference(params, gradients, values)
    opt_state = sgd(hyperparams(0, 0, 0)).init(params)
    update = jax.jit(step)
    for gradient, numbers in zip(gradients, values, strict=True):
        params, opt_state = update(params, opt_state, gradient, hyperparams(*numbers))
    for name in SHAPES:
        assert params[name].dtype == jnp.float32
        # Eight steps of a few float32 roundings each, of values up to about ten.
        np.testing.assert_allclose(params[name], expected[name], rtol=1e-5, atol=1e-5)


def named(values):
    """Hyperparameters by name, as float32; those of the toy problem where nothing else is said."""
    return Hyperparams(**{name: jnp.float32(value) for name, value in (TOY | values).items()})


TOY = {"learning_rate": 0.05, "momentum": 0.875, "weight_decay": 0.01}


@partial(jax.jit, static_argnames=("name", "masks"), donate_argnames="carry")
def loop(carry, gradients, values, *, name, masks):
    """Updates in a `while_loop`, compiled once for each optimiser, its masks, and the number of gradients."""

    def one(carry):
        number, params, opt_state = carry
        optimizer = make_optimizer(name, values, **dict(masks))
        gradient = jax.tree.map(lambda leaf: leaf[number], gradients)
        updates, opt_state = optimizer.update(gradient, opt_state, params)
        return number + 1, optax.apply_updates(params, updates), opt_state

    num_steps = len(jax.tree.leaves(gradients)[0])
    return lax.while_loop(lambda carry: carry[0] < num_steps, one, carry)


def run(name, params, gradients, values, **masks):
    """Updates in a compiled `while_loop` whose carry is donated, gradients by step."""
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *gradients)
    params = jax.tree.map(jnp.array, params)
    carry = (jnp.int32(0), params, init_optimizer(name, params))
    return loop(carry, stacked, named(values), name=name, masks=tuple(masks.items()))[1]


def mlperf_local_rate(decay, coefficient, mask, gradients, params):
    """Equation 6 of You et al. (2017) as MLPerf's reference has it, in float64; optax divides by ‖g + λw‖."""

    def scaled(gradient, param, is_kernel):
        gradient, param = np.asarray(gradient, np.float64), np.asarray(param, np.float64)
        if not is_kernel:
            return jnp.float32(gradient)
        weights, gradients = np.linalg.norm(param), np.linalg.norm(gradient)
        ratio = coefficient * weights / (gradients + decay * weights) if weights > 0 and gradients > 0 else 1.0
        return jnp.float32(ratio * (gradient + decay * param))

    return jax.tree.map(scaled, gradients, params, mask(params))


def optax_own(name, values, mask):
    """optax's own optimiser of Python floats."""
    v = TOY | {"beta2": 0.999, "epsilon": 1e-8, "trust_coefficient": 1e-3, "clip_norm": math.inf} | values
    rate, momentum, decay = v["learning_rate"], v["momentum"], v["weight_decay"]
    adam = {"b1": momentum, "b2": v["beta2"], "eps": v["epsilon"], "weight_decay": decay, "mask": mask}
    own = {
        "sgd": lambda: optax.chain(optax.add_decayed_weights(decay, mask), optax.sgd(rate, momentum)),
        "nesterov": lambda: optax.chain(optax.add_decayed_weights(decay, mask), optax.sgd(rate, momentum, True)),
        "adamw": lambda: optax.adamw(rate, **adam),
        "lars": lambda: optax.chain(
            optax.stateless(partial(mlperf_local_rate, decay, v["trust_coefficient"], mask)),
            optax.scale_by_learning_rate(rate),
            optax.trace(momentum),
        ),
        "lamb": lambda: optax.lamb(rate, **adam),
        "adam": lambda: optax.chain(
            optax.add_decayed_weights(decay, mask), optax.adam(rate, b1=momentum, b2=v["beta2"], eps=v["epsilon"])
        ),
        "lion": lambda: optax.lion(rate, b1=momentum, b2=v["beta2"], weight_decay=decay, mask=mask),
        "muon": lambda: optax.contrib.muon(
            rate, beta=momentum, eps=v["epsilon"], weight_decay=decay, adam_b1=momentum, adam_b2=v["beta2"]
        ),
    }[name]()
    if math.isinf(v["clip_norm"]):
        return own
    return optax.chain(optax.clip_by_global_norm(v["clip_norm"]), own)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("values", "tolerance"),
    [
        # Twenty steps of a few float32 roundings each. 1 - 2⁻¹⁰ is a float32 whose difference to 1 is exact.
        ({"beta2": 0.75, "momentum": 0.0, "weight_decay": 0.0, "epsilon": 1e-3}, 2e-6),
        ({"beta2": 1 - 2**-10, "clip_norm": 0.5, "weight_decay": 0.5, "trust_coefficient": 0.1}, 2e-6),
        # 0.999 in float32 is 1.3e-8 above, so 1 - β2 is 1.3e-5 of itself off, and what it divides half of that: optax
        # of Python floats has it exact in the moment and rounded in the correction.
        ({"beta2": 0.999, "momentum": 0.9}, 2e-5),
    ],
)
def test_equals_optax_of_python_floats_called_from_a_python_loop(name, values, tolerance):
    # optax's LAMB has no mask of its own for the trust ratio: all leaves are compared there, the default below.
    masks = {"decay_mask": every_leaf, "trust_mask": every_leaf} if name == "lamb" else {}
    expected = params = drawn(0)
    gradients = [drawn(1 + number) for number in range(20)]
    optimizer = optax_own(name, values, every_leaf if name == "lamb" else kernels_only)
    state = optimizer.init(params)
    # Without jit, each call of Muon compiles the loop of its orthogonalisation again.
    update = jax.jit(optimizer.update) if name == "muon" else optimizer.update
    for gradient in gradients:
        updates, state = update(gradient, state, expected)
        expected = optax.apply_updates(expected, updates)
    found = run(name, params, gradients, values, **masks)
    if name == "muon":
        tolerance = 1e-4  # its orthogonalisation enlarges roundings of small singular values
    for leaf in SHAPES:
        assert found[leaf].dtype == jnp.float32
        np.testing.assert_allclose(found[leaf], expected[leaf], rtol=tolerance, atol=tolerance)


def masked_reference(name, params, gradients):
    """One update of each optimiser from zero moments, in float64, norms and biases left alone."""
    rate, decay = TOY["learning_rate"], TOY["weight_decay"]
    moved = {}
    for leaf, param in params.items():
        param, gradient = param.astype(np.float64), gradients[leaf].astype(np.float64)
        kernel = param.ndim > 1
        decayed = decay * param if kernel else 0.0
        if name in ("adamw", "lamb"):
            # After one update, the corrected moments are the gradient and its square.
            gradient = gradient / (np.abs(gradient) + 1e-8)
        direction = gradient + decayed
        if name == "adam":
            direction = direction / (np.abs(direction) + 1e-8)
        if name == "lion":
            direction = np.sign(gradient) + decayed
        if name == "muon":
            own = optax.contrib.muon(-1.0, beta=TOY["momentum"], adam_b1=TOY["momentum"])
            one = {leaf: gradients[leaf]}
            direction = np.asarray(own.update(one, own.init(one), one)[0][leaf], np.float64) + decayed
        if name == "nesterov":
            direction = direction * (1 + TOY["momentum"])
        if kernel and name == "lamb":
            direction = direction * np.linalg.norm(param) / np.linalg.norm(direction)
        if kernel and name == "lars":
            direction = np.asarray(mlperf_local_rate(decay, 1e-3, kernels_only, {leaf: gradient}, {leaf: param})[leaf])
        moved[leaf] = param - rate * direction
    return moved


@pytest.mark.parametrize(
    ("gradient", "weights", "expected"),
    [
        # ‖w‖ = 5, ‖g‖ = λ·‖w‖ = 0.5, g ⊥ w: 0.001 · 5 / (0.5 + 0.5) of g + λ·w. Over ‖g + λ·w‖ it is √2 times that.
        ([-0.4, 0.3], [3.0, 4.0], [0.0005, -0.0035]),
        ([0.3, 0.4], [3.0, 4.0], [-0.003, -0.004]),  # parallel: both rules agree
        ([0.0, 0.0], [3.0, 4.0], [-0.3, -0.4]),
        ([0.3, 0.4], [0.0, 0.0], [-0.3, -0.4]),
    ],
)
def test_the_local_rate_of_lars_is_that_of_the_paper(gradient, weights, expected):
    optimizer = make_optimizer("lars", hyperparams(1.0, 0.0, 0.1))
    params = {"kernel": jnp.asarray([weights])}
    updates, _ = optimizer.update({"kernel": jnp.asarray([gradient])}, optimizer.init(params), params)
    np.testing.assert_allclose(updates["kernel"], [expected], rtol=1e-6)


def test_the_local_rate_of_lars_follows_the_decay_of_each_group():
    groups = (Group("kernel", weight_decay=3.0),)
    params, gradients = {"kernel": jnp.asarray(drawn(0)["kernel"])}, {"kernel": jnp.asarray(drawn(1)["kernel"])}
    found = make_optimizer("lars", hyperparams(1.0, 0.0, 0.1), groups=groups)
    expected = make_optimizer("lars", hyperparams(1.0, 0.0, 0.3))
    updates, others = (each.update(gradients, each.init(params), params)[0] for each in (found, expected))
    np.testing.assert_allclose(updates["kernel"], others["kernel"], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_norms_and_biases_are_neither_decayed_nor_rescaled(name):
    params, gradients = drawn(0), drawn(1)
    expected = masked_reference(name, params, gradients)
    found = run(name, params, [gradients], {})
    for leaf in SHAPES:
        # A few float32 roundings of values up to three.
        np.testing.assert_allclose(found[leaf], expected[leaf], rtol=2e-6, atol=1e-6)


def test_clipping_keeps_the_direction_and_bounds_the_norm():
    params, gradients = drawn(0), drawn(1)
    norm = math.sqrt(sum(float(np.sum(np.square(leaf, dtype=np.float64))) for leaf in gradients.values()))
    plain = {"learning_rate": 1.0, "momentum": 0.0, "weight_decay": 0.0}
    for limit in (norm / 4, norm * 1.01, math.inf):
        found = run("sgd", params, [gradients], plain | {"clip_norm": limit})
        factor = min(1.0, limit / norm)
        for leaf in SHAPES:
            np.testing.assert_allclose(params[leaf] - found[leaf], factor * gradients[leaf], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("name", "moves"), [("sgd", False), ("nesterov", False), ("lars", True)])
def test_momentum_of_a_higher_rate_persists_only_in_lars(name, moves):
    zeros = {leaf: np.zeros(shape, np.float32) for leaf, shape in SHAPES.items()}
    params, state = drawn(0), init_optimizer(name, drawn(0))
    updates, state = make_optimizer(name, named({"weight_decay": 0})).update(drawn(1), state, params)
    at_rest = make_optimizer(name, named({"weight_decay": 0, "learning_rate": 0}))
    later, _ = at_rest.update(zeros, state, params)
    for leaf in SHAPES:
        factor = TOY["momentum"] if moves else 0.0
        np.testing.assert_allclose(later[leaf], factor * updates[leaf], rtol=1e-6)
