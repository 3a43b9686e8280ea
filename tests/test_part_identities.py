"""Which user-defined parts are the same: by the name of their file and their own, wherever they are run from."""

import runpy
import sys
import types

import pytest

from loopfeed.engine.parts import is_same_part, name_of

SCRIPT = """
import jax.numpy as jnp
import jax

from loopfeed.engine.run.train import train
from tests.toy import Linear, toy_batch, toy_config


def squared(outputs, labels, weights):
    return jnp.sum((outputs - jax.nn.one_hot(labels, 3)) ** 2, axis=1)


def run(run_dir, told=None, loss=squared, **values):
    config = toy_config(run_dir=run_dir, eval_split="off", **values)
    notify = (lambda line: None) if told is None else told.append
    return train(config, model=Linear(), batches=toy_batch, loss=loss, notify=notify)


if __name__ == "__main__":
    run(RUN, steps=1)
"""


def test_a_script_a_module_a_notebook_and_a_renamed_folder_agree(tmp_path, monkeypatch):
    run = tmp_path / "run"
    for folder in ("one", "other/deeper"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "experiment.py").write_text(SCRIPT.replace("RUN", repr(str(run))))
    runpy.run_path(str(tmp_path / "one/experiment.py"), run_name="__main__")

    monkeypatch.syspath_prepend(tmp_path / "other")
    from deeper import experiment  # type: ignore[import-not-found]

    told: list[str] = []
    experiment.run(run, told, steps=2, resume=True)
    cells = types.ModuleType("__main__")  # as in a notebook, it has no file
    with monkeypatch.context() as notebook:
        notebook.setitem(sys.modules, "__main__", cells)
        text = SCRIPT.partition("if __name__")[0]
        exec(compile(text, "/tmp/ipykernel_1/2.py", "exec"), vars(cells))
        assert name_of(cells.squared) == "__main__.squared"
        cells.run(run, told, steps=3, resume=True)
    experiment.run(run, told, steps=4, resume=True)
    assert not [each for each in told if "source" in each or "own_parts" in each]

    with pytest.raises(ValueError, match=r"must keep its own_parts, which was .*experiment\.squared"):
        experiment.run(run, steps=5, resume=True, loss=another)


def another(outputs, labels, weights):
    return outputs.sum(1) * 0 + labels


def test_a_changed_source_warns_and_goes_on(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for text, count in ((SCRIPT, 0), (SCRIPT.replace("** 2", "** 4"), 1)):
        (tmp_path / "changing_part.py").write_text(text)
        sys.modules.pop("changing_part", None)
        module = __import__("changing_part")
        told: list[str] = []
        module.run(tmp_path / "run", told, steps=1 + count, resume=bool(count))
        assert sum("the source of the loss has changed since the run recorded it" in each for each in told) == count


@pytest.mark.parametrize(
    ("before", "now", "is_same"),
    [
        ("losses.squared", "losses.squared", True),
        ("project.losses.squared", "losses.squared", True),
        ("__main__.squared", "losses.squared", True),
        ("losses.squared", "__main__.squared", True),
        ("__main__.Scale.loss", "losses.Scale.loss", True),
        ("losses.make.<locals>.loss", "a.losses.make.<locals>.loss", True),
        ("losses.squared", "losses.absolute", False),
        ("losses.squared", "my_losses.squared", False),
        ("__main__.loss", "losses.my_loss", False),
    ],
)
def test_names_of_earlier_versions_are_understood(before, now, is_same):
    assert is_same_part(before, now) is is_same
