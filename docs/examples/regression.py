"""Numbers instead of classes: from a file of labels to an evaluated network."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from loopfeed import TrainConfig, open_split, train

SIZE, NUM_IMAGES = 16, 400

# %% Images of one disc each, and its area (a fraction of the image) and brightness. In
# JSON lines, the numbers of an image are a list; in CSV they would have a column each.
random = np.random.default_rng(0)
folder = Path("discs")
folder.mkdir(exist_ok=True)
rows, columns = np.indices((SIZE, SIZE))
lines = []
for number in range(NUM_IMAGES):
    radius, brightness = random.uniform(2, 7), random.uniform(0.3, 1)
    top, left = random.uniform(6, SIZE - 7, 2)
    is_disc = (rows - top) ** 2 + (columns - left) ** 2 < radius**2
    levels = random.integers(0, 30, (SIZE, SIZE)) + 220 * brightness * is_disc
    image = np.repeat(levels[..., None], 3, axis=2).astype(np.uint8)
    Image.fromarray(image).save(folder / f"{number:04d}.png")
    targets = [float(is_disc.mean()), brightness]
    lines.append(json.dumps({"path": f"{number:04d}.png", "targets": targets}))
Path("discs.jsonl").write_text("\n".join(lines) + "\n")

# %% Pack them. Of all images, a fifth is held out for the evaluation.
command = Path(sys.executable).with_name("preprocess-imagenet")
options = ["--labels", "discs.jsonl", "--size", str(SIZE), "--holdout", "0.2"]
subprocess.run([command, "discs", "data/discs", *options], check=True)


# %% Train with the squared error. The number of outputs, 2, comes from the pack.
def area_error(outputs, labels):  # noqa: ANN001, ANN201
    """Return the absolute error of the area of each image, [B]."""
    return abs(outputs[:, 0] - labels[:, 0])


config = TrainConfig(
    data="data/discs",
    steps=50,
    batch=32,
    model="resnet8",
    loss="mean-squared-error",
    learning_rate=0.05,
    schedule="cosine",
)
result = train(config, metrics={"area_error": area_error})
record = result.evaluations[-1]

# %% The best constant prediction is the mean of the numbers, whose squared error is
# their variance. The network must have less than a fifth of it.
with open_split("data/discs", "val") as split:
    targets = split.read_targets(np.arange(split.num_images))
constant_loss = targets.var(axis=0).mean()
error = record.metrics["area_error"]
print(f"squared error {record.loss:.4f}, constant prediction {constant_loss:.4f}")
print(f"mean error of the area {error:.3f}")
assert record.num_images == len(targets) == NUM_IMAGES // 5
assert record.loss < constant_loss / 5
assert error < targets[:, 0].std() / 2
