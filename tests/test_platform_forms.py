"""Forms by platform: which ones are traced, and what they return."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import TrainConfig, evaluate, train
from loopfeed.engine.compilation import ahead_of_time as compilation
from loopfeed.engine.crossing import devices
from loopfeed.engine.crossing.choice import traced_platform
from loopfeed.engine.evaluation import counting
from loopfeed.engine.run import compiling
from loopfeed.models.layers.platform_forms import on_platform, tracing_for
from tests.small_resnets import small_resnets

SETTINGS: dict[str, Any] = {
    "batch": 4,
    "transport": "callback",
    "synthetic": True,
    "image_size": 8,
    "num_classes": 10,
    "model": "resnet8",
    "kernels": "xla",
}
SUMMANDS = {"cpu": 1, "cuda": 2, "default": 3}


def adding(traced):
    """Return a function whose forms each add another number, and note their names in `traced`."""

    def form(name):
        def add(x):
            traced.append(name)
            return x + SUMMANDS[name]

        return add

    return jax.jit(lambda x: on_platform(x, **{name: form(name) for name in SUMMANDS}))


def test_without_a_known_platform_the_device_decides():
    traced: list[str] = []
    assert adding(traced)(jnp.float32(10)) == 10 + SUMMANDS[jax.default_backend()]
    assert sorted(traced) == sorted(SUMMANDS)


@pytest.mark.parametrize("name", ["gpu", "CPU", "banana"])
def test_an_unknown_platform_is_refused(name):
    with pytest.raises(ValueError, match=f"must be one of cpu, cuda, rocm, tpu, or None for all, got {name!r}"):
        tracing_for(name)


@pytest.mark.parametrize(
    ("platform", "version", "traced"),
    [
        ("cpu", "", "cpu"),
        ("gpu", "PJRT C API\ncuda 13000", "cuda"),
        ("gpu", "rocm 60300", "rocm"),
        ("tpu", "", "tpu"),
        ("METAL", "", None),  # a backend of somebody else's, on which all forms are traced, as jax decides
    ],
)
def test_the_platform_of_a_device_can_be_traced_for(platform, version, traced):
    device: Any = SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))
    assert traced_platform(device) == traced
    with tracing_for(traced_platform(device)):
        pass


@small_resnets()
@pytest.mark.parametrize("what", ["run", "evaluation"])
def test_a_program_is_traced_for_the_platform_of_its_device(monkeypatch, tmp_path, what):
    traced, platforms = [], []

    def trace_ahead(*arguments, **options):
        platforms.append(options.get("platform"))
        traced.append(compilation.trace_ahead(*arguments, **options))
        return traced[-1]

    if what == "evaluation":
        run = tmp_path / "run"
        train(TrainConfig(steps=1, run_dir=run, **SETTINGS))
    monkeypatch.setattr(compiling if what == "run" else counting, "trace_ahead", trace_ahead)
    # As where the default device is a processor, but jax's default backend that of a card.
    monkeypatch.setattr(devices, "this_platform", lambda: "cuda")
    if what == "run":
        train(TrainConfig(steps=1, **SETTINGS))
    else:
        evaluate(run, evaluation=(np.zeros((4, 8, 8), np.uint32), np.zeros(4, np.int32)))
    assert platforms[0] == "cpu"
    assert "platform_index" not in str(traced[0].jaxpr)
