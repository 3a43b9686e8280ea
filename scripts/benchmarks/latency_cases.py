"""The cases of the bench `latency`: a call with one or many images in memory, beside the exports in other programs."""

import os
from collections.abc import Iterator
from functools import partial
from itertools import product
from pathlib import Path

from scripts.benchmarks.bench import Candidate, Case, Settings, Unit
from scripts.benchmarks.data import Say
from scripts.benchmarks.peers import TORCH, TORCH_PYTHON

_NETWORKS, _SIZE, _BATCHES = ("resnet18", "mobilenetv3_large_100"), 224, (1, 32)
# On all cores, a library whose threads wait for each other by spinning is slowed far more than others by other work.
_CORES = {1: "one core", 0: "all cores"}
# The name in the table, the file that is loaded, and the environment.
_CANDIDATES = (
    ("loopfeed", "weights.safetensors", ""),
    ("ONNX Runtime, our ONNX", "photos.onnx", ""),
    ("torch eager, our folder of timm", "photos-timm", TORCH),
)


def latency_cases(settings: Settings) -> Iterator[Case]:
    """Yield a case for each network, number of cores and batch.

    PyTorch takes part if `peers.TORCH_PYTHON` names a Python with timm.
    """
    for network in _NETWORKS:
        folder = settings.folder / "data" / f"latency-{network}"
        for cores, batch in product(_CORES, _BATCHES):
            candidates = tuple(
                Candidate(name, "predict_images.py", (folder / file, batch, _SIZE, cores), peer)
                for name, file, peer in _CANDIDATES
                if not peer or os.environ.get(TORCH_PYTHON)
            )
            name = f"{network} {_SIZE} px b{batch}, {_CORES[cores]}"
            prepare = partial(_ensure_files, network, folder)
            yield Case(name, Unit("ms a call", 1e3, is_time=True), candidates, round_s=3.0, prepare=prepare)


def _ensure_files(network: str, folder: Path, say: Say) -> None:
    """Write drawn weights and their exports, if that has not been done."""
    done = folder / "done.txt"
    if done.exists():
        return
    from loopfeed import export_model
    from scripts.benchmarks.drawn_weights import write_drawn_weights

    say(f"exporting {network} to {folder}")
    folder.mkdir(parents=True, exist_ok=True)
    weights, *others = (folder / file for _, file, _ in _CANDIDATES)
    write_drawn_weights(weights, network, image_size=_SIZE, num_classes=1000)
    for path in others:
        export_model(weights, path, overwrite=True)
    done.touch()
