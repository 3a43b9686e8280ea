"""`loop`: what the engine costs around a step, on a network that is next to nothing."""

from scripts.benchmarks.bench import Bench, Candidate, Case, Settings, Unit


def _cases(_: Settings) -> list[Case]:
    return [
        Case(
            "perceptron 3072-64-10 b32",
            Unit("steps/s"),
            "feedloop",
            (
                Candidate("feedloop", "loop_engine.py"),
                Candidate("Python loop, jax.jit", "loop_jit.py", ("python",), target=5.0),
                Candidate("limit: resident, silent", "loop_jit.py", ("resident",)),
            ),
        )
    ]


BENCH = Bench("loop", "steps of a tiny network by the whole engine, against a Python loop over a jitted step", _cases)
