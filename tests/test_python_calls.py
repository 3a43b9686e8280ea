"""What a Python program reads of errors: its own lines, and arguments in place of options."""

import inspect
import pickle
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import loopfeed
from loopfeed import TrainConfig, train
from loopfeed.engine.config import SETTINGS
from loopfeed.engine.python_calls import called_from_python, in_python_words
from loopfeed.engine.run.interrupted import train_interruptibly
from loopfeed.preprocess.shown_values import shown
from loopfeed.preprocess.suggestions import WEIGHTS_BY_NAME
from tests.toy import CountedBatches, Linear, toy_batch, toy_config


@pytest.fixture(autouse=True)
def _short(monkeypatch):
    monkeypatch.delenv("LOOPFEED_TRACEBACK", raising=False)


def frames(error: BaseException) -> list[str]:
    """Return the functions of a traceback, outermost first, from the call of the test on."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)][1:]


def broken_loss(outputs, labels, weights):
    return helper(outputs, labels)


def helper(outputs, labels):
    return outputs @ labels


def broken_callback(record):
    raise LookupError("mine")


@dataclass(frozen=True)
class FrozenError(Exception):
    """An error whose traceback cannot be set."""


def of_a_frozen_class():
    raise FrozenError


def of_another_process():
    raise LookupError("mine") from RuntimeError("its traceback as text, as concurrent.futures gives it")


def unlike_train():
    Linear(trian=1)  # type: ignore[call-arg]


def test_an_error_in_a_part_of_the_user_shows_the_users_frames_alone(monkeypatch):
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    for given, names in (
        ({"loss": broken_loss}, ["broken_loss", "helper"]),
        ({"callbacks": [broken_callback]}, ["broken_callback"]),
        ({"batches": CountedBatches(raise_at=1)}, ["__call__"]),
    ):
        with pytest.raises((TypeError, LookupError, ConnectionResetError)) as raised:
            train(toy_config(), **(parts | given))
        assert frames(raised.value) == names
        assert [note for note in raised.value.__notes__ if "LOOPFEED_TRACEBACK=full" in note]
    monkeypatch.setenv("LOOPFEED_TRACEBACK", "full")
    with pytest.raises(LookupError) as raised:
        train(toy_config(), **parts, callbacks=[broken_callback])
    assert frames(raised.value)[-1] == "broken_callback"
    assert len(frames(raised.value)) > 5


def test_what_an_error_of_the_user_says_stays(tmp_path):
    call: Any = called_from_python(train_interruptibly)
    with pytest.raises(LookupError) as raised:
        call(of_another_process)
    assert isinstance(raised.value.__cause__, RuntimeError)
    with pytest.raises(TypeError, match=r"'trian'(\n|$)"):  # not what an argument of the public function may have meant
        call(unlike_train)
    with pytest.raises(FrozenError):
        call(of_a_frozen_class)
    # The user's own folder may have the name of a package.
    code = compile("def helper():\n    loopfeed.read_weights(NONE)", str(tmp_path / "jax/helper.py"), "exec")
    exec(code, scope := {"loopfeed": loopfeed, "NONE": NONE, "__name__": "helper"})
    with pytest.raises(ValueError, match="weights must be a file") as refused:
        call(scope["helper"])
    assert frames(refused.value) == ["helper"]


def test_an_error_of_a_rule_has_no_frames_and_a_fault_of_loopfeed_keeps_its_own(tmp_path, monkeypatch):
    with pytest.raises(
        loopfeed.ShardError, match=r"does not exist; create it with loopfeed\.pack\(SOURCE, DEST\)"
    ) as it:
        train(TrainConfig(data=str(tmp_path / "none"), steps=1))
    assert frames(it.value) == []

    monkeypatch.setattr("loopfeed.engine.run.train.check_cache_places", dict[TrainConfig, None]().__getitem__)
    with pytest.raises(KeyError) as fault:
        train(toy_config(), model=Linear(), batches=toy_batch)
    assert "set_up_run" in frames(fault.value)


NONE = "/no/such/path"
ARRAYS = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)
called: Any = loopfeed  # as a notebook, which no type checker reads
REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "TrainConfig": (lambda: called.TrainConfig(stesp=1), "TrainConfig has no setting 'stesp': did you mean steps?"),
    "TrainConfig, a value": (lambda: called.TrainConfig(steps="a"), "steps must be of type int"),
    "TrainConfig.from_json": (lambda: called.TrainConfig.from_json({"batch": 0}), "batch must lie in 1"),
    "replace": (lambda: replace(TrainConfig(), fold="1"), "fold must be K/N"),
    "train": (lambda: called.train(3), "the settings must be a TrainConfig, got int"),
    "train, a dictionary": (lambda: called.train({"steps": 3}), r"give TrainConfig(**settings)"),
    "train, no settings": (lambda: called.train(steps=3), "give the settings, as loopfeed.train(TrainConfig("),
    "train, arrays": (
        lambda: called.train(toy_config(), batches=([], [])),
        "got tuple, which cannot return the batch of a given step again: write such a function, or pack the images",
    ),
    "train, an argument": (lambda: called.train(toy_config(), modle=1), "argument 'modle': did you mean model?"),
    "check_step": (lambda: called.check_step(TrainConfig(data=NONE)), "/no/such/path does not exist"),
    "show_batch": (lambda: called.show_batch(TrainConfig(data=NONE)), "/no/such/path does not exist"),
    "explain_program": (lambda: called.explain_program(TrainConfig(data=NONE)), "/no/such/path does not exist"),
    "open_run": (lambda: called.open_run(NONE), "RUN must be a run folder, but /no/such/path does not exist"),
    "open_run, a type": (lambda: called.open_run(None), "run must be a path, got None"),
    "run_settings": (lambda: called.run_settings(NONE), "RUN must be a run folder"),
    "pack": (lambda: called.pack(NONE, "out"), "/no/such/path does not exist; give the folder"),
    "pack, an argument": (lambda: called.pack(NONE, "out", sizee=1), "no argument sizee: did you mean size?"),
    "predict": (lambda: called.predict(NONE, []), "weights must be a file, but /no/such/path does not exist"),
    "predict, an argument": (lambda: called.predict(NONE, [], tpo=1), "argument 'tpo': did you mean top?"),
    "Predictor": (lambda: called.Predictor(NONE), "weights must be a file"),
    "evaluate": (lambda: called.evaluate(NONE), "RUN must be a run folder"),
    "evaluate_weights": (lambda: called.evaluate_weights(NONE, TrainConfig()), "/no/such/path does not exist"),
    "export_model": (lambda: called.export_model(NONE, "a.onnx"), "weights must be a file"),
    "read_weights": (lambda: called.read_weights(NONE), "weights must be a file"),
    "replay_run": (lambda: called.replay_run(NONE), "a run folder must contain config.json"),
    "report_run": (lambda: called.report_run(NONE, "a.html"), "/no/such/path"),
    "read_stages": (lambda: called.read_stages(NONE), "/no/such/path must be a readable file"),
    "load_recipe": (lambda: called.load_recipe("cifar"), "a recipe must be one of"),
    "open_split": (lambda: called.open_split(NONE, "train"), "/no/such/path"),
    "verify_split": (lambda: called.verify_split(NONE, "train"), "/no/such/path"),
    "build_model": (lambda: called.build_model("rsnet", num_classes=1, image_size=8), "rsnet"),
    "join_processes": (lambda: called.join_processes("a:1"), "but num_processes and process_id are missing"),
    "top_k": (lambda: called.top_k(0), "k of top_k must be at least 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("pack", {"source": ".", "dest": None}, "dest must be a path, got None"),
        (
            "pack",
            {"source": ".", "dest": "out", "overwrite": "no"},
            "overwrite must be True or False, got 'no' of type str",
        ),
        (
            "pack",
            {"source": ".", "dest": "out", "size": (32, 32)},
            "size must be a whole number or 'auto', got (32, 32)",
        ),
        ("pack", {"source": ".", "dest": "out", "holdout": "0.1"}, "holdout must be a number, got '0.1'"),
        ("pack", {"source": ".", "dest": "out", "workers": 1.5}, "workers must be a whole number or None, got 1.5"),
        ("pack", {"source": ".", "dest": "out", "levels": 3}, "levels must be a string or None, got 3"),
        ("predict", {"run_or_file": ".", "images": [], "settings": [1]}, "settings must be a mapping or None, got [1]"),
        ("predict", {"run_or_file": ".", "images": [], "notify": "x"}, "notify must be a function, got 'x'"),
        ("export_model", {"run_or_weights": ".", "out": "a", "overwrite": 2}, "overwrite must be True or False, got 2"),
        ("evaluate", {"run": ".", "snapshot": "3"}, "snapshot must be a whole number or 'best' or None, got '3'"),
        ("evaluate", {"run": 3}, "run must be a path or a TrainConfig, got 3 of type int"),
        ("build_model", {"name": "resnet8", "num_classes": 1.5, "image_size": 8}, "num_classes must be a whole number"),
    ],
)
def test_an_argument_of_another_type_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, name, arguments, message
):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TypeError) as refused:
        getattr(loopfeed, name)(**arguments)
    assert str(refused.value).startswith(message)
    assert frames(refused.value) == []
    assert list(tmp_path.iterdir()) == []


def test_numbers_of_numpy_and_paths_are_arguments_too(tmp_path):
    any_call: Any = loopfeed
    any_call.pack(
        ARRAYS, tmp_path / "packed", size=np.int64(8), workers=np.uint8(1), overwrite=np.bool(True), holdout=0
    )
    assert loopfeed.open_split(tmp_path / "packed", "train").num_images == len(ARRAYS[1])
    # Scalars of jax, switches as 0 and 1, and names of paths.
    any_call.top_k(jnp.int32(3))
    any_call.build_model("resnet8", num_classes=jnp.int32(3), image_size=8)
    with pytest.raises(ValueError, match="RUN must be a run folder"):
        any_call.report_run(NONE, "a.html", overwrite=0, evaluate=1)
    assert any_call.read_runtime(str(tmp_path)) is None


def test_parts_and_choices_keep_the_messages_that_say_what_to_give():
    for name, given, remedy in [
        ("loss", "cross-entropy", "choose a ready-made loss with TrainConfig(loss=…)"),
        ("schedule", "cosine", "such as an optax schedule"),
        ("metrics", ["top3"], "give a dict"),
    ]:
        with pytest.raises(ValueError, match="must be") as refused:
            called.train(toy_config(), model=Linear(), batches=toy_batch, **{name: given})
        assert remedy in str(refused.value)
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        called.train(toy_config(), 3)


class Unreadable:
    def __repr__(self):
        raise RuntimeError("no")


def test_a_value_of_any_kind_is_shown_in_one_short_line():
    endless: list[Any] = [1]
    endless.append(endless)
    for value, text in {
        "array": (np.zeros((2, 3), np.int8), "<ndarray [2, 3] of int8>"),
        "long": (10**5000, "an integer of 16,610 bits"),
        "set of long": ({10**5000}, "{an integer of 16,610 bits}"),
        "unreadable": (Unreadable(), "<Unreadable instance at 0x"),
        "endless": (endless, "[1, [1, ["),
        "path": (Path("a"), "PosixPath('a')"),
        "list": ([1, "two", None], "[1, 'two', None]"),
    }.values():
        found = repr(shown(value))
        assert found.startswith(text)
        assert len(found) <= 200
    assert len(repr(shown([[[0] * 300] * 300] * 300))) <= 200
    assert str(shown(Path("a"))) == "a"


@pytest.mark.parametrize("name", REFUSED)
def test_an_error_of_the_caller_is_one_message_below_the_callers_line(name):
    call, message = REFUSED[name]
    with pytest.raises((ValueError, TypeError)) as raised:
        call()
    shown = "".join(traceback.format_exception(raised.value))
    assert shown.count("Traceback") == 1  # and no error that the message is made of
    assert [each for each in frames(raised.value) if each not in ("<lambda>", "replace")] == []
    assert message in str(raised.value)


def test_every_public_function_and_class_refuses_arguments_without_frames_of_its_own():
    found = {name: getattr(loopfeed, name) for name in loopfeed.__all__}
    any_argument = (BaseException, loopfeed.Callback, loopfeed.Stage)
    for name, each in found.items():
        if getattr(each, "_is_protocol", False) or (isinstance(each, type) and issubclass(each, any_argument)):
            continue
        with pytest.raises(TypeError) as raised:
            each(no_such_argument=1)
        assert frames(raised.value) == [], name
        assert "Unpack" not in str(inspect.signature(each)), name  # but the names that may be given


def test_a_decorator_may_fill_in_what_a_signature_shows(tmp_path):
    bound = inspect.signature(loopfeed.pack).bind(tmp_path / "none", tmp_path / "out")
    bound.apply_defaults()
    with pytest.raises(ValueError, match="none does not exist"):
        loopfeed.pack(*bound.args, **bound.kwargs)


def test_a_folder_that_is_taken_is_refused_in_the_words_of_python(tmp_path):
    config = toy_config(run_dir=str(tmp_path / "run"))
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    train(config, **parts)
    rule = r"another folder \(run_dir\), continue the run \(resume=True\) or overwrite it \(overwrite=True\)$"
    with pytest.raises(ValueError, match=rule):
        train(config, **parts)
    # And what is returned has errors of the same form.
    run, predictor = loopfeed.open_run(tmp_path / "run"), loopfeed.Predictor(tmp_path / "run", model=Linear())
    for call in (
        lambda: run.weights(snapshot=99),
        lambda: run.batch(99, batches=toy_batch),
        lambda: run.batch(2),
        lambda: predictor.predict([]),
        lambda: list(predictor.stream(["a.png"], top=0)),
    ):
        with pytest.raises(
            ValueError, match=r"no snapshot|1 … 5|batches of your own|at least one image|top must be"
        ) as raised:
            call()
        assert frames(raised.value) == ["<lambda>"]


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("continue it (--resume), not --overwrite", "continue it (resume=True), not overwrite=True"),
        ("give --data DIR, or --eval-split off", "give data=DIR, or eval_split=off"),
        ("give --init-from runs/a or --data ../packed", "give init_from=runs/a or data=../packed"),
        (WEIGHTS_BY_NAME, WEIGHTS_BY_NAME),
        ("set --learning-rate; --no-eval-mirror", "set learning_rate; eval_mirror=False"),
        (
            "again: run-train --recipe a/config.json --run-dir a --overwrite",
            "again: train(replace(run_settings('a'), overwrite=True))",
        ),
        ("resume it with run-train --resume", "resume it with train(…, resume=True)"),
        (
            "from it: run-train --run-dir runs/a --resume",
            "from it: train(replace(run_settings('runs/a'), resume=True))",
        ),
        (
            "try control-run RUN --snapshot, or `run-eval --data`",
            "try control-run RUN --snapshot, or `run-eval --data`",
        ),
        ("--xla_flag and --no-such-option stay", "--xla_flag and --no-such-option stay"),
    ],
)
def test_options_become_settings(text, right):
    assert in_python_words(text) == right


def test_every_option_has_a_name_in_python():
    for setting in SETTINGS.values():
        for option in setting.options:
            assert in_python_words(f"({option.split('/')[0]})").startswith(f"({setting.name}")


def test_the_public_functions_are_pickled_by_their_public_names():
    for name in loopfeed.__all__:
        found = getattr(loopfeed, name)
        assert pickle.loads(pickle.dumps(found)) is found


def test_notices_are_in_the_words_of_python(tmp_path: Path):
    said: list[str] = []
    config = toy_config(run_dir=str(tmp_path / "run"))
    parts: dict[str, Any] = {"model": Linear(), "batches": toy_batch}
    train(config, **parts)
    loopfeed.train(loopfeed.TrainConfig(**(config.to_json() | {"resume": True})), notify=said.append, **parts)
    assert [line for line in said if "give a larger steps, or append a cycle of the schedule (append_epochs)" in line]
