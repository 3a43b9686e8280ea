"""The check of one training step: its parts, a step that is right, and planted faults of a compiler and of a model."""

import os
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from click.testing import CliRunner
from jax.extend import core
from jax.interpreters import mlir

import loopfeed
from loopfeed.engine.commands import cli
from loopfeed.engine.commands.look_options import report_lines, verdict
from loopfeed.engine.inspection.differences import LARGEST_EFFECT, MARGIN, Difference, compare, effect, largest_effect
from loopfeed.engine.inspection.step_check import StepCheck, _moved, _Seen, sample_of
from loopfeed.engine.program.flat_program import flatten_program
from loopfeed.engine.program.random_rounding import RandomRounding, switches
from loopfeed.models.layers.pooling import global_max_pool, max_pool
from tests.toy import Linear, toy_batch, toy_config

# --- planted faults


def planted(name, compiled):
    """Return an identity that, compiled into a larger program, computes `compiled` instead: a miscompiled operation."""
    primitive = core.Primitive(name)
    primitive.def_impl(lambda x: x)
    primitive.def_abstract_eval(lambda x: x)
    mlir.register_lowering(primitive, mlir.lower_fun(compiled, multiple_results=False))

    @jax.custom_vjp
    def identity(x):
        return primitive.bind(x)

    identity.defvjp(lambda x: (identity(x), None), lambda _, gradient: (gradient,))
    return identity


class Scoped(Linear):
    """The linear toy model with a function in a scope of its own, between two others."""

    def __init__(self, function=lambda x: x):
        super().__init__()
        self.function = function

    def apply(self, params, batch_stats, images, train):
        with jax.named_scope("first"):
            images = jnp.tanh(images)
        with jax.named_scope("middle"):
            images = self.function(images) * 0.5
        with jax.named_scope("last"):
            return super().apply(params, batch_stats, images, train)


def check(model):
    return loopfeed.check_step(toy_config(momentum=0.9), model=model, batches=toy_batch)


@pytest.mark.integration  # each operation is compiled alone
def test_rounding_explains_a_step_that_is_right():
    notes: list[str] = []
    found = loopfeed.check_step(toy_config(), model=Scoped(), batches=toy_batch, notify=notes.append)
    names = [f"forward/{name}" for name in ("first", "middle", "last")]
    assert [name for name in found.scopes if name.startswith("forward")] == names
    assert [name for name in found.scopes if not name.startswith("forward")][-1] == "opt_step"
    assert found.is_explained
    assert found.first_unexplained is None
    # A loop computes nothing of its own: a difference is a matter of the last bits.
    assert max(each.largest for each in [*found.scopes.values(), *found.program.values()]) < 1e-5
    assert {"loss", "weights", "batch statistics", "optimizer"} == set(found.results) == set(found.program)
    assert notes[-3].endswith("operations one by one, 3 times")


@pytest.mark.integration
def test_a_miscompiled_operation_is_found_in_its_scope():
    found = check(Scoped(planted("wrong_by_a_thousandth", lambda x: x * 1.001)))
    assert found.first_unexplained == "forward/middle"
    assert found.scopes["forward/middle"].largest == pytest.approx(1e-3, rel=0.01)
    assert not found.program["loss"].is_explained
    assert "WRONG in forward/middle: what leaves it in the loop differs by 1.0e-03" in verdict(found)


@pytest.mark.integration
def test_nan_is_reported_where_it_first_appears():
    found = check(Scoped(planted("not_a_number", lambda x: jnp.where(x > 0.2, jnp.nan, x))))
    assert found.first_unexplained == "forward/middle"
    assert not found.scopes["forward/middle"].is_finite
    assert found.scopes["forward/first"].is_explained
    assert "WRONG in forward/middle: what leaves it in the loop has NaN or infinity" in verdict(found)


@pytest.mark.integration
def test_a_model_that_differs_in_the_training_program_is_found():
    def different(x):
        # The step is traced alone; the program of the run traces the model inside its loops.
        return x * (1.01 if _is_inside_loop() else 1.0)

    found = check(Scoped(different))
    assert all(each.is_explained for each in [*found.scopes.values(), *found.results.values()])
    assert not found.program["weights"].is_explained
    assert "WRONG: the training program gives another loss and weights and optimizer" in verdict(found)


def _is_inside_loop():
    return any(frame.name == "while_loop" for frame in traceback.extract_stack())


