"""`infeed`: the cost of a pull, without reading data and without using them."""

from scripts.benchmarks.bench import GB_PER_S, Bench, Candidate, Case, Settings, Unit

# Pulls reuse the four buffers of the ring, so copies are measured from the same number of buffers.
_RING = 4


def _cases(_: Settings) -> list[Case]:
    pulls = Unit("µs a pull", 1e6, is_time=True)
    return [
        _case("4 bytes", 1, 1, "pulls", pulls, all_cores=False),
        _case("128×32×32 uint32", 128, 32, "bytes", GB_PER_S, all_cores=False),
        _case("128×224×224 uint32", 128, 224, "bytes", GB_PER_S, all_cores=True),
    ]


def _case(name: str, batch: int, size: int, unit_name: str, unit: Unit, *, all_cores: bool) -> Case:
    sizes = (str(batch), str(size), unit_name)
    num_bytes = 4 * batch * size * size
    copy = (str(num_bytes), "1", str(_RING * num_bytes))
    # If several threads share the copy, the array is copied in rows.
    rows = (str(num_bytes // batch), str(batch), str(_RING * num_bytes))
    candidates = [
        Candidate("inplace", "pulls.py", ("inplace", "infeed", *sizes)),
        Candidate("callback", "pulls.py", ("callback", "infeed", *sizes), target=1.0),
        Candidate("empty inplace call", "pulls.py", ("inplace", "empty", *sizes)),
        Candidate("empty io_callback", "pulls.py", ("callback", "empty", *sizes)),
        Candidate(
            "limit: copy, 1 thread", "memory_copies.py", (*copy, "1", unit_name), target=0.9 if all_cores else None
        ),
    ]
    if all_cores:
        candidates.append(Candidate("limit: copy, all cores", "memory_copies.py", (*rows, "0", unit_name)))
    return Case(name, unit, "inplace", tuple(candidates))


BENCH = Bench("infeed", "a pull of the infeed by either transport, against copies of the same bytes", _cases)
