"""A contact sheet: thumbnails of a split's images, captioned with their class names.

Owns the choice of images and the layout. The choice depends only on the split.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from loopfeed.preprocess.extents import all_upright
from loopfeed.preprocess.pixels import to_rgb
from loopfeed.preprocess.printable import printable
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import LABELS, read_array
from loopfeed.preprocess.shards.location import STORE_TIMEOUT_S
from loopfeed.preprocess.shards.reader import ShardSplit

READ_TIMEOUT_S = 120.0

_COLUMNS = 10
_MAX_CELLS = 100
_MIN_CELLS = 60
# Images are chosen by the first labels only, up to this many: all labels of 10^8 images would need 200 MB of memory.
_MAX_LABELS = 1 << 22

# What the built-in font lacks and no decomposition makes plain; a character that no font has; a limit for its search.
_SIMILAR = {
    "×": "x",
    "–": "-",
    "—": "-",
    "−": "-",
    "·": ".",
    "→": "->",
    "ß": "ss",
    "æ": "ae",
    "ø": "o",
    "ł": "l",
    "µ": "u",
}
_NO_CHARACTER = "\uffff"
_MOST_CHARACTERS = 1000

_BACKGROUND = (255, 255, 255)
_INK = (32, 33, 36)
_FAINT = (110, 114, 120)


@dataclass(frozen=True)
class Geometry:
    """The dimensions of a contact sheet, in pixels."""

    thumbnail: int = 112
    gap: int = 12
    caption: int = 20
    header: int = 60
    title_size: int = 18
    caption_size: int = 12
    line: int = 14  # between two lines of a caption


def draw_contact_sheet(split: ShardSplit, *, title: str) -> Image.Image:
    """Return an RGB contact sheet of up to 100 images from ``split``, ordered by label.

    With at most ten classes, each class starts a new row. With more, images are spread evenly over the classes. Images
    with targets are spread evenly over the split, with all their classes, or their numbers, as captions.

    Raises:
        ShardError: an image can't be read.
    """
    geometry = geometry_for(max(split.height, split.width))
    if split.manifest.targets is None:
        indices = choose_images(_labels(split), split.num_classes)
    else:
        num_shown = min(split.num_images, _MAX_CELLS)
        indices = np.arange(num_shown, dtype=np.int64) * split.num_images // num_shown
    labels = np.empty((len(indices), *split.label_row), np.int32)
    pixels = np.empty((len(indices), split.height, split.row_words), np.uint32)
    split.read_into(indices, pixels, labels, timeout_s=READ_TIMEOUT_S)
    thumbnails = [to_rgb(words, split.manifest.pixel_layout) for words in pixels]
    if split.manifest.is_whole:
        thumbnails = all_upright(thumbnails, labels)
        labels = labels[:, 1:] if split.target_words else labels[:, 1]
    captions = _captions(split, indices, labels)
    # Without one class per image, the sheet is filled row by row.
    cells = _place(labels, split.num_classes) if labels.ndim == 1 else _place(np.zeros(len(indices), np.int32), 1)
    return draw_sheet(
        thumbnails, captions, cells, title=title, facts=_facts(split), num_columns=_COLUMNS, geometry=geometry
    )


def draw_sheet(
    images: Iterable[NDArray[np.uint8]],
    captions: Sequence[str],
    cells: Sequence[tuple[int, int]],
    *,
    num_columns: int,
    geometry: Geometry,
    title: str = "",
    facts: str = "",
) -> Image.Image:
    """Return an RGB sheet of pictures with captions below them.

    Args:
        images: uint8 ``[H, W, 3]`` each.
        captions: a text for each image, of as many lines as the geometry has room for.
        cells: the row and the column of each image.
        num_columns: how many columns of pictures there is room for.
        geometry: the dimensions.
        title, facts: two lines at the top, for which the header has room.
    """
    num_rows = 1 + max(row for row, _ in cells)
    pitch = geometry.thumbnail + geometry.gap
    size = (
        num_columns * pitch + geometry.gap,
        geometry.header + num_rows * (pitch + geometry.caption) + geometry.gap,
    )
    sheet = Image.new("RGB", size, _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    _write_header(draw, title, facts, size[0] - 2 * geometry.gap, geometry)
    caption_font = ImageFont.load_default(size=geometry.caption_size)
    for rgb, caption, (row, column) in zip(images, captions, cells, strict=True):
        left = geometry.gap + column * pitch
        top = geometry.header + row * (pitch + geometry.caption)
        thumbnail = _thumbnail(rgb, geometry.thumbnail)
        sheet.paste(thumbnail, (left + (geometry.thumbnail - thumbnail.width) // 2, top))
        middle = left + geometry.thumbnail // 2
        for number, line in enumerate(caption.split("\n")):
            name = _fitted(draw, line, caption_font, geometry.thumbnail)
            y = top + geometry.thumbnail + 4 + number * geometry.line
            draw.text((middle, y), name, fill=_INK, font=caption_font, anchor="ma")
    return sheet


def _captions(split: ShardSplit, indices: NDArray[np.int64], labels: NDArray[np.int32]) -> list[str]:
    """Return the names of the classes of each image, or its numbers."""
    names, targets = [printable(each.name) for each in split.manifest.classes], split.manifest.targets
    if targets is None:
        return [names[label] for label in labels.tolist()]
    rows = split.read_targets(indices, timeout_s=READ_TIMEOUT_S)
    if targets.kind == "numbers":
        return [", ".join(f"{number:.4g}" for number in row) for row in rows.tolist()]
    return [", ".join(names[label] for label in np.flatnonzero(row)) or "-" for row in rows]


def geometry_for(side: int) -> Geometry:
    """Return the sheet's dimensions for images whose longer side is ``side`` pixels.

    Small images are enlarged by an integer factor, so that pixels stay square.
    """
    plain = Geometry()
    factor = round(plain.thumbnail / side)
    return Geometry(thumbnail=side * factor) if factor >= 2 else plain


def choose_images(labels: NDArray[np.uint16], num_classes: int) -> NDArray[np.int64]:
    """Return the int64 indices ``[n]`` of the images to show, ordered by class and evenly spaced within each class.

    Args:
        labels: uint16 ``[N]``.
        num_classes: K, the number of classes; if there are more than cells, the classes shown are evenly spaced.
    """
    present = np.unique(labels)
    if num_classes <= _COLUMNS:
        per_class = _COLUMNS * max(1, _MIN_CELLS // (_COLUMNS * num_classes))
    else:
        per_class = max(1, _MAX_CELLS // num_classes)
    num_shown = min(len(present), _MAX_CELLS // per_class)
    shown = present[np.arange(num_shown) * len(present) // num_shown]
    chosen = []
    for label in shown:
        members = np.flatnonzero(labels == label)
        count = min(per_class, len(members))
        chosen.append(members[np.arange(count) * len(members) // count])
    return np.concatenate(chosen).astype(np.int64)


def _labels(split: ShardSplit) -> NDArray[np.uint16]:
    array = read_array(split.location, LABELS)
    found: NDArray[np.uint16] = array[: min(split.num_images, _MAX_LABELS)].read().result(timeout=STORE_TIMEOUT_S)
    return found


def _place(labels: NDArray[np.int32], num_classes: int) -> list[tuple[int, int]]:
    """Return the row and column of each image's cell; with at most ten classes, each class starts a new row."""
    cells: list[tuple[int, int]] = []
    row, column = 0, -1
    for position, label in enumerate(labels.tolist()):
        begins_class = num_classes <= _COLUMNS and position > 0 and label != labels[position - 1]
        column += 1
        if column == _COLUMNS or begins_class:
            row, column = row + 1, 0
        cells.append((row, column))
    return cells


