"""Stages of a run: what each changes, exactly as a run of its own would, and how a run goes on across their borders."""

import json
import os
import re
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed import (
    ConfigError,
    Stage,
    explain_program,
    load_recipe,
    read_runtime,
    read_stages,
    read_weights,
    replay_run,
    report_run,
    run_settings,
    train,
)
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.order import EpochOrder
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.engine.images.positions import positions
from loopfeed.engine.parts import take_parts
from loopfeed.engine.profile import capture
from loopfeed.engine.run.compiling import plan_program
from loopfeed.engine.run.epochs import settle_epochs
from loopfeed.engine.runtime.report import describe_runtime
from loopfeed.engine.settings import SettingError
from loopfeed.engine.sizing import planning
from loopfeed.engine.sizing.device_rates import DeviceRates
from loopfeed.engine.sizing.planning import plan_here
from loopfeed.engine.stages import StageRanges, Stages
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack
from tests.toy import toy_config

NUM_IMAGES, SIZE = 22, 8


@dataclass
class Pooled:
    """A classifier of the mean colour through a hidden layer; it takes images of any size."""

    name: str = "pooled"

    def init(self, key):
        first, second = jax.random.split(key)
        hidden = {"w": jax.random.normal(first, (3, 5))}
        return {"hidden": hidden, "head": {"w": 0.3 * jax.random.normal(second, (5, 3))}}, {}

    def apply(self, params, batch_stats, images, train):
        return jnp.tanh(images.mean((1, 2)) @ params["hidden"]["w"]) @ params["head"]["w"], batch_stats


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stages")
    pack(fake_source(NUM_IMAGES, size=SIZE), folder)
    pack(fake_source(9, size=SIZE, seed=1, name="val"), folder)
    return str(folder)


def config_of(data, **values):
    """Return a configuration without evaluations, which are a loop more to compile."""
    base = {"data": data, "steps": 12, "batch": 4, "num_classes": None, "seed": 3, "eval_split": "off"}
    return toy_config(**(base | values))


def leaves(result):
    return [np.asarray(leaf) for leaf in jax.tree.leaves((result.params, result.batch_stats))]


def have_equal_weights(one, other):
    pairs = zip(leaves(one), leaves(other), strict=True)
    return all(np.array_equal(first, second) for first, second in pairs)


def equal(one, other):
    return one.losses.tolist() == other.losses.tolist() and have_equal_weights(one, other)


@contextmanager
def stopping_after(num_batches):
    """Let the disk fail behind a batch, so that runs in the block end with the updates that were due until then."""
    images_of = ShardBatches._images_of

    def fail(source, batch_index):
        if batch_index >= num_batches:
            raise ConnectionResetError("the disk went away")
        return images_of(source, batch_index)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShardBatches, "_images_of", fail)
        with pytest.raises(ConnectionResetError):
            yield


def test_stages_without_changes_are_a_run_without_stages(data):
    config = config_of(data, optimizer="adam", crop="random", crop_padding=2, mixup=0.3, ema_decay=0.9)
    plain = train(config, model=Pooled())
    stages = [Stage(until=5, batch=4), Stage(mixup=0.3)]
    assert equal(train(replace(config, stages=stages), model=Pooled()), plain)


def test_a_stage_is_a_run_of_its_own_on_the_images_that_follow(data, tmp_path):
    """Stages of batches 4 and 6 against two runs whose batches are taken from the order by their positions."""
    images, labels = np.empty((NUM_IMAGES, SIZE, SIZE), np.uint32), np.empty(NUM_IMAGES, np.int32)
    split = open_split(data, "train")
    split.read_into(np.arange(NUM_IMAGES), images, labels, timeout_s=10)
    split.close()
    order = EpochOrder(NUM_IMAGES, 3)

    def taking(batch, first):
        def batches(step):
            at = order.images_at(np.arange(first + step * batch, first + (step + 1) * batch))
            return images[at], labels[at]

        return batches

    shared = {"momentum": 0, "weight_decay": 0, "mean": (0.5,) * 3, "std": (0.25,) * 3}
    only_first: dict[str, Any] = {"label_smoothing": 0.1, "freeze": "hidden.*"}
    staged = train(
        config_of(
            data,
            **shared,
            stages=[Stage(until=3, **only_first), Stage(until=7, **only_first), Stage(batch=6, learning_rate=0.05)],
        ),
        model=Pooled(),
    )
    plain = toy_config(**shared, batch=4, seed=3)
    first = train(
        replace(plain, **only_first, steps=7, run_dir=str(tmp_path / "first")), model=Pooled(), batches=taking(4, 0)
    )
    second = train(
        replace(plain, steps=5, batch=6, learning_rate=0.05,
                init_from=str(tmp_path / "first/model.safetensors")),
        model=Pooled(), batches=taking(6, 28),
    )  # fmt: skip
    assert staged.losses.tolist() == [*first.losses.tolist(), *second.losses.tolist()]
    assert have_equal_weights(staged, second)


