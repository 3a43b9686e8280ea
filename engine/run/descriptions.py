"""What a run says of itself before it is compiled, and what `config.json` records of it beside the settings.

A run records the number of each rule of training whose results changed since runs were first recorded, so that a run
of an earlier version is never continued or replayed by another rule: it is refused by name. A rule that is missing in a
record has the number 1.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.control.request import factor_before
from loopfeed.engine.crossing.choice import wasted_steps_warning
from loopfeed.engine.crossing.devices import Placement
from loopfeed.engine.data.dataset import DATA_LOCATION
from loopfeed.engine.data.open_data import RunData, mixes_pairs
from loopfeed.engine.feed.batches import image_shape, label_form_of, whole_of
from loopfeed.engine.named_parts import OWN_FUNCTIONS, USER_SOURCES, record_named
from loopfeed.engine.owners import absolute_location
from loopfeed.engine.parts import UserParts, name_of
from loopfeed.engine.patterns import parse_freeze
from loopfeed.engine.processes import this_process
from loopfeed.engine.program.kernels import changed_kernels_notice, describe_kernels, record_kernels
from loopfeed.engine.program.train_state import TrainModel, name_of_model
from loopfeed.engine.records.initial_weights import InitialWeights
from loopfeed.engine.records.machine import MACHINE, Topology, machine_warning
from loopfeed.engine.records.recorded_run import RecordedRun
from loopfeed.engine.run.changes import check_data, describe_changes, machine_of, thread_rule
from loopfeed.engine.run.cycles import describe_rate_change
from loopfeed.engine.run.infeeds import depth_of
from loopfeed.engine.run.resume import describe_factor
from loopfeed.engine.run.run import Run
from loopfeed.engine.run.run_stages import describe_stages
from loopfeed.engine.run.starting_weights import check_given_weights
from loopfeed.engine.updates.selection import has_frozen_norms
from loopfeed.models.families.pooled_convnet import PooledConvNet
from loopfeed.models.registry import model_names, networks
from loopfeed.preprocess.quantities import quantity

RULES = "rules"
"""The key of the numbers of a run's rules in the resolved part of `config.json`."""


class ChangedRule(NamedTuple):
    """A rule that changed: its number now, and what it was and is, for the message that refuses earlier runs."""

    number: int
    was: str
    now: str


_CLASSIFIER = "the classifier of initial weights with other classes"
_NEW_CLASSIFIER = "the first classifier of a run from given weights of other classes"
_FROZEN_NORMS = "the normalisation of frozen batch norms"
_CHANGED_RULES = {
    "the local rate of lars": ChangedRule(2, "divided by ‖g + λ·w‖", "divides by ‖g‖ + λ·‖w‖"),
    "the gradient of binary-cross-entropy": ChangedRule(
        2, "was off by half at logits of exactly 0", "is the sigmoid less the target everywhere"
    ),
    "the gradient of the global maximum": ChangedRule(
        2, "went to all positions that equal it, of which XLA may find none", "goes to its first position"
    ),
    "the translation of trivialaugment": ChangedRule(
        2, "moved images by 16 pixels at strength 15 of 30", "moves them by 15, as torchvision's"
    ),
    "the translation of randaugment": ChangedRule(
        2, "moved images of a multiple of 331 pixels by a pixel less at this magnitude", "moves them as torchvision's"
    ),
    "the windowed order of images that are mixed": ChangedRule(
        2, "mixed neighbours of one block", "mixes images of different blocks"
    ),
    _CLASSIFIER: ChangedRule(
        2, "kept the rows of the file by their number", "compares the classes by their identifiers"
    ),
    _NEW_CLASSIFIER: ChangedRule(2, "was drawn from the seed", "is zero"),
    _FROZEN_NORMS: ChangedRule(2, "was by the statistics of each batch", "is by the running statistics"),
}
# Where a share of such a size was a whole number, and rounding passed by it.
_SIDE, _MAGNITUDES = 331, (11, 21, 22)


