"""What every test stands on: caches of its own, and no settings of the user."""

import gc
import os
import shutil
import signal
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.fake_cuda import FakeCuda


# A card is used by those tests alone that ask for it, and then by scripts/gpu-check, which says so beforehand.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Nothing is timed in a test: pytest's own limit ends one that hangs. The tests of a card do without hypothesis.
with suppress(ModuleNotFoundError):
    import hypothesis

    hypothesis.settings.register_profile("untimed", deadline=None)
    hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session", autouse=True)
def _own_caches(tmp_path_factory):
    """Keeps the tests out of the user's cache, and the user's settings out of the tests."""
    before = dict(os.environ)
    os.environ["XDG_CACHE_HOME"] = os.fspath(tmp_path_factory.mktemp("cache"))
    for name in ("FEEDLOOP_DATA", "JAX_COMPILATION_CACHE_DIR"):
        os.environ.pop(name, None)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session", autouse=True)
def _interruptible():
    """Has SIGINT interrupt: a shell without job control starts what it puts into the background with it ignored."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _young_heap():
    """Keeps what the modules before left alive from the collector: among all of it, one collection takes seconds."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def cache_folder(_own_caches) -> Path:
    return Path(os.environ["XDG_CACHE_HOME"]) / "feedloop"


@pytest.fixture(scope="session")
def chained_run(tmp_path_factory) -> Path:
    """A finished run of two launches, which no test may change."""
    from tests.chained_run import make_chained_run

    path = tmp_path_factory.mktemp("chained") / "run"
    make_chained_run(path)
    return path


@pytest.fixture
def copied_run(chained_run, tmp_path) -> Path:
    """A copy of the finished run, to be changed."""
    return Path(shutil.copytree(chained_run, tmp_path / "run"))


@pytest.fixture
def untraced_blocks():
    """Has residual blocks traced anew, for tests that put something else into them."""
    from models.families import resnet

    resnet._apply_block.clear_cache()  # type: ignore[attr-defined]
    yield
    resnet._apply_block.clear_cache()  # type: ignore[attr-defined]


@pytest.fixture
def cards(monkeypatch):
    """Has the transport "cuda" take a fake card, a new one each time; they are looked at once the test is over."""
    from engine.crossing.choice import choose_transport
    from tests.fake_xla import fake_transport

    made: list[FakeCuda] = []

    def choose(name, platform):
        if name != "cuda":
            return choose_transport(name, platform)
        transport, fake = fake_transport(seed=len(made))
        made.append(fake)
        return transport

    for module in ("engine.run.host_side", "engine.evaluation.run"):
        monkeypatch.setattr(f"{module}.choose_transport", choose)
    yield made
    for fake in made:
        assert fake.violations == []
        assert fake.num_device_blocks == 0