def test_a_parameter_that_is_trained_later_begins_as_a_new_one(data):
    config = config_of(data, optimizer="adam", learning_rate=0.01, momentum=0.9, weight_decay=0.0, steps=6)
    staged = replace(config, stages=[Stage(until=5, freeze="hidden.*"), Stage()])
    # At a rate of 0 the same program returns the weights with which the run begins.
    hidden, after = (
        np.asarray(train(replace(staged, learning_rate=rate), model=Pooled()).params["hidden"]["w"])
        for rate in (0.0, 0.01)
    )
    moved = np.abs(after - hidden)
    # The first update of Adam is the learning rate in every element; without a count of its own it would be 2.4 of it.
    assert moved == pytest.approx(np.full(moved.shape, 0.01), rel=1e-3)


def test_the_norm_is_clipped_over_all_parts(data):
    config = config_of(data, steps=4, clip_norm=0.05, momentum=0.5)
    parts = [Stage(until=3), Stage(freeze="hidden.*")]
    plain, staged = train(config, model=Pooled()), train(replace(config, stages=parts), model=Pooled())
    assert staged.losses.tolist() == plain.losses.tolist()  # the last is that of the weights after three updates


STAGES = [
    Stage(until=5, image_size=4, freeze="hidden.*", batch=2),
    Stage(until=8, crop="random", crop_padding=2, flip=0.5),
    Stage(batch=8, mixup=0.4, image_size=6, learning_rate=0.2),
]
# Two programs that tests share, each of which takes seconds to compile.
TWO_STAGES = [STAGES[0], STAGES[2]]
GROWING = [Stage(until="1e"), Stage(batch=11, flip=0.5)]


def test_a_run_goes_on_from_within_a_stage_and_from_a_border_as_if_it_had_not_stopped(data, tmp_path):
    more = {"snapshot_every_steps": 1, "optimizer": "adamw", "chunk_batches": 3, "accumulate_steps": 2}
    check_resumes(config_of(data, stages=TWO_STAGES, **more), tmp_path, (4, 5))


def check_resumes(config, folder, steps):
    """Train a run as a whole, and in two launches with each of these steps between them."""
    whole = train(replace(config, run_dir=str(folder / "whole")), model=Pooled())
    assert len(whole.losses) == 12
    for step in steps:
        run = replace(config, run_dir=str(folder / str(step)))
        with stopping_after(step * config.accumulate_steps):
            train(run, model=Pooled())
        resumed = train(replace(run, resume=True), model=Pooled())
        assert len(resumed.losses) == 12 - step
        assert have_equal_weights(resumed, whole)
        texts = [(folder / name / "loss.jsonl").read_text().splitlines() for name in ("whole", str(step))]
        lines, others = ([(each["loss"], each["lr"]) for each in map(json.loads, text)] for text in texts)
        assert lines == others


def test_stages_on_two_devices(data, tmp_path):
    environment = os.environ | {"JAX_NUM_CPU_DEVICES": "2"}
    command = [sys.executable, "-m", "tests.test_stages", data, str(tmp_path)]
    subprocess.run(command, env=environment, check=True, timeout=300)


def test_stages_on_a_card(data, cards):
    """Batches of several sizes through the ring of a fake card, in chunks that the stages do not fill."""
    config = config_of(data, stages=STAGES)
    found = train(replace(config, transport="cuda", chunk_batches=4), model=Pooled())
    # The loops are other programs, whose sums may be rounded in another order.
    assert found.losses == pytest.approx(train(config, model=Pooled()).losses, abs=1e-6)
    assert len(cards) == 1


