"""`startup`: start-up times in seconds, each measured on a whole process."""

from scripts.benchmarks.bench import Bench, Candidate, Case, Settings, Unit

_SECONDS = Unit("s", is_time=True)


def _cases(_: Settings) -> list[Case]:
    def candidate(name: str, kind: str) -> Candidate:
        return Candidate(name, "processes.py", (kind,))

    return [
        Case(
            "imports and help",
            _SECONDS,
            "run-train --help",
            (
                candidate("run-train --help", "help"),
                candidate("import loopfeed", "engine"),
                candidate("from loopfeed import train", "train"),
                candidate("import jax", "jax"),
                candidate("limit: python -c pass", "nothing"),
            ),
        ),
        Case(
            "first loss, resnet50 64 px b16",
            _SECONDS,
            "program from the cache",
            (
                candidate("program from the cache", "cached"),
                candidate("program compiled", "cold"),
            ),
        ),
    ]


BENCH = Bench("startup", "imports, --help, and the way to a training's first loss with and without the cache", _cases)
