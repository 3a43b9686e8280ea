"""Augmentation settings: a frozen, validated dataclass.

Owns names, ranges, defaults and the resulting output shape; must not import jax, so that the commands start fast.
`loopfeed.engine.images.augment` applies the settings.
"""

import math
import numbers
from dataclasses import dataclass
from typing import Any, Literal, get_args

from loopfeed.engine.settings import SettingError, is_number
from loopfeed.preprocess.extents import Whole
from loopfeed.preprocess.shown_values import shown

CropName = Literal["centre", "random", "resized"]
PaddingName = Literal["zeros", "reflect"]
AutoAugmentName = Literal["off", "randaugment", "trivialaugment"]

MAX_SIDE = 2**14
NUM_MAGNITUDES = 31
"""Number of magnitudes of an automatic augmentation, from 0, as in torchvision."""
MAX_AUTO_AUGMENT_OPS = 16

_RANGES: dict[str, tuple[float, float]] = {
    "horizontal_flip": (0, 1),
    # A factor of 1 + 10 saturates every image; the integer arithmetic in `jitter` is valid far beyond that.
    "brightness": (0, 10),
    "contrast": (0, 10),
    "saturation": (0, 10),
    "hue": (0, 0.5),
    # Beyond 1000 every share is 0.5 within 0.06; below 0.001 hardly any pair is mixed.
    "mixup_alpha": (0, 1000),
    "cutmix_alpha": (0, 1000),
    "erasing": (0, 1),
}

_AUTO_AUGMENT_RANGES = {
    "auto_augment_ops": (1, MAX_AUTO_AUGMENT_OPS),
    "auto_augment_magnitude": (0, NUM_MAGNITUDES - 1),
}


