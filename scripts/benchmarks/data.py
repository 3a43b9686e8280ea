"""The images that the benchmarks read, created once in `.bench/data/` as an array, as packed shards and as JPEG files.

The peers convert the array to their own formats; `preprocess` packs the shards from it.
"""

import io
import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from PIL import Image

from loopfeed.preprocess.control_groups import num_cores
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.pixels import Layout
from loopfeed.preprocess.shards import arrays
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.location import Location, open_location
from loopfeed.preprocess.shards.manifest import MANIFEST_KEY
from loopfeed.preprocess.shards.reader import read_manifest
from loopfeed.preprocess.shards.split_arrays import open_numbers
from loopfeed.preprocess.sources.listing import ListedSplit, Listing
from scripts.benchmarks.bench import Settings

type Say = Callable[[str], None]

NUM_CLASSES = 1000
SPLIT = "train"
NUMBERS = arrays.NUMBERS_PER_SHARD
"""Images whose labels are in one file. Sparse splits have multiples of so many images."""

# Without names, which cannot be the same in all files, and which training does not read.
_SPARSE_VERSION, _SPARSE_ARRAYS = 2, (arrays.PIXELS, arrays.LABELS, arrays.CHECKSUMS)
_JPEG_SIZE = (500, 375)
_JPEG_QUALITY = 92
_NUM_JPEGS = 1000
_JPEG_CLASSES = 10
_SPARSE_SIZE, _SPARSE_CLASSES = 32, 10
_SPARSE_SHARD = PackSettings(rule=ResizeRule(size=_SPARSE_SIZE, resize=_SPARSE_SIZE)).resolved_shard_images


@dataclass(frozen=True)
class Images:
    """The images of a case, and how they are packed; the labels are those of `_array_split`."""

    num_images: int
    size: int
    layout: Layout = "packed"

    def array_file(self, settings: Settings) -> Path:
        """Return the path of the images as an array, uint8 [num_images, size, size, 3], which may not exist yet."""
        return settings.folder / "data" / f"drawn-{self.num_images}-{self.size}.npy"

    def shards_folder(self, settings: Settings) -> Path:
        """Return the folder of the images as packed shards, in the split `SPLIT`, which may not exist yet."""
        return self.array_file(settings).with_name(f"{self.array_file(settings).stem}-{self.layout}")


