"""`loop`: the engine's cost per step, on a tiny network."""

from scripts.benchmarks.bench import Bench, Candidate, Case, Settings, Unit

_SIZES = ((8, 32), (32, 64))
_CHUNK = 16


def _cases(_: Settings) -> list[Case]:
    return [
        Case(
            f"perceptron {3 * size**2}-{hidden}-10 b32",
            Unit("steps/s"),
            f"loopfeed, --chunk {_CHUNK}",
            (
                Candidate(f"loopfeed, --chunk {_CHUNK}", "loop_engine.py", (str(size), str(hidden), str(_CHUNK))),
                Candidate("loopfeed", "loop_engine.py", (str(size), str(hidden), "1")),
                Candidate("Python loop, jax.jit", "loop_jit.py", ("python", str(size), str(hidden)), target=5.0),
                Candidate("limit: resident, silent", "loop_jit.py", ("resident", str(size), str(hidden))),
            ),
        )
        for size, hidden in _SIZES
    ]


BENCH = Bench("loop", "steps of a tiny network by the whole engine, against a Python loop over a jitted step", _cases)
