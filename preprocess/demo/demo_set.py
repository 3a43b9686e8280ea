"""Draws and packs the demo data set."""

import math
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

from loopfeed.preprocess.control_groups import num_cores
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.pack import PackProgress, pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.shards.split_files import prepare_for_writing
from loopfeed.preprocess.sources.open_source import open_source
from loopfeed.preprocess.system_errors import naming_file
from loopfeed.preprocess.workers import Pool

SUPERSAMPLING = 4
NUM_TRAIN_IMAGES = 5000
TRAIN_IMAGES_PER_VAL_IMAGE = 5
JPEG_QUALITY = 92
MIN_SIZE, MAX_SIZE = 16, 1024

# Minimum distance between shape and background colour in RGB (maximum 441). Below about 60, people start to guess.
MIN_CONTRAST = 110.0

# A polygon of points around the origin, within the unit circle; y points down.
Polygon = list[tuple[float, float]]
# Filled polygons, then polygons cut out of them.
Shape = tuple[list[Polygon], list[Polygon]]

DEMO_SIZE = 32
"""Height and width of the demo images in pixels."""


def pack_demo(
    data: str | os.PathLike[str],
    *,
    num_images: int = NUM_TRAIN_IMAGES,
    overwrite: bool = False,
    on_progress: Callable[[str, PackProgress], None] = lambda _split, _progress: None,
    storage_options: Mapping[str, str] | None = None,
) -> None:
    """Draw the demo data set in a temporary folder and pack it into `data`/train and `data`/val.

    The images are the same every time, so an interrupted pack is continued, and a finished pack is left unchanged.

    Args:
        data: a folder or a TensorStore URL.
        num_images: training images, at least 10; a fifth as many validation images, but at least 10, are packed too.
        overwrite: delete an existing pack and start over.
        on_progress: called with a split's name and its progress.
        storage_options: how to reach a remote store, such as ``{"endpoint": "http://127.0.0.1:9000"}``.

    Raises:
        ShardError: `data` contains something else, or cannot be written.
        ValueError: `num_images` is too small.
    """
    location = prepare_for_writing(open_location(data, storage_options=storage_options))
    rule = ResizeRule(size=DEMO_SIZE, resize=DEMO_SIZE)
    settings = PackSettings(rule=rule, num_workers=num_cores())
    with tempfile.TemporaryDirectory(prefix="loopfeed-demo-") as folder:
        drawn = draw_demo(Path(folder) / "demo", num_images=num_images, size=DEMO_SIZE)
        with open_source(drawn) as source:
            for name, split in source.splits.items():
                pack_split(
                    split,
                    location.child(name),
                    settings,
                    overwrite=overwrite,
                    on_progress=partial(on_progress, name),
                )


