"""WebDataset over tar shards of raw pixels: shards in random order, samples through a buffer of 1,000."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from peer_data import convert_once, labels_of, make_run, open_images, repeated
from protocol import Channel

channel = Channel()

import webdataset  # noqa: E402

SHARD_IMAGES, BUFFER = 256, 1000


def write(array: Path, target: Path) -> None:
    """Write tar files."""
    images = open_images(array)
    target.mkdir()
    with webdataset.ShardWriter(str(target / "%05d.tar"), maxcount=SHARD_IMAGES) as writer:
        for index, (image, label) in enumerate(zip(images, labels_of(len(images)), strict=True)):
            writer.write({"__key__": f"{index:08d}", "rgb": image.tobytes(), "cls": str(label).encode()})


def main(array: Path, batch: int, workers: int) -> None:
    """Serve batches."""
    folder = convert_once(array.with_suffix(".tars"), lambda target: write(array, target))
    shape = open_images(array).shape

    def parse(sample: dict[str, Any]) -> tuple[Any, int]:
        return np.frombuffer(sample["rgb"], np.uint8).reshape(shape[1:]), int(sample["cls"])

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    # Resampled endlessly, as its documentation recommends for training: no worker waits at the end of an epoch.
    data = webdataset.WebDataset(urls, resampled=True, shardshuffle=False).shuffle(BUFFER).map(parse)
    loader = webdataset.WebLoader(data.batched(batch, partial=False), batch_size=None, num_workers=workers)
    run = make_run(repeated(lambda: loader), lambda taken: taken[0].shape, (batch, *shape[1:]), shape[0] // batch)
    channel.ready(batch, versions={"webdataset": version("webdataset")}, facts={"workers": workers})
    channel.serve(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
