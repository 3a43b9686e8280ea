"""Runs under Slurm: the job script of the documentation is stopped, goes back into the queue, and completes the run."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from loopfeed.engine.commands.cli import main
from loopfeed.engine.commands.requeue import check_requeue, requeue_job
from tests.slurm_cluster import SlurmCluster, need_slurm

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/howto/slurm.md"
PROGRAM = "from loopfeed.engine.commands.cli import main; main(prog_name='run-train')"
TOY = "--model tests.toy:Linear --batches tests.device_runs:slow_batches --batch 12 --num-classes 3"
STEPS = 30


def job_script(folder: Path, run_dir: Path) -> Path:
    """The script of the page for a toy run, beside a `run-train` of this checkout."""
    (text,) = re.findall(r"^```bash\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    for old, new in [
        ("--data data/photos", TOY),
        ("runs/photos", str(run_dir)),
        ("--steps 450000", f"--steps {STEPS}"),
        ("--snapshot-every 5000", "--snapshot-every 5"),
    ]:
        assert old in text
        text = text.replace(old, new)
    folder.mkdir()
    script, command = folder / "job.sh", folder / "run-train"
    script.write_text(text)
    command.write_text(f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -c "{PROGRAM}" "$@"\n')
    command.chmod(0o755)
    return script


def losses(run_dir: Path) -> list[tuple[int, float]]:
    if not (run_dir / "loss.jsonl").exists():
        return []
    lines = [json.loads(line) for line in (run_dir / "loss.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines]


def wait_until(is_true, cluster: SlurmCluster, log: Path, seconds: float = 90) -> None:
    deadline = time.monotonic() + seconds
    while not is_true():
        said = log.read_text() if log.exists() else ""
        assert time.monotonic() < deadline, said + cluster.logs()
        time.sleep(0.2)


@pytest.mark.integration
def test_the_job_script_of_the_page_is_requeued_and_completes_the_run_with_the_same_bits(tmp_path):
    need_slurm()
    run_dir, log = tmp_path / "run", tmp_path / "photos.log"
    with SlurmCluster(tmp_path / "slurm") as cluster:
        script = job_script(tmp_path / "bin", run_dir)
        job = cluster.submit(script, ROOT, "--nodes=1", "--ntasks-per-node=2", f"--output={log}")
        wait_until(lambda: len(losses(run_dir)) >= 6, cluster, log)
        # As --signal does before the time limit: to the tasks, not to the script.
        cluster.call("scancel", "--signal=USR1", job)
        wait_until(lambda: "is back in the queue" in log.read_text(), cluster, log)
        stopped = losses(run_dir)
        assert json.loads((run_dir / "result.json").read_text())["snapshot_step"] == len(stopped) < STEPS
        wait_until(lambda: len(losses(run_dir)) == STEPS, cluster, log)
        wait_until(lambda: cluster.field(job, "JobState") == "COMPLETED", cluster, log)
        assert cluster.field(job, "Restarts") == "1"
    said = log.read_text()
    assert f"job {job} is back in the queue" in said
    assert losses(run_dir)[: len(stopped)] == stopped
    # The same topology without an interruption.
    whole = tmp_path / "whole"
    words = [*TOY.split(), "--run-dir", str(whole), "--steps", str(STEPS), "--spawn", "2"]
    subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=ROOT, timeout=120, check=True, capture_output=True)
    assert losses(run_dir) == losses(whole)
    assert (run_dir / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()


@pytest.fixture
def scontrol(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A command `scontrol` that writes down its arguments, knows a running job, and refuses job 13."""
    said = tmp_path / "said"
    command = tmp_path / "scontrol"
    command.write_text(
        f'#!/bin/sh\necho "$@" >> {said}\n'
        'case "$*" in *12c) echo JobId=12c JobState=COMPLETING Reason=None Restarts=0;;\n'
        "*12l) echo JobId=12l JobState=COMPLETING Reason=TimeLimit Restarts=0;;\n"
        "*show*) echo JobId=12 JobState=RUNNING Reason=None Restarts=1;;\n"
        '"requeue 13") echo "Requested operation is presently disabled" >&2; exit 1;; esac\n'
    )
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return said


