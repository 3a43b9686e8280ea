"""The drawn data set."""

import json
import re
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from loopfeed import TrainConfig
from loopfeed.engine.data.open_data import open_data
from loopfeed.engine.parts import UserParts
from loopfeed.engine.recipes import load_recipe
from loopfeed.engine.recipes.expected import expected_accuracy
from loopfeed.preprocess.demo.demo_set import SHAPES, draw_demo, draw_image
from loopfeed.preprocess.sources.open_source import open_source


def files_of(root):
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.jpg"))}


def test_it_is_a_source_with_balanced_classes(tmp_path):
    assert draw_demo(tmp_path / "demo", num_images=100) == tmp_path / "demo"
    with open_source(tmp_path / "demo") as source:
        assert [each.id for each in source.splits["train"].classes] == list(SHAPES)
        for split, count in (("train", 10), ("val", 2)):
            found = source.splits[split]
            assert Counter(found.image(i).label for i in range(len(found))) == dict.fromkeys(range(10), count)
    for content in (tmp_path / "demo").rglob("*.jpg"):
        with Image.open(content) as image:
            assert (image.format, image.mode, image.size) == ("JPEG", "RGB", (32, 32))


def test_the_same_arguments_draw_the_same_files(tmp_path):
    first = files_of(draw_demo(tmp_path / "1", num_images=20, seed=3))
    assert files_of(draw_demo(tmp_path / "2", num_images=20, seed=3)) == first
    other = files_of(draw_demo(tmp_path / "3", num_images=20, seed=4))
    assert not set(other.values()) & set(first.values())
    assert len(set(first.values())) == len(first) == 30
    more = files_of(draw_demo(tmp_path / "4", num_images=30, seed=3))
    assert all(more[name] == content for name, content in first.items())  # an image depends on its own number alone


def test_colour_is_independent_of_the_class():
    # Mean colours of 200 images a class; a class mean has a standard error of about 3.5 levels: five sigma.
    means = np.array(
        [
            np.mean(
                [draw_image(name, 16, np.random.default_rng((9, label, k))).mean((0, 1)) for k in range(200)], axis=0
            )
            for label, name in enumerate(SHAPES)
        ]
    )
    assert np.abs(means - means.mean(0)).max() < 18


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_images": 9}, "num_images must be at least 10, one per class, got 9"),
        ({"size": 15}, "size must be from 16 to 1024 pixels, got 15"),
        ({"size": 2000}, "size must be from 16 to 1024 pixels"),
        ({"seed": -1}, "seed must be 0 or more, got -1"),
    ],
)
def test_arguments_out_of_range(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        draw_demo(tmp_path / "demo", **options)
    assert not (tmp_path / "demo").exists()


def test_existing_files_are_not_overwritten(tmp_path):
    draw_demo(tmp_path, num_images=10)
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="train already exists; remove it or choose another folder"):
        draw_demo(tmp_path, num_images=10)
    assert files_of(tmp_path) == before


@pytest.mark.integration
@pytest.mark.timeout(1800)
@pytest.mark.usefixtures("llvms_optimiser")
def test_the_demo_reaches_the_accuracy_that_its_recipe_promises(tmp_path):
    """In six tenths of its steps, which reach it with less time at a low rate; that accuracy ends the run."""
    recipe = load_recipe("demo")
    floor = re.match(r"at least ([\d.]+) % top-1", recipe.expected)
    assert floor is not None
    top1 = float(floor[1]) / 100
    shorter = ["--steps", str(recipe.settings["steps"] * 6 // 10), "--stop-at-top1", str(top1), "--run-dir", "run"]
    for line in recipe.command.strip().splitlines():
        name, *arguments = line.split()
        own = shorter if name == "run-train" else []
        command = [str(Path(sys.executable).parent / name), *arguments, *own]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1500)
        assert done.returncode == 0, done.stderr
    last = json.loads((tmp_path / "run/eval.jsonl").read_text().splitlines()[-1])
    assert last["top1"] >= top1
    # The recipe's own run on these images is told what to expect.
    config = TrainConfig.from_json({**recipe.settings, "data": str(tmp_path / "data/demo")})
    with ExitStack() as stack:
        digest = open_data(config, UserParts(), stack, lambda _: None).contents_digest
    assert expected_accuracy(recipe, config, digest) == (f"expected: {recipe.expected}",)
