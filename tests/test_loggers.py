"""Loggers: what they get of a run, and that nothing that happens to them touches it."""

import errno
import re
import shutil
import sys
import threading
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from loopfeed import ConfigError, train
from loopfeed.engine.crossing.pushed import PushedImages
from loopfeed.engine.loggers import experiment_log, logger_sink
from loopfeed.engine.loggers.choice import check_loggers
from loopfeed.engine.loggers.logger_sink import LoggerSink, draw_images, log_record
from loopfeed.engine.loggers.tensorboard import TensorBoardSink, frame_record
from loopfeed.engine.loggers.wandb import WandbSink, check_login, is_in_repository_of_user, kept_run_id
from loopfeed.engine.objective.metrics import confusion_matrix
from loopfeed.engine.stream.sinks import LossRecord, RunDescription
from tests.toy import CLASSES, CountedBatches, Linear, toy_batch, toy_config

STEPS = 6


class Recording:
    """An open log that keeps what it gets."""

    def __init__(self, run=None):
        self.run, self.got, self.num_closed = run, [], 0

    def add_numbers(self, at, numbers):
        self.got.append((at.step, dict(numbers)))

    def add_histograms(self, at, histograms):
        self.got.append((at.step, list(histograms)))

    def add_picture(self, at, name, picture):
        self.got.append((at.step, name, picture.size))

    def add_table(self, at, name, table):
        self.got.append((at.step, name, table))

    def flush(self):
        pass

    def close(self):
        self.num_closed += 1


def run(sink, **values):
    notices: list[str] = []
    result = train(
        toy_config(**({"steps": STEPS} | values)),
        model=Linear(),
        batches=CountedBatches(),
        evaluation=toy_batch(99, batch=16),
        metrics={"matrix": confusion_matrix(CLASSES)},
        sinks=[sink],
        notify=notices.append,
    )
    assert len(result.losses) == result.steps_done
    return result, [notice for notice in notices if "warning" in notice]


def test_it_gets_everything_once_and_in_order():
    opened: list[Recording] = []

    def open_log(run):
        opened.append(Recording(run))
        return opened[0]

    sink = LoggerSink("a recorder", open_log)
    result, warnings = run(sink, histogram_every_steps=3, log_images_every_steps=4)
    (log,) = opened
    assert warnings == []
    assert log.num_closed == 1
    assert (log.run.step, log.run.classes, log.run.settings["steps"], log.run.facts["model"]) == (0, None, 6, "linear")
    numbers = [each for each in log.got if isinstance(each[1], dict) and "train/loss" in each[1]]
    assert [step for step, _ in numbers] == [1, 2, 3, 4, 5, 6]
    np.testing.assert_array_equal([each["train/loss"] for _, each in numbers], result.losses)
    assert {each["train/learning_rate"] for _, each in numbers} == {np.float32(0.1)}
    assert numbers[0][1].keys() == {"train/loss", "train/learning_rate", "speed/images_per_s", "speed/wait_ms"}
    names = ["weights/bias", "weights/weights", "gradients/bias", "gradients/weights"]
    assert [each for each in log.got if each[1] == names] == [(3, names), (6, names)]
    (evaluation,) = result.evaluations
    assert log.got[-2] == (
        6,
        {"eval/loss": evaluation.loss, "eval/top1": evaluation.top1},
    )
    assert log.got[-1][:2] == (6, "eval/matrix")
    assert [each[:2] for each in log.got if each[1] == "images/training"] == [(4, "images/training")]


class Faulty(Recording):
    """A log that fails, or hangs until it is released, in one of its functions."""

    def __init__(self, at, error=None):
        super().__init__()
        self._at, self._error, self.released = at, error, threading.Event()

    def _fault(self, where):
        if where == self._at:
            if self._error is not None:
                raise self._error
            self.released.wait(60)

    def add_numbers(self, at, numbers):
        self._fault(at.step)
        super().add_numbers(at, numbers)

    def flush(self):
        self._fault("flush")

    def close(self):
        super().close()
        self._fault("close")


FULL = OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("at", "error", "named"),
    [
        ("open", RuntimeError("no\nnetwork"), "RuntimeError: no network"),
        (3, FULL, r"OSError: \[Errno 28\] No space left on device"),
        (3, SystemExit("no"), "SystemExit: no"),
        ("close", FULL, r"OSError: \[Errno 28\]"),
    ],
)
def test_a_logger_that_fails_ends_alone_with_one_warning(at, error, named):
    log = Faulty(at, error)

    def open_log(_):
        if at == "open":
            raise error
        return log

    result, warnings = run(LoggerSink("a logger", open_log))
    assert (result.stopped_by, result.steps_done) == ("steps", STEPS)
    (warning,) = warnings
    assert re.fullmatch(f"warning: a logger: {named}.*: nothing more is logged there; the run is not affected", warning)
    assert at == "open" or log.num_closed == 1 + (at == "close")


