"""What jax's profiler sees of a training on a card: how long the card stood still, and what the host waited for.

A gap is a time in which no kernel and no copy ran on any stream that runs kernels; copies to the card on streams of
their own fill none.
"""

import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

_CARD_PLANE = "/device:GPU:0"
_STREAM_LINE = "Stream #"
_COPIES = ("Memcpy", "Memset")
# Calls of the driver in which a thread waits for the card.
_WAITS = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
# Between two kernels that were launched one behind the other lie a few µs.
_GAP_NS = 20_000.0

_WARM_STEPS, _TRACED_STEPS = 40, 60


@dataclass(frozen=True)
class Waits:
    """Calls of one of the driver's functions, and nanoseconds spent in them by all threads."""

    count: int
    total_ns: float


@dataclass(frozen=True)
class CardTrace:
    """What a trace tells.

    Attributes:
        span_ns: from the first kernel's begin to the last one's end.
        busy_ns: of these, while something ran.
        gaps_ns: times between, of `_GAP_NS` and more, longest first.
        waits: by the driver's function.
    """

    span_ns: float
    busy_ns: float
    gaps_ns: tuple[float, ...]
    waits: dict[str, Waits]


def read_trace(profile: Any) -> CardTrace:
    """Reads a `jax.profiler.ProfileData`.

    Raises:
        ValueError: nothing of the first card is in it.
    """
    running = sorted(_kernel_streams(profile))
    if not running:
        raise ValueError(f"a profile must have streams of {_CARD_PLANE} with kernels; found {_planes(profile)}")
    spans = list(_united(running))
    gaps = sorted((later[0] - earlier[1] for earlier, later in pairwise(spans)), reverse=True)
    return CardTrace(
        span_ns=spans[-1][1] - spans[0][0],
        busy_ns=sum(end - start for start, end in spans),
        gaps_ns=tuple(gap for gap in gaps if gap >= _GAP_NS),
        waits=_waits(profile),
    )


def _planes(profile: Any) -> str:
    return ", ".join(plane.name for plane in profile.planes) or "nothing"


def _kernel_streams(profile: Any) -> Iterator[tuple[float, float]]:
    """Begin and end of all that ran on the streams that run kernels."""
    for plane in profile.planes:
        if plane.name != _CARD_PLANE:
            continue
        for line in plane.lines:
            if not line.name.startswith(_STREAM_LINE):
                continue
            events = list(line.events)
            if any(not event.name.startswith(_COPIES) for event in events):
                yield from ((event.start_ns, event.start_ns + event.duration_ns) for event in events)


def _united(spans: Iterable[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """Joins spans, ordered by their begin, that overlap or touch."""
    current: tuple[float, float] | None = None
    for start, end in spans:
        if current is not None and start <= current[1]:
            current = current[0], max(current[1], end)
            continue
        if current is not None:
            yield current
        current = start, end
    if current is not None:
        yield current


def _waits(profile: Any) -> dict[str, Waits]:
    found: dict[str, Waits] = {}
    for plane in profile.planes:
        if not plane.name.startswith("/host:"):
            continue
        for line in plane.lines:
            for event in line.events:
                name = event.name.removesuffix("_ptsz")
                if name in _WAITS:
                    before = found.get(name, Waits(0, 0.0))
                    found[name] = Waits(before.count + 1, before.total_ns + event.duration_ns)
    return found


def describe(trace: CardTrace, num_steps: int) -> list[str]:
    """Gives the lines for a person, of a trace of so many steps."""
    still_ns = trace.span_ns - trace.busy_ns
    lines = [
        f"{num_steps} steps in {trace.span_ns / 1e6:,.1f} ms, {trace.span_ns / 1e6 / num_steps:,.2f} ms a step",
        f"the card stood still for {100 * still_ns / trace.span_ns:.2f} % of it, {still_ns / 1e3 / num_steps:,.0f} µs "
        f"a step; {len(trace.gaps_ns)} gaps of {_GAP_NS / 1e3:.0f} µs and more, the longest: "
        + (", ".join(f"{gap / 1e3:,.0f}" for gap in trace.gaps_ns[:5]) + " µs" if trace.gaps_ns else "none"),
    ]
    lines += [
        f"{name}: {waits.count / num_steps:.2f} calls a step, {waits.total_ns / 1e3 / waits.count:,.0f} µs each"
        for name, waits in sorted(trace.waits.items())
    ]
    return lines if trace.waits else [*lines, f"none of {', '.join(_WAITS)} was called"]


def trace_training(folder: Path, **settings: Any) -> CardTrace:
    """Trains on synthetic batches and reads the trace of the steps after the first ones.

    Args:
        folder: where the profile goes.
        settings: of `engine.TrainConfig`, without those of data and steps.
    """
    import jax

    from engine import TrainConfig, train
    from engine.sinks import LossRecord

    class TracingSink:
        """Has the profiler look at the steps `_WARM_STEPS` … `_WARM_STEPS + _TRACED_STEPS`."""

        def open(self) -> None: ...

        def write(self, record: LossRecord) -> None:
            if record.step == _WARM_STEPS:
                options = jax.profiler.ProfileOptions()
                options.python_tracer_level = 0
                jax.profiler.start_trace(folder, profiler_options=options)
            elif record.step == _WARM_STEPS + _TRACED_STEPS:
                jax.profiler.stop_trace()

        def write_evaluation(self, record: Any) -> None: ...

        def close(self) -> None: ...

    # A few steps more, so that the last ones traced are not those that end the run.
    steps = _WARM_STEPS + _TRACED_STEPS + 20
    train(TrainConfig(steps=steps, synthetic=True, eval_split="off", **settings), sinks=[TracingSink()])
    (written,) = folder.rglob("*.xplane.pb")
    return read_trace(jax.profiler.ProfileData.from_file(str(written)))


def main() -> None:
    """Traces the two networks of the bench `card` and prints what was seen."""
    for model, size, batch in (("resnet50", 224, 256), ("resnet8", 32, 512)):
        with tempfile.TemporaryDirectory() as folder:
            settings = {"model": model, "image_size": size, "batch": batch, "precision": "bfloat16"}
            trace = trace_training(Path(folder), **settings, num_classes=1000 if size == 224 else 10)
        print(f"trace of {model} {size} px b{batch} bfloat16, synthetic batches", flush=True)
        for line in describe(trace, _TRACED_STEPS):
            print(f"  {line}", flush=True)


if __name__ == "__main__":
    main()
