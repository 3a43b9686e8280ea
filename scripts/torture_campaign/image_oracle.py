"""The crops in a pack as zarr reads them, and the program `decode-images`, which makes them with Pillow only."""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageOps

from scripts.torture_campaign.oracle import read_zarr

_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_PLAIN_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"})
_METADATA = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"tIME", b"pHYs"})


def read_crops(dest: Path) -> dict[str, list[Any]]:
    """Return the crops, or the whole pictures, uint8 ``[H, W, 3]``, of each class of a pack."""
    pixels, labels = (read_zarr(dest / "train" / name) for name in ("pixels", "labels"))
    manifest = json.loads((dest / "train/manifest.json").read_bytes())
    rgb = np.stack([pixels >> shift & 0xFF for shift in (24, 16, 8)], axis=-1).astype(np.uint8)
    found: dict[str, list[Any]] = {}
    is_whole = (dest / "train/extents").is_dir()
    places = read_zarr(dest / "train/extents").tolist() if is_whole else [None] * len(rgb)
    for label, canvas, place in zip(labels.tolist(), rgb, places, strict=True):
        crop = canvas if place is None else _upright(canvas, place)
        found.setdefault(manifest["classes"][label]["id"], []).append(crop)
    return found


def _upright(canvas: Any, place: int) -> Any:
    """Return the picture on a canvas; a fault becomes a white one, which no comparison passes."""
    width, height, is_turned = place & 0x7FFF, place >> 15 & 0x7FFF, place >> 30 & 1
    beside = canvas.copy()
    beside[:height, :width] = 0
    if beside.any() or not 0 < height <= canvas.shape[0] or not 0 < width <= canvas.shape[1]:
        return np.full_like(canvas, 255)
    picture = canvas[:height, :width]
    return picture.swapaxes(0, 1) if is_turned else picture


def decode_images() -> int:
    """Run `decode-images FOLDER FILE SIZE CANVAS`: write the crop of each file, as `decode` returns it, as JSON."""
    folder, dest, size, canvas = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = {path.name: decode(path, int(size), canvas) for path in sorted(Path(folder).iterdir())}
    Path(dest).write_text(json.dumps(found), encoding="utf-8")
    return 0


def decode(path: Path, size: int, canvas: str = "square") -> str | None:
    """Return the central crop of an image or, on a canvas of 3:2, all of it, RGB in hexadecimal.

    None if Pillow fails; "" for modes whose conversion to 8 bits is not well defined (16-bit, float).
    """
    content = _with_last_byte(path.read_bytes())
    found = _decode_bytes(content, size, canvas)
    # Pillow refuses large texts and profiles. They are not pixels, so decode again without them.
    return _decode_bytes(_without_metadata(content), size, canvas) if found is None else found


def _with_last_byte(content: bytes) -> bytes:
    """Return a JPEG or WebP file that lacks only its last byte, of its end marker or its padding, with that byte."""
    if content.startswith(b"\xff\xd8") and content.endswith(b"\xff"):
        return content + b"\xd9"
    is_short_by_one = content.startswith(b"RIFF") and int.from_bytes(content[4:8], "little") == len(content) - 7
    return content + bytes(is_short_by_one)


def _without_metadata(content: bytes) -> bytes:
    """Return a PNG file without texts, times and profiles; return other files and truncated chunks unchanged."""
    kept, at = [content[:8]], 8
    while content.startswith(b"\x89PNG") and at + 12 <= len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        if content[at + 4 : at + 8] not in _METADATA:
            kept.append(content[at:end])
        at = end
    return b"".join([*kept, content[at:]])


def _decode_bytes(content: bytes, size: int, canvas: str) -> str | None:
    try:
        with Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            image.load()
            has_transparency = "transparency" in image.info
            if image.mode not in _PLAIN_MODES or (has_transparency and image.mode not in ("P", "L", "RGB")):
                return ""
            rgb = _on_white(ImageOps.exif_transpose(image))
    except Exception:  # noqa: BLE001 - Pillow's plugins raise all kinds of exceptions for damaged fields
        return None
    short = min(rgb.size)
    width, height = (int(size * side / short) for side in rgb.size)
    if canvas != "square":
        if 2 * max(width, height) > 3 * size:
            scale = 3 * size // 2 / max(rgb.size)
            width, height = (max(1, round(side * scale)) for side in rgb.size)
        return rgb.resize((width, height), Image.Resampling.BICUBIC).tobytes().hex()
    if width * height > 1 << 24:
        return ""
    resized = rgb.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size)).tobytes().hex()


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")
