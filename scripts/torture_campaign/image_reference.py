"""The program `decode-images`: decodes image files with Pillow only, as a reference for the content of a pack.

`decode-images FOLDER FILE SIZE` writes JSON: the RGB values of the crop of each file, in hexadecimal; None if Pillow
fails; an empty string for modes whose conversion to 8 bits is not well defined (16-bit, float).
"""

from __future__ import annotations

import io
import json
import sys
import warnings
from pathlib import Path

from PIL import Image, ImageOps

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
_PLAIN_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK"})
_METADATA = frozenset({b"tEXt", b"zTXt", b"iTXt", b"iCCP", b"tIME", b"pHYs"})


def main() -> int:
    """Decode the files of a folder; return the exit code."""
    folder, dest, size = sys.argv[1:]
    warnings.simplefilter("ignore")
    found = {path.name: decode(path, int(size)) for path in sorted(Path(folder).iterdir())}
    Path(dest).write_text(json.dumps(found), encoding="utf-8")
    return 0


def decode(path: Path, size: int) -> str | None:
    """Return the central crop of an image, RGB in hexadecimal; None if Pillow fails, "" if it is not compared."""
    content = path.read_bytes()
    found = decode_bytes(content, size)
    # Pillow refuses large texts and profiles. They are not pixels, so decode again without them.
    return decode_bytes(without_metadata(content), size) if found is None else found


def without_metadata(content: bytes) -> bytes:
    """Return a PNG file without texts, times and profiles; return other files and truncated chunks unchanged."""
    kept, at = [content[:8]], 8
    while content.startswith(b"\x89PNG") and at + 12 <= len(content):
        end = at + 12 + int.from_bytes(content[at : at + 4], "big")
        if content[at + 4 : at + 8] not in _METADATA:
            kept.append(content[at:end])
        at = end
    return b"".join([*kept, content[at:]])


def decode_bytes(content: bytes, size: int) -> str | None:
    """Return the same as `decode`, for the bytes of a file."""
    try:
        with Image.open(io.BytesIO(content), formats=FORMATS) as image:
            image.load()
            if image.mode not in _PLAIN_MODES or _has_odd_transparency(image):
                return ""
            upright = ImageOps.exif_transpose(image)
            rgb = _on_white(upright)
    except Exception:  # noqa: BLE001 - Pillow's plugins raise all kinds of exceptions for damaged fields
        return None
    short = min(rgb.size)
    width, height = (int(size * side / short) for side in rgb.size)
    if width * height > 1 << 24:
        return ""
    resized = rgb.resize((width, height), Image.Resampling.BICUBIC)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size)).tobytes().hex()


def _has_odd_transparency(image: Image.Image) -> bool:
    return "transparency" in image.info and image.mode not in ("P", "L", "RGB")


def _on_white(image: Image.Image) -> Image.Image:
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        rgba = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", rgba.size, "white"), rgba).convert("RGB")
    return image.convert("RGB")


if __name__ == "__main__":
    sys.exit(main())
