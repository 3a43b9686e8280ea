"""The table of benchmarks: their cases, and the candidates that are compared in each."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from loopfeed.preprocess.control_groups import num_cores
from scripts.benchmarks.bench import Bench, Candidate, Case, Settings, Unit
from scripts.benchmarks.container_cases import container_cases
from scripts.benchmarks.data import (
    NUMBERS,
    Images,
    Say,
    ensure_array,
    ensure_jpegs,
    ensure_shards,
    ensure_sparse,
    sparse_folder,
)
from scripts.benchmarks.hardware import describe_cards, instruction_sets
from scripts.benchmarks.latency_cases import latency_cases
from scripts.benchmarks.peers import TORCH, TORCH_PYTHON
from scripts.benchmarks.pictures import picture_cases

_IMAGES_PER_S = Unit("images/s")


# step: an update of a network by a resident batch


class _Network(NamedTuple):
    """A network at one size, and the targets of its cases.

    Attributes:
        model, image_size, batch, num_classes: the sizes.
        of_torch: in float32, the minimum speed relative to PyTorch.
        of_torch_bfloat16, of_float32: in bfloat16 on a processor with AMX, the minimum speed relative to PyTorch in
            bfloat16, and to Loopfeed in float32.
        of_products: in float32, the minimum speed relative to matrix products only.
        round_s: seconds of a round.
        has_neighbour: whether it is also measured beside a busy process.
    """

    model: str
    image_size: int
    batch: int
    num_classes: int
    of_torch: float
    of_torch_bfloat16: float
    of_float32: float
    of_products: float | None = None
    round_s: float = 4.0
    has_neighbour: bool = False

    @property
    def sizes(self) -> tuple[object, ...]:
        """The arguments of a candidate."""
        return self.model, self.image_size, self.batch, self.num_classes

    def case(self, dtype: str, candidates: tuple[Candidate, ...], also: str = "") -> Case:
        """Return a case of this network."""
        name = f"{self.model} {self.image_size} px b{self.batch} {dtype}{also}"
        # bfloat16 rounds each activation by up to 0.4 %, in places that differ between kernels.
        agree_to = 1e-2 if dtype == "bfloat16" else 1e-4
        return Case(name, _IMAGES_PER_S, candidates, round_s=self.round_s, agree_to=agree_to)


_NETWORKS = (
    _Network("resnet50", 224, 8, 1000, 1.1, 1.3, 2.0, of_products=0.7, round_s=8.0),
    _Network("resnet50", 64, 16, 1000, 1.3, 1.5, 1.3, has_neighbour=True),
    _Network("resnet18", 64, 16, 1000, 1.3, 1.5, 1.3),
    _Network("resnet8", 32, 128, 10, 1.1, 1.2, 2.0),
    _Network("resnet20", 32, 128, 10, 1.1, 1.2, 2.0, has_neighbour=True),
    _Network("convnet8", 32, 128, 10, 1.1, 1.2, 2.0),
)
_OF_SHARE = 0.8
# PyTorch's tuning guide recommends an allocator that keeps memory (jemalloc, TCMalloc); glibc's can be configured to.
# Otherwise each step returns memory to the system, which zeroes it again. A run of Loopfeed is one call of one program,
# which allocates its memory once. Here each round is a call, and rounds are long so that allocating a call's memory
# (2 GB for ResNet-50 at 224 px) matters as little. Keeping memory made the calls of small networks up to 1.3 times as
# long.
_KEPT_MEMORY = (
    ("MALLOC_MMAP_THRESHOLD_", str(1 << 32)),
    ("MALLOC_TRIM_THRESHOLD_", str(1 << 32)),
    ("MALLOC_TOP_PAD_", str(1 << 28)),
)
_TORCH_MODES: Mapping[str, tuple[str, ...]] = {
    "torch eager, memory kept": (),
    "torch channels_last, memory kept": ("channels_last",),
    "torch compile channels_last, memory kept": ("compile", "channels_last"),
}


def _step(_: Settings) -> Iterator[Case]:
    for network in _NETWORKS:
        yield from (_alone(network, dtype) for dtype in ("float32", "bfloat16"))
    for network in _NETWORKS:
        if network.has_neighbour:
            yield from (_beside(network, dtype) for dtype in ("float32", "bfloat16"))


def _alone(network: _Network, dtype: str) -> Case:
    perfect = Candidate("limit: memory and products", "roofline.py", ("step", dtype, *network.sizes))
    ours = (*_ours(network, dtype), perfect)
    if dtype == "float32":
        arguments = ("products", dtype, *network.sizes)
        products = Candidate("limit: products", "roofline.py", arguments, target=network.of_products)
        return network.case(dtype, (*ours, products, *_torch(network, dtype, network.of_torch)))
    # Without AMX a product in bfloat16 is at most twice as fast as in float32, and nothing is aimed at.
    has_amx = "amx_bf16" in instruction_sets()
    of_float32, of_torch = (network.of_float32, network.of_torch_bfloat16) if has_amx else (None, None)
    float32 = replace(_ours(network, "float32")[0], name="loopfeed, float32", target=of_float32)
    return network.case(dtype, (*ours, float32, *_torch(network, dtype, of_torch)))


def _beside(network: _Network, dtype: str) -> Case:
    """Return the case in which each candidate works alone and beside a busy process."""
    alone = (*_ours(network, dtype), *_torch(network, dtype)[1:])
    beside = (
        replace(each, name=f"{each.name}, beside", beside=each.name, target=None if each.peer else _OF_SHARE)
        for each in alone
    )
    return network.case(dtype, (*alone, *beside), also=" beside a busy process")


def _ours(network: _Network, dtype: str) -> tuple[Candidate, ...]:
    named = {"loopfeed": "auto", "loopfeed, kernels xla": "xla"}
    return tuple(Candidate(name, "step_jax.py", (kernels, dtype, *network.sizes)) for name, kernels in named.items())


def _torch(network: _Network, dtype: str, target: float | None = None) -> tuple[Candidate, ...]:
    return tuple(
        Candidate(name, "step_torch.py", (*network.sizes, *mode, dtype), TORCH, _KEPT_MEMORY, target=target)
        for name, mode in _TORCH_MODES.items()
    )


# loop, infeed, stream: what the engine costs

_CHUNK = 16
# Pulls reuse the four buffers of the ring, so copies are measured from the same number of buffers.
_RING = 4


def _loop(_: Settings) -> Iterator[Case]:
    for size, hidden in ((8, 32), (32, 64)):
        model = f"perceptron-{hidden}"
        plain = (model, "float32", size, 32, 10, "steps")
        candidates = (
            Candidate(f"loopfeed, --chunk {_CHUNK}", "engine_training.py", ("memory", model, size, _CHUNK)),
            Candidate("loopfeed", "engine_training.py", ("memory", model, size, 1)),
            Candidate("Python loop, jax.jit", "plain_training.py", ("python", *plain), target=5.0),
            Candidate("limit: resident, silent", "plain_training.py", ("resident", *plain)),
        )
        yield Case(f"perceptron {3 * size**2}-{hidden}-10 b32", Unit("steps/s"), candidates)


def _infeed(_: Settings) -> Iterator[Case]:
    """Yield the cases of a pull, without reading data and without using them."""
    pulls, gigabytes = Unit("µs a pull", 1e6, is_time=True), Unit("GB/s", 1e-9)
    for name, batch, size, counted, unit, of_copy in (
        ("4 bytes", 1, 1, "pulls", pulls, None),
        ("128×224×224 uint32", 128, 224, "bytes", gigabytes, 0.9),
    ):
        row_bytes = 4 * size**2
        whole = (batch * row_bytes, 1, _RING * batch * row_bytes)
        # Several threads share the copy by its rows.
        rows = (row_bytes, batch, _RING * batch * row_bytes)
        yield Case(
            name,
            unit,
            (
                Candidate("inplace", "pulls.py", ("inplace", batch, size, counted)),
                Candidate("callback", "pulls.py", ("callback", batch, size, counted), target=1.0),
                Candidate("limit: copy, 1 thread", "memory_copies.py", (*whole, 1, counted), target=of_copy),
                Candidate("limit: copy, all cores", "memory_copies.py", (*rows, 0, counted)),
            ),
        )


def _stream(settings: Settings) -> Iterator[Case]:
    for model, size, batch in (("resnet18", 64, 16), ("resnet8", 32, 128)):
        images = Images(4096, size)
        arguments = (model, images.shards_folder(settings), batch, 3)
        candidates = (
            Candidate("from shards", "engine_training.py", ("packed", *arguments)),
            Candidate("limit: nothing to read", "engine_training.py", ("ready", *arguments), target=0.98),
        )
        prepare = partial(ensure_shards, settings, images=images)
        name = f"{model} {size} px b{batch} from shards"
        yield Case(name, _IMAGES_PER_S, candidates, round_s=3.0, prepare=prepare)


# reader, pack: images on disk

_PACKED, _DENSE = Images(4096, 224), Images(4096, 224, layout="dense")
_READ_BATCH = 128
# name, environment, worker processes, target; each reads the same raw images from its own format
_LOADERS = (
    ("DataLoader, memmap", TORCH, 2, 1.5),
    ("DataLoader, no worker", TORCH, 0, 1.5),
    ("FFCV, raw", "ffcv", 2, 1.0),
    ("Grain, ArrayRecord", "grain", 2, 1.5),
    ("Grain, threads alone", "grain", 0, 1.5),
    ("WebDataset", "webdataset", 2, 1.5),
    ("tf.data, TFRecord", "tensorflow", 2, 1.5),
)
# The start and end of a pack take a negligible part of a data set's time, but a tenth of that of a few hundred files.
_LEAST_PACKED = 2000


def _reader(settings: Settings) -> Iterator[Case]:
    image_bytes = 4 * _PACKED.size**2
    copies, array = (image_bytes, _READ_BATCH, _PACKED.num_images * image_bytes), _PACKED.array_file(settings)

    def prepare(say: Say) -> None:
        for images in (_PACKED, _DENSE):
            ensure_shards(settings, say, images)
        if settings.peers:
            ensure_array(settings, say, _PACKED)

    candidates = (
        Candidate("checksums", "read_shards.py", (_PACKED.shards_folder(settings), _READ_BATCH)),
        Candidate("checksums, dense", "read_shards.py", (_DENSE.shards_folder(settings), _READ_BATCH)),
        Candidate("limit: copy, 1 thread", "memory_copies.py", (*copies, 1, "images")),
        Candidate("limit: copy, all cores", "memory_copies.py", (*copies, 0, "images"), target=0.7),
        *(
            Candidate(name, "read_peer.py", (peer, array, _READ_BATCH, workers), peer, target=target)
            for name, peer, workers, target in _LOADERS
        ),
    )
    name = f"{_PACKED.num_images} × {_PACKED.size} px raw, random, b{_READ_BATCH}"
    yield Case(name, _IMAGES_PER_S, candidates, prepare=prepare)


def _pack(settings: Settings) -> Iterator[Case]:
    folder = settings.folder / "data"
    arguments = (folder / "jpeg-repeated", folder / "packing")
    candidates = (
        Candidate("pack", "pack_images.py", ("pack", *arguments)),
        Candidate("limit: decode, resize", "pack_images.py", ("decode", *arguments), target=0.9),
        Candidate("FFCV, raw", "pack_ffcv.py", (*arguments, num_cores()), "ffcv", target=1.5),
    )
    name = "JPEG to 224 px" if settings.images is None else f"{settings.images.name} to 224 px"
    prepare = partial(ensure_jpegs, settings, folder=arguments[0], least=_LEAST_PACKED)
    yield Case(name, _IMAGES_PER_S, candidates, round_s=3.0, prepare=prepare)


# startup, scaling: what does not depend on the network

_PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "run-train --help": ("run-train", "--help"),
    "import loopfeed": ("python", "-c", "import loopfeed"),
    "from loopfeed import train": ("python", "-c", "from loopfeed import train"),
    "import jax": ("python", "-c", "import jax"),
    "limit: python -c pass": ("python", "-c", "pass"),
}
_NUMS_IMAGES = (96 * NUMBERS, 10 * NUMBERS, NUMBERS)
# What grows, a model, seconds of a round, and points: images of the set, and steps before the first round. The first
# point is the base, the largest set or the longest run; it should be at most a twentieth slower than any other.
_SCALED: tuple[tuple[str, str, float, tuple[tuple[int, int], ...]], ...] = (
    ("images of the data set", "resnet8", 3.0, tuple((num_images, 10) for num_images in _NUMS_IMAGES)),
    ("images of the data set", "perceptron-64", 1.5, tuple((num_images, 100) for num_images in _NUMS_IMAGES)),
    ("steps of the run", "perceptron-64", 1.5, ((NUMBERS, 20_000), (NUMBERS, 2_000))),
)
_SCALED_BATCH = 128
_FLAT = 0.95


def _startup(_: Settings) -> Iterator[Case]:
    seconds = Unit("s", is_time=True)
    programs = tuple(Candidate(name, "processes.py", words) for name, words in _PROGRAMS.items())
    yield Case("imports and help", seconds, programs)
    trainings = {"program from the cache": "cached", "program compiled": "cold"}
    first_loss = tuple(Candidate(name, "processes.py", (kind,)) for name, kind in trainings.items())
    yield Case("first loss, resnet50 64 px b16", seconds, first_loss)


def _scaling(settings: Settings) -> Iterator[Case]:
    """Yield the cases of the size of the data set and of the length of a run, on one device."""
    unit = Unit("µs a step", 1e6 * _SCALED_BATCH, is_time=True)
    for what, model, round_s, points in _SCALED:
        candidates = tuple(
            Candidate(
                f"{num_images:,} images, after {warm_steps:,} steps",
                "engine_training.py",
                ("packed", model, sparse_folder(settings, num_images), _SCALED_BATCH, warm_steps),
                target=None if (num_images, warm_steps) == points[0] else _FLAT,
            )
            for num_images, warm_steps in points
        )
        prepare = partial(ensure_sparse, settings, nums_images=[num_images for num_images, _ in points])
        yield Case(f"{what}, {model} 32 px b{_SCALED_BATCH}", unit, candidates, round_s=round_s, prepare=prepare)


# card: everything runs on this Python, PyTorch too if it is installed there

# Candidates share the card, so none may preallocate most of its memory.
_ON_CARD = (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"), ("JAX_PLATFORMS", "cuda,cpu"))
_TORCH_ON_CARD = "torch compile channels_last autocast"


class _Training(NamedTuple):
    """A network on a card, its batches, and the images that feed it.

    Attributes:
        num_images: images in the shards: for large images few, because all of them are in the file cache anyway.
        torch_mode: arguments of `step_torch.py` after the sizes.
    """

    model: str
    size: int
    batch: int
    num_images: int
    precision: str = "bfloat16"
    warm_steps: int = 60
    environment: tuple[tuple[str, str], ...] = _ON_CARD
    torch_mode: tuple[str, ...] = ("cuda", "channels_last", "compile")

    def case(
        self, settings: Settings, other: Candidate, *, name: str = "", limit: float | None, round_s: float
    ) -> Case:
        """Return the case of this training from shards, on a resident batch, and by another candidate."""
        images = Images(self.num_images, self.size)
        arguments = (self.model, images.shards_folder(settings), self.batch, self.warm_steps, self.precision)
        candidates = (
            Candidate("from shards", "engine_training.py", ("packed", *arguments)),
            Candidate("limit: resident batch", "engine_training.py", ("resident", *arguments), target=limit),
            other,
        )
        return Case(
            f"{name}{self.model} {self.size} px b{self.batch} {self.precision}",
            _IMAGES_PER_S,
            tuple(replace(each, environment=self.environment) for each in candidates),
            round_s=round_s,
            prepare=partial(self.prepare, settings, images),
        )

    def prepare(self, settings: Settings, images: Images, say: Say) -> None:
        """Create the shards; raise RuntimeError if a card is wanted and there is none."""
        if self.environment == _ON_CARD and not describe_cards():
            raise RuntimeError("nvidia-smi lists no card")
        ensure_shards(settings, say, images)

    def torch(self) -> Candidate:
        """Return PyTorch as a candidate."""
        peer = TORCH if os.environ.get(TORCH_PYTHON) else ""
        arguments = (self.model, self.size, self.batch, 1000, *self.torch_mode)
        return Candidate(_TORCH_ON_CARD, "step_torch.py", arguments, peer, target=1.1)

    def plain(self) -> Candidate:
        """Return a Python loop as a candidate."""
        arguments = ("python", self.model, self.precision, self.size, self.batch, 1000, "images")
        return Candidate("Python loop, jax.jit", "plain_training.py", arguments, target=2.0)


_LARGE = _Training("resnet50", 224, 256, num_images=1536)
_SMALL = _Training("resnet8", 32, 512, num_images=16_384)
# The first case of `card` with the smallest sizes, on the processor: every script and message, no figure of worth.
_REHEARSED = _Training(
    "resnet8",
    32,
    8,
    num_images=64,
    precision="float32",
    warm_steps=2,
    environment=(("JAX_PLATFORMS", "cpu"),),
    torch_mode=("channels_last", "bfloat16"),
)


def _card(settings: Settings) -> Iterator[Case]:
    yield _LARGE.case(settings, _LARGE.torch(), limit=0.99, round_s=5.0)
    yield _SMALL.case(settings, _SMALL.plain(), limit=None, round_s=1.5)


def _rehearsal(settings: Settings) -> Iterator[Case]:
    yield _REHEARSED.case(settings, _REHEARSED.torch(), name="rehearsal: ", limit=None, round_s=0.2)


CARD = Bench("card", "an NVIDIA card (by scripts/gpu-check): from shards, against PyTorch and a Python loop", _card)
REHEARSAL = Bench("card-rehearsal", "the first case of card on the processor, tiny: whether all of it runs", _rehearsal)
BENCHES = (
    Bench("step", "the training step on a resident batch, against PyTorch and a perfect step", _step),
    Bench("loop", "steps of a tiny network by the whole engine, against a Python loop over a jitted step", _loop),
    Bench("infeed", "a pull of the infeed by either transport, against copies of the same bytes", _infeed),
    Bench("stream", "training from packed shards, against the same program with nothing to read", _stream),
    Bench("reader", "packed images of 224 px in random order, against copies and other projects' loaders", _reader),
    Bench("pack", "JPEG files to shards of 224 px, against decoding and resizing alone", _pack),
    Bench("containers", "archives, Parquet and arrays to shards, against folders and libraries", container_cases),
    Bench("pictures", "reading and training on whole photographs, against their central squares", picture_cases),
    Bench("latency", "a call of Predictor on images in memory, against ONNX Runtime and PyTorch", latency_cases),
    Bench("startup", "imports, --help, and the way to a training's first loss with and without the cache", _startup),
    Bench("scaling", "step time and memory against the number of images and the length of the run", _scaling),
    CARD,
    REHEARSAL,
)
