"""`step`: only the training step, with its batch on the device."""

from typing import NamedTuple

from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings


class _Network(NamedTuple):
    """A case and its targets: the minimum speed relative to a jitted step, to PyTorch and to matrix products only."""

    model: str
    image_size: int
    batch: int
    num_classes: int
    of_jit: float
    of_torch: float
    of_products: float | None = None
    round_s: float = 4.0


_NETWORKS = (
    _Network("resnet50", 224, 8, 1000, of_jit=3.0, of_torch=1.1, of_products=0.7, round_s=8.0),
    _Network("resnet50", 64, 16, 1000, of_jit=3.0, of_torch=1.1),
    _Network("resnet18", 64, 16, 1000, of_jit=3.0, of_torch=1.1),
    _Network("resnet8", 32, 128, 10, of_jit=1.0, of_torch=1.0),
    _Network("resnet20", 32, 128, 10, of_jit=1.0, of_torch=1.0),
    _Network("convnet8", 32, 128, 10, of_jit=1.0, of_torch=1.0),
)
# PyTorch's tuning guide recommends an allocator that keeps memory (jemalloc, TCMalloc); glibc's can be configured to.
# Otherwise each step returns memory to the system, which zeroes it again. A run of Feedloop is one call of one program,
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


def _cases(_: Settings) -> list[Case]:
    return [_case(network) for network in _NETWORKS]


def _case(network: _Network) -> Case:
    model, image_size, num_classes = network.model, str(network.image_size), str(network.num_classes)
    sizes = (model, image_size, str(network.batch), num_classes)
    products = (model, image_size, num_classes)
    return Case(
        f"{model} {image_size} px b{network.batch} float32",
        IMAGES_PER_S,
        "feedloop",
        (
            Candidate("feedloop", "step_loop.py", sizes),
            Candidate("jax.jit a step", "step_jit.py", sizes, target=network.of_jit),
            Candidate("limit: products", "matrix_product.py", products, target=network.of_products),
            *(
                Candidate(name, "step_torch.py", (*sizes, *variant), "torch", environment, target=network.of_torch)
                for name, variant, environment in _TORCH
            ),
        ),
        round_s=network.round_s,
        agree=("parameters", "first loss"),
    )


BENCH = Bench("step", "the training step on a resident batch, against a jitted step, PyTorch and products", _cases)
