"""The space that packed images take on disk and in memory. Reads sizes of files, but no images."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from loopfeed.preprocess.pixels import words_of_row
from loopfeed.preprocess.shards.arrays import PIXELS
from loopfeed.preprocess.shards.manifest import Manifest
from loopfeed.preprocess.shards.reader import ShardSplit
from loopfeed.preprocess.shards.shard_index import CHECKSUM_BYTES, ENTRY
from loopfeed.preprocess.shards.targets import num_words

# ILSVRC 2012: Russakovsky et al. (2015), arXiv:1409.0575, table 2.
IMAGENET_TRAIN, IMAGENET_VAL = 1_281_167, 50_000
# A label, the checksum of an image beside its pixels and in `checksums/`, and its entry in the index of the shard.
_OTHER_BYTES = 2 + 2 * CHECKSUM_BYTES + ENTRY.size


@dataclass(frozen=True)
class Volume:
    """The size of a set of packed images.

    Attributes:
        num_images: number of images.
        image_bytes: bytes of one image in memory.
        stored_bytes: bytes of one image in the shard files, on average.
        disk_bytes: bytes of all files.
        source: what the numbers come from, in words.
    """

    num_images: int
    image_bytes: int
    stored_bytes: float
    disk_bytes: int
    source: str


def imagenet_volume(size: int, num_images: int = IMAGENET_TRAIN) -> Volume:
    """Return the size of a split of ImageNet-1k, packed as raw pixels with checksums.

    Args:
        size: height and width of the images in pixels.
        num_images: number of images of the split.
    """
    image_bytes = 4 * size * words_of_row(size, "packed")
    disk_bytes = num_images * (image_bytes + _OTHER_BYTES)
    formula = f"ImageNet-1k at {size} px, 4·{size}² + {_OTHER_BYTES} bytes an image"
    return Volume(num_images, image_bytes, image_bytes + CHECKSUM_BYTES, disk_bytes, formula)


def split_volume(split: ShardSplit) -> Volume:
    """Return the size of a packed split: of its files in a local folder, else what its manifest says."""
    manifest, folder = split.manifest, split.location.local_path
    if folder is not None:
        pixels = _size_of(path for path in (folder / PIXELS).rglob("*"))
        return Volume(
            manifest.num_images,
            manifest.image_bytes,
            pixels / manifest.num_images,
            _size_of(folder.rglob("*")),
            "the files of the pack",
        )
    pixels = sum(_most_bytes(manifest, shard) for shard in range(manifest.num_shards))
    source = "the manifest" if manifest.codec == "raw" else "the manifest: at most, because the shards are compressed"
    disk_bytes = pixels + manifest.num_images * (_OTHER_BYTES + _target_bytes(manifest))
    return Volume(manifest.num_images, manifest.image_bytes, pixels / manifest.num_images, disk_bytes, source)


def _target_bytes(manifest: Manifest) -> int:
    """Return the bytes of an image's targets, which several classes or numbers have instead of a label."""
    targets = manifest.targets
    return 0 if targets is None else 4 * num_words(targets.kind, manifest.num_classes)


def _most_bytes(manifest: Manifest, shard: int) -> int:
    size = manifest.shard_bytes(shard)
    return manifest.max_shard_bytes if size is None else size


def _size_of(paths: Iterable[Path]) -> int:
    return sum(path.stat().st_size for path in paths if path.is_file())