# The ten classes are shapes. Colour, position, size, angle, lighting and clutter vary independently of the class, so a
# network must learn shape. Images are JPEG files in class folders, like any other source.
def draw_demo(dest: Path, *, num_images: int = NUM_TRAIN_IMAGES, size: int = 32, seed: int = 0) -> Path:
    """Draw the demo images and save them as `dest/train/<class>/*.jpg` and `dest/val/<class>/*.jpg`.

    An image depends only on seed, split and index, so the same arguments produce the same images.

    Args:
        dest: folder to draw into; created if missing.
        num_images: training images of all ten classes together, at least 10; a fifth as many validation images are
            drawn in addition.
        size: side of an image in pixels, 16 to 1024.
        seed: a whole number ≥ 0.

    Returns:
        `dest`.

    Raises:
        ValueError: an argument is out of range, or `dest` already contains a train or val folder.
    """
    dest = Path(dest)
    num_classes = len(SHAPES)
    if num_images < num_classes:
        raise ValueError(f"num_images must be at least {num_classes}, one per class, got {num_images}")
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise ValueError(f"size must be from {MIN_SIZE} to {MAX_SIZE} pixels, got {size}")
    if seed < 0:
        raise ValueError(f"seed must be 0 or more, got {seed}")
    counts = {"train": num_images, "val": max(num_classes, num_images // TRAIN_IMAGES_PER_VAL_IMAGE)}
    for split in counts:
        if (dest / split).exists():
            raise ValueError(f"{dest / split} already exists; remove it or choose another folder")
    jobs = []
    for split_number, (split, count) in enumerate(counts.items()):
        for label, name in enumerate(SHAPES):
            folder = dest / split / name
            folder.mkdir(parents=True)
            jobs += [(folder, size, (seed, split_number, index)) for index in range(label, count, num_classes)]
    with Pool(num_cores(), "draw") as pool:
        list(pool.map(lambda job: _save(*job), jobs))
    return dest


def draw_image(name: str, size: int, rng: np.random.Generator) -> np.ndarray:
    """Draw one image of the class `name` and return its RGB pixels as uint8 `[size, size, 3]`."""
    shape_paint, background_paint = _two_colours(rng)
    background = _lighting(background_paint, size, rng)
    for _ in range(rng.integers(0, 4)):
        speck = _mask(_DISC if rng.random() < 0.5 else _SQUARE, size, rng.uniform(0.03, 0.09), rng, reach=1.0)
        background += speck * (rng.uniform(0, 255, 3) - background)
    mask = _mask(SHAPES[name](rng), size, rng.uniform(0.32, 0.46), rng, reach=0.0)
    image = background + mask * (_lighting(shape_paint, size, rng) - background)
    image += rng.normal(0.0, rng.uniform(2.0, 9.0), image.shape)
    return np.clip(np.rint(image), 0, 255).astype(np.uint8)


def _save(folder: Path, size: int, key: tuple[int, int, int]) -> None:
    pixels = draw_image(folder.name, size, np.random.default_rng(key))
    path = folder / f"{key[-1]:05d}.jpg"
    with naming_file(path):
        Image.fromarray(pixels).save(path, quality=JPEG_QUALITY, subsampling=0)


def _two_colours(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    while True:
        colours = rng.uniform(20, 235, (2, 3))
        if np.linalg.norm(colours[0] - colours[1]) >= MIN_CONTRAST:
            return colours[0], colours[1]


def _lighting(colour: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Return an area of one colour, unevenly lit and tinted by a smooth random field, as float64 `[size, size, 3]`."""
    coarse = np.clip(colour + rng.normal(0.0, 14.0, (4, 4, 3)), 0, 255).astype(np.uint8)
    return np.asarray(Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC)).astype(np.float64)


def _mask(shape: Shape, size: int, radius: float, rng: np.random.Generator, *, reach: float) -> np.ndarray:
    """Return the fraction (0 to 1) of each pixel that a shape covers, as float64 `[size, size, 1]`.

    Args:
        shape: what to draw, at a random angle.
        size: side in pixels.
        radius: of the circle around the shape, as a fraction of the side.
        rng: for angle and position.
        reach: how far the centre may be from the middle, as a fraction of half the side; at 0 the whole shape stays at
            least a pixel inside the image.
    """
    canvas = size * SUPERSAMPLING
    stray = max(reach * 0.5, 0.5 - radius - 1 / size)
    centre = 0.5 + rng.uniform(-stray, stray, 2)
    angle = rng.uniform(0.0, 2 * math.pi)
    turn = radius * np.array([[math.cos(angle), math.sin(angle)], [-math.sin(angle), math.cos(angle)]])
    image = Image.new("L", (canvas, canvas))
    draw = ImageDraw.Draw(image)
    for polygons, fill in zip(shape, (255, 0), strict=True):
        for polygon in polygons:
            points = (np.asarray(polygon) @ turn + centre) * canvas
            draw.polygon([(float(x), float(y)) for x, y in points], fill=fill)
    return np.asarray(image.reduce(SUPERSAMPLING)).astype(np.float64)[..., None] / 255.0


def _regular(num_corners: int, radius: float = 1.0, x: float = 0.0) -> Polygon:
    angles = [2 * math.pi * corner / num_corners for corner in range(num_corners)]
    return [(x + radius * math.cos(angle), radius * math.sin(angle)) for angle in angles]


def _bar(left: float, top: float, right: float, bottom: float) -> Polygon:
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


_DISC: Shape = ([_regular(64)], [])
_SQUARE: Shape = ([_regular(4)], [])


def _checkers(rng: np.random.Generator) -> Shape:
    cells = int(rng.integers(3, 5))
    side = 1.4 / cells
    corners = [(-0.7 + column * side, -0.7 + row * side) for row in range(cells) for column in range(row % 2, cells, 2)]
    return [_bar(left, top, left + side, top + side) for left, top in corners], []


def _crescent(rng: np.random.Generator) -> Shape:
    return [_regular(64)], [_regular(64, rng.uniform(0.72, 0.85), rng.uniform(0.42, 0.55))]


def _cross(rng: np.random.Generator) -> Shape:
    arm = rng.uniform(0.2, 0.32)
    return [_bar(-0.94, -arm, 0.94, arm), _bar(-arm, -0.94, arm, 0.94)], []


def _heart(rng: np.random.Generator) -> Shape:
    widths = [2 * math.pi * step / 64 for step in range(64)]
    stretch = rng.uniform(0.9, 1.05)
    outline = [
        (
            stretch * math.sin(t) ** 3 * 0.95,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 17,
        )
        for t in widths
    ]
    return [outline], []


def _ring(rng: np.random.Generator) -> Shape:
    return [_regular(64)], [_regular(64, rng.uniform(0.5, 0.72))]


def _star(rng: np.random.Generator) -> Shape:
    inner = rng.uniform(0.38, 0.48)
    outer_points, inner_points = _regular(5), [(-x * inner, -y * inner) for x, y in _regular(5)]
    # The inner corners are the outer ones rotated by 180 degrees, so the third one follows the first outer one.
    return [[point for tip in range(5) for point in (outer_points[tip], inner_points[(tip + 3) % 5])]], []


def _stripes(rng: np.random.Generator) -> Shape:
    count = int(rng.integers(3, 5))
    pitch = 1.4 / (2 * count - 1)
    return [_bar(-0.7, -0.7 + 2 * row * pitch, 0.7, -0.7 + (2 * row + 1) * pitch) for row in range(count)], []


# In index order, which for class folders is the order of their names.
SHAPES: dict[str, Callable[[np.random.Generator], Shape]] = {
    "checkers": _checkers,
    "crescent": _crescent,
    "cross": _cross,
    "disc": lambda _: _DISC,
    "heart": _heart,
    "ring": _ring,
    "square": lambda _: _SQUARE,
    "star": _star,
    "stripes": _stripes,
    "triangle": lambda _: ([_regular(3)], []),
}
