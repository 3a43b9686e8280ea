"""MosaicML Streaming over MDS shards of raw pixels, shuffled, through torch's DataLoader."""

import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peer_data import convert_once, labels_of, make_run, open_images, repeated
from protocol import Channel

channel = Channel()

from streaming import MDSWriter, StreamingDataLoader, StreamingDataset  # noqa: E402


def write(array: Path, target: Path) -> None:
    """Write MDS shards without compression."""
    images = open_images(array)
    sides = ",".join(map(str, images.shape[1:]))
    columns = {"image": f"ndarray:uint8:{sides}", "label": "int"}
    with MDSWriter(out=str(target), columns=columns) as writer:
        for image, label in zip(images, labels_of(len(images)), strict=True):
            writer.write({"image": image.copy(), "label": int(label)})


def main(array: Path, batch: int, workers: int) -> None:
    """Serve batches."""
    folder = convert_once(array.with_suffix(".mds"), lambda target: write(array, target))
    shape = open_images(array).shape
    data: Any = StreamingDataset(local=str(folder), shuffle=True, batch_size=batch)
    loader = StreamingDataLoader(
        data, batch_size=batch, num_workers=workers, drop_last=True, persistent_workers=workers > 0
    )
    run = make_run(repeated(lambda: loader), lambda taken: taken["image"].shape, (batch, *shape[1:]), shape[0] // batch)
    versions = {"mosaicml-streaming": version("mosaicml-streaming"), "torch": version("torch")}
    channel.ready(batch, versions=versions, facts={"workers": workers})
    channel.serve(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