def run_on_two_devices(data, folder):
    config = config_of(data, stages=TWO_STAGES, snapshot_every_steps=1, devices="cpu:2")
    check_resumes(config, folder, (5,))
    with pytest.raises(SettingError, match="stage 1 of 2: batch must be a multiple of the number of devices, 2, got 3"):
        train(replace(config, stages=[Stage(until=4, batch=3), Stage()], snapshot_every_steps=None), model=Pooled())


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 50)), min_size=1, max_size=5), st.integers(0, 60))
def test_ranges_count_images(lengths, number):
    stops = np.cumsum([length for length, _ in lengths]).tolist()
    sizes = [size for _, size in lengths]
    ranges = StageRanges.of(stops, sizes)
    per_number = np.repeat(sizes, [length for length, _ in lengths]).tolist() + [sizes[-1]] * 61
    assert ranges.image_at(number) == sum(per_number[:number])
    assert ranges.number_at(ranges.image_at(number)) == number
    assert ranges.number_at(ranges.image_at(number) + Fraction(1, 2)) == number + 1


def test_positions_after_four_thousand_million_images():
    origin = 2**32 - 5
    first = jnp.uint32(origin >> 32), jnp.uint32(origin & 0xFFFFFFFF)
    high, low = positions(jnp.int32(3), 4, 1, 2, first)
    assert [int(a) << 32 | int(b) for a, b in zip(high, low, strict=True)] == [origin + 13, origin + 14]


def test_epochs_are_counted_in_images():
    config = TrainConfig(
        epochs=9, warmup_epochs=2.5, batch=10, stages=[Stage(until="2e", batch=5), Stage(until="4.5e"), Stage(batch=20)]
    )
    settled = settle_epochs(config, 101)
    # 202 images in batches of 5 are 41 steps (205 images), 454.5 in batches of 10 another 25, 909 in those of 20 23.
    assert [(each.first, each.stop, each.first_image) for each in settled.step_ranges] == [
        (0, 41, 0), (41, 66, 205), (66, 89, 455),
    ]  # fmt: skip
    assert (settled.steps, settled.warmup_steps) == (89, 46)
    assert settle_epochs(settled, 101) == settled
    assert TrainConfig.from_json(json.loads(json.dumps(settled.to_json()))) == settled
    assert settle_epochs(TrainConfig(stages=[Stage(until=3), Stage(until="1e")], batch=10), 101).steps == 11
    with pytest.raises(SettingError, match=r"got step 11: let it end earlier \(until\), or give more epochs$"):
        settle_epochs(TrainConfig(stages=[Stage(until="1e"), Stage()], batch=10, epochs=1), 101)


@pytest.mark.parametrize(
    ("values", "fault"),
    [
        ({"stages": []}, r"stages must be a list of stages, such as .*, got \[\]"),
        ({"stages": "a.toml"}, r"got 'a.toml': give what read_stages\(FILE\) returns"),
        ({"stages": [Stage(), Stage()]}, "stage 1 of 2: only the last stage may leave out where it ends"),
        ({"stages": [Stage(until="0e"), Stage()]}, "until must be a number of steps above 0, or of epochs"),
        ({"stages": [Stage(until=True), Stage()]}, "until must be a number of steps above 0"),
        ({"stages": [{"until": 4}, {"steps": 3}]}, "stages, stage 2 of 2: steps belongs to the whole run, not to a"),
        ({"stages": [Stage(until=4, batch=0), Stage()]}, "stage 1 of 2: batch must lie in 1"),
        ({"stages": [Stage(until=4), Stage(until=4), Stage()]}, r"stage 2: until must be more than .* 4 steps, got 4"),
        ({"stages": [Stage(until=12), Stage()]}, "stage 1 must end before the run, at step 12, got step 12"),
        ({"stages": [Stage(until=4), Stage(until=9)]}, "the last stage must end with the run, at step 12, got step 9"),
        ({"stages": [Stage(until=4, image_size=9), Stage()]}, "image_size must be at most that of the run, 8 px"),
        ({"stages": [Stage(until=4, freeze=".*"), Stage()]}, "stage 1 of 2: freeze must leave parameters to train"),
        ({"stages": [Stage(until=4, freeze="heat.*"), Stage()]}, "stage 1 of 2: freeze: the pattern 'heat"),
        ({"stages": [Stage(until=4, crop_padding=2), Stage()]}, "stage 1 of 2: crop_padding requires crop random"),
        ({"stages": [Stage(until=3, batch=3), Stage(mixup=1.0)]}, "must begin after an even number of images, got 9"),
        ({"stages": [Stage(until=3, batch=3, mixup=1.0), Stage()]}, "stage 1 of 2: .* must be even, got 3"),
        ({"stages": [Stage(until=3, crop="random"), Stage()]}, "stage 1 of 2: a random crop needs more than one"),
        ({"stages": [Stage(until=3, until_step=4), Stage(until_step=3)]}, "until_step is computed from until"),
        ({"stages": [{"until": 3, "self": 1}, {}]}, "a stage has no setting 'self'"),
        ({"stages": [Stage(until=4), Stage(batch=6)], "order": "windowed"}, "the windowed order depends on it"),
    ],
)  # fmt: skip
def test_stages_that_cannot_be_trained_are_refused(data, values, fault):
    with pytest.raises(SettingError, match=fault):
        train(config_of(data, **values), model=Pooled())


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("until_stesp", "a stage has no setting 'until_stesp': did you mean until?"),
        ("stepss", "a stage has no setting 'stepss': remove it"),
        ("lr", "a stage has no setting 'lr': did you mean learning_rate?"),
        ("steps", "steps belongs to the whole run, not to a stage: a stage may have batch, "),
    ],
)
def test_a_stage_refuses_other_settings_when_it_is_made(name, fault):
    with pytest.raises(SettingError, match=re.escape(fault)):
        Stage(**{name: 3})


