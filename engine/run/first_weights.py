"""The state with which a new run begins: drawn from the seed, with the weights that the user gives put into it."""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.program.train_state import TrainModel, TrainState, init_state
from loopfeed.engine.records.initial_weights import InitialWeights, load_initial_weights
from loopfeed.engine.run.resume import Resume
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.update import Weights, init_update
from loopfeed.preprocess.shards.classes import ImageClass


def draw_state(model: TrainModel, settings: CompiledSettings, words: jax.Array) -> TrainState:
    """Return the initial state that the words of a seed, uint32 [2], determine."""
    # The generator is named, so that the user's default generator changes neither the run nor the key's shape.
    return init_state(model, settings, jax.random.wrap_key_data(words, impl="threefry2x32"))


def read_weights_of_run(
    config: TrainConfig,
    registry_name: str | None,
    start: Resume,
    shape: TrainState,
    notify: Callable[[str], None],
    classes: Sequence[ImageClass] = (),
) -> InitialWeights | None:
    """Read the initial weights before any slow work begins; return None if the launch uses none.

    Args:
        config: the settings.
        registry_name: the name of the model in the registry, None for a user-defined model.
        start: where the launch begins; a snapshot has weights of its own.
        shape: shapes and dtypes of the initial state.
        notify: called with lines of text about the weights.
        classes: the classes of the data by label.

    Raises:
        ValueError: the file does not fit the model.
    """
    if config.init_from is None or start.snapshot is not None:
        return None
    given = load_initial_weights(
        config.init_from,
        registry_name,
        shape.params,
        shape.batch_stats,
        classes=classes,
        storage_options=storage_options_of(config),
    )
    notify(f"weights: {config.init_from}")
    for note in given.notes:
        notify(note)
    return given


def put_given_weights(given: InitialWeights | None, drawn: TrainState, settings: CompiledSettings) -> TrainState:
    """Return a randomly initialised state with the given weights, if there are any, and an update that fits them."""
    if given is None:
        return drawn
    weights = jax.tree.map(partial(jnp.array, copy=True), given.over(Weights(drawn.params, drawn.batch_stats)))
    params, batch_stats = weights
    return drawn._replace(params=params, batch_stats=batch_stats, update=init_update(settings, weights))
