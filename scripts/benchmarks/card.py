"""`card`: training on an NVIDIA card; `card-rehearsal`: the same, so small that a processor does it in a minute.

Everything runs on this Python, PyTorch too if it is installed; `LOOPFEED_TORCH_PYTHON` names another one for PyTorch.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from scripts.benchmarks.bench import GB_PER_S, IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import Images, Say, ensure_shards
from scripts.benchmarks.hardware import describe_cards
from scripts.benchmarks.peers import TORCH, TORCH_PYTHON

# Candidates share the card, so none may preallocate most of its memory.
_SHARED = (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"), ("JAX_PLATFORMS", "cuda,cpu"))
_TORCH = "torch compile channels_last autocast"
# Images per batch, for batches of 25.7 and 103 MB.
_FEEDS = (128, 512)


def _needs_a_card(prepare: Callable[[Say], object] = lambda _: None) -> Callable[[Say], object]:
    """Return a preparation that fails without a card and otherwise calls ``prepare``."""

    def prepare_for_card(say: Say) -> object:
        if not describe_cards():
            raise RuntimeError("nvidia-smi lists no card")
        return prepare(say)

    return prepare_for_card


@dataclass(frozen=True)
class _Training:
    """A network, its batches and the images that feed it.

    Attributes:
        num_images: images in the shards: for large images few, because all of them are in the file cache anyway.
        torch_variant: arguments of `step_torch.py` after the sizes.
    """

    model: str
    size: int
    batch: int
    num_images: int
    precision: str = "bfloat16"
    warm_steps: int = 60
    environment: tuple[tuple[str, str], ...] = _SHARED
    torch_variant: tuple[str, ...] = ("cuda", "channels_last", "compile")

    @property
    def sizes(self) -> str:
        """The image size, the batch and the precision, for a name."""
        return f"{self.size} px b{self.batch} {self.precision}"

    def shards(self, settings: Settings, say: Say) -> None:
        """Create the shards if they do not exist."""
        ensure_shards(settings, say, Images(self.num_images, self.size))

    def engine(self, settings: Settings, name: str, kind: str, *more: str, target: float | None = None) -> Candidate:
        """Return the engine as a candidate, on batches of a kind."""
        data = str(Images(self.num_images, self.size).shards_folder(settings))
        arguments = (kind, self.model, data, str(self.batch), str(self.warm_steps), self.precision, *more)
        return Candidate(name, "engine_training.py", arguments, environment=self.environment, target=target)

    def torch(self) -> Candidate:
        """Return PyTorch as a candidate."""
        arguments = (self.model, str(self.size), str(self.batch), "1000", *self.torch_variant)
        peer = TORCH if os.environ.get(TORCH_PYTHON) else ""
        return Candidate(_TORCH, "step_torch.py", arguments, peer=peer, environment=self.environment, target=1.1)


_LARGE = _Training("resnet50", 224, 256, num_images=1536)
_SMALL = _Training("resnet8", 32, 512, num_images=16_384)
# On two cores of a processor each candidate takes about ten seconds.
_REHEARSED = _Training(
    "resnet8",
    32,
    8,
    num_images=64,
    precision="float32",
    warm_steps=2,
    environment=(("JAX_PLATFORMS", "cpu"),),
    torch_variant=("channels_last", "bfloat16"),
)


def _cases(settings: Settings) -> list[Case]:
    return [_against_torch(settings), _variants(settings), _loop(settings), *(_feed(batch) for batch in _FEEDS)]


def _against_torch(settings: Settings) -> Case:
    """Compare with a resident batch and with PyTorch: few candidates, whose programs share the card's memory."""
    candidates = (
        _LARGE.engine(settings, "from shards", "packed"),
        _LARGE.engine(settings, "limit: resident batch", "resident", target=0.99),
        _LARGE.torch(),
    )
    prepare = _needs_a_card(partial(_LARGE.shards, settings))
    return Case(f"resnet50 {_LARGE.sizes}", IMAGES_PER_S, "from shards", candidates, round_s=5.0, prepare=prepare)


def _variants(settings: Settings) -> Case:
    candidates = (_LARGE.engine(settings, "from shards", "packed"), *_variants_of(_LARGE, settings))
    prepare = _needs_a_card(partial(_LARGE.shards, settings))
    name = f"variants of resnet50, {_LARGE.sizes}"
    return Case(name, IMAGES_PER_S, "from shards", candidates, round_s=5.0, prepare=prepare)


def _loop(settings: Settings) -> Case:
    fed = ("python", _SMALL.model, _SMALL.precision, str(_SMALL.size), str(_SMALL.batch), "1000", "images")
    candidates = (
        _SMALL.engine(settings, "from shards", "packed"),
        _SMALL.engine(settings, "limit: resident batch", "resident"),
        *_variants_of(_SMALL, settings),
        Candidate("Python loop, jax.jit", "plain_training.py", fed, environment=_SHARED, target=2.0),
    )
    prepare = _needs_a_card(partial(_SMALL.shards, settings))
    return Case(f"resnet8 {_SMALL.sizes}", IMAGES_PER_S, "from shards", candidates, prepare=prepare)


def _variants_of(training: _Training, settings: Settings) -> tuple[Candidate, ...]:
    """Return the engine without reading, and with any kernels."""
    return (
        training.engine(settings, "nothing to read", "ready"),
        training.engine(settings, "from shards, not deterministic", "packed", "any"),
    )


def _rehearsed(settings: Settings) -> list[Case]:
    """Return the first case with the smallest sizes, on the processor: every script and message, no figure of worth."""
    candidates = (
        _REHEARSED.engine(settings, "from shards", "packed"),
        _REHEARSED.engine(settings, "limit: resident batch", "resident"),
        _REHEARSED.torch(),
    )
    prepare = partial(_REHEARSED.shards, settings)
    name = f"rehearsal: resnet8 {_REHEARSED.sizes}"
    return [Case(name, IMAGES_PER_S, "from shards", candidates, round_s=0.2, prepare=prepare)]


def _feed(batch: int) -> Case:
    size = 224
    sizes = (str(batch), str(size))
    return Case(
        f"host to card, {batch}×{size}×{size} uint32",
        GB_PER_S,
        "ring",
        (
            Candidate("ring", "card_feed.py", ("ring", *sizes)),
            Candidate("limit: pinned copies", "card_feed.py", ("copies", *sizes), target=0.9),
        ),
        prepare=_needs_a_card(),
    )


BENCH = Bench("card", "an NVIDIA card (by scripts/gpu-check): from shards, by a loop, by copies", _cases)
REHEARSAL = Bench("card-rehearsal", "the first case of card on the processor, tiny: whether all of it runs", _rehearsed)
