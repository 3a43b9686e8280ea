"""Reading a container by its own library: webdataset and datasets with Pillow's decoding and resizing, or numpy.

Runs on the Python of the peer `containers`, without loopfeed; numpy on any.
"""

import io
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from protocol import Channel, timed, versions_of

channel = Channel()
_RESIZE, _CROP = 256, 224


def cropped(image: Any) -> Any:
    """Return the central square of an image, as preprocess-imagenet packs it: uint8 [224, 224, 3]."""
    image = image.convert("RGB")
    scale = _RESIZE / min(image.size)
    image = image.resize((round(image.width * scale), round(image.height * scale)), 3)  # bicubic
    left, top = (image.width - _CROP) // 2, (image.height - _CROP) // 2
    return np.asarray(image.crop((left, top, left + _CROP, top + _CROP)))


def of_webdataset(folder: Path, workers: int) -> Callable[[], int]:
    """Return a pass over tar files, with images decoded by worker processes."""
    import webdataset

    urls = [str(path) for path in sorted(folder.glob("*.tar"))]
    # Its own decode("pil") takes classes for numbers.
    data = webdataset.WebDataset(urls, shardshuffle=False).map(
        lambda each: cropped(Image.open(io.BytesIO(each["jpg"])))
    )
    loader = webdataset.WebLoader(data.batched(64), batch_size=None, num_workers=workers)
    return lambda: sum(len(batch) for batch in loader)


def of_datasets(folder: Path, workers: int) -> Callable[[], int]:
    """Return a pass over Parquet files in random order, with images decoded by worker processes."""
    import datasets
    from torch.utils.data import DataLoader

    files = [str(path) for path in sorted(folder.glob("*.parquet"))]
    data = datasets.load_dataset("parquet", data_files=files, split="train", cache_dir=str(folder / ".cache"))
    data = data.with_transform(lambda rows: {"pixels": [cropped(each) for each in rows["image"]]})
    loader = DataLoader(data, 64, shuffle=True, num_workers=workers, collate_fn=list)
    return lambda: sum(len(batch) for batch in loader)


def of_numpy(folder: Path, workers: int) -> Callable[[], int]:  # noqa: ARG001
    """Return a pass over the images of an .npz file in random order, after loading it."""
    path = next(folder.glob("*.npz"))

    def read() -> int:
        with np.load(path) as arrays:
            images = arrays["x_train"]
        order = np.random.default_rng(0).permutation(len(images))
        return sum(len(images[index].copy()) > 0 for index in order)

    return read


READERS = {"webdataset": of_webdataset, "datasets": of_datasets, "numpy": of_numpy}


def main(library: str, folder: Path, workers: int) -> None:
    """Serve passes over all images."""
    read = READERS[library](folder, workers)
    count = read()
    versions = versions_of(library)
    channel.ready(count, versions=versions, facts={"images": count, "workers": workers})
    channel.serve(timed(lambda num_units: [read() for _ in range(num_units)]))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
