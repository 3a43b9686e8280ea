"""Several devices: the same inputs and sums whatever their number, resumes on another number, and what is refused."""

import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from loopfeed import ConfigError, devices
from loopfeed.engine.config import parse_devices
from loopfeed.engine.crossing.devices import choose_devices, settle_devices
from loopfeed.engine.crossing.infeed import SharedWords
from loopfeed.engine.replicas import AXIS, norm_groups
from loopfeed.models.layers.batch_norm import NormGroups, RunningStats, batch_norm, normalising_over
from tests.double_runs import RUNS
from tests.toy import toy_config

ROOT = Path(__file__).parents[1]
SEVERAL = 4  # tests/double_runs.py has two and eight, tests/test_processes.py three, and two of two


def in_process(*arguments: str) -> str:
    """Run a module or a program in a process of its own, because jax makes its devices only once."""
    done = subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What `tests/device_runs.py` prints, by number of devices."""
    folder = tmp_path_factory.mktemp("runs")
    printed = {
        number: in_process("-m", "tests.device_runs", str(number), str(folder / str(number))) for number in (1, SEVERAL)
    }
    return {number: json.loads(text.splitlines()[-1]) for number, text in printed.items()}, folder


@pytest.mark.integration
def test_several_devices_train_on_the_same_bits_to_the_same_losses(found):
    one, several = (found[0][each]["everything"] for each in (1, SEVERAL))
    assert several["inputs"] == one["inputs"]
    np.testing.assert_allclose(several["losses"], one["losses"], rtol=1e-6)
    # AdamW divides by the size of a gradient: where that is small, so are the digits that are left.
    np.testing.assert_allclose(several["weights"], one["weights"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(several["seen"], one["seen"], rtol=1e-4)
    np.testing.assert_allclose(several["evaluations"], one["evaluations"], rtol=1e-5)
    assert found[0][SEVERAL]["devices"] == ["cpu"] * SEVERAL
    assert several["again"] == several["losses"]


@pytest.mark.integration
@pytest.mark.parametrize("norms", ["whole", "four"])
def test_norms_over_a_stated_number_of_images_do_not_depend_on_the_devices(found, norms):
    one, several = (found[0][each]["networks"] for each in (1, SEVERAL))
    np.testing.assert_allclose(several[norms], one[norms], rtol=1e-6)
    assert one["whole"] != one["four"]


@pytest.mark.integration
def test_fifty_steps_in_float64_do_not_depend_on_the_devices(tmp_path):
    losses = json.loads(in_process("-m", "tests.double_runs", str(tmp_path)).splitlines()[-1])
    for norms, number in RUNS:
        weights, alone = (np.load(tmp_path / f"{norms}-{each}.npy") for each in (number, 1))
        np.testing.assert_allclose(weights, alone, rtol=1e-9, atol=1e-12)
        # Losses leave the program as float32.
        np.testing.assert_allclose(losses[f"{norms}-{number}"], losses[f"{norms}-1"], rtol=2e-7)
    assert losses["whole-1"] != losses["sixteen-1"]


@pytest.mark.integration
@pytest.mark.parametrize(("before", "after"), [(1, SEVERAL), (SEVERAL, 2)])
def test_a_failed_run_goes_on_with_another_number_of_devices_and_is_replayed(found, tmp_path, before, after):
    results, folder = found
    assert results[before]["interrupted"]["failure"] == "cut off"
    program = f"""
