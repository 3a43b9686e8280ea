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
_TORCH = {
    "torch eager": (),
    "torch channels_last": ("channels_last",),
    "torch compile": ("compile",),
    "torch compile channels_last": ("compile", "channels_last"),
}


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
            Candidate("jax.jit a step", "step_jit.py", sizes, target=1.0),
            Candidate("limit: products", "matrix_product.py", (model, str(image_size), str(num_classes))),
            *(
                Candidate(name, "step_torch.py", (*sizes, *variant), peer="torch", target=1.0)
                for name, variant in _TORCH.items()
            ),
        ),
        agree=("parameters", "first loss"),
    )


BENCH = Bench("step", "the training step on a resident batch, against a jitted step, PyTorch and products", _cases)
