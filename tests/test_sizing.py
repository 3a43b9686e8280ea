"""The arithmetic of a plan, by hand and against brute force, and the search for the largest batch that fits."""

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.config import TrainConfig
from loopfeed.engine.parts import UserParts
from loopfeed.engine.sizing.cards import CARDS, SHARE_VARIABLE, memory_share
from loopfeed.engine.sizing.flow import COPY, DECODE, DEVICES, LINK, READ, Flow, Stage, imagenet_volume, split_volume
from loopfeed.engine.sizing.plan import START, Memory, Place, Plan, find_largest_batch, plan_lines, program_parts
from loopfeed.engine.sizing.planning import BlackImages, stand_for_imagenet
from loopfeed.preprocess.shards.reader import open_split
from tests.fake_source import fake_source, pack
from tests.labelled_photographs import draw_photographs, pack_labelled, write_labels

GB = 10**9


def test_the_parts_of_a_program_add_up_to_what_xla_counts():
    analysis = {"arguments": 700, "results": 730, "reused": 690, "temporaries": 5000, "code": 20}
    assert program_parts(analysis, 600, 1) == {
        "arguments": 700,
        "results, in new memory": 40,
        "temporaries": 5000,
        "code": 20,
    }
    assert sum(program_parts(analysis, 600, 1).values()) == 700 + 730 - 690 + 5000 + 20
    # With several devices, the state that was copied to all of them stays on the first.
    assert program_parts(analysis, 600, 2) == {**program_parts(analysis, 600, 1), START: 600}


@given(
    st.integers(1, 64),
    st.integers(2, 4000),
    st.integers(0, 10**6),
    st.floats(0.3, 1.7),
    st.integers(1, 10**8),
    st.data(),
)
def test_the_batch_that_is_found_fits_and_the_next_does_not(unit, count, fixed, power, limit, data):
    """Whatever the need, as long as it grows with the batch: here by a power of it."""
    batch = unit * count

    def need(size):
        return fixed + int(1000 * size**power)

    if need(batch) <= limit:
        limit = data.draw(st.integers(0, need(batch) - 1))
    asked = []

    def compiled(size):
        asked.append(size)
        return need(size)

    found = find_largest_batch(
        compiled, limit, batch=batch, need_bytes=need(batch), fixed_bytes=fixed, unit=unit, most_compilations=40
    )
    assert all(0 < size < batch and size % unit == 0 for size in asked)
    assert len(asked) == len(set(asked))
    assert found.is_settled
    assert found.fits == 0 or need(found.fits) <= limit
    assert found.too_large == batch or found.too_large in asked
    assert need(found.too_large) > limit
    # Nothing that fits was missed by more than the distance between sizes, an eighth.
    assert found.too_large - found.fits <= max(unit, found.too_large / 8 + unit)


def test_a_search_ends_with_its_compilations_and_says_what_is_left():
    asked = []

    def need(size):
        asked.append(size)
        return 10**9 if size > 3 else 10

    found = find_largest_batch(need, 500, batch=1024, need_bytes=10**9, fixed_bytes=1, unit=1, most_compilations=2)
    assert len(asked) == 2
    assert not found.is_settled
    # A need that is a straight line needs two: the size by the line, and the next.
    line = find_largest_batch(lambda size: 50 + 7 * size, 750, batch=128, need_bytes=946, fixed_bytes=50, unit=4)
    assert (line.fits, line.too_large, line.is_settled) == (96, 104, True)  # not 100: a multiple of 8
    none = find_largest_batch(lambda size: 1000, 750, batch=8, need_bytes=2000, fixed_bytes=900, unit=4)
    assert (none.fits, none.too_large, none.is_settled) == (0, 4, True)


