"""`stream`: the cost of feeding a training from disk."""

from functools import partial

from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import SPLIT, ensure_shards, shards_folder

# model, side in pixels, images per batch
_CASES = (("resnet18", 64, 16), ("resnet8", 32, 128))
_NUM_IMAGES = 4096
_WARM_STEPS = "3"


def _cases(settings: Settings) -> list[Case]:
    return [_case(settings, *sizes) for sizes in _CASES]


def _case(settings: Settings, model: str, size: int, batch: int) -> Case:
    data = shards_folder(settings, num_images=_NUM_IMAGES, size=size)
    arguments = (str(data), SPLIT, model, str(batch), _WARM_STEPS)
    return Case(
        f"{model} {size} px b{batch} from shards",
        IMAGES_PER_S,
        "from shards",
        (
            Candidate("from shards", "stream_training.py", ("packed", *arguments)),
            Candidate("limit: nothing to read", "stream_training.py", ("ready", *arguments), target=0.98),
        ),
        round_s=3.0,
        prepare=partial(ensure_shards, settings, num_images=_NUM_IMAGES, size=size),
    )


BENCH = Bench("stream", "training from packed shards, against the same program with nothing to read", _cases)
