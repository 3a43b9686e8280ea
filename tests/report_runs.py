"""Runs for tests of the report page, on packed images whose first class has a hostile name."""

import os
from pathlib import Path
from typing import Any

from loopfeed import TrainConfig, train
from loopfeed.preprocess.shards.classes import ImageClass
from tests.fake_source import fake_source, pack
from tests.toy import Linear

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=\"alert('1')\">&amp;"
CLASSES = (ImageClass("n1", HOSTILE), ImageClass("n2", "goldfish"), ImageClass("n3", "great white shark"))
NUM_EVALUATED = 11
RUN, OTHER = "<b>run", "other"


def make_runs(folder: Path) -> None:
    """Make a data set, a run on it, and another run with other settings."""
    pack(fake_source(20, classes=CLASSES, broken=frozenset({4})), folder / "data")
    pack(fake_source(NUM_EVALUATED, seed=1, name="val", classes=CLASSES), folder / "data")
    several: dict[str, dict[str, Any]] = {RUN: {}, OTHER: {"learning_rate": 0.5, "seed": 3}}
    for name, values in several.items():
        data, run = os.fspath(folder / "data"), os.fspath(folder / name)
        train(TrainConfig(steps=12, batch=4, data=data, eval_every_steps=4, run_dir=run, **values), model=Linear())
