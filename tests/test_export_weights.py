"""The file that export-weights writes: where it must not be, and what is left of a run that it would have replaced."""

import os

import pytest

from loopfeed import train
from loopfeed.engine.evaluation.export import export_weights
from tests.toy import Linear, toy_batch, toy_config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export") / "run"
    train(toy_config(steps=2, run_dir=folder), model=Linear(), batches=toy_batch)
    return folder


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "new.safetensors", "snapshots/new.safetensors"])
def test_a_file_in_the_folder_of_a_run_is_refused(run, tmp_path, name):
    before = {each: each.read_bytes() for each in run.rglob("*") if each.is_file()}
    (tmp_path / "link").symlink_to(run)
    (tmp_path / "file").symlink_to(run / name)
    for out in (run / name, tmp_path / "link" / name, tmp_path / "file"):
        with pytest.raises(ValueError, match=r"OUT must not be in the folder of a run, .* is in .*: choose another"):
            export_weights(run, out, snapshot=2, overwrite=True)
    assert {each: each.read_bytes() for each in run.rglob("*") if each.is_file()} == before


def test_a_file_outside_is_written_and_replaced_only_on_request(run, tmp_path):
    out = tmp_path / "w.safetensors"
    digest = export_weights(run, out, snapshot=2).digest
    with pytest.raises(ValueError, match=r"w\.safetensors exists: choose another path, or replace it \(--overwrite\)"):
        export_weights(run, out, snapshot=2)
    out.write_text("damaged")
    assert export_weights(run, out, snapshot=2, overwrite=True).digest == digest
    with pytest.raises(ValueError, match="OUT must not be in the folder of a run"):
        export_weights(run, run.parent / "run" / ".." / "run" / "x", snapshot=2)


@pytest.mark.parametrize("overwrite", [False, True])
def test_other_places_are_refused_with_a_remedy_that_helps(run, tmp_path, overwrite):
    (tmp_path / "file").touch()
    for out, message in (
        (os.devnull, "OUT must be a regular file, but /dev/null is not: choose another path"),
        (tmp_path, f"OUT must be a file, but {tmp_path} is a folder: choose another path"),
        (tmp_path / "no/w", f"OUT must be in an existing folder, but {tmp_path}/no is missing: create it"),
        (tmp_path / "file/w", f"OUT must be in an existing folder, but {tmp_path}/file is a file: choose another path"),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            export_weights(run, out, snapshot=2, overwrite=overwrite)
        assert str(caught.value) == message
