"""The settings for packing, and the plan that determines every byte of a split.

Equal plans produce byte-identical splits, so an unfinished pack can be continued if and only if its plan is unchanged.
Reads no image.

And the hold-out rule of a data set. A pack records its rule in its plan's `tool_versions`, which earlier versions of
Loopfeed can read; see `loopfeed.preprocess.sources.selection.held_out`.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.pixels import LAYOUTS, Layout, words_of_row
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import CODECS, Codec
from loopfeed.preprocess.shards.classes import MAX_CLASSES
from loopfeed.preprocess.shards.location import Location, ShardError
from loopfeed.preprocess.shards.manifest import FORMAT_VERSION, MANIFEST_KEY, Manifest
from loopfeed.preprocess.shards.split_files import PARTS, PLAN_KEY
from loopfeed.preprocess.sources.selection import HOLDOUT_RULE

if TYPE_CHECKING:
    from loopfeed.preprocess.shards.targets import SplitTargets
    from loopfeed.preprocess.sources.listing import SourceSplit

OnError = Literal["skip", "fail"]

# Only in the plan of a pack with targets.
_TARGETS, _LABELS_FILE = "targets", "labels_file"
_LABEL_KINDS = {None: "one class", "classes": "any number of classes", "numbers": "numbers to predict"}
_RESIZE_RULE = "resize_rule"
_DECODING = "decoding"
"""Only in the plan of an unfinished pack: the version of the rules by which files are decoded (`decoding_version`)."""
DECODING_VERSION = 4
# What a user calls the entries of a plan.
_NAMES = {
    "num_candidates": "the number of images",
    "classes": "the list of classes",
    "layout": "--layout",
    "codec": "--codec",
    "checksum": "--checksum",
    "shard_images": "--shard-images",
    "tool_versions": "the set of library versions",
    "format_version": "the version of the format",
    _DECODING: "the version of the decoding rules",
}
_DIFFERENCES = {
    "source_digest": (
        "the source's images changed (files were added, removed, renamed or resized, or --holdout or --limit changed, "
        "or the classes, groups or weights of --labels)"
    ),
    _LABELS_FILE: "the file of labels changed (--labels)",
}

# The value of an option whose entry a rule leaves out.
_LEFT_OUT = {"canvas": "square"}

_SHARD_BYTES = 64 << 20
_MAX_SHARD_IMAGES = 1 << 14
_MAX_SHARD_BYTES = 4 << 30


class ShardArguments(TypedDict, total=False):
    """The keyword arguments of `loopfeed.pack` for the form of the shards, as `PackSettings` describes them."""

    shard_images: int | None
    layout: Layout
    codec: Codec
    checksum: bool
    on_error: OnError


@dataclass(frozen=True)
class PackSettings:
    """The settings for packing a split, validated on creation.

    Attributes:
        rule: how images are resized and cropped.
        shard_images: images per shard file, ≥ 1; None selects the largest power of two that fits in 64 MiB, at most
            16,384.
        codec: ``raw`` is fastest to read, ``blosc`` takes about a quarter less space.
        checksum: whether to store a CRC-32C of each image, so that a flipped bit is an error.
        num_workers: decoding threads, ≥ 1.
        layout: ``packed``, one word per pixel, or ``dense``, a quarter smaller; the size must be a multiple of 4.
        holdout_rule: the rule by which a part of the split's images was held out, or None if none was; see
            `loopfeed.preprocess.sources.selection.held_out`.
        on_error: ``skip`` records an image that can't be packed in ``failures.jsonl``, ``fail`` stops at it.
    """

    rule: ResizeRule = field(default_factory=ResizeRule)
    shard_images: int | None = None
    codec: Codec = "raw"
    checksum: bool = True
    num_workers: int = 1
    layout: Layout = "packed"
    on_error: OnError = "skip"
    holdout_rule: int | None = None

    def __post_init__(self) -> None:
        for name in ("shard_images", "num_workers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        # A compressed or remote shard is filled in memory.
        shard_bytes = self.resolved_shard_images * self.image_bytes
        if shard_bytes > _MAX_SHARD_BYTES:
            height, width = self.rule.stored_shape
            raise ValueError(
                f"shard_images {self.shard_images:,} at {width} × {height} px makes shard files of "
                f"{shard_bytes / 2**30:,.0f} GiB, more than the {_MAX_SHARD_BYTES >> 30} GiB allowed; use at most "
                f"{quantity(_MAX_SHARD_BYTES // self.image_bytes, 'image')}"
            )
        if self.codec not in CODECS:
            raise ValueError(f"codec must be one of {', '.join(CODECS)}, got {self.codec!r}")
        if self.on_error not in ("skip", "fail"):
            raise ValueError(f"on_error must be skip or fail, got {self.on_error!r}")

    @property
    def image_bytes(self) -> int:
        """Size of one image's pixels in bytes, before compression and without its checksum."""
        height, width = self.rule.stored_shape
        return 4 * height * words_of_row(width, self.layout)

    @property
    def resolved_shard_images(self) -> int:
        """Number of images per shard file: ``shard_images``, or the default if it is None."""
        if self.shard_images is not None:
            return self.shard_images
        fitting = max(1, _SHARD_BYTES // self.image_bytes)
        return min(_MAX_SHARD_IMAGES, 1 << (fitting.bit_length() - 1))


def make_plan(
    source: SourceSplit,
    settings: PackSettings,
    targets: SplitTargets | None = None,
    *,
    format_version: int = FORMAT_VERSION,
) -> dict[str, Any]:
    """Return the plan, which contains everything that determines the bytes of the split, as JSON values.

    With ``targets``, those are packed instead of the classes of the images. The version is that of an unfinished pack
    if there is one (`loopfeed.preprocess.packing.split_state.version_to_pack`).

    Raises:
        ShardError: the split is empty or has more classes than a label can represent.
    """
    if not len(source):
        raise ShardError(f"the source's split {source.name!r} contains no images; check the path and --limit")
    if len(source.classes) > MAX_CLASSES:
        raise ShardError(
            f"the source has {len(source.classes)} classes, more than the {MAX_CLASSES} that a 16-bit label can "
            "represent; remove some classes"
        )
    plan: dict[str, Any] = {
        "format_version": format_version,
        "num_candidates": len(source),
        "classes": [[each.id, each.name] for each in source.classes],
        "layout": LAYOUTS[settings.layout],
        "codec": settings.codec,
        "checksum": settings.checksum,
        "shard_images": settings.resolved_shard_images,
        _RESIZE_RULE: settings.rule.to_json(),
        "source_digest": source.digest(),
        "tool_versions": tool_versions(),
        _DECODING: DECODING_VERSION,
    }
    # Rule 1 is not recorded, as in packs of earlier versions.
    if settings.holdout_rule not in (None, 1):
        plan["tool_versions"] |= {_VERSION: str(settings.holdout_rule)}
    if targets is not None:
        plan |= _target_plan(targets.kind, targets.labels_file)
    return dict(json.loads(json.dumps(plan)))


def _target_plan(kind: str, labels_file: str) -> dict[str, Any]:
    return {_TARGETS: kind, _LABELS_FILE: labels_file}


def is_plan(values: dict[str, Any]) -> bool:
    """Return whether ``values`` is a plan of any format version."""
    return values.keys() >= {"format_version", "num_candidates", "source_digest"}


def decoding_version(plan: Mapping[str, Any]) -> int:
    """Return the version of the rules by which the files of a pack are decoded.

    Version 1, which no plan states, ignored XMP orientations and the ranges that files name, scaled floats image by
    image, and left out files that lack only their end marker. Version 2 left out AVIF and JPEG
    2000, version 3 HEIC and JPEG XL.
    """
    found = plan.get(_DECODING, 1)
    return found if isinstance(found, int) else DECODING_VERSION


def plan_of(manifest: Manifest) -> dict[str, Any]:
    """Return the plan with which a finished split was packed."""
    return {
        "format_version": manifest.format_version,
        "num_candidates": manifest.num_images + manifest.num_failures,
        "classes": [[each.id, each.name] for each in manifest.classes],
        "layout": manifest.layout,
        "codec": manifest.codec,
        "checksum": manifest.checksum,
        "shard_images": manifest.shard_images,
        _RESIZE_RULE: dict(manifest.resize_rule),
        "source_digest": manifest.source_digest,
        "tool_versions": dict(manifest.tool_versions),
    } | ({} if (targets := manifest.targets) is None else _target_plan(targets.kind, targets.labels_file))


def check_same_plan(found: dict[str, Any], wanted: dict[str, Any], where: str, *, can_overwrite: bool = True) -> None:
    """Check that the pack at ``where``, which may be unfinished, was begun with the plan now requested.

    Args:
        found: the plan with which it was begun.
        wanted: the plan now requested.
        where: its location, for the message.
        can_overwrite: whether the message suggests --overwrite, which one process of several must not use.

    Raises:
        ShardError: the plans differ; the message lists each setting that differs.
    """
    if decoding_version(found) < decoding_version(wanted):
        # Finished, or continued with the images that are decoded as before.
        found, wanted = ({key: value for key, value in each.items() if key != _DECODING} for each in (found, wanted))
    differing = [key for key in sorted(found.keys() | wanted.keys()) if found.get(key) != wanted.get(key)]
    if differing == [PARTS]:
        raise ShardError(f"{where}: {_other_parts(found.get(PARTS), wanted.get(PARTS))}")
    if _LABELS_FILE in differing:
        # The classes follow from the file, and the digest of the source covers them.
        differing = [key for key in differing if key not in ("classes", "source_digest", _TARGETS)]
    remedy = (
        "Use the same source and options, another DEST, or --overwrite to pack it again"
        if can_overwrite
        else "Use the same source and options as the process that began this pack, or another DEST"
    )
    if (found.keys() ^ wanted.keys()) & {_LABELS_FILE}:
        # Then the classes, the format and the order of the images differ too.
        was, now = (_LABEL_KINDS[plan.get(_TARGETS)] for plan in (found, wanted))
        hint = ""
        if found.get(_TARGETS) == "numbers":
            hint = " (a column class or label is now the class, even of numbers; under another name it is a number)"
        raise ShardError(f"{where} was packed with {was} for each image, now there is {now}{hint}. {remedy}")
    differences = _differences(differing, found, wanted)
    if differences:
        raise ShardError(
            f"{where} was packed from a different source or with different settings: {'; '.join(differences)}. {remedy}"
        )


def describe_differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """Return a description of each entry of two plans that differs."""
    keys = sorted(found.keys() | wanted.keys())
    return _differences([key for key in keys if found.get(key) != wanted.get(key)], found, wanted)


def _differences(keys: Iterable[str], found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    differences = []
    for key in keys:
        was, now = found.get(key), wanted.get(key)
        if key == _RESIZE_RULE and isinstance(was, dict) and isinstance(now, dict):
            # Its entries have the names of the options that set them.
            differences += [
                f"--{name} was {was.get(name, _LEFT_OUT.get(name, 'not given'))}, is now "
                f"{now.get(name, _LEFT_OUT.get(name, 'not given'))}"
                for name in sorted(was.keys() | now.keys(), key=[*now, *was].index)
                if was.get(name) != now.get(name)
            ]
        else:
            text = f"{_NAMES.get(key, key)} was {_shown(was)}, is now {_shown(now)}"
            differences.append(_DIFFERENCES.get(key, text))
    return differences


def _other_parts(found: int | None, wanted: int | None) -> str:
    if found is None:
        return (
            "this unfinished pack was begun without --part; run the same command without --part to continue it, or use "
            "another DEST"
        )
    if wanted is None:
        return (
            f"this unfinished pack was begun with {describe_count(found)}; continue it in the same way, then finish "
            "it with --finish, or use --overwrite to pack it again on this machine"
        )
    return (
        f"this unfinished pack was begun with {describe_count(found)}, not {describe_count(wanted)}; continue it in "
        "the same way, or use another DEST"
    )


def describe_count(parts: int) -> str:
    """Return the options by which a pack was divided into ``parts``."""
    return "--executor dask" if parts == 1 else f"--part I/{parts}"


def tool_versions() -> dict[str, str]:
    """Return the versions of the libraries that determine the bytes of a split."""
    names = ("numpy", "pillow", "tensorstore")
    return {name: metadata.version(name) for name in names}


def _shown(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {each}" for key, each in value.items())
    if isinstance(value, list):
        return quantity(len(value), "class")
    # A plan contains the description of a layout.
    return next((name for name, text in LAYOUTS.items() if text == value), str(value))


HELD_OUT_SPLITS = ("train", "val")
"""The splits that are made from one by holding out images."""

_VERSION = "holdout"


def choose_holdout_rule(location: Location, *, replaced: Collection[str] = ()) -> int:
    """Return the rule by which to hold out images for a data set: that of a split which stays there, else the newest.

    Under another rule, an image could be in both splits, and an unfinished pack could not be completed.

    Args:
        location: the data set.
        replaced: the splits that will be packed anew.
    """
    for name in HELD_OUT_SPLITS:
        if name not in replaced and (rule := _recorded_rule(location.child(name))) is not None:
            return rule
    return HOLDOUT_RULE


def _recorded_rule(location: Location) -> int | None:
    """Return the rule of a pack, finished or not; None if there is no readable pack."""
    for key in (PLAN_KEY, MANIFEST_KEY):
        try:
            values = json.loads(location.read(key) or b"null")
        except (ValueError, RecursionError):
            continue  # packing reports it
        if isinstance(values, dict) and isinstance(versions := values.get("tool_versions"), dict):
            rule = str(versions.get(_VERSION, 1))
            return int(rule) if rule.isdecimal() else 1
    return None
