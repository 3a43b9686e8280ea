"""The notebook of the documentation in a real kernel, and a kernel that is interrupted and shut down."""

import json
import time
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.integration
ROOT = Path(__file__).parents[1]
LIMIT_S = 200
PREPARE = """
import time
from dataclasses import replace
from loopfeed import train
from tests.test_notebook import Slow
from tests.toy import Linear, toy_config
config = toy_config(steps=5_000, run_dir={folder!r})
parts = dict(model=Linear(), batches=Slow())
"""


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path):
    pytest.importorskip("nbclient", reason="nbclient is not installed (extra integrations)")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    # Neither the start-up files nor the history of whoever runs the tests, which other kernels write at the same time.
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))


def test_the_notebook_of_the_documentation_runs(tmp_path):
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(ROOT / "docs/examples/notebook.ipynb", 4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    NotebookClient(notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = {cell.source: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    # One output, updated in place until the run has ended, and no line beside it.
    (shown,) = outputs["result = train(config)"]
    assert shown.data["text/plain"].startswith("run done: 40 steps in ")
    assert shown.data["text/html"].count("<svg") >= 1
    (card,) = outputs["result"]
    assert card.data["text/plain"].splitlines()[1].startswith("  loss")
    (plot,) = outputs["result.plot()"]
    assert plot.data["image/svg+xml"].startswith("<svg")
    texts = [len(each.data.get("text/html", "")) for some in outputs.values() for each in some if "data" in each]
    assert max(texts) < 20_000
    (handle,) = next(some for source, some in outputs.items() if "background=True" in source)
    assert handle.data["text/plain"].startswith("run stopped by run.stop(): ")


class Kernel:
    """A kernel that runs cells."""

    def __init__(self, folder: Path) -> None:
        from jupyter_client.manager import start_new_kernel

        self.manager, self.client = start_new_kernel(kernel_name="python3")
        self.run(PREPARE.format(folder=str(folder)))

    def run(self, code: str, interrupt_at: Path | None = None) -> dict[str, Any]:
        """Run a cell, and interrupt the kernel once a file has grown; return the reply."""
        sent, before = self.client.execute(code), _size(interrupt_at)
        while interrupt_at is not None and _size(interrupt_at) <= before + 200:
            time.sleep(0.02)
        if interrupt_at is not None:
            self.manager.interrupt_kernel()
        while (reply := self.client.get_shell_msg(timeout=LIMIT_S))["parent_header"]["msg_id"] != sent:
            pass
        content: dict[str, Any] = reply["content"]
        return content


def _size(path: Path | None) -> int:
    return path.stat().st_size if path is not None and path.exists() else 0


def test_an_interrupted_kernel_says_how_to_go_on_and_one_that_is_shut_down_keeps_its_run(tmp_path):
    folder = tmp_path / "run"
    kernel = Kernel(folder)
    try:
        for cell in ("train(config, **parts)", "train(replace(config, resume=True), **parts)"):
            reply = kernel.run(cell, interrupt_at=folder / "loss.jsonl")
            assert (reply["status"], reply["ename"]) == ("error", "RunInterrupted")
            assert "its weights and a snapshot are in" in reply["evalue"]
            assert len(reply["traceback"]) <= 4  # a rule, the title, the line of the cell, the message
        steps = [json.loads(line)["step"] for line in (folder / "loss.jsonl").read_text().splitlines()]
        assert steps == list(range(1, steps[-1] + 1))
        refused = kernel.run("train(config, **parts)")
        assert refused["evalue"].endswith("continue the run (resume=True) or overwrite it (overwrite=True)")
        cell = "run = train(replace(config, resume=True), **parts, background=True)"
        assert kernel.run(f"{cell}\nwhile len(run.losses) < 3: time.sleep(0.01)")["status"] == "ok"
    finally:
        kernel.manager.shutdown_kernel()
        kernel.client.stop_channels()
    end = json.loads((folder / "result.json").read_text())
    assert (end["stopped_by"], end["error"]) == ("the end of the kernel", None)
    assert end["snapshot_step"] == end["steps_done"] > steps[-1]
    assert [*(folder / "snapshots").iterdir()]
