"""torch.utils.data.DataLoader over a memory-mapped array, a batch fetched by one fancy index; 0 workers or several."""

import sys
from pathlib import Path
from typing import Any

from peer_data import labels_of, make_run, open_images, repeated
from protocol import Channel

channel = Channel()

import torch  # noqa: E402
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler  # noqa: E402


class Images(Dataset):  # type: ignore[type-arg,unused-ignore]
    """A data set that returns a batch for a list of indices."""

    def __init__(self, array: Path) -> None:
        self._array, self._images = array, open_images(array)
        self._labels = labels_of(len(self._images))

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, indices: list[int]) -> tuple[Any, Any]:
        """Return a copy of the images and their labels."""
        return torch.from_numpy(self._images[indices]), torch.from_numpy(self._labels[indices])


def main(array: Path, batch: int, workers: int) -> None:
    """Serve batches."""
    images = Images(array)
    sampler = BatchSampler(RandomSampler(images), batch, drop_last=True)
    loader = DataLoader(images, sampler=sampler, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    shape = (batch, *open_images(array).shape[1:])
    run = make_run(repeated(lambda: loader), lambda taken: taken[0].shape, shape, len(images) // batch)
    channel.ready(batch, versions={"torch": torch.__version__}, facts={"workers": workers})
    channel.serve(run)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
