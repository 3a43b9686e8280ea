"""A source of images in memory for tests of packing, which can fail at chosen images."""

import hashlib
import io
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import tensorstore as ts
from PIL import Image

from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.pack import PackResult, pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.split_files import PLAN_KEY
from loopfeed.preprocess.sources.listing import SourceImage

CLASSES = (ImageClass("n1", "tench"), ImageClass("n2", "goldfish"), ImageClass("n3", "great white shark"))


@dataclass
class FakeSource:
    """Images ``uint8 [n, H, W, 3]`` served as PNG; ``broken`` ones are truncated, ``raising`` ones raise when read.

    ``forms`` are other formats than PNG, by their names in Pillow.
    """

    images: np.ndarray
    labels: list[int]
    name: str = "train"
    classes: tuple[ImageClass, ...] = CLASSES
    broken: frozenset[int] = frozenset()
    raising: dict[int, BaseException] = field(default_factory=dict)
    forms: dict[int, str] = field(default_factory=dict)
    reads: list[int] = field(default_factory=list)
    weights: np.ndarray | None = None
    groups: np.ndarray | None = None

    def __len__(self):
        return len(self.images)

    def image(self, index):
        return SourceImage(f"{self.classes[self.labels[index]].id}/{index}.png", self.labels[index])

    def key(self, index):
        return self.image(index).name

    def num_bytes(self, index):
        return self.images[index].nbytes

    def read(self, index):
        self.reads.append(index)
        if index in self.raising:
            raise self.raising[index]
        encoded = io.BytesIO()
        Image.fromarray(self.images[index]).save(encoded, self.forms.get(index, "PNG"))
        return encoded.getvalue()[:40] if index in self.broken else encoded.getvalue()

    def digest(self):
        return hashlib.sha256(self.images.tobytes() + bytes(self.labels)).hexdigest()

    def changed(self, **changes):
        return replace(self, **changes, reads=[])


def fake_source(num_images: int, *, size: int = 4, seed: int = 0, **values) -> FakeSource:
    rng = np.random.default_rng(seed)
    images = rng.integers(0, 256, (num_images, size, size, 3), dtype=np.uint8)
    return FakeSource(images, [index % len(CLASSES) for index in range(num_images)], **values)


def settings_for(source: FakeSource, **values) -> PackSettings:
    size = source.images.shape[1]
    return PackSettings(rule=ResizeRule(size=size, resize=size), **({"shard_images": 4} | values))


def pack(source: FakeSource, dest: Path | str, *, context: ts.Context | None = None, **values) -> PackResult:
    """Pack ``source`` at its own size into ``dest``/its name."""
    overwrite = values.pop("overwrite", False)
    location = open_location(str(dest), context=context).child(source.name)
    return pack_split(source, location, settings_for(source, **values), overwrite=overwrite)


def leave_unfinished_split(split: Path) -> None:
    """Create the files of a split whose packing was interrupted at its start."""
    plan = split / PLAN_KEY
    plan.parent.mkdir(parents=True)
    plan.write_text("{}")


def packed_words(source: FakeSource) -> tuple[np.ndarray, np.ndarray]:
    """Return the expected content of the shards, computed by shifts: ``uint32 [N, H, W]`` and labels ``[N]``."""
    good = [index for index in range(len(source)) if index not in source.broken and index not in source.raising]
    rgb = source.images[good].astype(np.uint32)
    words = rgb[..., 0] << 24 | rgb[..., 1] << 16 | rgb[..., 2] << 8
    return words, np.array([source.labels[index] for index in good], np.int32)


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the bytes of every file below ``folder`` by its relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
