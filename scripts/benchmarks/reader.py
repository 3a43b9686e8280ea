"""`reader`: Loopfeed and other loaders read images of 224 px from packed files in random order (warm page cache)."""

from collections.abc import Callable

from loopfeed.preprocess.pixels import Layout
from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import SPLIT, array_file, ensure_array, ensure_shards, shards_folder

_NUM_IMAGES, _SIZE, _BATCH = 4096, 224, 128
_PACKS: tuple[tuple[bool, Layout], ...] = ((True, "packed"), (False, "packed"), (True, "dense"))
# name, script, environment, worker processes, target; each reads the same raw images from its own format
_PEERS = (
    ("DataLoader, memmap", "read_torch.py", "torch", 2, 1.5),
    ("DataLoader, no worker", "read_torch.py", "torch", 0, 1.5),
    ("FFCV, raw", "read_ffcv.py", "ffcv", 2, 1.0),
    ("Grain, ArrayRecord", "read_grain.py", "grain", 2, 1.5),
    ("Grain, threads alone", "read_grain.py", "grain", 0, 1.5),
    ("WebDataset", "read_webdataset.py", "webdataset", 2, 1.5),
    ("Streaming, MDS", "read_streaming.py", "streaming", 2, 1.5),
    ("tf.data, TFRecord", "read_tensorflow.py", "tensorflow", 2, 1.5),
)


def _cases(settings: Settings) -> list[Case]:
    array = array_file(settings, num_images=_NUM_IMAGES, size=_SIZE)
    image_bytes = 4 * _SIZE * _SIZE
    copies = (str(image_bytes), str(_BATCH), str(_NUM_IMAGES * image_bytes))
    peers = tuple(
        Candidate(name, script, (str(array), str(_BATCH), str(workers)), peer=peer, target=target)
        for name, script, peer, workers, target in _PEERS
    )

    def shards(*, checksum: bool = True, layout: Layout = "packed", threads: int = 0) -> tuple[str, ...]:
        folder = shards_folder(settings, num_images=_NUM_IMAGES, size=_SIZE, checksum=checksum, layout=layout)
        return str(folder), SPLIT, str(_BATCH), str(threads)

    def prepare(say: Callable[[str], None]) -> None:
        for checksum, layout in _PACKS:
            ensure_shards(settings, say, num_images=_NUM_IMAGES, size=_SIZE, checksum=checksum, layout=layout)
        if settings.peers:
            ensure_array(settings, say, num_images=_NUM_IMAGES, size=_SIZE)

    return [
        Case(
            f"{_NUM_IMAGES} × {_SIZE} px raw, random, b{_BATCH}",
            IMAGES_PER_S,
            "checksums",
            (
                Candidate("checksums", "read_shards.py", shards()),
                Candidate("no checksums", "read_shards.py", shards(checksum=False), target=0.7),
                Candidate("checksums, 1 thread", "read_shards.py", shards(threads=1)),
                Candidate("checksums, dense", "read_shards.py", shards(layout="dense")),
                Candidate("limit: copy, 1 thread", "memory_copies.py", (*copies, "1", "images")),
                Candidate("limit: copy, all cores", "memory_copies.py", (*copies, "0", "images"), target=0.7),
                *peers,
            ),
            prepare=prepare,
        )
    ]


BENCH = Bench("reader", "packed images of 224 px in random order, against copies and other projects' loaders", _cases)
