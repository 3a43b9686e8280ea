"""The files of TensorBoard and Weights & Biases, read back with TensorBoard's own reader and from the offline files."""

import io
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from loopfeed import train
from loopfeed.engine.loggers.experiment_log import LogRefusedError
from loopfeed.engine.loggers.logger_sink import draw_images
from loopfeed.engine.loggers.tensorboard import EventFile
from loopfeed.engine.loggers.wandb import check_login
from loopfeed.engine.objective.metrics import confusion_matrix
from tests.test_observed import Seen
from tests.toy import CLASSES, CountedBatches, Linear, toy_batch, toy_config

pytestmark = [
    pytest.mark.integration,  # the packages are large
    pytest.mark.filterwarnings("ignore:::tensorboard", "ignore:::wandb", "ignore:::google", "ignore:::pydantic"),
]

ROOT = Path(__file__).parents[1]
CADENCES: dict[str, Any] = {"histogram_every_steps": 4, "log_images_every_steps": 5, "eval_every_steps": 3}


def launch(run_dir, *, steps, sinks=(), **values):
    notices: list[str] = []
    settings = {"run_dir": run_dir, "steps": steps, "tensorboard": True, "wandb": "toys", **CADENCES, **values}
    train(
        toy_config(**settings),
        model=Linear(),
        batches=CountedBatches(),
        evaluation=toy_batch(99, batch=16),
        metrics={"matrix": confusion_matrix(CLASSES)},
        sinks=sinks,
        notify=notices.append,
    )
    return [notice for notice in notices if "warning" in notice]


@pytest.fixture(scope="module")
def logged(tmp_path_factory):
    """A run of three launches: to step 6, to step 10, and from step 6 again to step 12."""
    folder = tmp_path_factory.mktemp("logged") / "run"
    seen = Seen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "offline")
        patch.setenv("WANDB_ERROR_REPORTING", "false")
        warnings = launch(folder, steps=6, sinks=[seen])
        warnings += launch(folder, steps=10, resume=True, sinks=[seen])
        shutil.rmtree(folder / "snapshots" / "10")
        warnings += launch(folder, steps=12, resume=True, sinks=[seen])
    return folder, seen, warnings


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def events(logged):
    from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator
    from tensorboard.util.tensor_util import make_ndarray

    read = EventAccumulator(str(logged[0] / "tensorboard"), {"tensors": 0})
    read.Reload()
    return {
        tag: [(event.step, make_ndarray(event.tensor_proto)) for event in read.Tensors(tag)]
        for tag in read.Tags()["tensors"]
    }


def test_scalars_are_those_of_the_logs_without_the_steps_that_were_done_again(logged, events):
    folder, _, warnings = logged
    assert warnings == []
    losses, evaluations = lines(folder / "loss.jsonl"), lines(folder / "eval.jsonl")
    assert len(list((folder / "tensorboard").iterdir())) == 3
    names = {"train/loss": "loss", "train/learning_rate": "lr", "speed/wait_ms": "wait_ms"}
    for tag, name in names.items():
        assert [step for step, _ in events[tag]] == list(range(1, 13))
        # `loss.jsonl` has the host's measurements with three decimals.
        tolerance = 6e-4 if name == "wait_ms" else 0
        expected = [np.float32(each[name]) for each in losses]
        np.testing.assert_allclose([value for _, value in events[tag]], expected, rtol=0, atol=tolerance)
    for name in ("top1", "loss"):
        assert events[f"eval/{name}"] == [(each["step"], np.float32(each[name])) for each in evaluations]
    assert "eval/top5" not in events  # of three classes
    assert [each["step"] for each in evaluations] == [3, 6, 9, 12]


def test_histograms_have_the_programs_buckets(logged, events):
    by_step = {pushed.step: pushed.histograms for pushed in logged[1].histograms}
    assert sorted(by_step) == [4, 8, 12]
    for tag in ("weights/weights", "gradients/bias"):
        assert [step for step, _ in events[tag]] == [4, 8, 12]
        for step, found in events[tag]:
            histogram = by_step[step][tag]
            expected = np.stack([histogram.edges[:-1], histogram.edges[1:], histogram.counts], axis=1)
            np.testing.assert_array_equal(found, expected)