def test_the_memory_that_jax_takes(monkeypatch):
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)
    assert CARDS["h100"].usable_bytes == 63_707_234_304  # three quarters of 84,942,979,072
    monkeypatch.setenv(SHARE_VARIABLE, "0.5")
    assert CARDS["h100"].usable_bytes == 42_471_489_536
    for wrong in ("all", "0", "1.5", "nan"):
        monkeypatch.setenv(SHARE_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{SHARE_VARIABLE} must be a number above 0 and at most 1, got '{wrong}'"):
            memory_share()


@pytest.mark.parametrize(
    ("rates", "wanted", "bound"),
    [
        ((30_000, 25_000, 90_000), 24_000, (DEVICES, 24_000)),
        ((10_000, 25_000, 90_000), 24_000, (READ, 10_000)),
        ((30_000, 8_000, 90_000), 24_000, (DECODE, 8_000)),
        ((30_000, 25_000, 5_000), None, (COPY, 5_000)),
        ((None, None, None), None, None),
        ((None, None, None), 8, (DEVICES, 8)),
    ],
)
def test_the_slowest_stage_bounds_the_run(rates, wanted, bound):
    stages = [Stage(name, 200_704, rate, "") for name, rate in zip((READ, DECODE, COPY), rates, strict=True)]
    assert Flow(stages, wanted).bound == bound


def test_imagenet_takes_what_its_formula_says():
    train = imagenet_volume(224)
    assert (train.num_images, train.image_bytes) == (1_281_167, 4 * 224 * 224)
    assert train.disk_bytes == 1_281_167 * (4 * 224 * 224 + 2 + 4 + 4 + 16)
    assert imagenet_volume(32, 50_000).disk_bytes == 50_000 * 4_122


@pytest.mark.parametrize("codec", ["raw", "blosc"])
def test_the_size_of_a_pack_is_that_of_its_files_and_of_the_formula(tmp_path, codec):
    pack(fake_source(40, size=64), tmp_path, codec=codec)
    with open_split(str(tmp_path), "train") as split:
        found = split_volume(split)
        every = sum(path.stat().st_size for path in (tmp_path / "train").rglob("*") if path.is_file())
        pixels = sum(path.stat().st_size for path in (tmp_path / "train/pixels").rglob("*") if path.is_file())
        assert (found.num_images, found.image_bytes, found.disk_bytes) == (40, 4 * 64 * 64, every)
        assert found.stored_bytes == pixels / 40
        if codec == "raw":
            # Less the files of the split that do not grow with it; the index of a shard is that of a whole one.
            formula = imagenet_volume(64, 40).disk_bytes
            assert formula <= found.disk_bytes <= formula + 16 * split.manifest.shard_images + 100_000


@pytest.mark.parametrize(("kind", "words"), [("classes", 1), ("numbers", 3)])
def test_the_size_of_a_remote_pack_counts_the_targets_of_each_image(tmp_path, kind, words):
    paths = draw_photographs(tmp_path / "photographs", 9)
    labels = write_labels(tmp_path / "labels.csv", paths, kind=kind)
    pack_labelled(tmp_path / "photographs", labels, tmp_path / "data")
    with open_split(str(tmp_path / "data"), "train") as split:
        assert split.target_words == words
        # Only the manifest is known.
        remote: Any = SimpleNamespace(manifest=split.manifest, location=SimpleNamespace(local_path=None))
        found = split_volume(remote)
    assert found.disk_bytes == round(9 * found.stored_bytes) + 9 * (26 + 4 * words)


def test_synthetic_batches_stand_for_imagenet_in_a_plan():
    heard: list[str] = []
    config = TrainConfig(synthetic=True, epochs=90, warmup_epochs=5, batch=8192, image_size=32)
    settled, parts = stand_for_imagenet(config, UserParts(), heard.append)
    assert settled.eval_every_steps == math.ceil(5 * 1_281_167 / 8192)  # 18 evaluations, as by default on ImageNet
    every = replace(config, eval_every_steps="0.5e", snapshot_every_steps="2e")  # type: ignore[arg-type]
    cadences = stand_for_imagenet(every, UserParts(), lambda _: None)[0]
    assert (cadences.eval_every_steps, cadences.snapshot_every_steps) == (79, 313)
    assert (cadences.eval_every_epochs, cadences.snapshot_every_epochs) == (None, None)
    assert settled.steps == math.ceil(90 * 1_281_167 / 8192)
    assert settled.warmup_steps == math.ceil(5 * 1_281_167 / 8192)
    assert (settled.epochs, settled.warmup_epochs) == (None, None)
    assert heard == ["epochs: 90 of 1,281,167 images each, 14,076 steps in total"]
    assert isinstance(parts.evaluation, BlackImages)
    assert parts.evaluation.num_batches == math.ceil(50_000 / 8192)
    assert (
        stand_for_imagenet(TrainConfig(eval_split="off", synthetic=True), UserParts(), heard.append)[1] == UserParts()
    )
    other = TrainConfig(data="shards", epochs=3)
    assert stand_for_imagenet(other, UserParts(), heard.append) == (other, UserParts())


def a_plan(**changes) -> Plan:
    """Return a plan of 256 GPUs with round numbers."""
    stages = (
        Stage(READ, 200_000, 10_000, "2 threads, disk"),
        Stage(DECODE, 200_000, 25_000, "2 threads"),
        Stage(COPY, 200_000, 40_000, "1 thread"),
        Stage(LINK, 200_000, 2_560_000, "peak, not measured"),
    )
    values: dict[str, Any] = {
        "subject": "resnet50, 25,557,032 parameters, batch 8,192 of 224 × 224 px, bfloat16",
        "place": Place("NVIDIA H100 80GB HBM3", 256, 8, 63_700_000_000, "jax takes", False, False),
        "memory": Memory({"arguments": 200_000_000, "temporaries": 1_500_000_000}, ["fits: jax takes 63.7 GB"]),
        "flow": Flow(stages, 24_000),
        "num_steps": 14_076,
        "train_images": 14_076 * 8192,
        "num_evaluations": 3,
        "eval_images": 50_000,
        "volumes": [("train", imagenet_volume(224))],
        "num_snapshots": 4,
        "snapshot_bytes": 200_000_000,
        "weights_bytes": 100_000_000,
        "num_lines": 14_076,
    }
    return Plan(**(values | changes))


def test_a_plan_is_printed_in_lines_of_80_columns():
    assert plan_lines(a_plan()) == [
        "plan for 256 × NVIDIA H100 80GB HBM3, 32 hosts with 8 devices each",
        "  resnet50, 25,557,032 parameters, batch 8,192 of 224 × 224 px, bfloat16",
        "",
        "memory of a device, by XLA's analysis, compiled for it without one",
        "  arguments                                   200.0 MB",
        "  temporaries                                  1.50 GB",
        "  total                                        1.70 GB",
        "  fits: jax takes 63.7 GB",
        "",
        "data of each host, whose devices train on 24,000 images/s",
        "                            needed  this machine    images/s  how",
        "  read from storage      4.80 GB/s     2.00 GB/s      10,000  2 threads, disk",
        "  check and decode       4.80 GB/s     5.00 GB/s      25,000  2 threads",
        "  copy in memory         4.80 GB/s     8.00 GB/s      40,000  1 thread",
        "  copy to devices        4.80 GB/s   512.00 GB/s   2,560,000  peak, not measured",
        "",
        "run: 14,076 steps, 115,310,592 images; 3 evaluations of 50,000 images",
        "  320,000 images/s, bound by: read from storage",
        "  if each host reads, decodes and copies as fast as this machine",
        "  not counted: averaging the gradients over the devices",
        "  the devices would train on 768,000: they wait 58% of the time",
        "  takes 6.0 min",
        "",
        "disk",
        "  shards of train                            257.17 GB  1,281,167 images",
        "    by ImageNet-1k at 224 px, 4·224² + 26 bytes an image",
        "  snapshots, at most 4                        800.0 MB",
        "  weights and logs, about                     101.7 MB",
        "  total                                      258.07 GB",
        "",
        "dry run: nothing was trained",
    ]
    assert max(map(len, plan_lines(a_plan()))) <= 80
