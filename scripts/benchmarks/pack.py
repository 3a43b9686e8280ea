"""`pack`: packing JPEG files into shards of 224 px, as `preprocess-imagenet` does."""

import shutil
from collections.abc import Callable
from pathlib import Path

from loopfeed.preprocess.cores import num_cores
from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import ensure_jpegs, jpeg_files

# The start and end of a pack take a negligible part of a data set's time, but a tenth of that of a few hundred files.
_LEAST_IMAGES = 2000


def _cases(settings: Settings) -> list[Case]:
    repeated = settings.folder / "data" / "jpeg-repeated"
    arguments = (str(repeated), str(settings.folder / "data" / "packing"))

    def prepare(say: Callable[[str], None]) -> None:
        _repeat(ensure_jpegs(settings, say), repeated)

    return [
        Case(
            "JPEG to 224 px" if settings.images is None else f"{settings.images.name} to 224 px",
            IMAGES_PER_S,
            "pack",
            (
                Candidate("pack", "pack_images.py", ("pack", *arguments)),
                Candidate("limit: decode, resize", "pack_images.py", ("decode", *arguments), target=0.9),
                Candidate("FFCV, raw", "pack_ffcv.py", (*arguments, str(num_cores())), peer="ffcv", target=1.5),
            ),
            round_s=3.0,
            prepare=prepare,
        )
    ]


def _repeat(images: Path, folder: Path) -> None:
    """Create `folder` again with links to the files of `images`, repeated until there are at least `_LEAST_IMAGES`."""
    shutil.rmtree(folder, ignore_errors=True)
    files = jpeg_files(images)
    for copy in range(-(-_LEAST_IMAGES // max(1, len(files)))):
        for file in files:
            link = folder / file.parent.name / f"{copy}-{file.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())


BENCH = Bench("pack", "JPEG files to shards of 224 px, against decoding and resizing alone", _cases)