def test_pictures_and_settings_are_there(logged, events):
    by_step = {pushed.step: pushed for pushed in logged[1].images}
    assert [step for step, _ in events["images/training"]] == [5, 10]
    for step, (width, height, content) in events["images/training"]:
        picture = Image.open(io.BytesIO(content))
        assert picture.size == (int(width), int(height))
        np.testing.assert_array_equal(np.asarray(picture), np.asarray(draw_images(by_step[step], None)))
    assert [step for step, _ in events["eval/matrix"]] == [step for step, _ in events["eval/loss"]]
    text = events["settings"][0][1][0].decode()
    assert "| batch | 8 |" in text
    assert "| model | linear |" in text
    assert "_hparams_/session_start_info" in events


def test_the_package_says_whether_it_would_ask_for_an_account(tmp_path, monkeypatch):
    import wandb

    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "DISABLED", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()  # the settings of the tests before
    try:
        check_login(wandb)  # no terminal: it would raise an error
        monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: True)
        with pytest.raises(LogRefusedError, match="no account is known for"):
            check_login(wandb)
        # The address of the service before.
        (tmp_path / ".netrc").write_text(f"machine api.wandb.ai login user password {'a' * 40}\n")
        check_login(wandb)
    finally:
        wandb.teardown()  # its settings, which it reads once


def wandb_records(path: Path) -> list[Any]:
    """Return the messages in a .wandb file: LevelDB's log format, with a CRC-32 over type and data."""
    from wandb.proto import wandb_internal_pb2

    content, at, found, parts = path.read_bytes(), 7, [], b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        if 32_768 - at % 32_768 < 7:
            at += 32_768 - at % 32_768
            continue
        checksum, size, kind = struct.unpack_from("<IHB", content, at)
        data = content[at + 7 : at + 7 + size]
        assert zlib.crc32(data, zlib.crc32(bytes([kind]))) == checksum
        parts, at = parts + data, at + 7 + size
        if kind in (1, 4):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


def test_weights_and_biases_has_one_run_with_the_same_numbers(logged):
    folder, _, _ = logged
    files = sorted((folder / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime)
    run_id = (folder / "wandb" / "run-id").read_text().split()[0]
    assert [path.name for path in files] == [f"run-{run_id}.wandb"] * 3
    losses = {each["step"]: each["loss"] for each in lines(folder / "loss.jsonl")}
    for path, steps in zip(files, (range(1, 7), range(7, 11), range(7, 13)), strict=True):
        records = wandb_records(path)
        (begun,) = [record.run for record in records if record.HasField("run")]
        assert (begun.project, begun.run_id, begun.display_name) == ("toys", run_id, "run")
        config = {item.key: json.loads(item.value_json) for item in begun.config.update}
        assert (config["batch"], config["model"]) == (8, "linear")
        rows = [
            {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for record in records
            if record.HasField("history")
        ]
        found = {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
        assert list(found) == list(steps)
        assert {step: np.float32(loss) for step, loss in found.items()} == {
            step: np.float32(losses[step]) for step in steps
        }
        names = {name.removesuffix("/_type") for row in rows for name in row}
        assert {"weights/bias", "gradients/weights", "eval/top1", "eval/matrix", "images/training"} <= names, names


def test_a_full_disk_ends_the_event_file_alone(tmp_path, monkeypatch):
    def open_full(self, folder):
        folder.mkdir(parents=True)
        self.path = folder / "events"
        self._file = Path("/dev/full").open("wb")  # noqa: SIM115 - closed by the log

    monkeypatch.setattr(EventFile, "__init__", open_full)
    warnings = launch(tmp_path / "run", steps=8, wandb=None)
    assert len(lines(tmp_path / "run" / "loss.jsonl")) == 8
    (warning,) = warnings
    assert warning.startswith("warning: TensorBoard: OSError: [Errno 28] No space left on device")


UNREACHABLE = """
import sys
from tests.test_logger_files import launch
print(launch(sys.argv[1], steps=3, tensorboard=False))
"""


def test_without_a_network_weights_and_biases_ends_alone(tmp_path):
    """In a process of its own, because the package keeps what it read of the environment."""
    own = {
        "HOME": str(tmp_path),
        "WANDB_BASE_URL": "http://127.0.0.1:9",
        "WANDB_API_KEY": "0" * 40,
        "WANDB_INIT_TIMEOUT": "3",
    }
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")} | own
    command = [sys.executable, "-c", UNREACHABLE, tmp_path / "run"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert len(lines(tmp_path / "run" / "loss.jsonl")) == 3
    assert re.search(r"\[.warning: Weights & Biases: [^]]*: nothing more is logged there.*\]$", done.stdout), done
