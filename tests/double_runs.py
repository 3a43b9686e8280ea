"""Runs in float64 on 1, 2 and 8 devices of the processor, for `tests/test_devices.py`.

    python -m tests.double_runs FOLDER

Saves the weights of each run as FOLDER/NORMS-NUMBER.npy, and prints the losses as one line of JSON.
"""

import json
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from loopfeed import TrainConfig, train
from tests.normed_network import SETTINGS, Normed

NORMS: dict[str, dict[str, Any]] = {"whole": {"batch_norm_sync": True}, "sixteen": {"batch_norm_group": 16}}
# The whole batch is one group for any number of devices.
RUNS = [("whole", 1), ("whole", 8), *(("sixteen", number) for number in (1, 2, 8))]
OPTIMISER: dict[str, Any] = {"optimizer": "nesterov", "learning_rate": 0.5, "clip_norm": 1.0, "ema_decay": 0.9}


def trained(norms, number):
    """Train on a number of devices; return the losses, float32 [50], and all weights, float64 [n]."""
    config = TrainConfig(steps=50, accumulate_steps=2, devices=f"cpu:{number}", **NORMS[norms], **OPTIMISER, **SETTINGS)
    result = train(config, model=Normed("float64"))
    leaves = jax.tree.leaves((result.params, result.batch_stats))
    assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float64)}
    return result.losses, np.concatenate([np.ravel(leaf) for leaf in leaves])


def main(folder):
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", max(number for _, number in RUNS))
    losses = {}
    for norms, number in RUNS:
        found, weights = trained(norms, number)
        np.save(Path(folder) / f"{norms}-{number}.npy", weights)
        losses[f"{norms}-{number}"] = found.tolist()
    print(json.dumps(losses))


if __name__ == "__main__":
    main(sys.argv[1])
