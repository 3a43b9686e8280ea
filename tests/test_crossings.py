"""Which form the crossings take: by name, by backend, and how many batches a pull brings."""

import re
from types import SimpleNamespace

import jax
import pytest

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.crossing import choice as crossings
from loopfeed.engine.crossing.choice import choose_chunk, choose_transport, this_platform, wasted_steps_warning
from loopfeed.engine.crossing.cuda.driver import CudaDriver, CudaError
from loopfeed.engine.crossing.transport import InplaceTransport
from tests.fake_cuda import FakeCuda


@pytest.mark.parametrize(
    ("name", "platform", "chosen"),
    [
        ("auto", "cpu", "inplace"),
        ("auto", "tpu", "callback"),
        ("auto", "rocm", "callback"),
        ("inplace", "cpu", "inplace"),
        ("callback", "cpu", "callback"),
        ("callback", "cuda", "callback"),
    ],
)
def test_the_transport_follows_name_and_platform(name, platform, chosen):
    transport = choose_transport(name, platform)
    assert transport.name == chosen
    assert not transport.runs_ahead


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_on_a_card_the_driver_is_asked_for_the_device_that_jax_computes_on(monkeypatch, name):
    fake = FakeCuda()
    monkeypatch.setattr("loopfeed.engine.crossing.cuda.driver.load_functions", lambda: fake.functions)
    transport = choose_transport(name, "cuda")
    assert transport.name == "cuda"
    assert transport.runs_ahead
    assert fake.calls["cuDevicePrimaryCtxRetain"] == 1


@pytest.mark.parametrize(("name", "needed"), [("inplace", "cpu"), ("cuda", "cuda")])
def test_a_transport_elsewhere_than_on_its_backend_is_refused(name, needed):
    with pytest.raises(
        ValueError, match=f"--transport {name} requires jax to run on {needed}, but jax runs on tpu.*: omit --tr"
    ):
        choose_transport(name, "tpu")


def test_a_missing_driver_is_an_error_with_a_remedy(monkeypatch):
    monkeypatch.setattr("loopfeed.engine.crossing.cuda.driver.LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(
        CudaError, match=r"needs NVIDIA's driver, libcuda-that-is-not-there.so.1, .* --transport callback"
    ):
        CudaDriver()


@pytest.mark.parametrize(
    ("backend", "version", "platform"),
    [
        ("cpu", "cpu", "cpu"),
        ("gpu", "PJRT C API\ncuda 13000", "cuda"),
        ("gpu", "PJRT C API\nrocm 60300", "rocm"),
        ("tpu", "PJRT C API\nTFRT TPU v4", "tpu"),
    ],
)
def test_the_two_kinds_of_gpu_are_told_apart(monkeypatch, backend, version, platform):
    device = SimpleNamespace(client=SimpleNamespace(platform_version=version))
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert this_platform() == platform


@pytest.mark.parametrize("error", [AssertionError(), RuntimeError("no plugin")])
def test_jax_without_a_device_is_an_error_with_a_remedy(monkeypatch, error):
    def fail():
        raise error

    monkeypatch.setattr(jax, "default_backend", fail)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    with pytest.raises(ValueError, match=r"found no device with JAX_PLATFORMS=cuda.*: for an NVIDIA GPU, install"):
        this_platform()


class Ahead(InplaceTransport):
    runs_ahead = True


@pytest.mark.parametrize(("asked", "chunk"), [(None, 10), (1, 1), (8, 8)])
def test_a_host_that_runs_ahead_pulls_several_batches(asked, chunk):
    assert choose_chunk(asked, Ahead()) == chunk


@pytest.mark.parametrize(("asked", "chunk"), [(None, 1), (8, 8)])
def test_elsewhere_a_pull_brings_one_batch_or_what_was_asked_for(asked, chunk):
    assert choose_chunk(asked, InplaceTransport()) == chunk


def test_a_default_device_of_jaxs_is_the_one_that_is_driven():
    assert crossings.this_device() == jax.local_devices()[0]
    with jax.default_device(jax.local_devices(backend="cpu")[-1]):
        assert crossings.this_device() == jax.local_devices(backend="cpu")[-1]


@pytest.mark.parametrize(
    ("values", "chunk", "told"),
    [
        ({"steps": 1000}, 10, None),
        ({"steps": 1001, "chunk_batches": 10}, 10, None),  # nine turns of a thousand
        ({"steps": 15}, 10, None),  # once, and five alone
        (
            {"steps": 15, "chunk_batches": 10},
            10,
            r"every 15 batches, which wastes 5 of the last chunk's 10 steps: choose a --chunk that divides 15",
        ),
        ({"steps": 1000, "eval_every_steps": 100, "snapshot_every_steps": 250}, 50, None),
        ({"steps": 1000, "eval_every_steps": 100, "snapshot_every_steps": 250}, 40, r"every 50 .* wastes 30 of"),
        ({"steps": 9, "accumulate_steps": 10}, 10, None),
        ({"steps": 0}, 10, None),
    ],
)
def test_many_wasted_steps_cause_a_warning(values, chunk, told):
    found = wasted_steps_warning(TrainConfig(**values), chunk)
    assert found is None if told is None else re.search(told, str(found))