class Flat(Pooled):
    def init(self, key):
        return {"w": jnp.zeros((SIZE * SIZE * 3, 3))}, {}

    def apply(self, params, batch_stats, images, train):
        return images.reshape(len(images), -1) @ params["w"], batch_stats


def test_a_network_of_one_size_and_batches_of_one_size_are_refused(data):
    with pytest.raises(
        SettingError, match="stage 2 of 2: image_size must be a size that the model takes, but it does not take 4 px"
    ):
        train(config_of(data, stages=[Stage(until=4), Stage(image_size=4)]), model=Flat())
    pixels, labels = np.zeros((4, SIZE, SIZE), np.uint32), np.zeros(4, np.int32)
    config = toy_config(batch=4, stages=[Stage(until=4), Stage(batch=6)])
    with pytest.raises(SettingError, match="because your batches have one size, got"):
        train(config, model=Pooled(), batches=lambda _: (pixels, labels))
    with pytest.raises(SettingError, match=r"a number of epochs must not be given with .* endless, got 1e"):
        train(replace(config, stages=[Stage(until="1e"), Stage()]), model=Pooled(), batches=lambda _: (pixels, labels))


def test_a_resume_keeps_the_stages(data, tmp_path):
    run = config_of(data, stages=GROWING, run_dir=str(tmp_path / "run"))
    with stopping_after(3):
        train(run, model=Pooled())
    with pytest.raises(SettingError, match="stages was "):
        train(replace(run, resume=True, stages=[Stage(until="2e"), GROWING[1]]), model=Pooled())
    assert train(replace(run, resume=True, steps=14), model=Pooled()).steps_done == 14


def test_the_program_of_one_stage_is_explained(data):
    config = config_of(data, stages=STAGES)
    rates = DeviceRates(flops_per_s=1e12, bytes_per_s=1e11, dtype="float32", device="an example")
    found = explain_program(config, rates=rates, stage=2, model=Pooled())
    assert (found.batch, found.image_size) == (4, (8, 8))
    with pytest.raises(ValueError, match="stage must lie in 1 … 3, the stages of the run, got 4"):
        explain_program(config, rates=rates, stage=4, model=Pooled())


def test_what_is_said_of_stages(data, tmp_path):
    """The lines before the start, the times in the runtime report, and the table on the report page."""
    said: list[str] = []
    config = config_of(data, stages=STAGES, run_dir=str(tmp_path / "run"))
    launch = train(config, model=Pooled(), notify=said.append).runtime.last
    assert [each for each in said if each.startswith("stage 1 of 3")] == [
        "stage 1 of 3, steps 1 to 5: image_size 4, freeze hidden.*, batch 2, learning rate × 0.5, as the batch"
    ]
    assert any("stage 1: frozen: 15 of 30 parameters" in each for each in said)
    assert [(each.start_step, each.end_step, each.num_images) for each in launch.stages] == [
        (0, 5, 10), (5, 8, 12), (8, 12, 32),
    ]  # fmt: skip
    report = read_runtime(tmp_path / "run")
    assert report is not None
    assert " 6 to 8 " in describe_runtime(report)
    page = report_run(tmp_path / "run", tmp_path / "page.html", model=Pooled(), evaluate=False).read_text()
    assert "stage 3 of 3, steps 9 to 12" in page


