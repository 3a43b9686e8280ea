"""The weights that a new run starts from in the place of drawn ones, and what they say of its input.

Owns which statistics normalise the images of such a run, and what the user is told. Must not know: formats of files.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from loopfeed.engine.config import TrainConfig, stage_error
from loopfeed.engine.data.open_data import RunData
from loopfeed.engine.feed.batches import image_shape
from loopfeed.engine.owners import storage_options_of
from loopfeed.engine.patterns import parse_freeze
from loopfeed.engine.program.train_state import TrainState
from loopfeed.engine.records.initial_weights import InitialWeights, load_initial_weights
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.records.run_folder import CONFIG
from loopfeed.engine.records.weights_metadata import (
    IMAGE_SIZE,
    MEAN,
    STD,
    channels_in,
    image_size_in,
    resize_rule_of,
)
from loopfeed.engine.run.resume import Resume
from loopfeed.engine.settings import SettingError
from loopfeed.engine.updates.selection import matches
from loopfeed.engine.updates.settings import CompiledSettings
from loopfeed.engine.updates.update import Weights, init_update
from loopfeed.models.registry import find_network
from loopfeed.preprocess.printable import printable

GIVEN_WEIGHTS = "init_from_sha256"
"""The key of the digest of the initial weights' tensors in the resolved part of `config.json`."""
ORIGIN = "init_from_origin"
"""The key of the source, the revision and the SHA-256 of the file of these weights."""


def read_weights_of_run(
    config: TrainConfig,
    registry_name: str | None,
    start: Resume,
    shape: TrainState,
    notify: Callable[[str], None],
    data: RunData,
) -> InitialWeights | None:
    """Read the initial weights before any slow work begins; return None if the launch uses none.

    Args:
        config: the settings.
        registry_name: the name of the model in the registry, None for a user-defined model.
        start: where the launch begins; a snapshot has weights of its own. A run that starts again takes the commit of a
            repository that it recorded.
        shape: shapes and dtypes of the initial state.
        notify: called with two lines of text about the weights and their input, and with warnings.
        data: the data of the run.

    Raises:
        ValueError: the file does not fit the model, or the settings freeze a classifier of zeros.
    """
    if config.init_from is None or start.snapshot is not None:
        return None
    recorded = {} if start.recorded is None else start.recorded.resolved.get(ORIGIN) or {}
    given = load_initial_weights(
        config.init_from,
        registry_name,
        shape.params,
        shape.batch_stats,
        classes=data.classes,
        storage_options=storage_options_of(config),
        revision=recorded.get("revision"),
    )
    _check_is_trained(config, registry_name, given)
    notes = [note for note in given.notes if not note.startswith("warning: ")]
    notify("; ".join([f"weights: {_describe_origin(given)}", *notes]))
    notify(f"input: {_describe_input(config, data, given)}")
    for note in given.notes:
        if note not in notes:
            notify(note)
    return given


def _check_is_trained(config: TrainConfig, registry_name: str | None, given: InitialWeights) -> None:
    """Raise SettingError if a classifier of zeros is not trained from the first step, so that nothing else learns."""
    if registry_name is None or not given.has_new_classifier:
        return
    path, frozen = f"{find_network(registry_name).head}.kernel", parse_freeze(config.by_stage[0].freeze)
    if pattern := next((each for each in frozen if matches((each,), path)), None):
        fault = (
            f"the classifier is new, and zero, so nothing learns before it does, but {pattern!r} matches {path}: "
            "leave it out of the patterns"
        )
        raise (
            SettingError("freeze", "{setting}: {fault}", fault=fault)
            if config.stages is None
            else stage_error(1, config, f"freeze: {fault}")
        )


def _describe_origin(given: InitialWeights) -> str:
    source, revision, sha256 = given.origin
    is_named = revision is None or source.endswith(f"@{revision}")
    details = [] if is_named else [f"revision {revision}"]
    details += [] if sha256 is None else [f"sha256 {sha256[:12]}"]
    return printable(source) + (f" ({', '.join(details)})" if details else "")


