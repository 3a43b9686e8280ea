"""Packing a folder of JPEG files into shards; or only decoding and resizing them."""

import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from protocol import Channel, timed, versions_of

from loopfeed.preprocess.control_groups import num_cores
from loopfeed.preprocess.decoding.decode import DecodeError, ResizeRule, decode_image
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.sources.open_source import open_source

RULE = ResizeRule()


def decode(path: Path) -> bool:
    """Decode and resize a file; return whether that succeeded."""
    try:
        decode_image(path.read_bytes(), RULE)
    except DecodeError:
        return False
    return True


def pack(images: Path, dest: Path) -> float:
    """Pack all splits from scratch with one thread per core; return the seconds."""
    shutil.rmtree(dest, ignore_errors=True)
    started = time.perf_counter()
    with open_source(images) as source:
        for name, split in source.splits.items():
            pack_split(split, open_location(str(dest)).child(name), PackSettings(num_workers=num_cores()))
    return time.perf_counter() - started


def main(kind: str, images: Path, dest: Path) -> None:
    """Serve passes over all images."""
    channel, pool = Channel(), ThreadPoolExecutor(num_cores())
    files = sorted(path for path in images.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    decode_all = timed(lambda num_units: list(pool.map(decode, num_units * files)))

    def pack_all(num_units: int) -> float:
        return sum(pack(images, dest) for _ in range(num_units))

    run = {"pack": pack_all, "decode": decode_all}[kind]
    run(1)
    facts = {"images": len(files), "threads": num_cores()}
    channel.ready(len(files), versions=versions_of("pillow", "tensorstore"), facts=facts)
    channel.serve(run)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
