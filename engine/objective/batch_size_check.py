"""The check that the metrics of a run do not depend on the batch size, on random numbers, before anything is compiled.

A metric that counts padding rows, or that mixes the examples of a batch, would be wrong without a sign of it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32
from numpy.typing import NDArray

from loopfeed.engine.feed.batches import PADDING_LABEL
from loopfeed.engine.objective.objective import Objective

type Values = Mapping[str, Any]
"""The value of each metric, by name."""

_NUM_EXAMPLES, _BATCH = 48, 32
_NUM_ROWS = 2 * _BATCH
# Relative. Far above the rounding of float32, also where a card multiplies in TF32; that of narrower dtypes is added.
_TOLERANCE = 0.002
# Padding rows may happen to leave one number as it is.
_SEEDS = range(2)


def check_batch_size(objective: Objective, outputs: Any, notify: Callable[[str], None]) -> None:
    """Check that each metric is the same of random examples in one batch, and in two of which the last is padded.

    Args:
        objective: the objective of the run.
        outputs: the shapes and dtypes of the outputs of its model, jax.ShapeDtypeStruct [B, …] each.
        notify: called with a line of text if the metrics raise an error on random numbers, and so are not checked.

    Raises:
        ValueError: a metric differs; the message names it, both values and the remedy.
    """
    if not objective.metrics:
        return
    measure = jax.jit(partial(_in_batches, objective))
    try:
        measured = [jax.device_get(measure(*_draw_examples(objective, outputs, seed))) for seed in _SEEDS]
    except Exception as error:  # noqa: BLE001 - a metric of the user's may not take random numbers
        reason = str(error).partition("\n")[0] or type(error).__name__
        notify(f"whether the metrics depend on the batch size was not checked; on random numbers they fail: {reason}")
        return
    dtypes = [leaf.dtype for leaf in jax.tree.leaves(outputs) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    tolerance = max(_TOLERANCE, *(4 * float(jnp.finfo(dtype).eps) for dtype in dtypes), 0.0)
    for whole, padded, merged in measured:
        _check_equal(whole, padded, merged, tolerance)


def _check_equal(whole: Values, padded: Values, merged: Values, tolerance: float) -> None:
    for name, expected in whole.items():
        if (found := _describe(expected, padded[name], tolerance)) is not None:
            raise ValueError(
                f"the metric {name} must not depend on the batch size, but of the same {_NUM_EXAMPLES} random examples "
                f"it is {found[0]} in one batch, and {found[1]} in two batches of {_BATCH}, of which the last has "
                f"{_NUM_ROWS - _NUM_EXAMPLES} padding rows: leave out rows whose weight is 0 (weights, the last "
                "argument of update), and compute what is counted of an example from its own row alone"
            )
        if (found := _describe(expected, merged[name], tolerance)) is not None:
            raise ValueError(
                f"the metric {name} must be the same of states that are merged, but of the same {_NUM_EXAMPLES} random "
                f"examples it is {found[0]} in one state, and {found[1]} in two that are merged: merge must return the "
                "state that update returns for both parts together"
            )


def _in_batches(
    objective: Objective, outputs: Any, labels: Any, weights: Float32[Array, "B"]
) -> list[dict[str, jax.Array]]:
    """Return the metrics of the examples in one batch, of two batches, and of these merged; called while tracing."""

    def add(state: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
        rows = jax.tree.map(lambda leaf: leaf[start:stop], (outputs, labels, weights))
        return objective.update_metrics(state, *rows)

    none = objective.init_metrics()
    first = add(none, 0, _BATCH)
    states = (
        add(none, 0, _NUM_EXAMPLES),
        add(first, _BATCH, _NUM_ROWS),
        objective.merge_metrics(first, add(none, _BATCH, _NUM_ROWS)),
    )
    return [objective.finish_metrics(state) for state in states]


def _draw_examples(objective: Objective, shapes: Any, seed: int) -> tuple[Any, Any, NDArray[np.float32]]:
    """Return random outputs and labels, and weights, of 48 examples and 16 padding rows.

    Of half of the examples with class numbers, the label has the largest logit: a count of hits is not always 0. The
    outputs of padding rows are larger than the others, as a model's for black images may be.
    """
    random = np.random.default_rng(seed)
    is_example = np.arange(_NUM_ROWS) < _NUM_EXAMPLES
    outputs = jax.tree.map(lambda leaf: random.normal(size=(_NUM_ROWS, *leaf.shape[1:])), shapes)
    for leaf in jax.tree.leaves(outputs):
        leaf[~is_example] = 4 * leaf[~is_example] + 2
    if objective.label_form is None:
        logits = outputs["logits"] if isinstance(outputs, Mapping) else outputs
        labels = random.integers(logits.shape[1], size=_NUM_ROWS)
        rows = np.arange(0, _NUM_ROWS, 2)
        logits[rows, labels[rows]] = logits[rows].max(axis=1) + 1
        labels = np.where(is_example, labels, PADDING_LABEL).astype(np.int32)
    else:
        labels = objective.label_form.draw(random, _NUM_ROWS)
        for leaf in jax.tree.leaves(labels):
            leaf[~is_example] = 0
    outputs = jax.tree.map(lambda leaf, like: jnp.asarray(leaf, like.dtype), outputs, shapes)
    return outputs, labels, is_example.astype(np.float32)


def _describe(expected: Any, found: Any, tolerance: float) -> tuple[str, str] | None:
    """Return the first two numbers of a metric that differ by more than rounding, None if there are none."""
    one, other = (np.asarray(each, np.float64) for each in (expected, found))
    scale = np.abs(one[np.isfinite(one)]).max(initial=0.0)
    is_same = np.isclose(other, one, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
    if is_same.all():
        return None
    at = tuple(int(each) for each in np.argwhere(~is_same)[0])
    where = f" at {list(at)}" if at else ""
    return f"{one[at]:.6g}{where}", f"{other[at]:.6g}"
