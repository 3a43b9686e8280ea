"""The file `manifest.json`, which describes a split and how it was packed. Only complete splits have this file.

Owns the manifest's fields, their validation and the strict JSON form. Does not access a store.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from itertools import chain
from typing import Any

from loopfeed.preprocess.claimed_size import MAX_SIDE
from loopfeed.preprocess.extents import Whole
from loopfeed.preprocess.file_kinds import HEAD_BYTES, JSON_TEXT, kind_of
from loopfeed.preprocess.json_digest import json_digest
from loopfeed.preprocess.pixels import LAYOUTS, Layout, words_of_row
from loopfeed.preprocess.quantities import quantity
from loopfeed.preprocess.shards.arrays import (
    CHECKSUMS,
    CODECS,
    COLUMNS,
    EXTENTS,
    GROUPS,
    LABELS,
    NAME_OFFSETS,
    NAMES,
    PIXELS,
    TARGETS,
    WEIGHTS,
    Codec,
    NumberShards,
    row_shards,
)
from loopfeed.preprocess.shards.checksum import CHECKSUM_BYTES, ENTRY
from loopfeed.preprocess.shards.classes import MAX_CLASSES, ImageClass
from loopfeed.preprocess.shards.location import ShardError
from loopfeed.preprocess.shards.targets import Targets, num_words
from loopfeed.preprocess.shown_values import shown

FORMAT_VERSION = 5
"""The format version of new packs: with the names of the images, and whatever other arrays the manifest says.

