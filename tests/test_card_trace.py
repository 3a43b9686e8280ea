"""Reading a profile of a card; the profile is written by hand, because there is no card."""

import pytest
from jax.profiler import ProfileData

from scripts.benchmarks.card_trace import Waits, describe, read_trace

US = 10**6  # picoseconds


def line(name, *events):
    """A line of a plane: its events as (name's number, begin in µs, length in µs)."""
    written = "".join(
        f"events {{ metadata_id: {number} offset_ps: {round(start * US)} duration_ps: {round(length * US)} }}\n"
        for number, start, length in events
    )
    return f'lines {{ name: "{name}" timestamp_ns: 1000\n{written}}}\n'


def plane(name, names, *lines):
    metadata = "".join(
        f'event_metadata {{ key: {number} value {{ id: {number} name: "{each}" }} }}\n'
        for number, each in enumerate(names)
    )
    return f'planes {{ name: "{name}"\n{"".join(lines)}{metadata}}}\n'


def profile(*planes):
    return ProfileData.from_text_proto("".join(planes))


KERNELS = ("conv", "MemcpyD2D", "MemcpyH2D")


def test_busy_time_is_the_union_of_all_kernel_streams_without_copies():
    card = plane(
        "/device:GPU:0",
        KERNELS,
        line("Stream #13(Compute,MemcpyD2D)", (0, 0, 100), (1, 100, 20), (0, 200, 50), (0, 1000, 10)),
        line("Stream #14(Compute)", (0, 210, 60)),
        line("Stream #20(MemcpyH2D)", (2, 0, 5000)),
        line("XLA Ops", (0, 0, 9000)),
    )
    trace = read_trace(profile(card, plane("/device:GPU:1", KERNELS, line("Stream #1(Compute)", (0, 0, 10**5)))))
    assert trace.span_ns == pytest.approx(1010e3)
    assert trace.busy_ns == pytest.approx((120 + 70 + 10) * 1e3)
    assert trace.gaps_ns == pytest.approx((730e3, 80e3))
    assert trace.xla_waits == Waits(0, 0)


def test_waits_are_counted_over_all_host_threads():
    names = ("CudaStream::BlockHostUntilDone", "cuLaunchKernel")
    host = plane("/host:CPU", names, line("main", (0, 0, 10), (1, 10, 5)), line("other", (0, 400, 30)))
    card = plane("/device:GPU:0", KERNELS, line("Stream #1(Compute)", (0, 0, 1000)))
    trace = read_trace(profile(host, card))
    assert trace.xla_waits == Waits(2, 40e3)
    told = describe(trace, {"the thread that copies": Waits(5, 1e6)}, 10)
    assert told[0] == "10 steps in 1.0 ms, 0.10 ms a step"
    assert told[1].startswith("the card was idle for 0.00 % of it, 0 µs a step; 0 gaps of 20 µs or more")
    assert told[2:] == [
        "waits of XLA, for a stream: 0.20 a step, 20 µs each",
        "waits of the thread that copies: 0.50 a step, 200 µs each",
    ]


def test_a_profile_without_a_card_is_refused_with_its_content():
    with pytest.raises(ValueError, match="streams of /device:GPU:0 with kernels, found /host:CPU"):
        read_trace(profile(plane("/host:CPU", ("cuStreamSynchronize",), line("main", (0, 0, 1)))))