@pytest.fixture
def invoke(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        codes: list[int] = []
        monkeypatch.setattr(os, "_exit", codes.append)
        result = CliRunner().invoke(cli.main, arguments)
        return (codes or [result.exit_code])[0], result.output

    return run


@pytest.mark.integration
def test_the_command_prints_the_table_and_fails_if_the_step_is_wrong(invoke, tmp_path):
    options = ["--synthetic", "--image-size", "8", "--num-classes", "3", "--batch", "4", "--step-check"]
    options += ["--model", "tests.test_step_check:miscompiled", "--compilation-cache", "off"]
    code, output = invoke(*options)
    assert code == 1, output
    assert "WRONG in forward/middle" in output
    assert not list(tmp_path.iterdir())


class miscompiled(Scoped):  # noqa: N801 - stands for a function that returns a model
    """The linear model for images of 8 px, with a wrong operation."""

    def __init__(self):
        super().__init__(planted("wrong_in_a_command", lambda x: x * 1.1))

    def init(self, key):
        return {"weights": 0.1 * jax.random.normal(key, (192, 3)), "bias": jnp.zeros(3)}, {"batches": jnp.zeros(())}


def test_a_step_is_checked_in_one_process(invoke):
    for options, message in [
        (["--spawn", "2"], "--step-check runs in one process, got --spawn"),
        (["--show-batch", "a.png"], "--show-batch and --step-check both replace the training"),
    ]:
        code, output = invoke("--synthetic", "--step-check", *options)
        assert (code, message in output) == (2, True), output


# --- the flat program


def sample_function(x, y):
    @jax.custom_vjp
    def cube(x):
        return x**3

    cube.defvjp(lambda x: (cube(x), x), lambda x, g: (3 * x * x * g,))

    @jax.checkpoint
    def inner(x):
        with jax.named_scope("deep"):
            return jax.nn.relu(jnp.sin(x) @ y)

    def loss(x):
        with jax.named_scope("train"), jax.named_scope("forward"):
            carry, _ = jax.lax.scan(lambda c, row: (c + cube(row).sum(), None), 0.0, inner(x))
            return jax.lax.cond(carry > 0, lambda c: c * 2, lambda c: c, carry) + jax.jit(jnp.cos)(x).sum()

    return jax.value_and_grad(loss)(x)


def test_the_operations_compute_what_the_function_does():
    random = np.random.default_rng(0)
    x, y = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((3, 4), (4, 4)))
    flat = flatten_program(jax.make_jaxpr(sample_function)(x, y))
    value, gradient = jax.jit(sample_function)(x, y)
    for found in (flat.run([x, y]), jax.jit(lambda *arguments: flat.run(arguments))(x, y)):
        np.testing.assert_allclose(found[0], value, rtol=1e-5)
        np.testing.assert_allclose(found[1], gradient, rtol=1e-5)
    names = {operation.name for operation in flat.operations}
    assert {"scan", "cond", "sin", "dot_general"} <= names
    assert not names & {"jit", "pjit", "custom_vjp_call", "custom_jvp_call", "checkpoint", "remat2"}
    scopes = [(scope.action, scope.path) for scope in flat.boundaries().values()]
    assert ("forward", "deep") in scopes
    assert ("backward", "deep") in scopes


def test_every_value_is_watched_and_large_ones_are_sampled():
    x = jnp.arange(6.0)
    flat = flatten_program(jax.make_jaxpr(lambda x: (jnp.sin(x) * 2, jnp.cos(x)))(x))
    seen: dict[int, Any] = {}
    flat.run([x], seen.__setitem__)
    assert len(seen) == sum(len(operation.outputs) for operation in flat.operations) == 3
    large = jnp.arange(200_001)
    np.testing.assert_array_equal(sample_of(large), np.arange(0, 200_001, 4))
    assert sample_of(x) is x


# --- the rule


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_random_rounding_changes_by_about_the_unit(dtype):
    x = jnp.asarray(np.linspace(1, 2, 1000).astype(dtype))
    flat = flatten_program(jax.make_jaxpr(lambda x: jnp.transpose(x * x))(x))
    changed = flat.run([x], change=RandomRounding(1))[0]
    other = flat.run([x], change=RandomRounding(2))[0]
    ratio = np.asarray(changed, np.float64) / np.asarray(flat.run([x])[0], np.float64)
    unit = float(ml_dtypes.finfo(dtype).eps)
    assert 0.2 * unit < np.abs(ratio - 1).mean() < 2 * unit
    assert (other != changed).any()
    moved = flatten_program(jax.make_jaxpr(lambda x: x[::-1].reshape(10, 100))(x))
    np.testing.assert_array_equal(moved.run([x], change=RandomRounding(1))[0], moved.run([x])[0])