def _describe_input(config: TrainConfig, data: RunData, given: InitialWeights) -> str:
    """Return what the weights say of their input, and where the run differs."""
    parts = []
    for name in (MEAN, STD):
        found, chosen = channels_in(given.metadata.get(name, "")), getattr(config, name)
        if found is None:
            parts.append(f"{name} of the {'data' if chosen is None else 'settings'}, as the weights record none")
        elif chosen is None or found == chosen:
            parts.append(f"{name} {_triple(found)} of the weights")
        else:
            parts.append(f"{name} {_triple(chosen)} of the settings, that of the weights is {_triple(found)}")
    return "; ".join([", ".join(parts), *_describe_size(config, data, given)])


def _describe_size(config: TrainConfig, data: RunData, given: InitialWeights) -> list[str]:
    """Return a part of the line about the input on size and interpolation, if the weights record them."""
    size = image_size_in(given.metadata.get(IMAGE_SIZE, ""))
    if size is None:
        return []
    shape = image_shape(data.source) if config.image_size is None else (config.image_size, config.image_size)
    rules = [resize_rule_of(given.metadata, given.origin.source), data.resize_rule]
    resamples = ["" if rule is None else f" {printable(str(rule.get('resample')))}" for rule in rules]
    if not all(resamples):
        resamples = ["", ""]
    theirs, ours = (f"{h} × {w} px{resample}" for (h, w), resample in zip((size, shape), resamples, strict=True))
    return [theirs if theirs == ours else f"the weights are for {theirs}, the run has {ours}"]


def _triple(channels: tuple[float, ...]) -> str:
    return " ".join(f"{each:.4g}" for each in channels)


def with_statistics(config: TrainConfig, data: RunData, given: InitialWeights | None, start: Resume) -> RunData:
    """Return the data of a run with the statistics by which the weights that it starts from expect its images.

    Settings win. A run that goes on keeps what it recorded, so that one of an earlier version, which took the
    statistics of its data, keeps these.
    """
    recorded = {} if start.recorded is None else start.recorded.resolved
    if recorded.get(GIVEN_WEIGHTS) is not None:
        found: dict[str, Any] = {name: tuple(recorded[name]) for name in (MEAN, STD)}
    elif given is not None:
        found = {name: channels for name in (MEAN, STD) if (channels := channels_in(given.metadata.get(name, "")))}
    else:
        return data
    return replace(data, **{name: value for name, value in found.items() if getattr(config, name) is None})


def check_given_weights(
    given: InitialWeights | None, recorded: RecordedRun, run: Path | None, notify: Callable[[str], None]
) -> None:
    """Raise ValueError if the initial weights are not those of the recorded run; say so if only their file is another.

    A file of another format, or with other metadata, may hold the same tensors.
    """
    before, origin = recorded.resolved.get(GIVEN_WEIGHTS), recorded.resolved.get(ORIGIN) or {}
    if given is None:
        return
    if given.digest != before:
        again = (
            "with --overwrite" if run is None else f"(run-train --recipe {run / CONFIG} --run-dir {run} --overwrite)"
        )
        of = "".join(f", {name} {value}" for name, value in origin.items() if name != "source" and value)
        raise ValueError(
            "a run that is resumed or replayed from its beginning must start from its original weights, but those of "
            f"{recorded.config.init_from} differ (their digest was {_short(before)}{of}, is now "
            f"{_short(given.digest)}): restore the file, or train the run again {again}"
        )
    if origin.get("sha256") not in (None, given.origin.sha256):
        notify(f"the file of {printable(given.origin.source)} is another than the run started from, with equal tensors")


def _short(digest: str | None) -> str:
    return "none" if digest is None else digest[:12]


def put_given_weights(given: InitialWeights | None, drawn: TrainState, settings: CompiledSettings) -> TrainState:
    """Return a randomly initialised state with the given weights, if there are any, and an update that fits them."""
    if given is None:
        return drawn
    weights = jax.tree.map(partial(jnp.array, copy=True), Weights(given.params, given.batch_stats))
    params, batch_stats = weights
    return drawn._replace(params=params, batch_stats=batch_stats, update=init_update(settings, weights))
