"""What a run says about itself before it compiles: the model, the infeed and the devices, in one line each."""

from collections.abc import Iterable, Iterator

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.crossing.choice import wasted_steps_warning
from loopfeed.engine.crossing.devices import Placement
from loopfeed.engine.data.open_data import RunData
from loopfeed.engine.program.kernels import describe_kernels
from loopfeed.engine.run.infeeds import depth_of
from loopfeed.preprocess.quantities import quantity


def describe_run(
    config: TrainConfig,
    data: RunData,
    model_name: str,
    num_params: int,
    place: Placement,
    chunk: int,
    also: Iterable[str | None],
) -> Iterator[str]:
    """Yield what will be trained and how, and warnings about what has no effect.

    Args:
        config: the settings.
        data: the opened data.
        model_name: the name of the model in messages.
        num_params: number of learnable parameters.
        place: the devices and the transport.
        chunk: training batches per pull.
        also: more lines, to be told after that about the model.
    """
    noun = "number" if data.targets == "numbers" else "class"
    classes = f", {quantity(data.num_classes, noun)}" if data.num_classes else ""
    yield f"model: {model_name}, {quantity(num_params, 'parameter')}{classes}"
    yield from filter(None, also)
    if not place.is_here:
        return
    source, transport, depth = data.source, place.transport, depth_of(config, data.source, place, chunk)
    at_once = f", {chunk} {'steps enqueued ' * transport.runs_ahead}at once" if chunk > 1 else ""
    yield (
        f"infeed: batches of {source.batch} image{'s' * (source.batch > 1)} of {source.height} × {source.width} px "
        f"from {data.description}; {depth} batch{'es' * (depth > 1)} read ahead; {transport.name} transport"
        f"{_describe_devices(place)}{at_once}"
    )
    if (kernels := describe_kernels(config, place.platform)) is not None:
        yield kernels
    if transport.runs_ahead and (wasted := wasted_steps_warning(config, chunk)) is not None:
        yield wasted


def _describe_devices(place: Placement) -> str:
    """Return the part of the line about the infeed on the devices, empty for one of a processor."""
    kind, count = place.team.devices[0].device_kind, len(place.team.devices)
    if place.platform == "cpu":
        return f" on {count} devices of the processor" if count > 1 else ""
    return f" on {f'{count} × ' if count > 1 else ''}{kind}"