@pytest.mark.parametrize(
    ("code", "signals", "process_id", "environment", "is_requeued"),
    [
        (130, {signal.SIGUSR1}, None, {"SLURM_PROCID": "0"}, True),
        (130, {signal.SIGTERM}, 0, {"SLURM_PROCID": "1"}, True),
        (130, {signal.SIGTERM}, None, {}, True),
        # The first process alone puts the job back.
        (130, {signal.SIGTERM}, None, {"SLURM_PROCID": "1"}, False),
        (130, {signal.SIGTERM}, 1, {"SLURM_PROCID": "0"}, False),
        # Complete, failed, stopped by the user or by control-run, cancelled.
        (0, {signal.SIGTERM}, None, {}, False),
        (1, {signal.SIGTERM}, None, {}, False),
        (2, {signal.SIGTERM}, None, {}, False),
        (130, {signal.SIGINT}, None, {}, False),
        (130, set(), None, {}, False),
        (130, {signal.SIGTERM}, None, {"SLURM_JOB_ID": "12c"}, False),
        (130, {signal.SIGTERM}, None, {"SLURM_JOB_ID": "12l"}, True),
        # Slurm puts a preempted job back itself.
        (130, {signal.SIGTERM}, None, {"SLURM_RESTART_COUNT": "0"}, False),
    ],
)
def test_a_job_is_put_back_only_if_slurm_stopped_its_run(scontrol, code, signals, process_id, environment, is_requeued):
    job = {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1", **environment}
    assert requeue_job(code, signals, process_id, job) == code
    asked = scontrol.read_text().splitlines() if scontrol.exists() else []
    assert [line for line in asked if line.startswith("requeue")] == [f"requeue {job['SLURM_JOB_ID']}"] * is_requeued


@pytest.mark.integration
def test_one_process_is_stopped_requeued_and_continued_by_the_same_command(scontrol, tmp_path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    words = [*TOY.split(), "--run-dir", str(run_dir), "--steps", str(STEPS), "--requeue"]
    job = os.environ | {"SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, *words], cwd=ROOT, env=job, stdout=output, stderr=output
        )
    deadline = time.monotonic() + 60
    while len(losses(run_dir)) < 4:
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(60) == 130, log.read_text()
    assert scontrol.read_text().splitlines()[-1] == "requeue 12"
    assert 4 <= len(losses(run_dir)) < STEPS
    subprocess.run([sys.executable, "-c", PROGRAM, *words], cwd=ROOT, env=job, timeout=120, check=True)
    assert [step for step, _ in losses(run_dir)] == list(range(1, STEPS + 1))
    assert scontrol.read_text().count("requeue 12") == 1


def test_a_job_that_slurm_does_not_take_back_is_an_error(scontrol, capsys):
    assert requeue_job(130, {signal.SIGTERM}, None, {"SLURM_JOB_ID": "13", "SLURM_RESTART_COUNT": "1"}) == 1
    assert scontrol.read_text().splitlines()[-1] == "requeue 13"
    message = "job 13 could not be put back into the queue (Requested operation is presently disabled): submit it again"
    assert message in capsys.readouterr().err


def test_requeue_needs_a_job_its_command_and_a_folder(scontrol, monkeypatch):
    del scontrol
    monkeypatch.setattr("loopfeed.engine.commands.cli.leave", lambda code, **_: sys.exit(code))
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    done = CliRunner().invoke(main, ["--synthetic", "--run-dir", "run", "--requeue"])
    assert done.exit_code == 2
    assert "--requeue needs a job of Slurm, but SLURM_JOB_ID is not set" in done.output
    job = {"SLURM_JOB_ID": "12", "PATH": os.environ["PATH"]}
    check_requeue("run", overwrite=False, environment=job)
    with pytest.raises(ValueError, match="needs Slurm's command scontrol"):
        check_requeue("run", overwrite=False, environment=job | {"PATH": "/nowhere"})
    with pytest.raises(ValueError, match="continues the run of one folder, got none"):
        check_requeue(None, overwrite=False, environment=job)
    with pytest.raises(ValueError, match="--overwrite replaces it, got both"):
        check_requeue("run", overwrite=True, environment=job)
