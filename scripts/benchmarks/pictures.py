"""The cases of the bench `pictures`: what whole photographs cost beside their central squares.

Real photographs compress and crop differently from noise: give a folder of them by ``--images``.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

from loopfeed.preprocess.control_groups import num_cores
from loopfeed.preprocess.decoding.decode import ResizeRule
from loopfeed.preprocess.packing.pack import pack_split
from loopfeed.preprocess.packing.plan import PackSettings
from loopfeed.preprocess.shards.arrays import Codec
from loopfeed.preprocess.shards.location import open_location
from loopfeed.preprocess.sources.open_source import open_source
from scripts.benchmarks.bench import Candidate, Case, Settings, Unit
from scripts.benchmarks.data import SPLIT, Say, ensure_jpegs

_IMAGES_PER_S = Unit("images/s")
_READ_BATCH = 128
_SQUARE = "square of 224 of 256 px"
_RULES = {
    _SQUARE: ResizeRule(),
    "whole, 256 px": ResizeRule(canvas="3:2"),
    "whole, 192 px": ResizeRule(168, 192, canvas="3:2"),
    "whole, 160 px": ResizeRule(140, 160, canvas="3:2"),
}
_CODECS: tuple[Codec, ...] = ("raw", "blosc")


# The perceptron has next to nothing to compute: what is left is the pull of a batch and its crops.
_NETWORK, _NO_NETWORK = "resnet18", "perceptron-16"
_CROP_SIZE, _BATCH = 128, 32


def picture_cases(settings: Settings) -> Iterator[Case]:
    """Yield the cases: reading each pack, and training on random crops from it."""
    folder = settings.folder / "data" / f"pictures-{'drawn' if settings.images is None else settings.images.name}"
    packs = {f"{name}, {codec}": folder / f"{number}-{codec}"
             for codec in _CODECS for number, name in enumerate(_RULES)}  # fmt: skip
    prepare = partial(_ensure_packs, settings, folder=folder)
    readers = tuple(Candidate(name, "read_shards.py", (pack, _READ_BATCH)) for name, pack in packs.items())
    yield Case(f"photographs, random, b{_READ_BATCH}", _IMAGES_PER_S, readers, prepare=prepare)
    for model in (_NETWORK, _NO_NETWORK):
        trained = [_training(name, model, "packed", pack) for name, pack in packs.items()]
        if model == _NO_NETWORK:
            trained += [_training(f"{name}, nothing to read", model, "ready", packs[f"{name}, raw"]) for name in _RULES]
        name = f"{model}, crops of {_CROP_SIZE} px b{_BATCH} from photographs"
        yield Case(name, _IMAGES_PER_S, tuple(trained), round_s=3.0, prepare=prepare)


def _training(name: str, model: str, kind: str, pack: Path) -> Candidate:
    return Candidate(name, "engine_training.py", (kind, model, pack, _BATCH, 3, "float32", _CROP_SIZE))


def _ensure_packs(settings: Settings, say: Say, *, folder: Path) -> None:
    """Pack the photographs by each rule, where that has not been done; an interrupted pack is continued."""
    images = folder / "images"
    if not images.exists():
        ensure_jpegs(settings, say, images, least=1)
    with open_source(images) as source:
        for codec in _CODECS:
            for number, rule in enumerate(_RULES.values()):
                location = open_location(str(folder / f"{number}-{codec}")).child(SPLIT)
                manifest = pack_split(
                    source.splits[SPLIT], location, PackSettings(rule=rule, codec=codec, num_workers=num_cores())
                ).manifest
                say(f"{location.display}: {manifest.width} × {manifest.height} px, {codec}")
