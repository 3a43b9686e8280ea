"""Analysis of a jax profile of a training on a card: how long the card was idle, and whether XLA waited for it.

A gap is a time in which no kernel and no copy ran on any stream that runs kernels; copies to the card on separate
streams do not fill gaps. The profiler does not record driver calls that wait, such as `cuStreamSynchronize`; it only
has XLA's own events for them, at the highest level of detail.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

_CARD_PLANE = "/device:GPU:0"
_STREAM_LINE = "Stream #"
_COPIES = ("Memcpy", "Memset")
# XLA's name for waiting until a stream is empty.
_XLA_WAIT = "BlockHostUntilDone"
# Between two consecutively launched kernels there are a few µs.
_GAP_NS = 20_000.0


@dataclass(frozen=True)
class Waits:
    """The number of waits of a thread, and their total duration in nanoseconds."""

    count: int
    total_ns: float

    @property
    def mean_ns(self) -> float:
        """Mean duration of a wait, 0 if there was none."""
        return self.total_ns / max(self.count, 1)


@dataclass(frozen=True)
class CardTrace:
    """The results of a trace.

    Attributes:
        span_ns: time from the start of the first kernel to the end of the last.
        busy_ns: the part of it in which something ran.
        gaps_ns: gaps of at least `_GAP_NS`, longest first.
        xla_waits: waits of XLA's threads for a stream.
    """

    span_ns: float
    busy_ns: float
    gaps_ns: tuple[float, ...]
    xla_waits: Waits


def read_trace(profile: Any) -> CardTrace:
    """Read a `jax.profiler.ProfileData`.

    Raises:
        ValueError: the profile has no kernels of the first card.
    """
    running = sorted(_kernel_streams(profile))
    if not running:
        raise ValueError(f"a profile must have streams of {_CARD_PLANE} with kernels, found {_planes(profile)}")
    spans = list(_united(running))
    gaps = sorted((later[0] - earlier[1] for earlier, later in pairwise(spans)), reverse=True)
    return CardTrace(
        span_ns=spans[-1][1] - spans[0][0],
        busy_ns=sum(end - start for start, end in spans),
        gaps_ns=tuple(gap for gap in gaps if gap >= _GAP_NS),
        xla_waits=_xla_waits(profile),
    )


def _planes(profile: Any) -> str:
    return ", ".join(plane.name for plane in profile.planes) or "nothing"


def _kernel_streams(profile: Any) -> Iterator[tuple[float, float]]:
    """Yield start and end of every event on the streams that run kernels."""
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
    """Merge spans, sorted by their start, that overlap or touch."""
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


def _xla_waits(profile: Any) -> Waits:
    lengths_ns = [
        event.duration_ns
        for plane in profile.planes
        if plane.name.startswith("/host:")
        for line in plane.lines
        for event in line.events
        if _XLA_WAIT in event.name
    ]
    return Waits(len(lengths_ns), sum(lengths_ns))


def describe(trace: CardTrace, driver_waits: Mapping[str, Waits], num_steps: int) -> list[str]:
    """Return a description of the trace, as lines of text.

    Args:
        trace: trace of `num_steps` steps.
        driver_waits: waits for an event of the driver, by the thread that waited.
        num_steps: number of traced steps.
    """
    still_ns = trace.span_ns - trace.busy_ns
    waits = {"XLA, for a stream": trace.xla_waits, **driver_waits}
    return [
        f"{num_steps} steps in {trace.span_ns / 1e6:,.1f} ms, {trace.span_ns / 1e6 / num_steps:,.2f} ms a step",
        f"the card was idle for {100 * still_ns / trace.span_ns:.2f} % of it, {still_ns / 1e3 / num_steps:,.0f} µs "
        f"a step; {len(trace.gaps_ns)} gaps of {_GAP_NS / 1e3:.0f} µs or more, the longest: "
        + (", ".join(f"{gap / 1e3:,.0f}" for gap in trace.gaps_ns[:5]) + " µs" if trace.gaps_ns else "none"),
        *(
            f"waits of {who}: {each.count / num_steps:.2f} a step, {each.mean_ns / 1e3:,.0f} µs each"
            for who, each in waits.items()
        ),
    ]
