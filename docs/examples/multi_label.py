"""Several classes per image: from a file of labels to an evaluated network."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from PIL import Image

from loopfeed import TrainConfig, mean_average_precision, open_split, train

COLOURS, SIZE, NUM_IMAGES = ("red", "green", "blue"), 16, 400

# %% Images with up to three coloured squares each, in one folder, and a line for each
# in labels.csv: the path below the folder, and the names of its classes, joined by |.
random = np.random.default_rng(0)
folder = Path("squares")
folder.mkdir(exist_ok=True)
lines = ["path,classes"]
for number in range(NUM_IMAGES):
    has_colour = random.random(len(COLOURS)) < (0.5, 0.4, 0.2)
    image = random.integers(0, 90, (SIZE, SIZE, 3)).astype(np.uint8)
    for colour in np.flatnonzero(has_colour):
        top, left = random.integers(0, SIZE - 5, 2)
        image[top : top + 5, left : left + 5, colour] += 120
    Image.fromarray(image).save(folder / f"{number:04d}.png")
    names = "|".join(np.array(COLOURS)[has_colour])
    lines.append(f"{number:04d}.png,{names}")
(folder / "labels.csv").write_text("\n".join(lines) + "\n")

# %% Pack them. Of all images, a fifth is held out for the evaluation.
command = Path(sys.executable).with_name("preprocess-imagenet")
options = ["--labels", "squares/labels.csv", "--size", str(SIZE), "--holdout", "0.2"]
subprocess.run([command, "squares", "data/squares", *options], check=True)


# %% Train with the loss for several classes. Their number, 3, comes from the pack. The
# labels that metrics see are float32 [B, 3], 0 or 1.
def wrong_bits(logits, labels):  # noqa: ANN001, ANN201
    """Return the fraction of wrong bits of each image, [B]."""
    return ((logits > 0) != (labels > 0.5)).mean(axis=1)


config = TrainConfig(
    data="data/squares",
    steps=50,
    batch=32,
    model="resnet8",
    loss="binary-cross-entropy",
    learning_rate=0.1,
    schedule="cosine",
)
metrics = {"wrong_bits": wrong_bits, "mAP": mean_average_precision(len(COLOURS))}
result = train(config, metrics=metrics)
record = result.evaluations[-1]

# %% The best constant prediction is the frequency of each colour among the evaluated
# images. The network must have less than half of its loss and of its wrong bits.
with open_split("data/squares", "val") as split:
    assert [each.name for each in split.manifest.classes] == ["blue", "green", "red"]
    frequency = split.read_targets(np.arange(split.num_images)).mean(axis=0)
entropy = frequency * np.log(frequency) + (1 - frequency) * np.log(1 - frequency)
constant_loss = -entropy.mean()
constant_wrong = np.minimum(frequency, 1 - frequency).mean()
wrong, precision = record.metrics["wrong_bits"], record.metrics["mAP"]
print(f"loss {record.loss:.3f}, constant prediction {constant_loss:.3f}")
print(f"wrong bits {wrong:.1%}, constant prediction {constant_wrong:.1%}")
print(f"mean average precision {precision:.3f}")
assert record.num_images == NUM_IMAGES // 5
assert record.loss < constant_loss / 2
assert wrong < constant_wrong / 2
assert precision > 0.9
