"""`step`: only the training step, its batch on the device, in float32 and bfloat16, alone and beside other work."""

from dataclasses import replace
from typing import NamedTuple

from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings
from scripts.benchmarks.hardware import instruction_sets

FLOAT32, BFLOAT16 = "float32", "bfloat16"


class _Network(NamedTuple):
    """A network at one size, and the targets of its cases.

    Attributes:
        model, image_size, batch, num_classes: the sizes.
        of_jit, of_torch, of_products: in float32, the minimum speed relative to a jitted step, to PyTorch, and to
            matrix products only.
        of_torch_bfloat16, of_float32: in bfloat16 on a processor with AMX, the minimum speed relative to PyTorch in
            bfloat16, and to Loopfeed in float32.
        round_s: seconds of a round.
        has_neighbour: whether it is also measured beside a busy process.
    """

    model: str
    image_size: int
    batch: int
    num_classes: int
    of_jit: float
    of_torch: float
    of_torch_bfloat16: float
    of_float32: float
    of_products: float | None = None
    round_s: float = 4.0
    has_neighbour: bool = False


_NETWORKS = (
    _Network("resnet50", 224, 8, 1000, 3.0, 1.1, 1.3, 2.0, of_products=0.7, round_s=8.0),
    _Network("resnet50", 64, 16, 1000, 3.0, 1.3, 1.5, 1.3, has_neighbour=True),
    _Network("resnet18", 64, 16, 1000, 3.0, 1.3, 1.5, 1.3),
    _Network("resnet8", 32, 128, 10, 1.0, 1.1, 1.2, 2.0),
    _Network("resnet20", 32, 128, 10, 1.0, 1.1, 1.2, 2.0, has_neighbour=True),
    _Network("convnet8", 32, 128, 10, 1.0, 1.1, 1.2, 2.0),
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
_TORCH = (
    ("torch eager", (), ()),
    ("torch eager, memory kept", (), _KEPT_MEMORY),
    ("torch channels_last, memory kept", ("channels_last",), _KEPT_MEMORY),
    ("torch compile, memory kept", ("compile",), _KEPT_MEMORY),
    ("torch compile channels_last, memory kept", ("compile", "channels_last"), _KEPT_MEMORY),
)
# bfloat16 rounds each activation by up to 0.4 %, in places that differ between kernels.
_AGREE_TO = {FLOAT32: 1e-4, BFLOAT16: 1e-2}


def _cases(_: Settings) -> list[Case]:
    both = (FLOAT32, BFLOAT16)
    alone = [_case(network, dtype) for network in _NETWORKS for dtype in both]
    return alone + [_case_beside(network, dtype) for network in _NETWORKS if network.has_neighbour for dtype in both]


def _case(network: _Network, dtype: str) -> Case:
    limit = Candidate("limit: memory and products", "roofline.py", ("step", dtype, *_sizes(network)))
    own: tuple[Candidate, ...] = (_loopfeed(network, dtype), _loopfeed(network, dtype, "xla"), limit)
    if dtype == FLOAT32:
        products, jit = ("products", dtype, *_sizes(network)), ("jit", "xla", dtype, *_sizes(network))
        own += (
            Candidate("limit: products", "roofline.py", products, target=network.of_products),
            Candidate("jax.jit a step", "step_jax.py", jit, target=network.of_jit),
        )
        return _made(network, dtype, (*own, *_torch(network, dtype, network.of_torch)))
    # Without AMX a product in bfloat16 is at most twice as fast as in float32, and nothing is aimed at.
    of_float32, of_torch = (network.of_float32, network.of_torch_bfloat16) if _has_amx() else (None, None)
    float32 = replace(_loopfeed(network, FLOAT32), name="loopfeed, float32", target=of_float32)
    return _made(network, dtype, (*own, float32, *_torch(network, dtype, of_torch)))


def _case_beside(network: _Network, dtype: str) -> Case:
    """Return the case in which each candidate works alone and beside a busy process: see `neighbour.py`."""
    torch = (each for each in _torch(network, dtype) if "channels_last" in each.arguments)
    alone = (_loopfeed(network, dtype), _loopfeed(network, dtype, "xla"), *torch)
    beside = (
        replace(each, name=f"{each.name}, beside", beside=each.name, target=None if each.peer else _OF_SHARE)
        for each in alone
    )
    return _made(network, dtype, (*alone, *beside), also=" beside a busy process")


def _made(network: _Network, dtype: str, candidates: tuple[Candidate, ...], *, also: str = "") -> Case:
    return Case(
        f"{network.model} {network.image_size} px b{network.batch} {dtype}{also}",
        IMAGES_PER_S,
        "loopfeed",
        candidates,
        round_s=network.round_s,
        agree=("parameters", "first loss"),
        agree_to=_AGREE_TO[dtype],
    )


def _loopfeed(network: _Network, dtype: str, kernels: str = "auto") -> Candidate:
    name = "loopfeed" if kernels == "auto" else f"loopfeed, kernels {kernels}"
    return Candidate(name, "step_jax.py", ("loop", kernels, dtype, *_sizes(network)))


def _torch(network: _Network, dtype: str, target: float | None = None) -> tuple[Candidate, ...]:
    """Return PyTorch's modes; in bfloat16 only those that keep their memory."""
    return tuple(
        Candidate(name, "step_torch.py", (*_sizes(network), *variant, dtype), "torch", environment, target=target)
        for name, variant, environment in _TORCH
        if environment or dtype == FLOAT32
    )


def _sizes(network: _Network) -> tuple[str, ...]:
    return network.model, str(network.image_size), str(network.batch), str(network.num_classes)


def _has_amx() -> bool:
    return "amx_bf16" in instruction_sets()


BENCH = Bench(
    "step", "the training step on a resident batch, against a jitted step, PyTorch and a perfect step", _cases
)
