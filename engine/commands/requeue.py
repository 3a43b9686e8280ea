"""`run-train --requeue`: puts the Slurm job of a run that a signal stopped back into the queue, and continues the run.

See <https://slurm.schedmd.com/scontrol.html> (requeue) and <https://slurm.schedmd.com/sbatch.html> (--signal).
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Set
from pathlib import Path

from loopfeed.engine.commands.command_end import say_to_stderr
from loopfeed.engine.records.run_folder import CONFIG

STOPS = (signal.SIGUSR1,)
"""The signals that a job script asks Slurm for before the time limit; they stop the run as SIGTERM does."""
_STOPPED = 130
_ASK_S = 60


def check_requeue(run_dir: str | None, *, overwrite: bool, environment: Mapping[str, str] = os.environ) -> None:
    """Check that this process could put its job back into the queue.

    Raises:
        ValueError: outside a job of Slurm, without its `scontrol`, or without a run folder to continue.
    """
    if "SLURM_JOB_ID" not in environment:
        raise ValueError(
            "--requeue needs a job of Slurm, but SLURM_JOB_ID is not set: submit a script with sbatch, or leave it out"
        )
    if shutil.which("scontrol", path=environment.get("PATH")) is None:
        raise ValueError("--requeue needs Slurm's command scontrol, which is not on the PATH: add its folder to PATH")
    if run_dir is None:
        raise ValueError("--requeue continues the run of one folder, got none: give it with --run-dir")
    if overwrite:
        raise ValueError("--requeue continues a run and --overwrite replaces it, got both: leave one out")


def has_run(run_dir: str) -> bool:
    """Return whether there is a run in the folder, which the job then continues."""
    return (Path(run_dir) / CONFIG).is_file()


def requeue_job(
    code: int, signals: Set[int], process_id: int | None, environment: Mapping[str, str] = os.environ
) -> int:
    """Put the job of this process back into the queue if a signal of Slurm stopped its run.

    Args:
        code: the exit code of the run.
        signals: the signals that this process received.
        process_id: number of this process; None takes that of Slurm.
        environment: the environment variables.

    Returns:
        The exit code: 1 if the job could not be put back.
    """
    number = int(environment.get("SLURM_PROCID", "0")) if process_id is None else process_id
    if code != _STOPPED or number != 0 or not signals & {signal.SIGTERM, *STOPS}:
        return code
    job = environment["SLURM_JOB_ID"]
    try:
        fields = dict(word.partition("=")[::2] for word in _ask("show", "job", "-o", job).split())
        if int(fields.get("Restarts", 0)) > int(environment.get("SLURM_RESTART_COUNT", 0)):
            say_to_stderr(f"run-train: Slurm has put job {job} back into the queue itself")
            return code
        if not _is_to_continue(fields):
            say_to_stderr(f"run-train: job {job} was cancelled, so it is not put back into the queue")
            return code
        _ask("requeue", job)
    except (OSError, subprocess.SubprocessError) as error:
        said = getattr(error, "stderr", None) or error
        say_to_stderr(
            f"run-train: job {job} could not be put back into the queue ({str(said).strip()}): submit it again"
        )
        return 1
    say_to_stderr(f"run-train: job {job} is back in the queue, and will continue the run")
    return code


def _is_to_continue(fields: Mapping[str, str]) -> bool:
    """Return whether a job was stopped by its time limit, by a preemption, or by a signal before them.

    `scancel` sends SIGTERM too, but means it: the job then has ended, without a reason.
    """
    return fields.get("JobState") in ("RUNNING", "TIMEOUT", "PREEMPTED") or fields.get("Reason") == "TimeLimit"


def _ask(*words: str) -> str:
    done = subprocess.run(["scontrol", *words], capture_output=True, text=True, timeout=_ASK_S, check=True)
    return done.stdout
