"""The images that the benchmarks read, created once in `.bench/data/` as an array, as packed shards and as JPEG files.

The peers convert the array to their own formats; `preprocess` packs the shards from it.
"""

import hashlib
import io
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from PIL import Image

from loopfeed.preprocess.cores import num_cores
from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.pixels import Layout
from loopfeed.preprocess.shards.classes import ImageClass
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.sources.listing import SourceImage
from scripts.benchmarks.bench import Settings

type Say = Callable[[str], None]

NUM_CLASSES = 1000
SPLIT = "train"
_JPEG_SIZE = (500, 375)
_JPEG_QUALITY = 92
_NUM_JPEGS = 1000
_JPEG_CLASSES = 10


@dataclass(frozen=True)
class Images:
    """The images of a case, and how they are packed; the labels are those of `ArraySource`."""

    num_images: int
    size: int
    checksum: bool = True
    layout: Layout = "packed"

    def array_file(self, settings: Settings) -> Path:
        """Return the path of the images as an array, uint8 [num_images, size, size, 3], which may not exist yet."""
        origin = "drawn" if settings.images is None else hashlib.sha256(str(settings.images).encode()).hexdigest()[:12]
        return settings.folder / "data" / f"{origin}-{self.num_images}-{self.size}.npy"

    def shards_folder(self, settings: Settings) -> Path:
        """Return the folder of the images as packed shards, in the split `SPLIT`, which may not exist yet."""
        kind = f"{'crc' if self.checksum else 'plain'}{'-dense' * (self.layout == 'dense')}"
        return self.array_file(settings).with_name(f"{self.array_file(settings).stem}-{kind}")


def ensure_array(settings: Settings, say: Say, images: Images) -> Path:
    """Create the array if it does not exist: repeated photographs if there are some, otherwise noise."""
    path, num_images, size = images.array_file(settings), images.num_images, images.size
    if path.exists():
        return path
    say(f"making {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    array = open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=(num_images, size, size, 3))
    if settings.images is None:
        random = np.random.default_rng(0)
        for index in range(num_images):
            array[index] = random.integers(256, size=(size, size, 3), dtype=np.uint8)
    else:
        rule = ResizeRule(size=size, resize=max(size, size * 8 // 7))
        photographs = list(_decoded(settings.images, num_images, rule))
        if not photographs:
            raise ValueError(f"--images must contain JPEG files in class folders, but {settings.images} contains none")
        for index, image in enumerate(islice(cycle(photographs), num_images)):
            array[index] = image
    array.flush()
    del array
    unfinished.rename(path)
    return path


def ensure_shards(settings: Settings, say: Say, images: Images) -> Path:
    """Pack the images if that has not been done; an interrupted pack is continued."""
    folder = images.shards_folder(settings)
    if not (folder / SPLIT / "manifest.json").exists():
        array = ensure_array(settings, say, images)
        say(f"packing {folder}")
        rule = ResizeRule(size=images.size, resize=images.size)
        how = PackSettings(rule=rule, checksum=images.checksum, layout=images.layout, num_workers=num_cores())
        pack_split(ArraySource(array), open_location(str(folder)).child(SPLIT), how)
    return folder


def ensure_jpegs(settings: Settings, say: Say) -> Path:
    """Return a folder of class folders of JPEG files: the user's, otherwise one with drawn files of a typical size."""
    folder = jpegs_folder(settings)
    if folder.exists():
        return folder
    say(f"drawing {folder}")
    unfinished = folder.with_name("jpeg.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    for label in range(_JPEG_CLASSES):
        (unfinished / f"class{label}").mkdir(parents=True)
    with ThreadPoolExecutor(num_cores()) as pool:
        list(pool.map(lambda index: _draw_jpeg(unfinished, index), range(_NUM_JPEGS)))
    unfinished.rename(folder)
    return folder


def jpegs_folder(settings: Settings) -> Path:
    """Return the folder of the JPEG files, which may not exist yet."""
    return settings.folder / "data" / "jpeg" if settings.images is None else settings.images


def jpeg_files(folder: Path) -> list[Path]:
    """Return the JPEG files of a folder of class folders, sorted."""
    return sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))


class ArraySource:
    """An array of images as a source to pack, each as a BMP file, which takes almost no time to decode."""

    name = SPLIT
    classes = tuple(ImageClass(f"c{label:04d}", f"class {label}") for label in range(NUM_CLASSES))

    def __init__(self, path: Path) -> None:
        self._path = path

    @cached_property
    def _images(self) -> np.ndarray:
        return np.load(self._path, mmap_mode="r")

    def __len__(self) -> int:
        return len(self._images)

    def image(self, index: int) -> SourceImage:
        """Return the name and label of an image."""
        return SourceImage(f"{index}.bmp", index % NUM_CLASSES)

    def num_bytes(self, index: int) -> int:
        """Return the size of an image's pixels in bytes."""
        return int(self._images[index].nbytes)

    def read(self, index: int) -> bytes:
        """Return an image as the bytes of a BMP file."""
        file = io.BytesIO()
        Image.fromarray(np.asarray(self._images[index])).save(file, "BMP")
        return file.getvalue()

    def digest(self) -> str:
        """Return a digest of the array's name and shape, which determine its content."""
        return hashlib.sha256(f"{self._path.name} {self._images.shape}".encode()).hexdigest()


def _decoded(folder: Path, most: int, rule: ResizeRule) -> list[np.ndarray]:
    def decode(path: Path) -> np.ndarray | None:
        try:
            return decode_image(path.read_bytes(), rule)
        except DecodeError:
            return None

    with ThreadPoolExecutor(num_cores()) as pool:
        return [image for image in pool.map(decode, jpeg_files(folder)[:most]) if image is not None]


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