def test_the_plan_has_the_work_of_each_stage(data, monkeypatch):
    """The run as a whole is compiled; what would be compiled for a stage alone is counted by its images."""
    config = config_of(data, stages=[Stage(until=4, image_size=4), Stage(batch=8)])
    compiled_alone = []

    def plan_program_or_count(run):
        if len(run.stages) == 2:
            return plan_program(run)
        (stage,) = run.stages
        compiled_alone.append((stage.num_rows, stage.settings.augmentation.resized_to))
        return SimpleNamespace(compiled=SimpleNamespace(step_flops=1e9 * stage.num_rows))

    monkeypatch.setattr(planning, "plan_program", plan_program_or_count)
    plan = plan_here(config, take_parts({"model": Pooled()}), lambda _: None)
    assert (plan.num_steps, plan.train_images, plan.memory.step_flops) == (12, 4 * 4 + 8 * 8, None)
    assert compiled_alone == [(4, 4), (8, None)]
    assert [line.partition("; ")[2] for line in plan.stages] == ["4.00 GFLOP a batch", "8.00 GFLOP a batch"]


def test_a_profile_says_which_stage_was_traced(data, tmp_path, monkeypatch):
    """The seventh batch and all after it wait until the trace has begun, which takes longer than all steps."""
    traced, start, images_of = threading.Event(), capture._start, ShardBatches._images_of

    def start_and_say():
        stop = start()
        traced.set()
        return stop

    def images_once_traced(source, batch_index):
        assert batch_index < 6 or traced.wait(60), "the trace did not begin"
        return images_of(source, batch_index)

    monkeypatch.setattr(capture, "_start", start_and_say)
    monkeypatch.setattr(ShardBatches, "_images_of", images_once_traced)
    config = config_of(data, stages=STAGES, run_dir=str(tmp_path / "run"), profile=True, profile_steps="6:8")
    profile = train(config, model=Pooled()).profile
    assert profile is not None
    assert any("of stage 2 of 3, steps 6 to 8;" in note for note in profile.notes)