@pytest.mark.parametrize("at", [3, "close"])
def test_a_logger_that_hangs_is_left_behind_with_one_warning(at):
    log = Faulty(at)
    try:
        result, warnings = run(LoggerSink("a logger", lambda _: log, call_timeout_s=0.3))
        assert (result.stopped_by, result.steps_done) == ("steps", STEPS)
        assert warnings == [
            "warning: a logger: it did not answer within 0.3 s: nothing more is logged there; the run is not affected"
        ]
    finally:
        log.released.set()


def test_a_logger_that_is_too_slow_misses_steps_and_says_so_once(monkeypatch):
    monkeypatch.setattr(logger_sink, "_MOST_QUEUED", 2)
    log = Faulty(1)
    threading.Timer(0.3, log.released.set).start()
    _, warnings = run(LoggerSink("a logger", lambda _: log), steps=400)
    assert warnings == ["warning: a logger: it is slower than the run: some steps are left out"]
    steps = [step for step, _, *_ in log.got]
    assert steps == sorted(steps)
    assert 1 <= len(steps) < 400
    assert log.num_closed == 1


def test_a_logger_that_hangs_keeps_few_images_in_memory():
    released, log = threading.Event(), Recording()
    warnings: list[str] = []

    def open_log(_):
        released.wait(60)
        return log

    sink = LoggerSink("a logger", open_log)
    sink.describe_run(RunDescription({}, {}, None, 0, None, warnings.append))
    sink.open()
    for step in range(100):
        sink.write_images(pushed_images(1, 2, step=step))
    sink.write(LossRecord(100, 1.0, 0.1, 10.0, 0.0, 5.0))
    released.set()
    sink.close()
    sink.finish()
    assert [each[0] for each in log.got] == [*range(32), 100]
    assert warnings == ["warning: a logger: it is slower than the run: some steps are left out"]


@pytest.mark.parametrize(("name", "value"), [("tensorboard", True), ("wandb", "project")])
def test_a_missing_package_is_named_at_once(name, value, monkeypatch, tmp_path):
    monkeypatch.setattr(experiment_log, "find_spec", lambda _: None)
    message = rf"needs the package {name}, which is not installed: pip install 'loopfeed\[{name}\]'"
    with pytest.raises(ConfigError, match=message):
        train(toy_config(run_dir=tmp_path / "run", **{name: value}), model=Linear(), batches=CountedBatches())
    assert not (tmp_path / "run").exists()
    with pytest.raises(ModuleNotFoundError, match=message):
        {"tensorboard": TensorBoardSink, "wandb": WandbSink}[name]("x")
    monkeypatch.setattr(experiment_log, "find_spec", lambda _: SimpleNamespace())
    check_loggers(toy_config(**{name: value}))


def logged(record, **values):
    log = Recording()
    log_record(log, record, **({"last_step": 7, "classes": None} | values))
    return log.got


def pushed_images(count, side, **values):
    images = np.random.default_rng(0).integers(0, 256, (count, side, side, 3)).astype(np.uint8)
    labels = np.arange(count, dtype=np.int32) % 3
    return PushedImages(1, 0.0, images, labels, None)._replace(**values)


def test_the_grid_contains_each_image_enlarged_and_its_class():
    pushed = pushed_images(7, 8)
    sheet = np.asarray(draw_images(pushed, ("ant", "bee", "a name that is much too long for one image")))
    side = 8 * 14
    for index, image in enumerate(pushed.images):
        row, column = divmod(index, 3)
        top, left = 8 + row * (side + 15 + 8), 8 + column * (side + 8)
        np.testing.assert_array_equal(sheet[top : top + side : 14, left : left + side : 14], image)
        assert sheet[top + side : top + side + 15, left : left + side].min() < 100  # the caption
        assert (sheet[top : top + side + 15, left + side : left + side + 8] == 255).all()


def test_records_of_event_files_are_framed_with_masked_checksums():
    """The bytes are those that TensorBoard's own writer makes."""
    assert frame_record(b"").hex() == GOLDEN[0]
    assert frame_record(b"feedloop").hex() == GOLDEN[1]


GOLDEN = (
    "000000000000000029039807d8ea82a2",
    "0800000000000000ff86240f666565646c6f6f707e566917",
)


def test_git_is_run_in_no_repository_that_came_with_a_run_folder(tmp_path, monkeypatch):
    mine, gift = tmp_path / "project", tmp_path / "project/runs/gift"
    gift.mkdir(parents=True)
    monkeypatch.chdir(mine)
    assert is_in_repository_of_user(gift)
    (mine / ".git").mkdir()
    assert is_in_repository_of_user(gift)
    assert not is_in_repository_of_user(tmp_path)
    (gift / "objects").mkdir()
    assert is_in_repository_of_user(gift)
    (gift / "HEAD").touch()
    assert not is_in_repository_of_user(gift)
    (gift / "HEAD").unlink()
    (gift.parent / ".git").write_text("gitdir: elsewhere")
    assert not is_in_repository_of_user(gift)


