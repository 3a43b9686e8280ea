"""What a launch says about itself before it compiles: the model, the infeed and the devices, in one line each."""

from loopfeed.engine.run.data import RunData
from loopfeed.engine.run.resolve import Resolved
from loopfeed.preprocess.quantities import quantity


def describe_model(resolved: Resolved, num_params: int) -> str:
    """Return the line about the model."""
    data = resolved.data
    noun = "number" if data.targets == "numbers" else "class"
    return f"model: {resolved.model_name}, {quantity(num_params, 'parameter')}" + (
        f", {quantity(data.num_classes, noun)}" if data.num_classes else ""
    )


def describe_infeed(data: RunData, depth: int, transport: str) -> str:
    """Return the beginning of the line about the infeed, with `depth` batches read ahead by a transport."""
    source = data.source
    return (
        f"infeed: batches of {source.batch} image{'s' * (source.batch > 1)} of {source.height} × {source.width} px "
        f"from {data.description}; {depth} batch{'es' * (depth > 1)} read ahead; {transport} transport"
    )


def describe_devices(platform: str, kind: str, count: int) -> str:
    """Return the part of that line about the devices, empty for one of a processor."""
    if platform == "cpu":
        return f" on {count} devices of the processor" if count > 1 else ""
    return f" on {f'{count} × ' if count > 1 else ''}{kind}"


def describe_chunk(chunk: int, *, runs_ahead: bool) -> str:
    """Return the part of that line about the batches per pull, empty for one."""
    return f", {chunk} {'steps enqueued ' * runs_ahead}at once" if chunk > 1 else ""
