"""Predictions for images in memory: by `loopfeed.Predictor`, ONNX Runtime or PyTorch, which the file's name says.

A unit is one call, from uint8 pixels to logits. Every program has a thread for each core that it may use.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from protocol import Channel, timed, versions_of

Images = Any  # uint8 [B, H, W, 3]
Call = Callable[[Images], Any]


def load_predictor(path: Path, batch: int) -> Call:
    """Return a call of Loopfeed."""
    from loopfeed import Predictor

    predictor = Predictor(path, settings={"batch": batch})
    return lambda images: predictor.predict(images, logits=True).logits


def load_onnx(path: Path, _: int) -> Call:
    """Return a call of ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    # Its default is the cores of the machine, whose threads would wait for each other on fewer.
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda images: session.run(["logits"], {"images": images})[0]


def load_timm(path: Path, _: int) -> Call:
    """Return a call of PyTorch in eager mode."""
    import timm
    import torch

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    net = timm.create_model(f"local-dir:{path}", pretrained=True).eval()
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))["pretrained_cfg"]
    mean, std = (torch.tensor(config[name]).view(3, 1, 1) for name in ("mean", "std"))

    def call(images: Images) -> Any:
        with torch.inference_mode():
            levels = torch.from_numpy(images).permute(0, 3, 1, 2).float() / 255
            return net((levels - mean) / std).numpy()

    return call


# By the suffix of the file, "" for a folder: the loader, and the distributions whose versions are recorded.
LOADERS: dict[str, tuple[Callable[[Path, int], Call], tuple[str, ...]]] = {
    ".safetensors": (load_predictor, ("jax", "jaxlib")),
    ".onnx": (load_onnx, ("onnxruntime",)),
    "": (load_timm, ("torch", "timm")),
}


def main(path: Path, batch: int, size: int, cores: int) -> None:
    """Serve calls with `batch` images, on so many cores, 0 for all."""
    channel = Channel()
    if cores:
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:cores])
    started = time.perf_counter()
    load, libraries = LOADERS[path.suffix]
    call = load(path, batch)
    images = np.random.default_rng(0).integers(0, 256, (batch, size, size, 3), dtype=np.uint8)
    logits = call(images)
    first_s = time.perf_counter() - started
    call(images)

    def work(num_units: int) -> None:
        for _ in range(num_units):
            call(images)

    facts = {"largest logit": float(np.abs(logits).max()), "s until the first result": round(first_s, 2)}
    channel.ready(1, versions=versions_of(*libraries), facts=facts)
    channel.serve(timed(work))


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