import dataclasses, json, shutil
from loopfeed import replay_run, run_settings, train
from tests.device_runs import evaluation
from tests.toy import Linear, toy_batch
run = {str(tmp_path / "run")!r}
shutil.copytree({str(folder / str(before))!r}, run)
parts = dict(model=Linear(), batches=toy_batch, evaluation=evaluation())
config = dataclasses.replace(run_settings(run), resume=True, devices="cpu:{after}")
result = train(config, **parts)
report = replay_run(run, from_step=0, **parts)
print(json.dumps([result.losses.tolist(), str(report)]))
"""
    # The replay needs the larger of both numbers from the beginning.
    start = f"import jax\njax.config.update('jax_num_cpu_devices', {SEVERAL})"
    found_losses, report = json.loads(in_process("-c", f"{start}\n{program}").splitlines()[-1])
    assert report.startswith("the same bits: 10 losses")
    losses = [json.loads(line) for line in (tmp_path / "run/loss.jsonl").read_text().splitlines()]
    assert [each["step"] for each in losses] == list(range(1, 11))
    assert len(found_losses) < 10
    earlier = json.loads((tmp_path / "run/config.json").read_text())["earlier"]
    assert earlier[0]["settings"]["devices"] == f"cpu:{before}"


def test_devices_are_listed_and_one_is_the_default():
    (here, *_) = devices()
    assert (here.platform, here.number, here.memory_bytes) == ("cpu", 0, None)
    assert choose_devices(toy_config()) == [jax.local_devices()[0]]
    assert settle_devices(toy_config()) == toy_config()


def test_the_setting_names_a_platform_and_a_number():
    assert parse_devices("4") == (None, 4)
    assert parse_devices("cpu:16") == ("cpu", 16)
    assert parse_devices("4096") == (None, 4096)
    with pytest.raises(ConfigError, match="at most 1,024 devices, got 'cpu:1025': give fewer"):
        parse_devices("cpu:1025")


def test_more_devices_than_there_are_is_an_error_with_the_remedy():
    with pytest.raises(ConfigError, match=r"devices must be at most 1, .* got 64: give fewer, or cpu:64$"):
        choose_devices(toy_config(devices="64"))
    with pytest.raises(ConfigError, match=r"JAX_NUM_CPU_DEVICES=64, because jax was used before$"):
        choose_devices(toy_config(devices="cpu:64"))


@pytest.mark.parametrize(
    ("images", "count", "groups"),
    [
        (None, 4, NormGroups()),
        (8, 4, NormGroups()),
        (4, 4, NormGroups(4)),
        (4, 1, NormGroups(4)),
        (16, 4, NormGroups(None, AXIS, ((0, 1), (2, 3)), 2)),
        (32, 4, NormGroups(None, AXIS, None, 4)),
        (32, 1, NormGroups()),
    ],
)
def test_norm_groups_are_parts_of_a_device_or_whole_devices(images, count, groups):
    assert norm_groups(images, 32, count) == groups


@pytest.mark.parametrize(("images", "count"), [(3, 4), (12, 4), (24, 4), (64, 4), (64, 1)])
def test_other_norm_groups_are_refused(images, count):
    several = {
        4: "8, the images of each device, or be 16 or 32, the images of several devices",
        1: "32, .* each device",
    }
    with pytest.raises(ConfigError, match=rf"batch_norm_group must divide {several[count]}, got {images}: choose an"):
        norm_groups(images, 32, count)


def test_groups_of_images_are_normalised_each_by_itself():
    random = np.random.default_rng(0)
    x, scale, bias, mean, var = (
        jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((6, 3, 4, 2), *[(2,)] * 4)
    )
    var = jnp.square(var)

    def run(x, images):
        with normalising_over(NormGroups(images)):
            return batch_norm(x, scale, bias, RunningStats(mean, var), train=True, relu=True)

    compiled = jax.jit(run, static_argnums=1)
    found, moved = compiled(x, 2)
    parts = [compiled(x[first : first + 2], None) for first in (0, 2, 4)]
    np.testing.assert_allclose(found, np.concatenate([y for y, _ in parts]), rtol=1e-6, atol=1e-6)
    for number in (0, 1):
        np.testing.assert_allclose(moved[number], np.mean([each[1][number] for each in parts], axis=0), rtol=1e-6)
    gradient = jax.jit(jax.grad(lambda x, images: jnp.square(run(x, images)[0]).sum()), static_argnums=1)
    expected = [gradient(x[first : first + 2], None) for first in (0, 2, 4)]
    np.testing.assert_allclose(gradient(x, 2), np.concatenate(expected), rtol=1e-4, atol=1e-5)


def test_all_devices_get_the_words_of_the_first_that_asks():
    asked = []

    def words_of(batch_index, num_batches):
        asked.append(batch_index)
        return len(asked), 0, num_batches

    shared = SharedWords(words_of, 3)
    assert [shared(0, 4), shared(0, 4), shared(4, 2), shared(0, 4), shared(4, 2), shared(4, 2)] == [
        *[(1, 0, 4)] * 2,
        (2, 0, 2),
        (1, 0, 4),
        *[(2, 0, 2)] * 2,
    ]
    assert asked == [0, 4]
    assert shared(0, 4) == (3, 0, 4)  # nothing is kept of an answered pull


def test_a_batch_that_does_not_divide_is_refused():
    program = """
from loopfeed import train
from tests.toy import Linear, toy_batch, toy_config
try:
    train(toy_config(devices="cpu:3"), model=Linear(), batches=toy_batch)
except ValueError as error:
    print(error)
"""
    assert "batch must be a multiple of the number of devices, 3, got 8" in in_process("-c", program)