Earlier versions, still readable, have no names. Version 1 has no ``checksums/``, and its manifest has no digests of the
checksums, of the labels' shard files and of the arrays' metadata; version 2 has one class per image, version 3
``targets/`` instead of ``labels/``, and version 4 whole pictures, with ``extents/`` and perhaps ``targets/``."""
_CHECKSUMS_VERSION, TARGETS_VERSION, WHOLE_VERSION = 2, 3, 4
READABLE_VERSIONS = (1, 2, 3, 4, 5)
MANIFEST_KEY = "manifest.json"
FAILURES_KEY = "failures.jsonl"
NO_MANIFEST_REMEDY = "restore that file, or clear the split's folder by hand and pack again"
"""The remedy for a missing or unrecognisable manifest. Even with --overwrite, packing then refuses the folder, because
it may not be a pack."""

# The format versions from which on fields are on disk.
_SINCE = (
    dict.fromkeys(("label_digests", "checksum_digests", "metadata_digests"), _CHECKSUMS_VERSION)
    | {"targets": TARGETS_VERSION, "extent_digests": WHOLE_VERSION}
    | dict.fromkeys(("column_digests", "name_bytes", "num_groups"), FORMAT_VERSION)
)
# Blosc adds 16 bytes to incompressible data, the checksum 4, the index 16.
_MAX_ADDED_BYTES = 64
# Python converts no integer of many digits to text.
_LISTS = (
    "class_counts",
    "channel_mean",
    "channel_std",
    "shard_digests",
    "label_digests",
    "checksum_digests",
    "extent_digests",
)
_DIGEST_KEY = "manifest_digest"
_DIGEST = re.compile("[0-9a-f]{64}")
# No image, shard file or split is larger: more would take memory for what no pack can hold.
_COUNTS = (
    *(("num_images", 1, 1 << 40), ("height", 1, MAX_SIDE), ("width", 1, MAX_SIDE), ("shard_images", 1, 1 << 30)),
    *(("num_failures", 0, 1 << 40), ("name_bytes", 0, 1 << 50), ("num_groups", 0, 1 << 32)),
)
# The keys that distinguish a split's manifest from other files of that name.
_IDENTIFYING_KEYS = frozenset({"format_version", "num_images", "source_digest"})


@dataclass(frozen=True)
class Manifest:
    """A description of the contents of a split, validated on creation.

    Attributes:
        format_version: version of the on-disk format: 5, or 1 to 4 for an older pack.
        num_images: number of images packed, N ≥ 1.
        height: height of an image in pixels.
        width: width of an image in pixels.
        layout: the pixel layout, as described in `loopfeed.preprocess.pixels.LAYOUTS`.
        codec: ``raw`` or ``blosc``.
        checksum: whether each image has a CRC-32C.
        shard_images: images per shard file; the last file may have fewer.
        classes: identifiers and names in the order of the labels, which are 0-based; in a pack with targets, the names
            of its K classes or columns.
        class_counts: number of images of each class; they add up to ``num_images`` unless the images have several
            classes each. None in a pack with numbers.
        channel_mean: mean of R, G and B over all pixels, 0..1, from exact integer sums.
        channel_std: standard deviation of R, G and B over all pixels (population), same scale.
        resize_rule: how images were resized and cropped, as JSON of ``loopfeed.preprocess.decoding.decode.ResizeRule``.
        source_digest: SHA-256 of the source's listing, hexadecimal.
        num_failures: number of images that could not be packed; ``failures.jsonl`` lists them.
        tool_versions: versions of the libraries that determine the pixels, by name.
        shard_digests: SHA-256 of each shard file's pixels as little-endian words, hexadecimal.
        labels_digest: SHA-256 of all labels as little-endian numbers; in a pack with targets, of the targets.
        failures_digest: SHA-256 of ``failures.jsonl``.
        label_digests: SHA-256 of the labels in each shard file of ``labels/`` or ``targets/``; none in version 1.
        checksum_digests: the same for ``checksums/``; none in version 1, or if ``checksum`` is false.
        metadata_digests: SHA-256 of each array's ``zarr.json``, by the array's name; none in version 1.
        targets: the targets of a pack with ``targets/``, None in others.
        extent_digests: as ``label_digests``, for ``extents/``; none without whole pictures.
        column_digests: as ``label_digests``, for each of ``names``, ``name_offsets``, ``weights`` and ``groups`` that
            the split has: always the first two from version 5 on, none before.
        name_bytes: the number of bytes of all names.
        num_groups: all groups of the split have lower numbers; the numbers are those of the groups of all splits. 0
            without ``groups/``.

    On disk there is one more field, ``manifest_digest``, the SHA-256 of all others; ``targets`` exists on disk from
    version 3 on, ``extent_digests`` from version 4 on and what follows it from version 5 on, and the three attributes
    before ``targets`` do not exist in version 1.
    """

    format_version: int
    num_images: int
    height: int
    width: int
    layout: str
    codec: Codec
    checksum: bool
    shard_images: int
    classes: tuple[ImageClass, ...]
    class_counts: tuple[int, ...]
    channel_mean: tuple[float, float, float]
    channel_std: tuple[float, float, float]
    resize_rule: Mapping[str, int | str]
    source_digest: str
    num_failures: int
    tool_versions: Mapping[str, str]
    shard_digests: tuple[str, ...]
    labels_digest: str
    failures_digest: str
    label_digests: tuple[str, ...] = ()
    checksum_digests: tuple[str, ...] = ()
    metadata_digests: Mapping[str, str] = field(default_factory=dict)
    targets: Targets | None = None
    extent_digests: tuple[str, ...] = ()
    column_digests: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    name_bytes: int = 0
    num_groups: int = 0

    def __post_init__(self) -> None:
        _check_version(self.format_version)
        for name, least, most in _COUNTS:
            is_valid = type(value := getattr(self, name)) is int and least <= value <= most
            _require(is_valid, f"{name} must be a whole number from {least} to {most:,}", value)
        known = " or ".join(map(repr, LAYOUTS.values()))
        if self.layout not in LAYOUTS.values():
            raise ShardError(
                f"layout must be {known}, found {self.layout!r}; install a newer loopfeed for other layouts"
            )
        is_divisible = self.pixel_layout == "packed" or self.width % 4 == 0
        _require(is_divisible, "the width must be a multiple of 4 in the dense layout", self.width)
        _require(self.codec in CODECS, f"codec must be one of {', '.join(CODECS)}", self.codec)
        _require(type(self.checksum) is bool, "checksum must be true or false", self.checksum)
        must_be_whole = self.format_version == WHOLE_VERSION
        rule = f"resize_rule must have {'a' if must_be_whole else 'no'} canvas in version {self.format_version}"
        is_valid = self.is_whole == must_be_whole or self.format_version > WHOLE_VERSION
        _require(is_valid, rule, dict(self.resize_rule))
        if self.is_whole:
            size, resize = self.resize_rule.get("size"), self.resize_rule.get("resize")
            is_valid = type(size) is int and 1 <= size <= self.height == resize
            _require(is_valid, "size of resize_rule must be from 1 to resize, the height of the canvas", (size, resize))
        self._check_targets()
        self._check_classes()
        for name in ("channel_mean", "channel_std"):
            value = getattr(self, name)
            is_valid = len(value) == 3 and all(type(part) is float and 0 <= part <= 1 for part in value)
            _require(is_valid, f"{name} must be three numbers from 0 to 1", value)
        self._check_digests()

    def _check_digests(self) -> None:
        is_first = self.format_version == 1
        self._check_columns()
        names = [] if is_first else sorted((PIXELS, *self.number_arrays))
        for name, count in (
            ("shard_digests", self.num_shards),
            ("label_digests", 0 if is_first else self.num_parts(self.label_array)),
            ("checksum_digests", 0 if is_first else self.num_parts(CHECKSUMS) * self.checksum),
            ("extent_digests", self.num_parts(EXTENTS) * self.is_whole),
        ):
            _require(
                len(getattr(self, name)) == count,
                f"{name} must have {quantity(count, 'entry')}",
                len(getattr(self, name)),
            )
        found = sorted(self.metadata_digests)
        _require(found == names, f"the keys of metadata_digests must be {', '.join(names) or 'none'}", found)
        lists = (self.shard_digests, *(self.digests_of(name) for name in self.number_arrays))
        digests = (*chain(*lists), *self.metadata_digests.values())
        source = () if self.targets is None else (self.targets.labels_file,)
        for digest in (*digests, *source, self.labels_digest, self.failures_digest):
            _require(
                type(digest) is str and _DIGEST.fullmatch(digest) is not None, "a digest must be a SHA-256", digest
            )

    def _check_columns(self) -> None:
        required = (NAMES, NAME_OFFSETS) if self.has_names else ()
        allowed = (*required, WEIGHTS, GROUPS) if self.has_names else ()
        found = self.column_digests.keys()
        rule = f"the keys of column_digests must be {', '.join(allowed) or 'none'}"
        _require(found <= {*allowed} and found >= {*required}, rule, sorted(found))
        for name, digests in self.column_digests.items():
            count = self.num_parts(name)
            rule = f"{name} of column_digests must have {quantity(count, 'entry')}"
            _require(len(digests) == count, rule, len(digests))
        _require((GROUPS in found) == (self.num_groups > 0), "num_groups must be 0 without groups", self.num_groups)

    def _check_targets(self) -> None:
        has_targets = self.format_version == TARGETS_VERSION
        rule = f"targets must {'be an object' if has_targets else 'be absent'} in version {self.format_version}"
        _require(self.format_version >= WHOLE_VERSION or (self.targets is not None) == has_targets, rule, self.targets)
        if self.targets is not None and (fault := self.targets.faults(len(self.classes))) is not None:
            raise ShardError(f"{fault}; restore the file or pack the split again with --overwrite")

    def _check_classes(self) -> None:
        counts = self.class_counts
        num_classes = len(self.classes)
        _require(1 <= num_classes <= MAX_CLASSES, f"there must be 1 to {MAX_CLASSES} classes", num_classes)
        if self.targets is not None:
            num_counts = num_classes if self.targets.kind == "classes" else 0
            _require(len(counts) == num_counts, f"class_counts must have {quantity(num_counts, 'entry')}", len(counts))
            are_counts = all(type(count) is int and 0 <= count <= self.num_images for count in counts)
            _require(are_counts, f"class_counts must be 0 to {self.num_images}", counts)
            return
        _require(len(counts) == num_classes, f"class_counts must have {quantity(num_classes, 'entry')}", len(counts))
        _require(all(type(count) is int and count >= 0 for count in counts), "class_counts must be ≥ 0", counts)
        _require(
            sum(counts) == self.num_images,
            f"class_counts must add up to {quantity(self.num_images, 'image')}",
            sum(counts),
        )

    @property
    def num_classes(self) -> int:
        """The number of classes, K; in a pack with targets, the number of targets of an image."""
        return len(self.classes)

    @property
    def is_whole(self) -> bool:
        """Whether the images are whole pictures on a canvas, whose places are in ``extents/``."""
        return "canvas" in self.resize_rule

    @property
    def has_names(self) -> bool:
        """Whether the names of the images are in ``names/`` and ``name_offsets/``."""
        return self.format_version >= FORMAT_VERSION

    @property
    def whole(self) -> Whole | None:
        """The geometry of whole pictures; None for images that fill their pixels."""
        rule = self.resize_rule
        return Whole(int(rule["size"]), int(rule["resize"])) if self.is_whole else None

    @property
    def label_array(self) -> str:
        """The name of the array with the labels: ``labels``, or ``targets``."""
        return LABELS if self.targets is None else TARGETS

    @property
    def number_arrays(self) -> tuple[str, ...]:
        """The names of all arrays of the split beside ``pixels/``."""
        has_checksums = self.checksum and self.format_version > 1
        extents = [EXTENTS] * self.is_whole
        return (self.label_array, *[CHECKSUMS] * has_checksums, *extents, *sorted(self.column_digests))

    def digests_of(self, name: str) -> tuple[str, ...]:
        """Return the SHA-256 of the numbers in each shard file of one of `number_arrays`."""
        known = {CHECKSUMS: self.checksum_digests, EXTENTS: self.extent_digests, self.label_array: self.label_digests}
        return known[name] if name in known else self.column_digests[name]

    def length_of(self, name: str) -> int:
        """Return the number of numbers or rows of one of `number_arrays`: N, but for the names."""
        return {NAMES: self.name_bytes, NAME_OFFSETS: self.num_images + 1}.get(name, self.num_images)

    def shards_of(self, name: str) -> NumberShards:
        """Return how one of `number_arrays` is divided into shard files."""
        if name == TARGETS:
            return row_shards(self.target_words)
        return COLUMNS[name].shards

    def num_parts(self, name: str) -> int:
        """Return the number of shard files of one of `number_arrays`."""
        return self.shards_of(name).num_parts(self.length_of(name))

    @property
    def target_words(self) -> int:
        """The number of 32-bit words of an image's targets; 0 in a pack without targets."""
        return 0 if self.targets is None else num_words(self.targets.kind, self.num_classes)

    @property
    def num_shards(self) -> int:
        """Number of shard files in ``pixels/``."""
        return -(-self.num_images // self.shard_images)

    @property
    def image_bytes(self) -> int:
        """Size in bytes of one image in its stored pixel layout, before compression and without its checksum."""
        return self.height * self.row_words * 4

    def shard_bytes(self, shard: int) -> int | None:
        """Return the size in bytes of shard file ``shard`` in ``pixels/``, or None if the shard is compressed."""
        if self.codec != "raw":
            return None
        start, stop = self.shard_range(shard)
        stored_bytes = self.image_bytes + CHECKSUM_BYTES * self.checksum
        return (stop - start) * stored_bytes + self.shard_images * ENTRY.size + CHECKSUM_BYTES

    @property
    def max_shard_bytes(self) -> int:
        """Maximum size in bytes of a shard file in ``pixels/``, including the overhead of the codec and of Zarr."""
        return self.shard_images * (self.image_bytes + _MAX_ADDED_BYTES) + _MAX_ADDED_BYTES

    @property
    def pixel_layout(self) -> Layout:
        """The short name of the pixel layout, ``packed`` or ``dense``."""
        return next(name for name, text in LAYOUTS.items() if text == self.layout)

    @property
    def row_words(self) -> int:
        """Number of uint32 words in a row of pixels."""
        return words_of_row(self.width, self.pixel_layout)

    def shard_range(self, shard: int) -> tuple[int, int]:
        """Return ``(start, stop)``, the range of image indices in shard file ``shard``."""
        start = shard * self.shard_images
        return start, min(start + self.shard_images, self.num_images)

    def _document(self) -> dict[str, Any]:
        known = _known_keys(self.format_version)
        return {name: value for name, value in asdict(self).items() if name in known}

    def to_json(self) -> str:
        """Return the manifest as JSON text; equal manifests give equal bytes."""
        document = self._document()
        # ASCII escapes, because a class folder's name need not be UTF-8.
        return json.dumps(document | {_DIGEST_KEY: json_digest(document)}, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, where: str = MANIFEST_KEY) -> Manifest:
        """Parse the output of `to_json`; ``where`` is the file name for error messages.

        Raises:
            ShardError: the text is not JSON, has an unknown or missing key, a newer format version or a value out of
                range, or was changed after it was written.
        """
        try:
            document = json.loads(text)
        except (ValueError, RecursionError) as error:
            start = text.encode() if isinstance(text, str) else text
            kind = kind_of(start[:HEAD_BYTES])
            if kind is not None and kind.is_lost and kind != JSON_TEXT:
                raise ShardError(f"{where}: it is {kind.name}; {kind.remedy}") from error
            raise ShardError(f"{where}: not valid JSON ({error}); {NO_MANIFEST_REMEDY}") from error
        if not isinstance(document, dict):
            found = type(document).__name__
            raise ShardError(f"{where}: a manifest must be a JSON object, found {found}; {NO_MANIFEST_REMEDY}")
        try:
            return cls._from_document(document)
        except ShardError as error:
            raise ShardError(f"{where}: {error}") from None

    @classmethod
    def _check_keys(cls, document: dict[str, Any]) -> set[str]:
        """Return the keys defined by the document's format version; raise ShardError if a key is missing or unknown."""
        # The version is checked first, because another version may have other keys.
        if "format_version" in document:
            _check_version(document["format_version"])
        if lacking := sorted(_IDENTIFYING_KEYS - document.keys()):
            raise ShardError(f"missing key {', '.join(lacking)}; {NO_MANIFEST_REMEDY}")
        known = _known_keys(document["format_version"]) | {_DIGEST_KEY}
        for kind, keys in (("unknown", set(document) - known), ("missing", known - set(document))):
            if keys:
                raise ShardError(
                    f"{kind} key {', '.join(sorted(keys))}; restore the file or pack again with --overwrite"
                )
        return known

    @classmethod
    def _from_document(cls, document: dict[str, Any]) -> Manifest:
        known = cls._check_keys(document)
        values = dict(document)
        stored_digest = values.pop(_DIGEST_KEY)
        lists = [name for name in _LISTS if name in known]
        for name in ("classes", *lists):
            _require(isinstance(values[name], list), f"{name} must be a list", values[name])
        for name in ("resize_rule", "tool_versions", *({"metadata_digests", "column_digests"} & known)):
            _require(isinstance(values[name], dict), f"{name} must be an object", values[name])
        for name in ("layout", "codec", "source_digest"):
            _require(isinstance(values[name], str), f"{name} must be a string", values[name])
        if values.get("targets") is not None:
            values["targets"] = _targets(values["targets"])
        values["classes"] = tuple(_image_class(entry) for entry in values["classes"])
        for name in lists:
            values[name] = tuple(values[name])
        if "column_digests" in known:
            columns = values["column_digests"]
            for name, digests in columns.items():
                _require(isinstance(digests, list), f"{name} of column_digests must be a list", digests)
            values["column_digests"] = {name: tuple(digests) for name, digests in columns.items()}
        manifest = cls(**values)
        if stored_digest != json_digest(manifest._document()):
            raise ShardError(
                f"a value was changed after packing ({_DIGEST_KEY} does not match); restore the file or pack the "
                "split again with --overwrite"
            )
        return manifest


def _known_keys(version: int) -> set[str]:
    return {each.name for each in fields(Manifest) if version >= _SINCE.get(each.name, 1)}


def is_manifest(text: bytes) -> bool:
    """Return whether ``text`` is a split's manifest (of any version, even damaged) and not another program's file."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(document, dict) and document.keys() >= _IDENTIFYING_KEYS


def _image_class(entry: Any) -> ImageClass:
    is_valid = isinstance(entry, dict) and set(entry) == {"id", "name"} and all(type(v) is str for v in entry.values())
    _require(is_valid, "a class must have the keys id and name, both strings", entry)
    return ImageClass(**entry)


def _targets(entry: Any) -> Targets:
    rule = "targets must be an object with kind, labels_file, minima and maxima"
    _require(isinstance(entry, dict), rule, entry)
    try:
        return Targets.from_json(entry)
    except (KeyError, TypeError):
        _require(False, rule, entry)
        raise


def _require(is_satisfied: bool, rule: str, found: object) -> None:
    if not is_satisfied:
        text = repr(shown(found))
        text = text if len(text) <= 80 else f"{text[:77]}…"
        raise ShardError(f"{rule}, found {text}; restore the file or pack the split again with --overwrite")


def _check_version(version: object) -> None:
    if type(version) is int and version in READABLE_VERSIONS:
        return
    if type(version) is int and version > FORMAT_VERSION:
        raise ShardError(
            f"format version {version} is newer than {FORMAT_VERSION}, the newest supported; install a newer loopfeed"
        )
    known = ", ".join(map(str, READABLE_VERSIONS[:-1])) + f" or {READABLE_VERSIONS[-1]}"
    raise ShardError(f"format_version must be {known}, found {version!r}; pack the split again with --overwrite")
