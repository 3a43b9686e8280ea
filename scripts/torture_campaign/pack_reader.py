"""The program `read-pack`: reads every image of a pack with the public reader and writes the result.

`read-pack PACK FILE [PAUSE_S]` writes JSON: for each split the SHA-256 of each image's words, the labels, and any
error. It exits with 0 if everything was read, and with 2 if the reader refused; other exceptions are not caught.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from loopfeed.preprocess.shards.reader import ShardError, open_split

READ_TIMEOUT_S = 3.0
BATCH = 12
SPLITS = ("train", "val")


def main() -> int:
    """Read the pack that the command line names; return the exit code."""
    pack, dest, *pause = sys.argv[1:]
    found: dict[str, Any] = {}
    code = 0
    for split in SPLITS:
        found[split] = {"images": [], "labels": []}
        try:
            read_split(pack, split, found[split], float(pause[0]) if pause else 0.0)
        except ShardError as error:
            print(f"read-pack: {error}", file=sys.stderr)
            found[split]["error"] = str(error)
            code = 2
    Path(dest).write_text(json.dumps(found), encoding="utf-8")
    return code


def read_split(pack: str, name: str, found: dict[str, Any], pause_s: float) -> None:
    """Read a split in batches of images from all its shards; record each image with its index."""
    with open_split(pack, name) as split:
        order = np.random.default_rng(0).permutation(split.num_images).astype(np.int64)
        for start in range(0, split.num_images, BATCH):
            indices = order[start : start + BATCH]
            pixels = np.empty((len(indices), split.height, split.row_words), np.uint32)
            labels = np.empty(len(indices), np.int32)
            split.read_into(indices, pixels, labels, timeout_s=READ_TIMEOUT_S)
            for index, image, label in zip(indices.tolist(), pixels, labels.tolist(), strict=True):
                found["images"].append([index, hashlib.sha256(image.astype("<u4").tobytes()).hexdigest()])
                found["labels"].append([index, label])
            time.sleep(pause_s)


if __name__ == "__main__":
    sys.exit(main())