def ensure_array(settings: Settings, say: Say, images: Images) -> Path:
    """Create the array, of noise, if it does not exist."""
    path, shape = images.array_file(settings), (images.size, images.size, 3)
    if path.exists():
        return path
    say(f"making {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    array = open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=(images.num_images, *shape))
    random = np.random.default_rng(0)
    for index in range(images.num_images):
        array[index] = random.integers(256, size=shape, dtype=np.uint8)
    array.flush()
    del array
    unfinished.rename(path)
    return path


def ensure_shards(settings: Settings, say: Say, images: Images) -> Path:
    """Pack the images if that has not been done; an interrupted pack is continued."""
    folder = images.shards_folder(settings)
    if not (folder / SPLIT / MANIFEST_KEY).exists():
        array = ensure_array(settings, say, images)
        say(f"packing {folder}")
        rule = ResizeRule(size=images.size, resize=images.size)
        how = PackSettings(rule=rule, layout=images.layout, num_workers=num_cores())
        pack_split(_array_split(array), open_location(str(folder)).child(SPLIT), how)
    return folder


class _BitmapStore:
    """The images of an array as BMP files, which take almost no time to decode."""

    def __init__(self, path: Path) -> None:
        self.images = np.load(path, mmap_mode="r")

    def read(self, name: str, offset: int, size: int) -> bytes:  # noqa: ARG002
        """Return the bytes of a file."""
        file = io.BytesIO()
        Image.fromarray(np.asarray(self.images[int(name.removesuffix(".bmp"))])).save(file, "BMP")
        return file.getvalue()

    def close(self) -> None:
        """Do nothing."""


def _array_split(path: Path) -> ListedSplit:
    """Return an array of images as a split to pack."""
    store = _BitmapStore(path)
    classes = tuple(ImageClass(f"c{label:04d}", f"class {label}") for label in range(NUM_CLASSES))
    listing = Listing(classes)
    for index, image in enumerate(store.images):
        listing.add("", f"{index}.bmp", index % NUM_CLASSES, image.nbytes)
    return ListedSplit(SPLIT, classes, listing, store, np.arange(len(listing)))


def sparse_folder(settings: Settings, num_images: int) -> Path:
    """Return the folder of the split that `ensure_sparse` creates, which may not exist yet."""
    return settings.folder / "data" / f"sparse-{num_images}-by-{_SPARSE_SHARD}-v{_SPARSE_VERSION}"


def ensure_sparse(settings: Settings, say: Say, nums_images: Sequence[int]) -> None:
    """Create packed splits of 32 px, any multiples of `NUMBERS` images, almost without disk space, if there are none.

    Every shard file is a link to a single one. To a reader a split is complete: it has every file, every index and
    checksum, and a manifest of the full length.
    """
    for num_images in nums_images:
        folder = sparse_folder(settings, num_images)
        if not (folder / SPLIT / MANIFEST_KEY).exists():
            whole = open_location(str(ensure_shards(settings, say, Images(_SPARSE_SHARD, _SPARSE_SIZE))))
            say(f"making {folder}")
            shutil.rmtree(folder, ignore_errors=True)
            _write_sparse(folder, whole, num_images)


def _write_sparse(folder: Path, whole: Location, num_images: int) -> None:
    """Write a split that repeats the one shard of another."""
    split, manifest = open_location(str(folder)).child(SPLIT), read_manifest(whole, SPLIT)
    stored = open_numbers(whole.child(SPLIT), manifest, arrays.CHECKSUMS)
    assert stored is not None
    checksums = np.resize(stored.read(np.arange(_SPARSE_SHARD), time.monotonic() + 60), NUMBERS)
    labels = np.arange(NUMBERS, dtype=np.uint16) % _SPARSE_CLASSES
    shape = (_SPARSE_SIZE, _SPARSE_SIZE)
    pixels = arrays.pixels_metadata(num_images, *shape, shard_images=_SPARSE_SHARD, codec="raw", checksum=True)
    arrays.create_array(split, arrays.PIXELS, pixels)
    first = Path(str(whole.local_path)) / SPLIT / arrays.PIXELS / arrays.shard_key(0, 3)
    _link(folder / SPLIT / arrays.PIXELS, first, range(num_images // _SPARSE_SHARD), rank=3)
    counts = [
        num_images // _SPARSE_CLASSES + (label < num_images % _SPARSE_CLASSES) for label in range(_SPARSE_CLASSES)
    ]
    sparse = replace(
        manifest,
        format_version=_SPARSE_VERSION,
        column_digests={},
        name_bytes=0,
        metadata_digests={name: manifest.metadata_digests[name] for name in _SPARSE_ARRAYS},
        num_images=num_images,
        classes=manifest.classes[:_SPARSE_CLASSES],
        class_counts=tuple(counts),
        shard_digests=manifest.shard_digests * (num_images // _SPARSE_SHARD),
        label_digests=_write_numbers(split, arrays.LABELS, labels, num_images),
        checksum_digests=_write_numbers(split, arrays.CHECKSUMS, checksums, num_images),
    )
    split.write(MANIFEST_KEY, sparse.to_json().encode())


def _write_numbers(split: Location, name: str, numbers: np.ndarray, num_images: int) -> tuple[str, ...]:
    """Write an array whose files all have the same numbers; return the digest of each file."""
    arrays.write_array(split, name, arrays.column_metadata(name, NUMBERS)).write(numbers).result(timeout=60)
    folder, num_files = Path(str(split.local_path)) / name, num_images // NUMBERS
    _link(folder, folder / arrays.shard_key(0, 1), range(1, num_files), rank=1)
    arrays.create_array(split, name, arrays.column_metadata(name, num_images))
    return (arrays.words_digest([numbers]),) * num_files


def _link(array: Path, target: Path, shards: range, *, rank: int) -> None:
    for shard in shards:
        link = array / arrays.shard_key(shard, rank)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(target)


def ensure_jpegs(settings: Settings, say: Say, folder: Path, least: int) -> None:
    """Create a folder of class folders with links to JPEG files, repeated until there are `least`.

    They are the user's, otherwise drawn ones of a typical size.
    """
    files = jpeg_files(settings.images or _drawn_jpegs(settings, say))
    shutil.rmtree(folder, ignore_errors=True)
    for copy in range(-(-least // max(1, len(files)))):
        for file in files:
            link = folder / file.parent.name / f"{copy}-{file.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())


def jpeg_files(folder: Path) -> list[Path]:
    """Return the JPEG files of a folder of class folders, sorted."""
    return sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))


def _drawn_jpegs(settings: Settings, say: Say) -> Path:
    folder = settings.folder / "data" / "jpeg"
    if not folder.exists():
        say(f"drawing {folder}")
        unfinished = folder.with_name("jpeg.unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        for label in range(_JPEG_CLASSES):
            (unfinished / f"class{label}").mkdir(parents=True)
        with ThreadPoolExecutor(num_cores()) as pool:
            list(pool.map(lambda index: _draw_jpeg(unfinished, index), range(_NUM_JPEGS)))
        unfinished.rename(folder)
    return folder


def _draw_jpeg(folder: Path, index: int) -> None:
    """Draw a smooth random field with grain, which compresses about as well as a photograph."""
    random = np.random.default_rng(index)
    width, height = _JPEG_SIZE
    image = np.zeros((height, width, 3))
    for cells, strength in ((4, 60.0), (16, 25.0), (64, 10.0)):
        coarse = np.clip(128 + strength * random.normal(size=(cells, cells, 3)), 0, 255).astype(np.uint8)
        image += np.asarray(Image.fromarray(coarse).resize(_JPEG_SIZE, Image.Resampling.BICUBIC)).astype(float) - 128
    image += 128 + random.normal(0, 6, (height, width, 1))
    drawn = Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))
    drawn.save(folder / f"class{index % _JPEG_CLASSES}" / f"{index:05d}.jpg", quality=_JPEG_QUALITY)
