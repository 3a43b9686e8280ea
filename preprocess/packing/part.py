"""Divides the blocks of a split among the parts of a pack.

A block is a range of source images, as many as a shard file holds. If all images can be packed, a block is a shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_PART = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")


@dataclass(frozen=True)
class Part:
    """Part ``number`` (from 1) of ``count``, which packs every ``count``-th block."""

    number: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.count:
            raise ValueError(f"part {self} does not exist; use a part from 1/{self.count} to {self.count}/{self.count}")

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    @classmethod
    def parse(cls, text: str) -> Part:
        """Parse "2/8"; raise ValueError for anything else."""
        match = _PART.fullmatch(text)
        if match is None or not int(match[2]):
            raise ValueError(f"part {text!r} is not of the form I/N; use 1/8 for the first of eight parts")
        return cls(int(match[1]), int(match[2]))

    def blocks(self, num_blocks: int) -> range:
        """Return the numbers of the part's blocks."""
        return range(self.number - 1, num_blocks, self.count)


def block_range(block: int, shard_images: int, num_candidates: int) -> range:
    """Return the indices of the source images of ``block``."""
    return range(block * shard_images, min((block + 1) * shard_images, num_candidates))


def describe_parts(blocks: Iterable[int], count: int) -> str:
    """Return "part 2/8 (shard 1), part 4/8 (shards 3, 11, 19 and 4 more)" for the numbers of some blocks."""
    of_part: dict[int, list[int]] = {}
    for block in blocks:
        of_part.setdefault(block % count, []).append(block)
    described = [f"part {number + 1}/{count} ({_shards(found)})" for number, found in sorted(of_part.items())]
    more = [f"{len(described) - _SHOWN} more parts"] if len(described) > _SHOWN else []
    return ", ".join(described[:_SHOWN] + more)


_SHOWN = 8


def _shards(blocks: list[int]) -> str:
    if len(blocks) == 1:
        return f"shard {blocks[0]}"
    shown = ", ".join(map(str, blocks[:3]))
    return f"shards {shown}" + (f" and {len(blocks) - 3:,} more" if len(blocks) > 3 else "")
