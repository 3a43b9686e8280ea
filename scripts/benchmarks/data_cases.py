"""The benches of data: `reader`, images of 224 px read from packed files in random order, and `pack`, their packing."""

import shutil
from pathlib import Path

from loopfeed.preprocess.cores import num_cores
from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import Images, Say, ensure_array, ensure_jpegs, ensure_shards, jpeg_files

_PACKED = Images(4096, 224)
_PLAIN, _DENSE = Images(4096, 224, checksum=False), Images(4096, 224, layout="dense")
_BATCH = 128
# name, environment, worker processes, target; each reads the same raw images from its own format
_PEERS = (
    ("DataLoader, memmap", "torch", 2, 1.5),
    ("DataLoader, no worker", "torch", 0, 1.5),
    ("FFCV, raw", "ffcv", 2, 1.0),
    ("Grain, ArrayRecord", "grain", 2, 1.5),
    ("Grain, threads alone", "grain", 0, 1.5),
    ("WebDataset", "webdataset", 2, 1.5),
    ("tf.data, TFRecord", "tensorflow", 2, 1.5),
)
# The start and end of a pack take a negligible part of a data set's time, but a tenth of that of a few hundred files.
_LEAST_IMAGES = 2000


def _reader(settings: Settings) -> list[Case]:
    image_bytes = 4 * _PACKED.size**2
    copies = (str(image_bytes), str(_BATCH), str(_PACKED.num_images * image_bytes))

    def shards(name: str, images: Images, threads: int = 0, target: float | None = None) -> Candidate:
        arguments = (str(images.shards_folder(settings)), "train", str(_BATCH), str(threads))
        return Candidate(name, "read_shards.py", arguments, target=target)

    def prepare(say: Say) -> None:
        for images in (_PACKED, _PLAIN, _DENSE):
            ensure_shards(settings, say, images)
        if settings.peers:
            ensure_array(settings, say, _PACKED)

    array = str(_PACKED.array_file(settings))
    candidates = (
        shards("checksums", _PACKED),
        shards("no checksums", _PLAIN, target=0.7),
        shards("checksums, 1 thread", _PACKED, threads=1),
        shards("checksums, dense", _DENSE),
        Candidate("limit: copy, 1 thread", "memory_copies.py", (*copies, "1", "images")),
        Candidate("limit: copy, all cores", "memory_copies.py", (*copies, "0", "images"), target=0.7),
        *(
            Candidate(name, "read_peer.py", (peer, array, str(_BATCH), str(workers)), peer=peer, target=target)
            for name, peer, workers, target in _PEERS
        ),
    )
    name = f"{_PACKED.num_images} × {_PACKED.size} px raw, random, b{_BATCH}"
    return [Case(name, IMAGES_PER_S, "checksums", candidates, prepare=prepare)]


def _pack(settings: Settings) -> list[Case]:
    repeated = settings.folder / "data" / "jpeg-repeated"
    arguments = (str(repeated), str(settings.folder / "data" / "packing"))

    def prepare(say: Say) -> None:
        _repeat(ensure_jpegs(settings, say), repeated)

    candidates = (
        Candidate("pack", "pack_images.py", ("pack", *arguments)),
        Candidate("limit: decode, resize", "pack_images.py", ("decode", *arguments), target=0.9),
        Candidate("FFCV, raw", "pack_ffcv.py", (*arguments, str(num_cores())), peer="ffcv", target=1.5),
    )
    name = "JPEG to 224 px" if settings.images is None else f"{settings.images.name} to 224 px"
    return [Case(name, IMAGES_PER_S, "pack", candidates, round_s=3.0, prepare=prepare)]


def _repeat(images: Path, folder: Path) -> None:
    """Create `folder` again with links to the files of `images`, repeated until there are at least `_LEAST_IMAGES`."""
    shutil.rmtree(folder, ignore_errors=True)
    files = jpeg_files(images)
    for copy in range(-(-_LEAST_IMAGES // max(1, len(files)))):
        for file in files:
            link = folder / file.parent.name / f"{copy}-{file.name}"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.resolve())


READER = Bench("reader", "packed images of 224 px in random order, against copies and other projects' loaders", _reader)
PACK = Bench("pack", "JPEG files to shards of 224 px, against decoding and resizing alone", _pack)
