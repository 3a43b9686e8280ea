"""What tests of oneDNN's kernels share: they are skipped where the library is missing."""

import pytest

from models.kernels import MissingKernelsError
from models.kernels.onednn.library import load_library

NO_LIBRARY = MissingKernelsError("onednn-cpu-gomp is not installed", "pip install 'feedloop[kernels]'")
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

    monkeypatch.setattr("engine.program.kernels.load_library", load)