def test_random_rounding_covers_a_sum_in_another_order():
    numbers = jax.random.normal(jax.random.key(0), (64, 4096))
    flat = flatten_program(jax.make_jaxpr(lambda x: x.sum(axis=1))(numbers))
    sums = np.asarray(flat.run([numbers])[0])
    one_by_one = np.zeros(64, np.float32)
    for column in np.asarray(numbers).T:
        one_by_one = one_by_one + column
    disturbed = [flat.run([numbers], change=RandomRounding(seed))[0] for seed in (1, 2)]
    assert compare(sums, one_by_one, disturbed).is_explained
    assert not compare(sums, sums * np.float32(1.001), disturbed).is_explained


def test_what_rounding_explains_and_what_not():
    reference = np.linspace(1, 2, 100, dtype=np.float32)
    unit = np.float32(2**-23)
    disturbed = [reference * (1 + 8 * unit)]
    assert compare(reference, reference, disturbed).is_identical
    found = compare(reference, reference * (1 + 20 * unit), disturbed)
    assert found.is_explained
    assert found.largest == pytest.approx(20 * unit, rel=0.2)
    assert found.ulp == pytest.approx(40, rel=0.2) or found.ulp == pytest.approx(20, rel=0.2)
    assert not compare(reference, reference * (1 + 50 * unit), disturbed).is_explained
    # A few units need no more explanation.
    assert compare(reference, reference * (1 + 2 * unit), [reference]).is_explained
    assert not compare(np.zeros(3, np.float32), np.ones(3, np.float32), [np.zeros(3, np.float32)]).is_explained


def test_nan_must_be_in_the_same_places():
    numbers = np.array([1, np.nan, np.inf], np.float32)
    assert compare(numbers, numbers, [numbers]).is_identical
    for other in ([1, np.nan, 3], [1, np.nan, -np.inf], [np.nan, np.nan, np.inf]):
        found = compare(numbers, np.array(other, np.float32), [numbers])
        assert not found.is_explained
        assert found.largest == float("inf")


def effect_beyond_switches(function, x):
    """Return how far random rounding moves a gradient when every switch is held where it was."""
    flat = flatten_program(jax.make_jaxpr(jax.grad(lambda x: (function(jnp.sin(x)) * WEIGHTS).sum()))(x))
    numbers, held = switches(flat), {}
    reference = flat.run([x], watch=lambda number, array: held.update({number: array} if number in numbers else {}))
    return effect(reference, flat.run([x], change=RandomRounding(1, held, widens_sums=False)))


WEIGHTS = np.linspace(1, 2, 7, dtype=np.float32)


@pytest.mark.parametrize(
    "function",
    [
        # Half of the numbers are within a rounding of the bound.
        lambda x: jnp.maximum(x - jnp.sin(0.5), 0).sum((0, 1, 2)),
        lambda x: jax.nn.relu(x - jnp.sin(0.5)).sum((0, 1, 2)),
        lambda x: jnp.abs(x - jnp.sin(0.5)).sum((0, 1, 2)),
        lambda x: jnp.clip(x, jnp.sin(0.5), 0.7).sum((0, 1, 2)),
        lambda x: jnp.where(x >= float(np.sin(np.float32(0.5))), x, 0.1 * x).sum((0, 1, 2)),
        # Ties.
        lambda x: max_pool(x, window=2, stride=2, padding=0).sum((0, 1, 2)),
        lambda x: global_max_pool(x).sum(0),
        lambda x: jnp.take_along_axis(x[0, 0], jnp.argmax(x[0, 0], axis=0)[None], axis=0)[0],
    ],
)
def test_switches_and_ties_are_no_effect_of_rounding(function):
    random = np.random.default_rng(0)
    x = np.where(random.random((2, 4, 4, 7)) < 0.5, 0.5, random.normal(size=(2, 4, 4, 7))).astype(np.float32)
    assert effect_beyond_switches(function, jnp.asarray(x)) < 1e-5


@pytest.mark.integration
def test_a_part_that_rounding_alone_moves_is_named():
    found = check(Scoped(lambda x: jnp.where(x == x.max((1, 2), keepdims=True), x, 0)))
    assert not found.is_right
    assert next(iter(found.unstable)) == "forward/middle"
    assert verdict(found).startswith("UNSTABLE in forward/middle")
    assert not check(Scoped(global_maximum_by_index)).unstable


