"""What tests of oneDNN's kernels share: they are skipped where the library is missing."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest

from loopfeed.models.kernels import MissingKernelsError
from loopfeed.models.kernels.onednn.library import Isa, load_library

NO_LIBRARY = MissingKernelsError("onednn-cpu-gomp is not installed", "pip install 'loopfeed[kernels]'")
"""The error of a machine on which nothing but the extra is missing."""


def why_missing() -> str:
    """Return why oneDNN's kernels cannot be used here, "" if they can."""
    try:
        load_library()
    except MissingKernelsError as error:
        return str(error)
    return ""


needs_onednn = pytest.mark.skipif(bool(why_missing()), reason=f"oneDNN's kernels are missing: {why_missing()}")


def without_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the engine find no oneDNN."""

    def load() -> None:
        raise NO_LIBRARY

    monkeypatch.setattr("loopfeed.engine.program.kernels.load_library", load)


def needs_instructions(isa: Isa) -> pytest.MarkDecorator:
    """Return the mark of a test of layers that use oneDNN only with these instruction sets."""
    is_missing = bool(why_missing()) or not load_library().has(isa)
    return pytest.mark.skipif(is_missing, reason=f"oneDNN's kernels are missing, or the processor has no {isa.name}")


@contextmanager
def choosing_for(isa: Isa) -> Iterator[None]:
    """Let the layers choose among their forms as on a processor with these instruction sets, and run as on this one."""
    library = replace(load_library(), isa=isa)
    with pytest.MonkeyPatch.context() as patch:
        for module in ("onednn_convolution", "onednn_product"):
            patch.setattr(f"loopfeed.models.layers.{module}.load_library", lambda: library)
        yield


@contextmanager
def onednn_for_all_shapes() -> Iterator[None]:
    """Let convolutions use oneDNN whatever their shapes, also where XLA's forms are faster, as for small networks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "loopfeed.models.layers.onednn_convolution.is_faster", lambda operation: operation.dtype != "float16"
        )
        yield
