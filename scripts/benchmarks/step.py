"""`step`: the training step alone, its batch on the device."""

from scripts.benchmarks.bench import IMAGES_PER_S, Bench, Candidate, Case, Settings

# model, pixels a side, images a batch, classes
_CASES = (
    ("resnet50", 224, 8, 1000),
    ("resnet50", 64, 16, 1000),
    ("resnet18", 64, 16, 1000),
    ("resnet8", 32, 128, 10),
    ("resnet20", 32, 128, 10),
    ("convnet8", 32, 128, 10),
)
# PyTorch's tuning guide advises an allocator that keeps memory (jemalloc, TCMalloc); glibc's can be told to. Without,
# each step gives memory back to the system and has it zeroed anew. On two cores of a virtual machine ResNet-50 (224 px,
# batch 8) then took up to twice as long in Feedloop.
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
    return [_case(*sizes) for sizes in _CASES]


def _case(model: str, image_size: int, batch: int, num_classes: int) -> Case:
    sizes = (model, str(image_size), str(batch), str(num_classes))
    return Case(
        f"{model} {image_size} px b{batch} float32",
        IMAGES_PER_S,
        "feedloop",
        (
            Candidate("feedloop", "step_loop.py", sizes),
            Candidate("feedloop, memory kept", "step_loop.py", sizes, environment=_KEPT_MEMORY),
            Candidate("jax.jit a step", "step_jit.py", sizes, target=1.0),
            Candidate("limit: products", "matrix_product.py", (model, str(image_size), str(num_classes))),
            *(
                Candidate(name, "step_torch.py", (*sizes, *variant), peer="torch", environment=environment, target=1.0)
                for name, variant, environment in _TORCH
            ),
        ),
        agree=("parameters", "first loss"),
    )


BENCH = Bench("step", "the training step on a resident batch, against a jitted step, PyTorch and products", _cases)