def rules_of(
    config: TrainConfig,
    parts: UserParts,
    model: TrainModel,
    data: RunData,
    given: InitialWeights | None = None,
    batch_stats: Any = None,
) -> dict[str, int]:
    """Return the numbers of the changed rules that a launch uses, by name.

    Args:
        config, parts, model, data: of the launch.
        given: the initial weights that it read, None if it read none.
        batch_stats: those of the model, which may be abstract; None if it has none.
    """
    stages = config.by_stage
    used = {
        "the local rate of lars": config.optimizer == "lars" and parts.optimizer is None,
        "the gradient of binary-cross-entropy": config.loss == "binary-cross-entropy",
        "the gradient of the global maximum": (
            parts.model is None and isinstance(networks().get(name_of_model(model)), PooledConvNet)
        ),
        "the translation of trivialaugment": any(stage.auto_augment == "trivialaugment" for stage in stages),
        "the translation of randaugment": any(_has_moved_randaugment(stage, data) for stage in stages),
        "the windowed order of images that are mixed": (
            config.order == "windowed" and data.location is not None and mixes_pairs(config)
        ),
        _CLASSIFIER: given is not None and given.is_by_identifier,
        _NEW_CLASSIFIER: given is not None and given.has_new_classifier,
        _FROZEN_NORMS: (
            parts.model is None and any(has_frozen_norms(batch_stats, parse_freeze(each.freeze)) for each in stages)
        ),
    }
    return {name: _CHANGED_RULES[name].number for name, is_used in used.items() if is_used}


def _has_moved_randaugment(config: TrainConfig, data: RunData) -> bool:
    source, size = data.source, config.image_size
    sides = image_shape(source) if size is None else (size,)
    is_rounded = config.auto_augment_magnitude in _MAGNITUDES and any(side % _SIDE == 0 for side in sides)
    return config.auto_augment == "randaugment" and is_rounded


def check_rules(rules: Mapping[str, int], recorded: Mapping[str, Any]) -> None:
    """Raise ValueError if a run was recorded with another number of a rule that it uses.

    Args:
        rules: those of the launch, as `rules_of` returns them.
        recorded: the resolved part of the run's `config.json`.
    """
    before = recorded.get(RULES, {})
    for name, number in rules.items():
        if before.get(name, 1) != number:
            was, now = _CHANGED_RULES[name][1:]
            raise ValueError(
                f"a resumed or replayed run must keep its rules, but {name} has changed since the version that made "
                f"this run: then it {was}, now it {now}. Start another run from its weights (--init-from RUN), "
                "or install that version"
            )


def describe_run(run: Run) -> Iterator[str]:
    """Yield what will be trained and how, in one line each, and warnings about what has no effect."""
    config, data, place, chunk = run.config, run.data, run.place, run.chunk
    noun = "number" if data.targets == "numbers" else "class"
    classes = f", {quantity(data.num_classes, noun)}" if data.num_classes else ""
    yield f"model: {run.model_name}, {quantity(run.num_params, 'parameter')}{classes}"
    yield from describe_stages(config)
    yield from filter(None, (run.selection, run.profiling.warning))
    if not place.is_here:
        return
    source, transport, depth = data.source, place.transport, depth_of(config, data.source, place, chunk)
    at_once = f", {chunk} {'steps enqueued ' * transport.runs_ahead}at once" if chunk > 1 else ""
    images = quantity(source.batch, "image" if whole_of(source) is None else "whole picture")
    images = f"up to {images}" if config.changes_batch else images
    yield (
        f"infeed: batches of {images} of {source.height} × {source.width} px "
        f"from {data.description}; {depth} batch{'es' * (depth > 1)} read ahead; {transport.name} transport"
        f"{_describe_devices(place)}{at_once}"
    )
    if (size := config.eval_image_size) is not None and data.evaluation is not None:
        trained = config.image_size or image_shape(source)[0]
        yield f"evaluations: at {size} × {size} px, training at {trained} × {trained} px"
    if (kernels := describe_kernels(config, place.platform, is_user_model=run.parts.model is not None)) is not None:
        yield kernels
    if transport.runs_ahead and (wasted := wasted_steps_warning(config, chunk)) is not None:
        yield wasted


