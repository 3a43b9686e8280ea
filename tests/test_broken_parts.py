"""A part that cannot work is refused in one sentence that names it before anything compiles; what works is accepted."""

import functools
import operator
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from loopfeed import Callback, Metric, train
from loopfeed.engine.given_values import check_takes
from loopfeed.engine.run.callbacks import as_callback
from loopfeed.engine.stream.function_sink import as_sink
from tests.toy import Linear, toy_batch, toy_config

LINEAR = Linear()
EVALUATION = toy_batch(0)


class Net:
    """A linear network of which one function is another."""

    def __init__(self, init=LINEAR.init, apply=LINEAR.apply):
        self.init, self.apply = init, apply


def returning(change):
    """Return a network whose apply returns what `change` makes of the logits and the statistics."""
    return {"model": Net(apply=lambda p, s, i, train: change(*LINEAR.apply(p, s, i, train)))}


def moving(update, state=()):
    """Return an optimizer whose update makes (updates, state) of the gradients and the state."""
    return {"optimizer": lambda rate: optax.GradientTransformation(lambda p: state, lambda g, s, p=None: update(g, s))}


def summed(gradients):
    return jax.tree.map(lambda leaf: leaf.sum(), gradients)


metric: Any = Metric

BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    # The wrong number of arguments
    "init": (
        {"model": Net(init=lambda: LINEAR.init(0))},
        r"init of Net must take \(key\), but takes \(\): give it these",
    ),
    "apply": (
        {"model": Net(apply=lambda p, s, i: LINEAR.apply(p, s, i, False))},
        r"apply of Net must take \(params, batch_stats, images, train\), of which train is given by .* but takes \(p",
    ),
    "loss": ({"loss": lambda o, y: o}, r"the loss must take \(outputs, labels, weights\), but takes \(o, y\): give it"),
    "jitted loss": ({"loss": jax.jit(lambda o, y: o)}, r"the loss must take .*, but takes \(o, y\)"),
    "metric": ({"metrics": {"top": lambda o: o}}, r"the metric top must take \(outputs, labels\), but takes \(o\)"),
    "update of a metric": (
        {"metrics": {"top": metric(lambda: 0, lambda s, o: s, max, lambda s: s)}},
        r"update of the metric top must take \(state, outputs, labels, weights\), but takes \(s, o\)",
    ),
    "finish of a metric": (
        {"metrics": {"top": metric(lambda: 0, lambda s, o, y, w: s, max, lambda: 0)}},
        r"finish of the metric top must take \(state\), but takes \(\)",
    ),
    "augment": ({"augment": lambda x: x}, r"augment must take \(images, keys\), but takes \(x\)"),
    "batches": ({"batches": lambda: 1}, r"the function batches must take \(step\), but takes \(\)"),
    "indices": ({"indices": lambda: 1, "batches": None}, r"the function indices must take \(epoch\), but takes \(\)"),
    "callback": ({"callbacks": [lambda: 1]}, r"a callback that is a function must take \(record\), but takes \(\)"),
    "sink": ({"sinks": [lambda a, b: 1]}, r"a sink that is a function must take \(record\), but takes \(a, b\)"),
    # What apply returns
    "swapped": (
        returning(lambda logits, stats: (stats, logits)),
        r"logits must be a float array \[8, K\], but apply of Net returned a dict with the keys batches in "
        r"their place: return \(logits, batch_stats\), in this order; among other outputs, logits have the key",
    ),
    "NumPy's logits": (
        returning(lambda logits, stats: (np.zeros((8, 3), np.float32), stats)),
        r"apply of Net returned float32 \[8, 3\] of NumPy in their place: compute them from the images with jax.numpy",
    ),
    "no logits": (
        returning(lambda logits, stats: ({"out": logits}, stats)),
        "returned a dict with the keys out in their",
    ),
    "no statistics": (
        returning(lambda logits, stats: (logits, None)),
        r"that of Net got {'batches': 'float32\[\]'} and returned None: return the argument batch_stats, or new values",
    ),
    "text as statistics": (returning(lambda logits, stats: (logits, {"batches": "x"})), "returned {'batches': 'str'}"),
    # What an optimizer returns
    "a state of text": (moving(lambda g, s: (g, s), "x"), r"init\(params\) must return .* returned str as the state"),
    "no updates": (
        moving(lambda g, s: None),
        r"must return a tuple \(updates, state\), but returned None: return these",
    ),
    "three": (moving(lambda g, s: (g, s, 1)), r"must return a tuple \(updates, state\), but returned a tuple of 3"),
    "only gradients": (
        moving(lambda g, s: g),
        r"tuple \(updates, state\), but returned a dict with the keys bias, weights",
    ),
    "a list": (
        moving(lambda g, s: (jax.tree.leaves(g), s)),
        "like the gradients, the same pytree, but for a dict with the keys bias, weights returned a list of 2, and",
    ),
    "None for one": (moving(lambda g, s: (g | {"bias": None}, s)), "and bias is in one of them only: make them with"),
    "of another shape": (
        moving(lambda g, s: (summed(g), s)),
        r"floats of the same shapes, but for bias, float32 \[3\], returned float32 \[\]: return a float for each",
    ),
    "integers": (
        moving(lambda g, s: (jax.tree.map(lambda leaf: leaf.astype(int), g), s)),
        r"floats of the same shapes, but for bias, float32 \[3\], returned int32 \[3\]",
    ),
    # Values where there are none
    "NumPy in apply": (
        {"model": Net(apply=lambda p, s, i, train: (np.asarray(i), s))},
        r"apply of Net is traced, so that its arrays have no values, but it passes them to NumPy in line \d+ of "
        r"test_broken_parts.py, `.*np.asarray\(i\).*`: use the function of the same name in jax.numpy, or one of",
    ),
    "if in apply": (
        {"model": Net(apply=lambda p, s, i, train: (i if i.sum() > 0 else -i, s))},
        "apply of Net is traced, .* but it chooses by one in line .*: use jax.numpy.where or jax.lax.cond instead",
    ),
    "NumPy in a loss": ({"loss": lambda o, y, w: np.log(o)}, r"the loss is traced, .* NumPy in line .*`.*np.log\(o\)"),
    "float in a loss": (
        {"loss": lambda o, y, w: float(o.mean())},
        r"the loss is traced, .* needs one as a Python number in line .*float\(o.mean\(\)\).*: keep it an array",
    ),
    "NumPy in a metric": ({"metrics": {"top": lambda o, y: np.asarray(o)}}, "the metric top is traced, .* to NumPy in"),
    "NumPy in augment": ({"augment": lambda x, k: np.flip(np.asarray(x))}, "augment is traced, .* to NumPy in line"),
    "NumPy in an optimizer": (
        moving(lambda g, s: (np.asarray(g["bias"]), s)),
        "optimizer's update is traced, .* NumPy",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_part_is_named_with_what_it_must_be_before_anything_compiles(case):
    part, message = BROKEN[case]
    lines: list[str] = []
    given = {"model": LINEAR, "batches": toy_batch, "evaluation": EVALUATION, "notify": lines.append}
    with pytest.raises(ValueError, match=message) as caught:
        train(toy_config(eval_every_steps=2), **(given | part))
    assert "\n" not in str(caught.value)
    assert not [line for line in lines if line.startswith("compiled")]


def with_default(outputs, labels, scale=1.0):
    return outputs


@functools.wraps(with_default)
def with_other_arguments(a, b, c, d):
    return with_default(a, b)


class Called:
    def __call__(self, a, b):
        return a

    def method(self, a, b):
        return a

    @classmethod
    def of_class(cls, a, b):
        return a


@pytest.mark.parametrize(
    "function",
    [
        with_default,
        lambda *args: args,
        lambda a, /, b, *, c=1, **others: a,
        functools.partial(lambda x, y, z: z, 1),
        functools.partial(lambda x, y, z: z, z=1),
        functools.partial(jax.jit(with_default), scale=2.0),
        jax.jit(with_default, static_argnames="scale"),
        jax.vmap(with_default),
        Called(),
        Called().method,
        Called.of_class,
        Called().__call__,
        max,
        operator.add,
        np.add,
        jnp.maximum,
        dict,
        optax.softmax_cross_entropy,
        functools.wraps(lambda a: a)(lambda *args: args),
        functools.wraps(lambda a: a)(lambda a, b: a),
        functools.lru_cache(with_default),
        type("NoSignature", (), {"__call__": with_default, "__signature__": 3})(),
    ],
)
def test_what_can_be_called_is_accepted(function):
    check_takes("it", function, "(a, b)", 0, 0)


def test_a_decorator_counts_by_its_own_arguments():
    with pytest.raises(ValueError, match=r"it must take \(a, b\), but takes \(a, b, c, d\)"):
        check_takes("it", with_other_arguments, "(a, b)", 0, 0)


def test_the_methods_of_callbacks_and_sinks_take_what_they_are_given():
    class Late(Callback):
        pass

    late: Any = Late()
    late.on_epoch = lambda epoch: None
    own: Any = SimpleNamespace(**dict.fromkeys(("open", "write", "write_evaluation", "close"), lambda: None))
    with pytest.raises(ValueError, match=r"Late.on_epoch must take \(epoch, record\), but takes \(epoch\)"):
        as_callback(late)
    with pytest.raises(ValueError, match=r"SimpleNamespace.write must take \(record\), but takes \(\)"):
        as_sink(own)
