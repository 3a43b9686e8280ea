"""Fine-tuning: start from given weights, and use the result."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import load_file

from loopfeed import (
    TrainConfig,
    build_model,
    from_torchvision,
    open_split,
    pack_demo,
    train,
    unpack_rgb,
)

# %% Weights to start from. Here a short run makes them; torchvision's weights in a
# safetensors file work as well.
if not Path("data/demo").exists():
    pack_demo("data/demo")
settings = {"data": "data/demo", "model": "resnet8", "batch": 64, "learning_rate": 0.1}
first = train(TrainConfig(**settings, steps=40, run_dir="runs/base"))

# %% Start from them. The first loss is close to the last loss of the first run, not to
# that of random weights. If num_classes differed, the classifier would be initialised
# from the seed.
tuned = train(
    TrainConfig(
        **settings | {"learning_rate": 0.01},
        steps=20,
        init_from="runs/base/model.safetensors",
        run_dir="runs/tuned",
    )
)

assert tuned.losses[:5].mean() < first.losses[:5].mean()
assert abs(tuned.losses[:5].mean() - first.losses[-5:].mean()) < abs(
    tuned.losses[:5].mean() - first.losses[:5].mean()
)

# %% Use the weights. The file has torchvision's names; its metadata contain the mean
# and standard deviation for normalisation.
with safe_open("runs/tuned/model.safetensors", "np") as file:
    about = file.metadata()
tensors = load_file("runs/tuned/model.safetensors")
params, batch_stats = from_torchvision(about["model"], tensors)
mean, std = (np.array(about[part].split(), np.float32) for part in ("mean", "std"))
model = build_model(about["model"], num_classes=10, image_size=32)

# %% Some images of the val split, as the packed words in storage.
with open_split("data/demo", "val") as split:
    pixels, labels = (
        np.empty((64, split.height, split.row_words), np.uint32),
        np.empty(64, np.int32),
    )
    split.read_into(np.arange(64), pixels, labels, timeout_s=30)

images = jnp.asarray((unpack_rgb(pixels) / np.float32(255) - mean) / std)
logits, _ = model.apply(params, batch_stats, images, train=False)
print(f"top-1 of {len(labels)} images: {(logits.argmax(1) == labels).mean():.1%}")

assert logits.shape == (64, 10)
assert jnp.isfinite(logits).all()