def global_maximum_by_index(x):
    return x + global_max_pool(x)[:, None, None]


def test_how_far_rounding_moves_is_relative_to_the_norm_of_a_part():
    ones, zeros = np.ones(4, np.float32), np.zeros(4, np.float32)
    assert effect([ones], [ones * np.float32(1.5)]) == 0.5
    # A sum that cancels is nothing beside the rest.
    assert effect([ones, zeros + 1e-9], [ones, zeros - 1e-9]) < 1e-8
    assert effect([zeros, np.arange(3)], [ones, np.arange(3) + 1]) == 0
    assert effect([ones], [ones * np.float32(np.nan)]) == np.inf
    assert largest_effect([np.float32, np.int32]) == LARGEST_EFFECT
    assert largest_effect([np.float32, ml_dtypes.bfloat16]) == 0.25


# --- the report


def difference(**values):
    return Difference(**({"num_values": 1, "largest": 1e-7, "ulp": 1.0, "measured": 1e-8, "allowed": 1e-6} | values))


def test_the_report_fits_80_columns_and_joins_what_is_right():
    scopes = {f"forward/layer{number // 10}/{number}/a-long-name-of-a-scope": difference() for number in range(40)}
    wrong = "forward/layer2/25/a-long-name-of-a-scope"
    scopes[wrong] = difference(measured=1e-3, largest=123.0, ulp=1e9)
    whole = {"loss": difference(largest=0.0), "weights": difference(is_finite=False, largest=float("inf"))}
    lines = report_lines(StepCheck(7, 1234, scopes, {"loss": difference()}, whole))
    assert max(map(len, lines)) <= 80
    text = "\n".join(lines)
    assert "  forward/layer1                     10" in text
    assert "~layer2/25/a-long-name-of-a-s" not in text  # the end of a long name is kept
    assert [line[-1] for line in lines if line.startswith("  ") and "/25/" in line] == ["!"]
    assert "identical" in text
    assert "NaN or infinity in one of them: WRONG" in text
    assert f"WRONG in {wrong}" in " ".join(lines)


def test_the_report_names_the_images_of_the_batch():
    names = ("cat/" + "x" * 90 + ".jpg", "dog/\x1b.jpg", "dog/2.jpg", "dog/3.jpg", "dog/4.jpg")
    good = {"loss": difference()}
    lines = report_lines(StepCheck(1, 5, {"forward": difference()}, good, good, names=names))
    assert max(map(len, lines)) <= 80
    assert "dog/?.jpg, dog/2.jpg and 2 more images" in " ".join(lines)


def test_the_verdict_on_a_right_step_states_the_rule():
    good = {"loss": difference()}
    text = verdict(StepCheck(1, 5, {"forward": difference()}, good, good))
    assert text.startswith(f"Rounding explains all differences. Allowed is {MARGIN:g} times")
    unstable = StepCheck(1, 5, {"forward": difference()}, good, good, {"forward": 0.5, "loss": 0.1})
    assert (unstable.is_explained, unstable.is_right) == (True, False)
    assert "UNSTABLE in forward and 1 more part: rounding alone moves" in " ".join(report_lines(unstable))
    assert "not compared" in "\n".join(report_lines(StepCheck(1, 5, {"forward": difference()}, good, {})))


def test_an_unstable_scope_with_the_name_of_a_result_is_found():
    ones = {"loss": [np.ones(4, np.float32)]}
    moved = {"loss": [np.full(4, 1.5, np.float32)]}
    assert _moved(_Seen(ones, ones), [_Seen(moved, ones)], 0.1) == {"loss": 0.5}


def test_what_follows_from_the_gradient_of_the_loss_may_move_twice_as_far():
    sizes = {"forward": 0.012, "backward/loss": 0.008, "backward/head": 0.012, "backward/stem": 0.017, "opt_step": 0.2}
    ones = {name: [np.ones(4, np.float32)] for name in sizes}
    moved = {name: [np.full(4, 1 + size, np.float32)] for name, size in sizes.items()}
    assert list(_moved(_Seen(ones, {}), [_Seen(moved, {})], 0.01)) == ["forward", "backward/stem", "opt_step"]
    growing = {f"backward/{name}": [np.full(4, 1 + size, np.float32)] for name, size in (("loss", 0.9), ("stem", 1.0))}
    ones = {name: [np.ones(4, np.float32)] for name in growing}
    assert list(_moved(_Seen(ones, {}), [_Seen(growing, {})], 0.01)) == list(growing)
