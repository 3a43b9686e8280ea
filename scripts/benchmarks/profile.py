"""`profile`: what a profile costs per step, outside of the window of steps that it traces and inside it."""

from scripts.benchmarks.bench import Bench, Candidate, Case, Settings, Unit

_SIZES = (("perceptron", 32, 32), ("resnet8", 32, 128), ("convnet8", 32, 128))
# Outside of the window, a profile may cost at most 2 %.
_LEAST_SPEED = 0.98


def _cases(_: Settings) -> list[Case]:
    return [
        Case(
            f"{model} {size} px b{batch}",
            Unit("steps/s"),
            "profile, outside of its window",
            (
                _candidate("profile, outside of its window", model, size, batch, "outside"),
                _candidate("no profile", model, size, batch, "off", target=_LEAST_SPEED),
                _candidate("profile, in its window", model, size, batch, "inside"),
            ),
        )
        for model, size, batch in _SIZES
    ]


def _candidate(name: str, model: str, size: int, batch: int, where: str, target: float | None = None) -> Candidate:
    return Candidate(name, "profiled_training.py", (model, str(size), str(batch), where), target=target)


BENCH = Bench("profile", "steps of a run with a profile, outside of the traced window and inside it", _cases)
