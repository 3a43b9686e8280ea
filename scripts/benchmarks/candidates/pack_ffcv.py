"""FFCV's `DatasetWriter`: JPEG files to one file of raw images of 224 px, as its ImageNet example makes them.

Each image is decoded in full, its shorter side resized to 256 px by Pillow's antialiased bicubic filter and its central
224 px taken, which gives the pixels of Loopfeed's packing except for rounding.
"""

import sys
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from protocol import Channel, timed, versions_of

channel = Channel()

from ffcv.fields import IntField, RGBImageField  # noqa: E402
from ffcv.writer import DatasetWriter  # noqa: E402

RESIZE, SIZE = 256, 224


class Photographs:
    """A data set that decodes and resizes one file at a time, with the number of its class."""

    def __init__(self, files: list[Path]) -> None:
        self._files = files
        self._labels = {name: label for label, name in enumerate(sorted({file.parent.name for file in files}))}

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return uint8 [224, 224, 3] and the label."""
        file = self._files[index]
        with Image.open(file) as opened:
            image = opened.convert("RGB")
        scale = RESIZE / min(image.size)
        width, height = (max(RESIZE, int(side * scale)) for side in image.size)
        image = image.resize((width, height), Image.Resampling.BICUBIC)
        left, top = (width - SIZE) // 2, (height - SIZE) // 2
        return np.array(image.crop((left, top, left + SIZE, top + SIZE))), self._labels[file.parent.name]


def main(images: Path, dest: Path, workers: int) -> None:
    """Serve passes over all images."""
    files = sorted(path for path in images.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    dest.mkdir(parents=True, exist_ok=True)

    def write(num_units: int) -> None:
        for _ in range(num_units):
            fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
            writer = DatasetWriter(str(dest / "packed.beton"), fields, num_workers=workers)
            writer.from_indexed_dataset(Photographs(files))

    write(1)
    channel.ready(len(files), versions=versions_of("ffcv"), facts={"images": len(files), "workers": workers})
    channel.serve(timed(write))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
