"""Pack images of a Python program: arrays, files, data sets, generators, splits."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image

from loopfeed import pack

pixels = np.random.default_rng(0).integers(0, 256, (60, 32, 32, 3), np.uint8)
labels, names = np.arange(60) % 3, ["cat", "dog", "ox"]

# %% Arrays: uint8 [N, H, W] or [N, H, W, C] (or PyTorch's [N, C, H, W]), and the number
# of each image's class. A fifth of each class becomes the split val.
done = pack((pixels, labels), "arrays", size=32, classes=names, holdout=0.2)
assert {split: each.manifest.num_images for split, each in done.items()} == {
    "train": 48,
    "val": 12,
}

# %% Files: each with its class, by name or by number.
Path("photographs").mkdir(exist_ok=True)
files = [(Path("photographs") / f"{i:02}.png", names[labels[i]]) for i in range(60)]
for image, (path, _) in zip(pixels, files, strict=True):
    Image.fromarray(image).save(path)
assert pack(files, "files", size=32)["train"].manifest.class_counts == (20, 20, 20)


# %% A data set, as of PyTorch, torchvision or Hugging Face. Its items are
# (image, label), or dicts with "image" and "label".
class Photographs:
    """Files as a data set."""

    classes = names

    def __len__(self) -> int:
        """Return the number of images."""
        return len(files)

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        """Return an image and its class."""
        return Image.open(files[index][0]).convert("RGB"), int(labels[index])


assert pack(Photographs(), "set", size=32)["train"].manifest.classes[2].id == "ox"


# %% A generator, which is read once. Images are arrays, images of Pillow, paths, or the
# bytes of files.
def generate() -> Iterator[tuple[bytes, str]]:
    """Yield the bytes and the class of each file."""
    for path, name in files:
        yield path.read_bytes(), name


assert pack(generate(), "generated", size=32)["train"].manifest.num_images == 60

# %% Splits, of any of these. The same call continues an interrupted pack.
splits = {"train": (pixels[:48], labels[:48]), "val": (pixels[48:], labels[48:])}
pack(splits, "splits", size=32, classes=names)
assert pack(splits, "splits", size=32, classes=names)["val"].was_complete
