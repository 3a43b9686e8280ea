"""A network as StableHLO, which any process with jax runs: a zip file with the program and what it is about."""

import io
import zipfile
from typing import Final

import jax

from loopfeed.engine.export.exported_model import ExportedModel, any_batch, describe, make_function

PLATFORMS: Final = ("cpu", "cuda", "tpu")
"""What the program is lowered for."""
PROGRAM, DESCRIPTION = "program.bin", "model.json"
# Of an entry of a zip file: without it, the same weights would not be the same bytes.
_NO_TIME = (1980, 1, 1, 0, 0, 0)


def stablehlo_file(exported: ExportedModel) -> bytes:
    """Return the content of a file with the program of `jax.export` for any batch size, and a JSON description.

    Raises:
        ValueError: the model cannot be traced for any number of images.
    """
    program = jax.export.export(jax.jit(make_function(exported)), platforms=PLATFORMS)(any_batch(exported))
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_STORED) as file:
        file.writestr(zipfile.ZipInfo(DESCRIPTION, _NO_TIME), describe(exported))
        file.writestr(zipfile.ZipInfo(PROGRAM, _NO_TIME), bytes(program.serialize()))
    return content.getvalue()