def _describe_devices(place: Placement) -> str:
    """Return the part of the line about the infeed on the devices, empty for one of a processor."""
    kind, count = place.team.devices[0].device_kind, len(place.team.devices)
    if place.platform == "cpu":
        return f" on {count} devices of the processor" if count > 1 else ""
    return f" on {f'{count} × ' if count > 1 else ''}{kind}"


def resolved_of(run: Run) -> dict[str, Any]:
    """Return what the settings of a run resolved to, as recorded."""
    name, parts, data = run.model_name, run.parts, run.data
    # Any other name shows by itself that the model is no built-in one, in the records of older versions too.
    is_ambiguous = parts.model is not None and name in model_names()
    own = ({"model": name_of(run.model)} if is_ambiguous else {}) | parts.names()
    return {
        "model": name,
        "data": data.description,
        DATA_LOCATION: absolute_location(data.location),
        "num_classes": data.num_classes,
        "height": image_shape(data.source)[0],
        "width": image_shape(data.source)[1],
        "mean": data.mean,
        "std": data.std,
        "eval_manifest_sha256": data.eval_manifest_digest,
        "num_eval_batches": data.evaluation.num_batches if data.evaluation else 0,
        **data.digests,
        **({} if (form := label_form_of(data.source)) is None else {"labels": form.describe()}),
        **({OWN_FUNCTIONS: own} if own else {}),
        **({USER_SOURCES: sources} if (sources := parts.sources()) else {}),
        **record_named(parts.named),
    }


def topology_of(run: Run) -> Topology:
    """Return the devices and processes of a launch."""
    return Topology(str(run.team.devices[0].device_kind), len(run.team.devices), this_process().count)


def crossings_of(run: Run) -> dict[str, Any]:
    """Return the topology, transport, batches per chunk and read ahead, oneDNN and machine of a launch, as recorded."""
    return {
        **topology_of(run).to_json(),
        "transport": run.transport.name,
        "chunk_batches": run.chunk,
        "prefetch": depth_of(run.config, run.data.source, run.place, run.chunk),
        **record_kernels(run.config, run.place.platform),
        MACHINE: machine_of(run.team.devices[0]),
    }


def describe_resume(run: Run, recorded: RecordedRun) -> Iterator[str | None]:
    """Yield what differs in a resumed launch: settings, learning rate, kernels, machine and devices; None if equal."""
    config, start, crossings, topology = run.config, run.start, crossings_of(run), topology_of(run)
    yield describe_changes(config, recorded.config)
    yield describe_factor(start)
    yield describe_rate_change(config, recorded.config, start.step, factor_before(start.events, start.batch_index))
    yield changed_kernels_notice(recorded.resolved, crossings)
    threads = thread_rule(config, is_user_model=run.registry_name is None)
    yield machine_warning(recorded.machines, crossings[MACHINE], threads)
    if (before := Topology.from_json(recorded.resolved)) != topology:
        norms_are_fixed = config.batch_norm_sync or config.batch_norm_group is not None
        depends = "" if norms_are_fixed else "; batch norms average over the images of each device"
        yield f"the run was on {before} and goes on with {topology}: the same images, other rounding{depends}"


def rules_of_run(run: Run) -> dict[str, int]:
    """Return the numbers of the changed rules that a launch uses, by name."""
    return rules_of(run.config, run.parts, run.model, run.data, run.given, run.state_shape.batch_stats)


def check_is_as_recorded(run: Run) -> None:
    """Raise ValueError if data, model, rules or initial weights are not those of the recorded run."""
    recorded = run.start.recorded
    assert recorded is not None
    check_data(resolved_of(run), run.data, recorded)
    check_rules(rules_of_run(run), recorded.resolved)
    check_given_weights(run.given, recorded, run.path if run.stored is None else None, run.notify)
