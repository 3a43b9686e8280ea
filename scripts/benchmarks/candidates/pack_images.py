"""Packing a folder or a container into shards; or only decoding and resizing the JPEG files of a folder."""

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


def pack(images: Path, dest: Path, rule: ResizeRule) -> tuple[float, int]:
    """Pack all splits from scratch with one thread per core; return the seconds and the number of images."""
    shutil.rmtree(dest, ignore_errors=True)
    started, count = time.perf_counter(), 0
    with open_source(images) as source:
        for name, split in source.splits.items():
            count += len(split)
            settings = PackSettings(rule=rule, num_workers=num_cores())
            pack_split(split, open_location(str(dest)).child(name), settings)
    return time.perf_counter() - started, count


def main(kind: str, images: Path, dest: Path, rule: ResizeRule) -> None:
    """Serve passes over all images."""
    channel, pool = Channel(), ThreadPoolExecutor(num_cores())
    files = sorted(path for path in images.glob("*/*") if path.suffix.lower() in (".jpg", ".jpeg"))
    decode_all = timed(lambda num_units: list(pool.map(decode, num_units * files)))

    def pack_all(num_units: int) -> float:
        return sum(pack(images, dest, rule)[0] for _ in range(num_units))

    run = {"pack": pack_all, "decode": decode_all}[kind]
    count = pack(images, dest, rule)[1] if kind == "pack" else len(files)
    run(1)
    facts = {"images": count, "threads": num_cores()}
    channel.ready(count, versions=versions_of("pillow", "tensorstore"), facts=facts)
    channel.serve(run)


if __name__ == "__main__":
    size = int(sys.argv[4]) if sys.argv[4:] else RULE.size
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), RULE if size == RULE.size else ResizeRule(size, size))
