"""The examples in the docstrings of the public names: what they print is what they say."""

import doctest
import io
import os
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import loopfeed

# No use without another library, an account, other processes, a store or minutes of work; records that others return;
# interfaces, and errors.
WITHOUT = {
    *("BatchSource", "EvaluationSource", "TrainModel", "WandbSink", "TensorBoardSink", "join_processes", "pack_demo"),
    *("Mistakes", "OpenedRun", "RunInterrupted"),
    *("ShardCache", "check_step", "describe_runtime", "evaluate_weights"),
    *("ChangedShardError", "ConfigError", "FeederError", "NonFiniteError", "ShardError"),
    *("Damage", "DeviceInfo", "Difference", "EvaluationRecord", "EvaluationResult", "ExportResult", "LoadedRecipe"),
    *(
        "ImagePredictions",
        "LossRecord",
        "Mistakes",
        "OpenedRun",
        "PackResult",
        "PredictionResult",
        "Profile",
        "ProgramReport",
        "ReplayReport",
        "RunHandle",
    ),
    *(
        "RunInterrupted",
        "RuntimeReport",
        "ShownBatch",
        "StepCheck",
        "ThisProcess",
        "TrainResult",
        "RunningStats",
        "DeviceRates",
    ),
}


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """Make the folder that the examples work in, which has red and blue photographs; return what they may name."""
    import jax
    import jax.numpy as jnp

    before, folder = Path.cwd(), tmp_path_factory.mktemp("examples")
    for split in ("train", "val"):
        for name, colour in {"blue": (40, 60, 220), "red": (230, 30, 20)}.items():
            (folder / "photographs" / split / name).mkdir(parents=True)
            for number in range(4):
                shade = tuple(min(255, level + 4 * number) for level in colour)
                Image.new("RGB", (8, 8), shade).save(folder / "photographs" / split / name / f"{number}.png")
    os.chdir(folder)
    yield {"jax": jax, "jnp": jnp, "np": np, "Path": Path} | {name: getattr(loopfeed, name) for name in loopfeed._HOME}
    os.chdir(before)


def test_the_examples_print_what_they_say(names):
    """In the order of the page of the reference: later examples use what earlier ones define and write."""
    with_examples = set()
    out = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False)
    first = ["pack", "Model", "TrainConfig", "train"]
    for name in [*first, *(name for name in loopfeed.__all__ if name not in first)]:
        text = getattr(loopfeed, name).__doc__
        example = doctest.DocTestParser().get_doctest(text, names, name, loopfeed._HOME[name], 0)
        if example.examples:
            with_examples.add(name)
            runner.run(example, out=out.write, clear_globs=False)
            names |= example.globs
    assert not out.getvalue(), out.getvalue()
    assert with_examples == set(loopfeed._HOME) - WITHOUT
