"""The programs and commands of docs/howto/export.md and serving.md, as a user runs them."""

import base64
import io
import json
import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import HTTPConnection
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from loopfeed import TrainConfig, pack_demo, predict, train
from loopfeed.engine.commands.export_cli import main as export_command
from scripts.benchmarks.drawn_weights import write_drawn_weights
from tests.page_programs import page_commands, page_program


def photograph(seed: int) -> bytes:
    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (40 + seed, 50, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def post(port: int, photographs: list[bytes]) -> Any:
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    connection.request("POST", "/", json.dumps([base64.b64encode(each).decode() for each in photographs]))
    return json.loads(connection.getresponse().read())


@pytest.mark.usefixtures("small_resnets")
def test_the_server_of_the_page_answers_many_threads_with_batches_of_any_size(tmp_path):
    weights = write_drawn_weights(tmp_path / "resnet8.safetensors", "resnet8")
    photographs = [photograph(seed) for seed in range(11)]
    expected = predict(weights, photographs, top=3)
    # The page says more sizes, each of which is compiled here.
    replaced = {
        "runs/photos": str(weights),
        "8000": "0",
        "server.serve_forever()": "",
        "32)": "8)",
        ", 2, 4, 8, 16": "",
    }
    program: dict[str, Any] = {}
    exec(page_program("serving.md", "ThreadingHTTPServer", replaced), program)
    program["Classify"].log_message = lambda *_: None
    with program["server"] as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with ThreadPoolExecutor(4) as pool:
            sizes = [1, 5, 11, 3] * 3
            answers = list(pool.map(lambda size: post(server.server_port, photographs[:size]), sizes))
        (damaged, whole) = post(server.server_port, [photographs[0][:100], photographs[0]])
        server.shutdown()
    for size, answer in zip(sizes, answers, strict=True):
        assert [each["classes"] for each in answer] == [
            [expected.class_of(label).name for label in labels] for labels in expected.labels[:size]
        ]
        found = [each["probabilities"] for each in answer]
        np.testing.assert_allclose(found, expected.probabilities[:size], rtol=1e-4)
    assert "truncated" in damaged["error"] or "image file" in damaged["error"]
    assert whole["classes"] == answers[0][0]["classes"]


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_the_page_on_exports_runs_from_top_to_bottom(tmp_path, monkeypatch):
    """On the demo set, whose images have 32 px; the last part where timm is installed."""
    pack_demo(tmp_path / "demo", num_images=100)
    monkeypatch.chdir(tmp_path)
    config = TrainConfig(data="demo", model="resnet18", steps=2, batch=4, run_dir="runs/photos")
    train(replace(config, eval_every_steps=2, snapshot_every_steps=2))
    shutil.copy("runs/photos/model.safetensors", "resnet18.safetensors")
    commands = page_commands("export.md", "export-model")
    assert len(commands) == 5
    for arguments in commands:
        done = CliRunner().invoke(export_command, arguments)
        assert done.exit_code == 0, done.output
    for word in ("deserialize", "InferenceSession"):
        run(sys.executable, page_program("export.md", word, {"224, 224": "32, 32"}))
    python = os.environ.get("LOOPFEED_TORCH_PYTHON", sys.executable)
    if subprocess.run([python, "-c", "import timm"], capture_output=True, check=False, timeout=240).returncode == 0:
        assert "[3, 32, 32]" in run(
            python, page_program("export.md", "create_model") + "\nprint(list(config['input_size']))"
        )


def run(python: str, program: str) -> str:
    return subprocess.run([python, "-c", program], capture_output=True, text=True, timeout=240, check=True).stdout
