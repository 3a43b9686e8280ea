"""The manifest of docs/howto/kubernetes.md: its fields fit each other, and `run-train` accepts its command."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

from loopfeed.engine.commands.cli import main

ROOT = Path(__file__).parents[1]
yaml: Any = pytest.importorskip("yaml")


@pytest.fixture(scope="module")
def manifest() -> tuple[dict[str, Any], dict[str, Any]]:
    """The service and the job."""
    page = (ROOT / "docs/howto/kubernetes.md").read_text(encoding="utf-8")
    (text,) = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    service, job = yaml.safe_load_all(text)
    return service, job


def test_the_pods_find_the_first_one(manifest):
    service, job = manifest
    assert (service["apiVersion"], service["kind"]) == ("v1", "Service")
    assert (job["apiVersion"], job["kind"]) == ("batch/v1", "Job")
    assert service["spec"]["clusterIP"] == "None"  # headless: the word, not null
    assert service["spec"]["publishNotReadyAddresses"] is True
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert spec["completionMode"] == "Indexed"
    assert pod["subdomain"] == service["metadata"]["name"]
    # Kubernetes refuses podFailurePolicy with any other policy.
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    (on_exit,) = [rule["onExitCodes"] for rule in spec["podFailurePolicy"]["rules"] if "onExitCodes" in rule]
    assert on_exit["containerName"] == container["name"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("has_run", [False, True])
def test_run_train_accepts_the_command_and_resumes_if_there_is_a_run(manifest, tmp_path, has_run):
    service, job = manifest
    (container,) = job["spec"]["template"]["spec"]["containers"]
    (tmp_path / "runs/photos").mkdir(parents=True)
    if has_run:
        (tmp_path / "runs/photos/config.json").touch()
    stand_in = tmp_path / "run-train"
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    stand_in.chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = subprocess.run(
        container["command"],
        cwd=tmp_path,
        env={"PATH": path, "JOB_COMPLETION_INDEX": "1"},
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    params = main.make_context("run-train", shlex.split(done.stdout)).params
    name, count = job["metadata"]["name"], job["spec"]["completions"]
    assert job["spec"]["parallelism"] == count
    assert params["coordinator"].rpartition(":")[0] == f"{name}-0.{service['metadata']['name']}"
    assert (params["num_processes"], params["process_id"], params["resume"]) == (count, 1, has_run)
    assert params["run_dir"] == "runs/photos"