def test_the_id_of_a_run_is_kept_for_who_wrote_it(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.delenv("WANDB_RUN_ID", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    kept = kept_run_id(tmp_path / "wandb", said.append)
    assert len(kept) == 8
    assert kept_run_id(tmp_path / "wandb", said.append) == kept
    assert kept_run_id(tmp_path / "other", said.append) != kept
    assert (tmp_path / "mine/loopfeed/wandb-key").stat().st_mode & 0o777 == 0o600
    shutil.move(tmp_path / "wandb", tmp_path / "moved")
    assert kept_run_id(tmp_path / "moved", said.append) == kept
    assert said == []
    file = tmp_path / "moved/run-id"
    written = file.read_text()
    # Of somebody else, without a mark or with one that is none, and one's own on another machine.
    for content, home in (
        ("kept1234\n", "mine"),
        (f"{kept}\n{'0' * 64}\n", "mine"),
        (f"{kept}\nä", "mine"),
        (written, "other"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / home))
        file.write_text(content)
        with monkeypatch.context() as patch:
            patch.setenv("WANDB_RUN_ID", "named")
            assert kept_run_id(file.parent, said.append) == "named"
        begun = kept_run_id(file.parent, said.append)
        assert begun not in content
        assert kept_run_id(file.parent, said.append) == begun
        (line,) = said
        assert line.startswith(
            f"{file} was not written by you on this machine: another run of Weights & Biases is begun"
        )
        assert line.endswith(f"set WANDB_RUN_ID={content.split()[0]})")
        said.clear()


def test_overwriting_a_run_removes_its_event_files_and_its_id_alone(tmp_path):
    run_dir = tmp_path / "run"
    run(LoggerSink("a recorder", Recording), run_dir=run_dir)
    for name in ("tensorboard/events.out.tfevents.1.feedloop", "tensorboard/mine", "wandb/run-id", "wandb/run-1/a"):
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).touch()
    run(LoggerSink("a recorder", Recording), run_dir=run_dir, overwrite=True)
    left = [
        path.relative_to(run_dir).as_posix()
        for name in ("tensorboard", "wandb")
        for path in run_dir.glob(f"{name}/**/*")
    ]
    assert sorted(left) == ["tensorboard/mine", "wandb/run-1", "wandb/run-1/a"]


@pytest.fixture
def no_account(monkeypatch, tmp_path):
    """A home folder without an account, and no variable that names one."""
    for name in ("API_KEY", "IDENTITY_TOKEN_FILE", "MODE", "DISABLED", "BASE_URL"):
        monkeypatch.delenv(f"WANDB_{name}", raising=False)
    monkeypatch.delenv("NETRC", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    # What the package itself says, which need not be installed.
    monkeypatch.setitem(sys.modules, "wandb.errors.term", cast(Any, SimpleNamespace(can_use_terminput=lambda: True)))
    monkeypatch.setitem(sys.modules, "wandb.sdk.lib.wbauth", cast(Any, SimpleNamespace()))
    return tmp_path


NETRC = "machine api.wandb.ai\n  login user\n  password 123\n"
NETRC_HERE = NETRC.replace("api.wandb.ai", "here")


@pytest.mark.parametrize(
    ("environment", "files", "settings"),
    [
        ({"WANDB_API_KEY": "123"}, {}, None),
        ({"WANDB_IDENTITY_TOKEN_FILE": "token"}, {}, None),
        ({"WANDB_MODE": "offline"}, {}, None),
        ({"WANDB_MODE": "disabled"}, {}, None),
        ({}, {".netrc": NETRC}, None),
        ({}, {"_netrc": NETRC}, None),
        ({"NETRC": "~/other", "WANDB_BASE_URL": "http://here:80/x"}, {"other": NETRC_HERE}, None),
        ({}, {}, {"api_key": "123"}),
        ({}, {}, {"mode": "offline"}),
    ],
)  # fmt: skip
def test_an_account_of_weights_and_biases_is_found_where_the_package_looks(
    no_account, monkeypatch, environment, files, settings
):
    given = SimpleNamespace(settings=SimpleNamespace(**(settings or {})))
    package = SimpleNamespace() if settings is None else SimpleNamespace(setup=lambda: given)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for name, text in files.items():
        (no_account / name).write_text(text)
        (no_account / name).chmod(0o600)
    check_login(package)


@pytest.mark.parametrize(
    "files", [{}, {".netrc": NETRC_HERE}, {".netrc": "nonsense"}, {".netrc": NETRC.replace("123", '""')}]
)
def test_without_an_account_nothing_is_asked(no_account, monkeypatch, files):
    asked: list[str] = []

    def ask(*_, **__):
        asked.append("(1) Create an account")
        threading.Event().wait(600)

    for name, text in files.items():
        (no_account / name).write_text(text)
        (no_account / name).chmod(0o600)
    package = SimpleNamespace(init=ask, login=ask, Settings=SimpleNamespace, __spec__=SimpleNamespace(name="wandb"))
    monkeypatch.setitem(sys.modules, "wandb", cast(Any, package))
    result, warnings = run(WandbSink("project", folder=no_account / "log"))
    assert (asked, result.stopped_by) == ([], "steps")
    assert warnings == [
        "warning: Weights & Biases: no account is known for https://api.wandb.ai: run `wandb login`, set "
        "WANDB_API_KEY, or log to files with WANDB_MODE=offline: nothing more is logged there; the run is not affected"
    ]
