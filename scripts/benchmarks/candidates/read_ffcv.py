"""FFCV's loader over its own file of raw images, kept in the page cache; random order."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_data import convert_once, labels_of, make_run, open_images, repeated
from protocol import Channel

channel = Channel()

from ffcv.fields import IntField, RGBImageField  # noqa: E402
from ffcv.fields.basics import IntDecoder  # noqa: E402
from ffcv.fields.rgb_image import SimpleRGBImageDecoder  # noqa: E402
from ffcv.loader import Loader, OrderOption  # noqa: E402
from ffcv.transforms import Squeeze, ToTensor  # noqa: E402
from ffcv.writer import DatasetWriter  # noqa: E402


class Images:
    """A data set of single images with their labels."""

    def __init__(self, array: Path) -> None:
        self._images = open_images(array)
        self._labels = labels_of(len(self._images))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Any, int]:
        """Return a copy of an image and its label."""
        return self._images[index].copy(), int(self._labels[index])


def write(array: Path, target: Path) -> None:
    """Write FFCV's file."""
    fields = {"image": RGBImageField(write_mode="raw"), "label": IntField()}
    DatasetWriter(str(target), fields, num_workers=2).from_indexed_dataset(Images(array))


def main(array: Path, batch: int, workers: int) -> None:
    """Serve batches."""
    file = convert_once(array.with_suffix(".beton"), lambda target: write(array, target))
    loader = Loader(
        str(file),
        batch_size=batch,
        num_workers=workers,
        order=OrderOption.RANDOM,
        os_cache=True,
        drop_last=True,
        pipelines={"image": [SimpleRGBImageDecoder(), ToTensor()], "label": [IntDecoder(), ToTensor(), Squeeze()]},
    )
    shape = open_images(array).shape
    run = make_run(repeated(lambda: loader), lambda taken: taken[0].shape, (batch, *shape[1:]), 2 * shape[0] // batch)
    channel.ready(batch, versions={"ffcv": version("ffcv"), "torch": version("torch")}, facts={"workers": workers})
    channel.serve(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
