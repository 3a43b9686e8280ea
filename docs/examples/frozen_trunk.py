"""Train a new head on the frozen trunk of a PyTorch network."""

import os
from pathlib import Path
from typing import Any

import jax
import numpy as np

from loopfeed import TrainConfig, pack_demo, train

# %% The environment may name a packed data set and a state dictionary, written by
# `safetensors.torch.save_file(model.state_dict(), "resnet8.safetensors")`. By default
# they are the demo set and a ResNet-8 that PyTorch trained on the first five of the
# ten classes.
data = os.environ.get("DATA", "data/demo")
trunk = os.environ.get("TRUNK", str(Path(__file__).with_name("trunk.safetensors")))
if data == "data/demo" and not Path(data).exists():
    pack_demo(data)

settings: dict[str, Any] = {
    "data": data,
    "model": "resnet8",
    "batch": 64,
    "steps": 50,
    "schedule": "cosine",
}

# %% All but the head `fc` is frozen. The file's head has another number of classes, so
# a new one begins at zero.
tuned = train(
    TrainConfig(
        **settings,
        init_from=trunk,
        freeze="conv1.*,bn1.*,layer.*",
        optimizer="adamw",
        learning_rate=0.02,
    ),
    notify=print,
)

# %% The baseline: the whole network from random weights, in equal steps.
scratch = train(TrainConfig(**settings, learning_rate=0.1))

found, baseline = (each.evaluations[-1].top1 for each in (tuned, scratch))
print(f"top-1 {found:.1%}, from scratch {baseline:.1%}")
assert found > baseline + 0.05

# %% The trunk is the file's, its running statistics included.
start = train(TrainConfig(**settings | {"steps": 0}, init_from=trunk))
for part in ("params", "batch_stats"):
    first, last = (dict(getattr(each, part)) for each in (start, tuned))
    first.pop("fc", None), last.pop("fc", None)
    jax.tree.map(np.testing.assert_array_equal, first, last)
