"""The run folder: what a run leaves behind, and where.

`config.json` (settings, what they resolved to, versions, the data's manifest digest), `loss.jsonl`, `result.json`
(how the run ended) and `model.safetensors` (the trained weights).
"""

import json
import platform
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from engine.config import TrainConfig
from engine.whole_file import write_whole

LOSS_LOG = "loss.jsonl"
EVALUATION_LOG = "eval.jsonl"
RESULT = "result.json"
_CONFIG = "config.json"
_WEIGHTS = "model.safetensors"
_WRITTEN_HERE = (RESULT, _WEIGHTS, EVALUATION_LOG, LOSS_LOG, _CONFIG)
_RECORDED_VERSIONS = ("feedloop", "jax", "jaxlib", "numpy", "optax", "tensorstore")


class RunFolder:
    """A folder for one run.

    Args:
        path: made where it is missing.
        overwrite: remove what an earlier run left; nothing else in the folder is touched.

    Raises:
        ValueError: where an earlier run is there and may not be overwritten, or the path cannot be a folder.
    """

    def __init__(self, path: Path, *, overwrite: bool) -> None:
        self.path = path
        self._is_new = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError):
            raise ValueError(f"the run folder must be a folder, and {path} is a file: choose another") from None
        except OSError as error:
            raise ValueError(
                f"the run folder must be writable, and {path} cannot be made ({error.strerror}): choose another"
            ) from error
        left = [name for name in _WRITTEN_HERE if (path / name).exists()]
        if left and not overwrite:
            self._refuse(left[-1])
        for name in left:
            (path / name).unlink()
        try:
            # Claimed in one step: of two runs that find the folder empty, one gets it.
            (path / _CONFIG).open("x").close()
        except FileExistsError:
            self._refuse(_CONFIG)

    def _refuse(self, name: str) -> NoReturn:
        raise ValueError(
            f"the run folder must be new, and {self.path} holds {name} of an earlier run: "
            "choose another (--run-dir), or overwrite it (--overwrite)"
        )

    def abandon(self) -> None:
        """Leaves the folder as it was, for a run that made no step."""
        for name in _WRITTEN_HERE:
            (self.path / name).unlink(missing_ok=True)
        if self._is_new:
            with suppress(OSError):  # somebody else's files are in it by now
                self.path.rmdir()

    @property
    def loss_log(self) -> Path:
        """Where the loss stream goes."""
        return self.path / LOSS_LOG

    @property
    def evaluation_log(self) -> Path:
        """Where the evaluations go."""
        return self.path / EVALUATION_LOG

    def write_config(self, config: TrainConfig, resolved: Mapping[str, Any], manifest_digest: str | None) -> None:
        """Records the settings as given and as resolved, the versions, and the data they were meant for."""
        self._write_json(
            _CONFIG,
            {
                "config": config.to_json(),
                "resolved": dict(resolved),
                "manifest_sha256": manifest_digest,
                "versions": {"python": platform.python_version()}
                | {name: version(name) for name in _RECORDED_VERSIONS},
            },
        )

    def write_result(self, result: Mapping[str, Any]) -> None:
        """Records how the run ended; its presence means that nothing more will be written."""
        self._write_json(RESULT, result)

    def write_weights(self, tensors: Mapping[str, NDArray[Any]], metadata: Mapping[str, str]) -> Path:
        """Writes the weights as safetensors; gives the file's path."""
        from safetensors.numpy import save

        path = self.path / _WEIGHTS
        # safetensors writes an array's memory as it lies; ascontiguousarray would make a vector of a scalar.
        laid_out = {name: np.asarray(tensor, order="C") for name, tensor in tensors.items()}
        write_whole(path, save(laid_out, dict(metadata)))
        return path

    def _write_json(self, name: str, value: Mapping[str, Any]) -> None:
        write_whole(self.path / name, (json.dumps(value, indent=2) + "\n").encode())
