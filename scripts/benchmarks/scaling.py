"""`scaling`: dependence on the size of the data set and the length of a run, on one device."""

from scripts.benchmarks.bench import Bench, Candidate, Case, Settings, Unit
from scripts.benchmarks.data import SPLIT, Say
from scripts.benchmarks.sparse_store import ensure_sparse, sparse_folder

_NUMS_IMAGES = (1_000, 100_000, 1_000_000, 10_000_000, 100_000_000)
_NUM_STEPS = (2_000, 20_000)
_BATCH = "128"
# The base is the largest set or the longest run; it should be at most a twentieth slower than any other.
_FLAT = 0.95
_US_A_STEP = Unit("µs a step", 1e6 * int(_BATCH), is_time=True)


def _cases(settings: Settings) -> list[Case]:
    def arguments(num_images: int, warm_steps: int, model: str = "perceptron") -> tuple[str, ...]:
        data = str(sparse_folder(settings, num_images))
        return "packed", data, SPLIT, model, _BATCH, str(warm_steps)

    def candidate(name: str, base: str, arguments: tuple[str, ...]) -> Candidate:
        return Candidate(name, "stream_training.py", arguments, target=None if name == base else _FLAT)

    largest, longest = f"{_NUMS_IMAGES[-1]:,}", f"after {_NUM_STEPS[-1]:,}"

    def prepare_all(say: Say) -> None:
        for num_images in _NUMS_IMAGES:
            ensure_sparse(settings, say, num_images=num_images)

    def prepare_one(say: Say) -> None:
        ensure_sparse(settings, say, num_images=_NUMS_IMAGES[1])

    return [
        Case(
            "images of the data set, resnet8 32 px b128",
            _US_A_STEP,
            largest,
            tuple(candidate(f"{each:,}", largest, arguments(each, 10, "resnet8")) for each in reversed(_NUMS_IMAGES)),
            round_s=3.0,
            prepare=prepare_all,
        ),
        Case(
            "images of the data set, perceptron 32 px b128",
            _US_A_STEP,
            largest,
            tuple(candidate(f"{each:,}", largest, arguments(each, 100)) for each in reversed(_NUMS_IMAGES)),
            prepare=prepare_all,
        ),
        Case(
            "steps of the run, perceptron 32 px b128",
            _US_A_STEP,
            longest,
            tuple(
                candidate(f"after {each:,}", longest, arguments(_NUMS_IMAGES[1], each)) for each in reversed(_NUM_STEPS)
            ),
            prepare=prepare_one,
        ),
    ]


BENCH = Bench("scaling", "step time and memory against the number of images and the length of the run", _cases)
