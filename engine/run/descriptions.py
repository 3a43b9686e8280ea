"""What a run says of itself before it is compiled, and what `config.json` records of it beside the settings."""

from collections.abc import Iterator
from typing import Any

from loopfeed.engine.crossing.choice import wasted_steps_warning
from loopfeed.engine.crossing.devices import Placement
from loopfeed.engine.data.dataset import DATA_LOCATION
from loopfeed.engine.feed.batches import label_form_of
from loopfeed.engine.locations import absolute_location
from loopfeed.engine.named_parts import record_named
from loopfeed.engine.parts import USER_SOURCES, name_of
from loopfeed.engine.processes import this_process
from loopfeed.engine.program.kernels import describe_kernels, record_kernels
from loopfeed.engine.records.machine import MACHINE
from loopfeed.engine.records.topology import Topology
from loopfeed.engine.run.changed_rules import check_rules, rules_of
from loopfeed.engine.run.changes import check_data, check_given_weights, machine_of
from loopfeed.engine.run.infeeds import depth_of
from loopfeed.engine.run.run import Run
from loopfeed.models.registry import model_names
from loopfeed.preprocess.quantities import quantity


def describe_run(run: Run) -> Iterator[str]:
    """Yield what will be trained and how, in one line each, and warnings about what has no effect."""
    config, data, place, chunk = run.config, run.data, run.place, run.chunk
    noun = "number" if data.targets == "numbers" else "class"
    classes = f", {quantity(data.num_classes, noun)}" if data.num_classes else ""
    yield f"model: {run.model_name}, {quantity(run.num_params, 'parameter')}{classes}"
    yield from filter(None, (run.selection, run.profiling.warning))
    if not place.is_here:
        return
    source, transport, depth = data.source, place.transport, depth_of(config, data.source, place, chunk)
    at_once = f", {chunk} {'steps enqueued ' * transport.runs_ahead}at once" if chunk > 1 else ""
    yield (
        f"infeed: batches of {source.batch} image{'s' * (source.batch > 1)} of {source.height} × {source.width} px "
        f"from {data.description}; {depth} batch{'es' * (depth > 1)} read ahead; {transport.name} transport"
        f"{_describe_devices(place)}{at_once}"
    )
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
        "height": data.source.height,
        "width": data.source.width,
        "mean": data.mean,
        "std": data.std,
        "eval_manifest_sha256": data.eval_manifest_digest,
        "num_eval_batches": data.evaluation.num_batches if data.evaluation else 0,
        **({} if (form := label_form_of(data.source)) is None else {"labels": form.describe()}),
        **({"own_parts": own} if own else {}),
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


def rules_of_run(run: Run) -> dict[str, int]:
    """Return the numbers of the changed rules that a launch uses, by name."""
    return rules_of(run.config, run.parts, run.model, run.data, run.given)


def check_is_as_recorded(run: Run) -> None:
    """Raise ValueError if data, model, rules or initial weights are not those of the recorded run."""
    recorded = run.start.recorded
    assert recorded is not None
    check_data(resolved_of(run), run.data, recorded)
    check_rules(rules_of_run(run), recorded.resolved)
    check_given_weights(run.given_digest, recorded)
