"""Fixtures of all tests: separate caches, without the user's settings."""

import ctypes
import gc
import os
import shutil
import signal
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fake_cuda import FakeCuda


# Only scripts/gpu-check runs tests on a GPU, and it sets this variable beforehand. Elsewhere, here and in the processes
# that tests start, programs compile in two thirds of the time: without LLVM's optimiser.
if os.environ.setdefault("JAX_PLATFORMS", "cpu") == "cpu":
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"

# Tests have no deadline of their own: pytest's limit ends one that hangs. The GPU tests run without hypothesis.
with suppress(ModuleNotFoundError):
    import hypothesis

    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory):
    """Separate the tests from the user's cache and settings."""
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = os.fspath(tmp_path_factory.mktemp("cache"))
    aws = [name for name in os.environ if name.startswith("AWS_")]
    for name in ("LOOPFEED_DATA", "JAX_COMPILATION_CACHE_DIR", *aws):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def _restore_sigint():
    """Restore the default SIGINT handler: without job control, a shell starts background processes ignoring it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _no_waits_for_the_disk():
    """Let `os.fsync` only check its descriptor: tests kill processes, whose files stay, but never the machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", os.fstat)
        yield


@pytest.fixture(scope="session", autouse=True)
def _cached_replays(_own_caches):
    """Let replays take compiled programs from the cache; by themselves they compile anew."""
    with pytest.MonkeyPatch.context() as patch:
        if "jax" in sys.modules:  # else no collected test replays a run
            patch.setattr("loopfeed.engine.replay.replay.OFF", None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _settings_of_python():
    """Word the errors of settings as Python programs get them, whichever modules of tests are imported."""
    import loopfeed

    loopfeed.TrainConfig  # noqa: B018 - the access prepares the class


@pytest.fixture
def no_spare_threads(monkeypatch):
    """Hide the threads that wait for work, so that each worker needs a new one."""
    from loopfeed.preprocess import workers

    monkeypatch.setattr(workers, "_spare_threads", cache(workers._SpareThreads))


@pytest.fixture(scope="module", autouse=True)
def _freeze_heap():
    """Exclude the objects of earlier modules from garbage collection, which would take seconds with all of them.

    What compilers left is given back to the system: glibc keeps half a gigabyte of it for a module that trains often.
    """
    gc.collect()
    gc.freeze()
    with suppress(AttributeError):  # other C libraries have no such function
        ctypes.CDLL(None).malloc_trim(0)


@pytest.fixture(scope="session")
def cache_folder(_own_caches) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "loopfeed"


@pytest.fixture(scope="session")
def chained_run(tmp_path_factory) -> Path:
    """Return a finished run of two launches, which no test may change."""
    from tests.chained_run import make_chained_run

    path = tmp_path_factory.mktemp("chained") / "run"
    make_chained_run(path)
    return path


@pytest.fixture
def copied_run(chained_run, tmp_path) -> Path:
    """Return a copy of the finished run, which the test may change."""
    return Path(shutil.copytree(chained_run, tmp_path / "run"))


@pytest.fixture(params=["cpu", "cuda"])
def platform(request):
    """Run a test twice: with the forms of the models for the CPU, and with those for an NVIDIA card, on the CPU."""
    from loopfeed.models.layers.platform_forms import tracing_for

    with tracing_for(request.param):
        yield request.param


@pytest.fixture
def on_a_card():
    """Trace the forms of the models for an NVIDIA card, which the CPU computes."""
    from loopfeed.models.layers.platform_forms import tracing_for

    with tracing_for("cuda"):
        yield


@pytest.fixture
def untraced_blocks():
    """Clear the traces of residual blocks before and after a test that replaces their parts."""
    from loopfeed.models.families import resnet

    resnet._apply_block.clear_cache()  # type: ignore[attr-defined]
    yield
    resnet._apply_block.clear_cache()  # type: ignore[attr-defined]


@pytest.fixture(scope="module", name="small_resnets")
def _small_resnets():
    """Replace the ResNets for small images in all tests of a module, each of which must use this."""
    from tests.small_resnets import small_resnets

    with small_resnets():
        yield


@pytest.fixture(scope="module")
def llvms_optimiser():
    """Compile as users do, in all tests of a module whose subject is arithmetic or speed."""
    import jax

    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("JAX_DISABLE_MOST_OPTIMIZATIONS", raising=False)  # in the processes that they start
        before = jax.config.read("jax_disable_most_optimizations")
        jax.config.update("jax_disable_most_optimizations", False)
        yield
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def uncached_replays(monkeypatch):
    """Let replays compile anew, as they do outside of tests."""
    monkeypatch.setattr("loopfeed.engine.replay.replay.OFF", "off")


@pytest.fixture
def cards(monkeypatch):
    """Make the transport "cuda" use a new fake card for each launch; check the cards after the test."""
    from loopfeed.engine.crossing.choice import choose_transport
    from tests.fake_xla import fake_transport

    made: list[FakeCuda] = []

    def choose(name, platform, num_devices=1):
        if name != "cuda":
            return choose_transport(name, platform, num_devices)
        transport, fake = fake_transport(seed=len(made))
        made.append(fake)
        return transport

    for module in ("loopfeed.engine.crossing.devices", "loopfeed.engine.evaluation.counting"):
        monkeypatch.setattr(f"{module}.choose_transport", choose)
    yield made
    for fake in made:
        assert fake.violations == []
        assert fake.num_device_blocks == 0