def test_recipes_have_stages(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('[settings]\nepochs = 3\n[[settings.stages]]\nuntil = "1e"\nflip = 0.5\n[[settings.stages]]\n')
    config = TrainConfig(**load_recipe(path).settings)
    assert config.stages == Stages.of([Stage(until="1e", flip=0.5), Stage()])
    path.write_text('[settings]\n[[settings.stages]]\nuntil = "1e"\nflop = 1\n[[settings.stages]]\n')
    with pytest.raises(ConfigError, match="a stage has no setting 'flop'"):
        load_recipe(path)


def test_stages_with_one_batch_that_is_not_that_of_the_run(data):
    config = config_of(data, learning_rate=0.1, batch=8)
    assert equal(
        train(replace(config, batch=4, stages=[Stage(batch=8, learning_rate=0.1)]), model=Pooled()),
        train(config, model=Pooled()),
    )


def test_a_stage_may_train_what_the_run_freezes_and_have_a_rate_where_the_run_has_none(data):
    frozen = config_of(data, freeze="hidden.*", learning_rate=0.0, steps=6)
    staged = [replace(frozen, stages=[Stage(until=3), Stage(freeze="", learning_rate=rate)]) for rate in (0.0, 0.1)]
    still, moved = (train(each, model=Pooled()).params["hidden"]["w"] for each in staged)
    assert not np.array_equal(still, moved)


def test_an_optimizer_of_ones_own_keeps_one_state(data):
    config = config_of(data, learning_rate=None, momentum=0.9, weight_decay=1e-4)
    with pytest.raises(SettingError, match="must freeze the same parameters, because it has one state for all"):
        train(replace(config, stages=[Stage(until=3, freeze="hidden.*"), Stage()]), model=Pooled(), optimizer=optax.sgd)
    stages = [Stage(until=3, flip=0.5), Stage()]
    assert len(train(replace(config, stages=stages), model=Pooled(), optimizer=optax.sgd(0.1)).losses) == 12


def test_the_last_stage_goes_on_in_a_run_of_more_steps(data, tmp_path):
    stages = [Stage(until=6), Stage(until=9, batch=11, flip=0.5)]
    run = config_of(data, steps=1000, stages=stages, run_dir=str(tmp_path / "run"))
    assert train(run, model=Pooled()).steps_done == 9
    assert train(replace(run, steps=12, resume=True), model=Pooled()).steps_done == 12
    longer = train(replace(run, steps=12, stages=[Stage(until=6), GROWING[1]], run_dir=None), model=Pooled())
    assert run_settings(tmp_path / "run").steps == 12
    assert replay_run(tmp_path / "run", model=Pooled()).is_same
    assert np.array_equal(
        read_weights(tmp_path / "run/model.safetensors").params["head"]["w"], longer.params["head"]["w"]
    )


def test_a_cycle_is_appended_in_the_batches_of_the_last_stage(data, tmp_path):
    run = config_of(data, steps=1000, epochs=3, stages=GROWING, run_dir=str(tmp_path / "run"))
    train(run, model=Pooled())
    before = run_settings(tmp_path / "run")
    train(replace(before, resume=True, append_epochs=2, warmup_epochs=1, learning_rate=None), model=Pooled())
    after = run_settings(tmp_path / "run")
    # 22 images are 6 batches of 4, and 44 the next 4 of 11, less 2 that the sixth has taken; two epochs more are 4.
    assert (before.steps, after.steps, after.warmup_steps) == (10, 14, 2)


def test_what_is_shown_of_a_run_belongs_to_its_stage(data):
    """Histograms name the gradients that a stage trains, images have its size, and epochs count its batches."""
    shown: list[Any] = []
    epochs: list[float] = []

    class Sink:
        def describe_run(self, description):
            epochs.extend(map(description.epoch_at, (0, 5, 8, 12)))

        def open(self):
            pass

        def write(self, record):
            pass

        def write_evaluation(self, record):
            pass

        def write_histograms(self, record):
            shown.append((record.step, sum(name.startswith("gradients/") for name in record.histograms)))

        def write_images(self, record):
            shown.append((record.step, record.images.shape[1:3]))

        def close(self):
            pass

    config = config_of(data, stages=STAGES, histogram_every_steps=3, log_images_every_steps=3)
    train(config, model=Pooled(), sinks=[Sink()])
    assert epochs == [0, 10 / 22, 22 / 22, 54 / 22]
    assert shown[::2] == [(3, 1), (6, 2), (9, 2), (12, 2)]
    assert shown[1::2] == [(3, (4, 4)), (6, (8, 8)), (9, (6, 6)), (12, (6, 6))]


def test_evaluations_at_a_border_change_no_loss(data):
    config = config_of(data, stages=GROWING)
    plain = train(config, model=Pooled())
    found = train(replace(config, eval_split="val", eval_every_steps=1), model=Pooled())
    assert found.losses.tolist() == plain.losses.tolist()
    assert len(found.evaluations) == 12


def test_files_of_stages(tmp_path):
    path = tmp_path / "stages.toml"
    path.write_text('[[stages]]\nuntil = "2e"\nimage_size = 16\n[[stages]]\nfreeze = "a"\n')
    assert read_stages(path) == Stages.of([Stage(until="2e", image_size=16), Stage(freeze="a")])
    for text, fault in [
        ("batch = 3", "must have tables \\[\\[stages\\]\\] and nothing else, got 'batch'"),
        ("x = ", "must be TOML in UTF-8"),
        ("", r"must have tables \[\[stages\]\], in double brackets, one for each stage, got none"),
        ("[stages]\nbatch = 3", "in double brackets, one for each stage, got a table"),
        ("[[stages]]\nuntil = 4e", "epochs are quoted, as in until"),
        ("stages = [3]", "must be a list of stages"),
    ]:
        path.write_text(text)
        with pytest.raises(SettingError, match=fault):
            read_stages(path)
    with pytest.raises(SettingError, match=r"must be a readable file .*: check the path"):
        read_stages(tmp_path / "none.toml")


if __name__ == "__main__":
    run_on_two_devices(sys.argv[1], Path(sys.argv[2]))