@dataclass(frozen=True, kw_only=True)
class Augmentation:
    """Settings for the augmentation on the device; by default, images are only normalised.

    The settings are static: each combination compiles a separate program. The order is fixed: crop, flip,
    automatic augmentation, colour (brightness, contrast, saturation, hue), cutmix or mixup, normalisation, erasing.

    Attributes:
        crop: "centre" (deterministic), "random" (uniform offsets), or "resized": a box of random area and aspect
            ratio, resized (Szegedy et al., 2014, arXiv:1409.4842; torchvision's RandomResizedCrop).
        size: height and width of the network's input, in pixels; None uses the stored height and width.
        crop_padding: pixels added on every side before a random crop.
        padding_mode: content of the padding: "zeros" (black) or "reflect" (mirrored, without repeating the border).
        area_range: least and largest fraction of the image's area in a resized crop, in 0 … 1.
        ratio_range: least and largest width / height of a resized crop; log-uniform between them.
        horizontal_flip: probability of mirroring left to right.
        brightness, contrast, saturation: a strength s each; the factor is uniform in max(0, 1 - s) … 1 + s.
        hue: largest rotation of the hue, in turns, 0 … 0.5; uniform in -hue … hue.
        mixup_alpha: parameter of Beta(alpha, alpha), from which the share of an image in its mixture with its partner
            is drawn (Zhang et al., 2018, arXiv:1710.09412); 0 is off.
        cutmix_alpha: the same for the share that remains when a rectangle of the partner is pasted (Yun et al., 2019,
            arXiv:1905.04899); 0 is off. If both are on, each pair uses one of them with equal probability.
        erasing: probability of erasing a rectangle of 0.02 … 0.33 of the area (Zhong et al., 2020, arXiv:1708.04896).
        auto_augment: "randaugment" (Cubuk et al., 2020, arXiv:1909.13719), "trivialaugment" (Müller and Hutter, 2021,
            arXiv:2103.10158) or "off", with the operations and ranges of torchvision.
        auto_augment_ops: operations that RandAugment applies to each image, 1 … 16.
        auto_augment_magnitude: magnitude of RandAugment's operations, 0 … 30.
        resized_to: height and width to which the crop is resized, in pixels; a resized crop has this size at once. None
            keeps the size of the crop.
        whole: the geometry of whole pictures on canvases; None for images that fill their pixels. A random crop then is
            a square of the side of the central crop at a random place, which is resized to `size`; None for `size` is
            that side.

    Raises:
        ValueError: if a value has the wrong type, is out of range, or contradicts another setting.
    """

    crop: CropName = "centre"
    size: int | None = None
    crop_padding: int = 0
    padding_mode: PaddingName = "zeros"
    area_range: tuple[float, float] = (0.08, 1.0)
    ratio_range: tuple[float, float] = (3 / 4, 4 / 3)
    horizontal_flip: float = 0.0
    brightness: float = 0.0
    contrast: float = 0.0
    saturation: float = 0.0
    hue: float = 0.0
    mixup_alpha: float = 0.0
    cutmix_alpha: float = 0.0
    erasing: float = 0.0
    auto_augment: AutoAugmentName = "off"
    auto_augment_ops: int = 2
    auto_augment_magnitude: int = 9
    resized_to: int | None = None
    whole: Whole | None = None

    def __post_init__(self) -> None:
        for name, declared in (("crop", CropName), ("padding_mode", PaddingName), ("auto_augment", AutoAugmentName)):
            if getattr(self, name) not in get_args(declared):
                raise ValueError(f"{name} must be one of {', '.join(get_args(declared))}, got {getattr(self, name)!r}")
        for name in ("size", "resized_to"):
            if (side := getattr(self, name)) is not None:
                object.__setattr__(self, name, _whole(name, side, 1, MAX_SIDE))
        object.__setattr__(self, "crop_padding", _whole("crop_padding", self.crop_padding, 0, MAX_SIDE))
        for name, (least, most) in _AUTO_AUGMENT_RANGES.items():
            object.__setattr__(self, name, _whole(name, getattr(self, name), least, most))
        for name, (low, high) in _RANGES.items():
            object.__setattr__(self, name, _real(name, getattr(self, name), low, high))
        object.__setattr__(self, "area_range", _pair("area_range", self.area_range, 1))
        object.__setattr__(self, "ratio_range", _pair("ratio_range", self.ratio_range, 100))
        self._check_padding()
        for name in _AUTO_AUGMENT_RANGES:
            found, default = getattr(self, name), getattr(type(self), name)
            if self.auto_augment != "randaugment" and found != default:
                raise SettingError(
                    name,
                    "{setting} requires {auto_augment} randaugment, got {setting} {found} with {auto_augment} "
                    "{policy}: set {auto_augment} to randaugment, or leave {setting} out",
                    found=found,
                    policy=self.auto_augment,
                )

    def _check_padding(self) -> None:
        if self.crop_padding and self.crop != "random":
            raise SettingError(
                "crop_padding",
                "{setting} requires {crop} random, got {setting} {padding} with {crop} {found}: "
                "set {crop} to random, or {setting} to 0",
                padding=self.crop_padding,
                found=self.crop,
            )
        if self.crop_padding and self.whole is not None:
            raise SettingError(
                "crop_padding",
                "{setting} must be 0 for whole pictures, whose random crops lie within them, got {padding}: leave "
                "{setting} out, or pack the central squares (--canvas square)",
                padding=self.crop_padding,
            )
        if self.padding_mode != "zeros" and not self.crop_padding:
            raise SettingError(
                "padding_mode",
                "{setting} {mode} requires {crop_padding} above 0, got {crop_padding} 0: "
                "set {crop_padding} above 0, or {setting} to zeros",
                mode=self.padding_mode,
            )

    @property
    def mixes(self) -> bool:
        """Whether the images at positions 2k and 2k + 1 are mixed with each other."""
        return self.mixup_alpha > 0 or self.cutmix_alpha > 0

    def output_shape(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of the network's input, for stored images of `height` × `width` pixels.

        Raises:
            ValueError: if the crop does not fit such images.
        """
        shape = self.crop_shape(height, width)
        return shape if self.resized_to is None else (self.resized_to, self.resized_to)

    def crop_shape(self, height: int, width: int) -> tuple[int, int]:
        """Return the (height, width) of a crop before it is `resized_to` another size; see `output_shape`."""
        if self.whole is not None:
            side = self.size or self.whole.size
            return side, side
        shape = (height, width) if self.size is None else (self.size, self.size)
        if self.crop == "resized":
            return shape
        padding = self.crop_padding
        room = (height + 2 * padding - shape[0], width + 2 * padding - shape[1])
        if min(room) < 0:
            raise ValueError(
                f"a {self.crop} crop must fit into the stored image, got size {self.size} for {height}×{width} px"
                f"{f' with {padding} px of padding' if padding else ''}: set a smaller size, or set crop to resized"
            )
        if self.crop == "random" and room == (0, 0):
            raise SettingError(
                "crop",
                "a random crop needs more than one possible place, got size {shape[0]}×{shape[1]} for images stored at "
                "{height}×{width} px: set {crop_padding} above 0, set a smaller size, or set {crop} to centre",
                shape=shape,
                height=height,
                width=width,
            )
        if self.padding_mode == "reflect" and padding >= min(height, width):
            raise SettingError(
                "crop_padding",
                "reflected padding must be narrower than the image, got {setting} {padding} for {height}×{width} px: "
                "set a smaller {setting}, or set {padding_mode} to zeros",
                padding=padding,
                height=height,
                width=width,
            )
        return shape

    def check_batch(self, batch: int) -> None:
        """Raise ValueError if images are mixed in pairs but `batch`, the number of images per device, is odd."""
        if self.mixes and batch % 2:
            raise ValueError(
                f"mixup and cutmix mix images in pairs, so the batch of each device must be even, got {batch}: "
                f"choose an even batch, or turn mixup and cutmix off"
            )


def _whole(name: str, value: Any, low: int, high: int) -> int:
    if not is_number(value, numbers.Integral) or not low <= int(value) <= high:
        raise ValueError(f"{name} must be an integer from {low} to {high}, got {shown(value)!r}")
    return int(value)


def _real(name: str, value: Any, low: float, high: float) -> float:
    try:
        number = float(value) if is_number(value, numbers.Real) else math.nan
    except OverflowError:  # an integer too large for a float
        number = math.nan
    if not low <= number <= high:
        raise ValueError(f"{name} must be a number in {low} … {high}, got {shown(value)!r}")
    return number


def _pair(name: str, value: Any, highest: float) -> tuple[float, float]:
    given = tuple(value) if isinstance(value, tuple | list) else ()
    if len(given) != 2:
        raise ValueError(f"{name} must be two numbers, the least and the largest, got {value!r}")
    least, largest = (_real(name, number, 0, math.inf) for number in given)
    if not 0 < least <= largest <= highest:
        raise ValueError(f"{name} must satisfy 0 < least ≤ largest ≤ {highest}, got {least} … {largest}")
    return least, largest
