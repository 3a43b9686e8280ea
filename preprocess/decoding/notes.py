"""What a pack should say about its images at its end, counted while they are decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True)
class DecodeNotes:
    """What was noted about one image, or about several: notes can be added in any order.

    Attributes:
        num_deep: images of more than 8 bits whose range neither the file nor `--levels` names.
        deep_max: their largest value, on the scale of 16 bits.
        num_declared: images of more than 8 bits whose file names the largest value of its range.
        white_min, white_max: the least and the greatest of these; 0 without such images.
        num_clipped: images with values beyond `--levels`.
        num_kept: truncated images that were packed (`--truncated keep`).
        num_changed: images that earlier versions decoded in another way.
        added_in: the latest version of the decoding rules in which the format of an image was added; 0 for the first.
        num_fitted: pictures that were made smaller because they are longer than the canvas.
        num_enlarged: images whose shorter side is less than the length to which it is resized.
        enlarged_max: the longest of these sides in pixels; 0 without such images.
        enlarged_square: the side of these images in pixels if all are squares of one size, else 0.
    """

    num_deep: int = 0
    deep_max: int = 0
    num_declared: int = 0
    white_min: int = 0
    white_max: int = 0
    num_clipped: int = 0
    num_kept: int = 0
    num_changed: int = 0
    added_in: int = 0
    num_fitted: int = 0
    num_enlarged: int = 0
    enlarged_max: int = 0
    enlarged_square: int = 0

    def __add__(self, other: DecodeNotes) -> DecodeNotes:
        squares = {each.enlarged_square for each in (self, other) if each.num_enlarged}
        whites = [each.white_min for each in (self, other) if each.num_declared]
        return DecodeNotes(
            self.num_deep + other.num_deep,
            max(self.deep_max, other.deep_max),
            self.num_declared + other.num_declared,
            min(whites, default=0),
            max(self.white_max, other.white_max),
            self.num_clipped + other.num_clipped,
            self.num_kept + other.num_kept,
            self.num_changed + other.num_changed,
            max(self.added_in, other.added_in),
            self.num_fitted + other.num_fitted,
            self.num_enlarged + other.num_enlarged,
            max(self.enlarged_max, other.enlarged_max),
            squares.pop() if len(squares) == 1 else 0,
        )

    def to_json(self) -> dict[str, int]:
        """Return the notes that are not 0 as a JSON object."""
        return {name: value for name, value in asdict(self).items() if value}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Self:
        """Parse the output of `to_json`; raise TypeError for anything else."""
        # Of earlier versions, and of use only while an image is packed.
        return cls(**{name: value for name, value in document.items() if name != "num_added"})


NOTHING = DecodeNotes()
