"""SGD: PyTorch's formula, its numbers free to change without another compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from engine.optim import Hyperparams, sgd

SHAPES = {"kernel": (3, 4), "bias": (4,), "scale": ()}


def hyperparams(learning_rate, momentum, weight_decay):
    return Hyperparams(*(jnp.float32(value) for value in (learning_rate, momentum, weight_decay)))


def step(params, opt_state, gradients, values):
    optimizer = sgd(values)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def drawn(seed):
    random = np.random.default_rng(seed)
    return {name: np.asarray(random.standard_normal(shape), np.float32) for name, shape in SHAPES.items()}


def reference(params, gradients_of_steps, values_of_steps):
    """The loop of torch.optim.SGD's documentation, dampening 0, no Nesterov, in float64."""
    params = {name: np.asarray(value, np.float64) for name, value in params.items()}
    buffers: dict[str, np.ndarray] = {}
    for gradients, (learning_rate, momentum, weight_decay) in zip(gradients_of_steps, values_of_steps, strict=True):
        for name, param in params.items():
            gradient = gradients[name].astype(np.float64) + weight_decay * param
            buffers[name] = momentum * buffers[name] + gradient if name in buffers else gradient
            params[name] = param - learning_rate * buffers[name]
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


def test_other_numbers_trace_nothing_anew():
    num_traces = 0

    def counted(*arguments):
        nonlocal num_traces
        num_traces += 1
        return step(*arguments)

    update = jax.jit(counted)
    params = drawn(0)
    opt_state = sgd(hyperparams(0, 0, 0)).init(params)
    for numbers in [(0.1, 0.9, 1e-4), (0.2, 0.0, 0.0), (0.0, 0.5, 1.0)]:
        params, opt_state = update(params, opt_state, drawn(1), hyperparams(*numbers))
    assert num_traces == 1


def test_the_state_keeps_its_shape_and_types():
    params = drawn(0)
    before = sgd(hyperparams(0.1, 0.9, 1e-4)).init(params)
    _, after = step(params, before, drawn(1), hyperparams(0.3, 0.1, 0.0))

    def form(state):
        return jax.tree.structure(state), [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state)]

    assert form(after) == form(before)


def test_it_finds_a_minimum():
    target = drawn(5)
    params = drawn(6)
    opt_state = sgd(hyperparams(0, 0, 0)).init(params)
    update = jax.jit(step)
    for _ in range(200):
        gradients = jax.tree.map(lambda param, goal: param - goal, params, target)
        params, opt_state = update(params, opt_state, gradients, hyperparams(0.1, 0.9, 0.0))
    for name in SHAPES:
        # Momentum's factor over 200 steps is 0.9**100, 3e-5.
        np.testing.assert_allclose(params[name], target[name], atol=1e-3)