def _facts(split: ShardSplit) -> str:
    manifest = split.manifest
    noun = "class" if manifest.targets is None or manifest.targets.kind == "classes" else "number"
    return (
        f"{quantity(manifest.num_images, 'image')}, {quantity(manifest.num_classes, noun)}, "
        f"{manifest.width} x {manifest.height} pixels"
    )


def _write_header(draw: ImageDraw.ImageDraw, title: str, facts: str, width: int, geometry: Geometry) -> None:
    title_font = ImageFont.load_default(size=geometry.title_size)
    facts_font = ImageFont.load_default(size=geometry.caption_size)
    name = _fitted(draw, title, title_font, width)
    draw.text((geometry.gap, geometry.gap - 2), name, fill=_INK, font=title_font)
    facts = _fitted(draw, facts, facts_font, width)
    draw.text((geometry.gap, geometry.gap + geometry.title_size + 6), facts, fill=_FAINT, font=facts_font)


def _thumbnail(rgb: NDArray[np.uint8], side: int) -> Image.Image:
    image = Image.fromarray(rgb)
    scale = side / max(image.size)
    size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
    return image.resize(size, Image.Resampling.NEAREST if scale >= 2 else Image.Resampling.LANCZOS)


def _fitted(
    draw: ImageDraw.ImageDraw, text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont, width: int
) -> str:
    """Return the text in the font's characters, truncated with "..." if it is wider than ``width`` pixels."""
    text = _in_font(text, font)
    if draw.textlength(text, font=font) <= width:
        return text
    while text and draw.textlength(text + "...", font=font) > width:
        text = text[:-1]
    return text.rstrip() + "..."


def _in_font(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Return the text with "?" or something similar, such as x for ×, for what Pillow's built-in font would show as ▯.

    The font has 111 characters: ASCII, and few others.
    """
    missing = _shape(_NO_CHARACTER, font)

    def has(characters: str) -> bool:
        return all(each.isascii() or _shape(each, font) != missing for each in characters)

    def similar(character: str) -> str:
        plain = _SIMILAR.get(character) or "".join(
            each for each in unicodedata.normalize("NFKD", character) if not unicodedata.combining(each)
        )
        return plain if has(plain) else "?"

    composed = unicodedata.normalize("NFC", text[:_MOST_CHARACTERS])
    return "".join(each if has(each) else similar(each) for each in composed)


def _shape(character: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> tuple[tuple[int, int], bytes]:
    mask = font.getmask(character)
    return mask.size, bytes(mask)
