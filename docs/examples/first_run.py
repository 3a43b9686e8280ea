"""A first run from Python: draw a small data set, train, evaluate, and resume."""

from dataclasses import replace
from pathlib import Path

from loopfeed import TrainConfig, evaluate, pack_demo, train

# %% Draw and pack a data set: ten shapes in two splits, as `preprocess-imagenet --demo`
# does.
if not Path("data/demo").exists():
    pack_demo("data/demo")

# %% Train. Everything that `run-train --help-all` lists is a setting here, under the
# name of docs/reference/settings.
config = TrainConfig(
    data="data/demo",
    model="resnet8",
    steps=60,
    batch=64,
    learning_rate=0.1,
    eval_every_steps=30,
    run_dir="runs/first",
)
result = train(config, notify=print)

assert result.is_complete
assert result.steps_done == len(result.losses) == 60
assert result.losses[-10:].mean() < result.losses[:10].mean()

# %% The evaluations that the program made during the run: exact counts over the whole
# val split.
for evaluation in result.evaluations:
    print(f"step {evaluation.step}: top-1 {evaluation.top1:.1%}")

assert [evaluation.step for evaluation in result.evaluations] == [30, 60]

# %% The run folder has the same: one line per step, the weights, and a snapshot of the
# whole state.
assert (result.run_dir / "model.safetensors").exists()
assert len((result.run_dir / "loss.jsonl").read_text().splitlines()) == 60

# %% Evaluate the written weights once more. The counts are those of the last
# evaluation, to the image.
again = evaluate("runs/first")

assert again.record.top1 == result.evaluations[-1].top1

# %% Resume and train to step 70: weights, momentum, position and random numbers come
# from the snapshot.
longer = train(replace(config, steps=70, resume=True))

assert longer.steps_done == 70
assert len(longer.losses) == 10
