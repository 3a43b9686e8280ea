"""`pack`: JPEG files to packed shards of 224 px, as `preprocess-imagenet` does it."""

from functools import partial

from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import ensure_jpegs, jpegs_folder


def _cases(settings: Settings) -> list[Case]:
    arguments = (str(jpegs_folder(settings)), str(settings.folder / "data" / "packing"))
    return [
        Case(
            "JPEG to 224 px" if settings.images is None else f"{settings.images.name} to 224 px",
            IMAGES_PER_S,
            "pack",
            (
                Candidate("pack", "pack_images.py", ("pack", *arguments)),
                Candidate("limit: decode, resize", "pack_images.py", ("decode", *arguments), target=0.9),
            ),
            round_s=3.0,
            prepare=partial(ensure_jpegs, settings),
        )
    ]


BENCH = Bench("pack", "JPEG files to shards of 224 px, against decoding and resizing alone", _cases)
