"""The targets of a split packed with a file of labels: bits of several classes per image, or numbers (regression).

Owns what the manifest says about them, and the conversion between bits and words. Does not access a store.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

TargetKind = Literal["classes", "numbers"]
TARGET_KINDS: tuple[TargetKind, ...] = ("classes", "numbers")

_WORD_BITS = 32
_DTYPES: dict[TargetKind, type[np.uint32 | np.float32]] = {"classes": np.uint32, "numbers": np.float32}

type TargetRows = NDArray[np.uint32] | NDArray[np.float32]
"""Rows as stored: uint32 ``[n, words]`` of bits, or float32 ``[n, K]`` numbers."""


@dataclass(frozen=True)
class Targets:
    """What a manifest says about the targets of its split, beside the names of their K classes or columns.

    Attributes:
        kind: ``classes``, a bit for each of K classes, or ``numbers``, K numbers.
        labels_file: SHA-256 of the file of labels that the split was packed with, hexadecimal.
        minima: the smallest number of each column; none for classes.
        maxima: the largest number of each column; none for classes.
    """

    kind: TargetKind
    labels_file: str
    minima: tuple[float, ...] = ()
    maxima: tuple[float, ...] = ()

    def faults(self, num_targets: int) -> str | None:
        """Return what is wrong with the values, for K = ``num_targets``, or None if they are valid."""
        if self.kind not in TARGET_KINDS:
            return f"the kind of targets must be {' or '.join(TARGET_KINDS)}, found {self.kind!r}"
        count = num_targets if self.kind == "numbers" else 0
        for name in ("minima", "maxima"):
            values = getattr(self, name)
            if len(values) != count or not all(type(each) is float and math.isfinite(each) for each in values):
                return f"{name} of targets must be {count} finite numbers, found {len(values)}"
        return None

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Targets:
        """Create the record from a JSON object; raise KeyError or TypeError if its form is wrong."""
        if document.keys() != {"kind", "labels_file", "minima", "maxima"}:
            raise KeyError("kind, labels_file, minima, maxima")
        if not isinstance(document["kind"], str) or not isinstance(document["labels_file"], str):
            raise TypeError("kind and labels_file")
        return cls(document["kind"], document["labels_file"], tuple(document["minima"]), tuple(document["maxima"]))  # type: ignore[arg-type]


@dataclass(frozen=True, eq=False)
class SplitTargets:
    """The targets of a split to pack, beside the names of their K classes or columns.

    Attributes:
        kind: whether they are classes or numbers.
        labels_file: SHA-256 of the file of labels, hexadecimal.
        values: the rows as they are stored, in the pack order of the split.
    """

    kind: TargetKind
    labels_file: str
    values: TargetRows


def num_words(kind: TargetKind, num_targets: int) -> int:
    """Return the number of 32-bit words in a row of K = ``num_targets`` targets."""
    return -(-num_targets // _WORD_BITS) if kind == "classes" else num_targets


def dtype_of(kind: TargetKind) -> type[np.uint32 | np.float32]:
    """Return the type of the stored numbers: uint32 words of bits, or float32."""
    return _DTYPES[kind]


def pack_bits(bits: NDArray[np.bool]) -> NDArray[np.uint32]:
    """Pack bool ``[n, K]`` into uint32 ``[n, ceil(K / 32)]``: class c is bit c % 32 of word c // 32, the rest are 0."""
    padded = np.zeros((len(bits), num_words("classes", bits.shape[1]) * _WORD_BITS), np.bool)
    padded[:, : bits.shape[1]] = bits
    return np.packbits(padded, axis=1, bitorder="little").view("<u4").astype(np.uint32, copy=False)


def unpack_bits(words: NDArray[np.uint32], num_classes: int) -> NDArray[np.bool]:
    """Unpack uint32 ``[n, words]`` into bool ``[n, K]``; the inverse of `pack_bits`."""
    octets = np.ascontiguousarray(words, "<u4").view(np.uint8)
    return np.unpackbits(octets, axis=1, count=num_classes, bitorder="little").astype(np.bool)


def has_excess_bits(words: NDArray[np.uint32], num_classes: int) -> NDArray[np.bool]:
    """Return bool ``[n]``: whether a row has a bit that belongs to none of the K classes."""
    last = num_classes % _WORD_BITS
    if not last:
        return np.zeros(len(words), np.bool)
    return (words[:, -1] >> np.uint32(last)) != 0


def count_classes(words: NDArray[np.uint32], num_classes: int) -> tuple[int, ...]:
    """Return the number of images with each of the K classes, from uint32 ``[n, words]``."""
    totals = np.zeros(num_classes, np.int64)
    step = max(1, (1 << 24) // num_classes)
    for start in range(0, len(words), step):
        totals += unpack_bits(words[start : start + step], num_classes).sum(axis=0)
    return tuple(totals.tolist())
