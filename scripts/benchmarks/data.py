"""The images that the benches read: made once, below `.bench/data/`, as an array, as packed shards and as JPEG files.

The array is for the peers, each of which writes it in its own format; the shards are packed from it by `preprocess`.
"""

import hashlib
import io
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from itertools import cycle, islice
from pathlib import Path

import numpy as np
from numpy.lib.format import open_memmap
from PIL import Image

from preprocess.cores import num_cores
from preprocess.decoding.decode import DecodeError, ResizeRule, decode_image
from preprocess.packing.pack import pack_split
from preprocess.packing.plan import PackSettings
from preprocess.pixels import Layout
from preprocess.shards.classes import ImageClass
from preprocess.shards.location import open_location
from preprocess.sources.listing import SourceImage
from scripts.benchmarks.bench import Settings

type Say = Callable[[str], None]

NUM_CLASSES = 1000
SPLIT = "train"
_JPEG_SIZE = (500, 375)
_JPEG_QUALITY = 92
_NUM_JPEGS = 1000
_JPEG_CLASSES = 10


def array_file(settings: Settings, *, num_images: int, size: int) -> Path:
    """Gives where the images are as an array: uint8 [num_images, size, size, 3]; labels are `labels_of`."""
    origin = "drawn" if settings.images is None else hashlib.sha256(str(settings.images).encode()).hexdigest()[:12]
    return settings.folder / "data" / f"{origin}-{num_images}-{size}.npy"


def shards_folder(
    settings: Settings, *, num_images: int, size: int, checksum: bool = True, layout: Layout = "packed"
) -> Path:
    """Gives where they are as packed shards, in the split `SPLIT`."""
    stem = array_file(settings, num_images=num_images, size=size).stem
    return settings.folder / "data" / f"{stem}-{'crc' if checksum else 'plain'}{'-dense' * (layout == 'dense')}"


def ensure_array(settings: Settings, say: Say, *, num_images: int, size: int) -> Path:
    """Makes the array where it is not there yet: photographs over and over where there are some, else noise."""
    path = array_file(settings, num_images=num_images, size=size)
    if path.exists():
        return path
    say(f"making {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    images = open_memmap(unfinished, mode="w+", dtype=np.uint8, shape=(num_images, size, size, 3))
    if settings.images is None:
        random = np.random.default_rng(0)
        for index in range(num_images):
            images[index] = random.integers(256, size=(size, size, 3), dtype=np.uint8)
    else:
        photographs = list(
            _decoded(settings.images, num_images, ResizeRule(size=size, resize=max(size, size * 8 // 7)))
        )
        if not photographs:
            raise ValueError(f"--images must hold JPEG files in class folders, and {settings.images} holds none")
        for index, image in enumerate(islice(cycle(photographs), num_images)):
            images[index] = image
    images.flush()
    del images
    unfinished.rename(path)
    return path


def ensure_shards(
    settings: Settings, say: Say, *, num_images: int, size: int, checksum: bool = True, layout: Layout = "packed"
) -> Path:
    """Packs the images where that has not been done; an interrupted pack goes on."""
    folder = shards_folder(settings, num_images=num_images, size=size, checksum=checksum, layout=layout)
    if not (folder / SPLIT / "manifest.json").exists():
        array = ensure_array(settings, say, num_images=num_images, size=size)
        say(f"packing {folder}")
        rule = ResizeRule(size=size, resize=size)
        pack_split(
            ArraySource(array),
            open_location(str(folder)).child(SPLIT),
            PackSettings(rule=rule, checksum=checksum, layout=layout, num_workers=num_cores()),
        )
    return folder


def ensure_jpegs(settings: Settings, say: Say) -> Path:
    """Gives a folder of class folders of JPEG files: the user's, else one of drawn files of a photograph's size."""
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
    """Gives where the JPEG files are, or will be."""
    return settings.folder / "data" / "jpeg" if settings.images is None else settings.images


def jpeg_files(folder: Path) -> list[Path]:
    """Gives the JPEG files of a folder of class folders, in order."""
    return sorted(path for path in folder.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))


class ArraySource:
    """An array of images as a source to pack: each is served as a BMP file, which costs next to nothing to read."""

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
        """Gives an image's name and label."""
        return SourceImage(f"{index}.bmp", index % NUM_CLASSES)

    def num_bytes(self, index: int) -> int:
        """Gives the length of an image's pixels."""
        return int(self._images[index].nbytes)

    def read(self, index: int) -> bytes:
        """Gives an image's file."""
        file = io.BytesIO()
        Image.fromarray(np.asarray(self._images[index])).save(file, "BMP")
        return file.getvalue()

    def digest(self) -> str:
        """Gives a digest of the array's name and shape, which say what is in it."""
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
    """Draws a smooth random field with grain, which compresses about as a photograph does."""
    random = np.random.default_rng(index)
    width, height = _JPEG_SIZE
    image = np.zeros((height, width, 3))
    for cells, strength in ((4, 60.0), (16, 25.0), (64, 10.0)):
        coarse = np.clip(128 + strength * random.normal(size=(cells, cells, 3)), 0, 255).astype(np.uint8)
        image += np.asarray(Image.fromarray(coarse).resize(_JPEG_SIZE, Image.Resampling.BICUBIC)).astype(float) - 128
    image += 128 + random.normal(0, 6, (height, width, 1))
    drawn = Image.fromarray(np.clip(image, 0, 255).astype(np.uint8))
    drawn.save(folder / f"class{index % _JPEG_CLASSES}" / f"{index:05d}.jpg", quality=_JPEG_QUALITY)
