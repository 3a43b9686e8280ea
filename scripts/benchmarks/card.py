"""`card`: training on an NVIDIA card. Everything runs on this Python, PyTorch too if it is installed."""

from collections.abc import Callable
from functools import partial

from scripts.benchmarks.bench import GB_PER_S, IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.data import SPLIT, Say, ensure_shards, shards_folder
from scripts.benchmarks.hardware import describe_cards

# Candidates share the card, so none may preallocate most of its memory.
_SHARED = (("XLA_PYTHON_CLIENT_PREALLOCATE", "false"), ("JAX_PLATFORMS", "cuda,cpu"))
_WARM_STEPS = "60"
_TORCH = ("torch compile channels_last autocast", ("cuda", "channels_last", "compile"))
# Images per batch, for batches of 25.7 and 103 MB.
_FEEDS = (128, 512)


def _needs_a_card(prepare: Callable[[Say], object] = lambda _: None) -> Callable[[Say], object]:
    """Return a preparation that fails without a card and otherwise calls ``prepare``."""

    def prepare_for_card(say: Say) -> object:
        if not describe_cards():
            raise RuntimeError("nvidia-smi lists no card")
        return prepare(say)

    return prepare_for_card


def _cases(settings: Settings) -> list[Case]:
    return [_stream(settings), _loop(settings), *(_feed(batch) for batch in _FEEDS)]


def _stream(settings: Settings) -> Case:
    num_images, size, batch = 8192, 224, "256"
    data = str(shards_folder(settings, num_images=num_images, size=size))
    arguments = (data, SPLIT, "resnet50", batch, _WARM_STEPS, "bfloat16")
    torch_name, variant = _TORCH
    return Case(
        f"resnet50 {size} px b{batch} bfloat16",
        IMAGES_PER_S,
        "from shards",
        (
            *_trainings(arguments, of_resident=0.99),
            Candidate(torch_name, "step_torch.py", ("resnet50", str(size), batch, "1000", *variant), target=1.1),
        ),
        round_s=5.0,
        prepare=_needs_a_card(partial(ensure_shards, settings, num_images=num_images, size=size)),
    )


def _loop(settings: Settings) -> Case:
    num_images, size, batch = 16_384, 32, "512"
    data = str(shards_folder(settings, num_images=num_images, size=size))
    fed = ("resnet8", str(size), batch, "1000", "bfloat16")
    return Case(
        f"resnet8 {size} px b{batch} bfloat16",
        IMAGES_PER_S,
        "from shards",
        (
            *_trainings((data, SPLIT, "resnet8", batch, _WARM_STEPS, "bfloat16")),
            Candidate("Python loop, jax.jit", "fed_jit.py", fed, environment=_SHARED, target=2.0),
        ),
        prepare=_needs_a_card(partial(ensure_shards, settings, num_images=num_images, size=size)),
    )


def _trainings(arguments: tuple[str, ...], of_resident: float | None = None) -> tuple[Candidate, ...]:
    """Return the engine's candidates: from shards, with the same kernels on other batches, and with any kernels."""
    own = partial(Candidate, script="stream_training.py", environment=_SHARED)
    return (
        own("from shards", arguments=("packed", *arguments)),
        own("limit: resident batch", arguments=("resident", *arguments), target=of_resident),
        own("nothing to read", arguments=("ready", *arguments)),
        own("from shards, not deterministic", arguments=("packed", *arguments, "any")),
    )


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
