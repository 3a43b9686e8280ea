"""A Slurm cluster of one node on this machine for tests, without authentication and without root's rights."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

# Where scripts/test --integrations unpacks Debian's packages if Slurm is not installed.
_UNPACKED = Path(__file__).parents[1] / ".venv/slurm"
_START_S = 30


def _program(name: str) -> Path | None:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is not None:
        return Path(found)
    unpacked = [_UNPACKED / f"usr/{folder}/{name}{suffix}" for folder in ("bin", "sbin") for suffix in ("", "-wlm")]
    return next((path for path in unpacked if path.is_file()), None)


def need_slurm() -> None:
    """Skip the test if Slurm is neither installed nor unpacked."""
    if _program("slurmctld") is None or _program("slurmd") is None:
        pytest.skip("Slurm is not installed, and scripts/test --integrations did not unpack it (Debian: slurm-wlm)")
    try:  # as its daemons look for addresses
        socket.getaddrinfo(None, 6817, socket.AF_INET, flags=socket.AI_ADDRCONFIG)
    except socket.gaierror:
        pytest.skip("Slurm needs an IPv4 address besides that of the loopback, which this machine does not have")


class SlurmCluster:
    """A controller and a node; as a context manager, it stops both on exit.

    Args:
        folder: for its configuration, state and logs.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True)
        for name in ("state", "spool"):
            (folder / name).mkdir()
        libraries = next((_UNPACKED / "usr/lib").glob("*/slurm-wlm"), None)
        is_unpacked = libraries is not None and str(_program("slurmctld")).startswith(str(_UNPACKED))
        self._environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        if is_unpacked:
            assert libraries is not None
            self._environment["LD_LIBRARY_PATH"] = f"{libraries}:{libraries.parent}"
        (folder / "slurm.conf").write_text(_configuration(folder, libraries if is_unpacked else None))
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> SlurmCluster:
        stepd = _program("slurmstepd")
        for words in (["slurmctld", "-D", "-c"], ["slurmd", "-D", "-c", *(["-d", str(stepd)] if stepd else [])]):
            with (self._folder / f"{words[0]}.out").open("w") as output:
                self._daemons.append(
                    subprocess.Popen(
                        [str(_program(words[0])), *words[1:]],
                        env=self._environment,
                        stdout=output,
                        stderr=subprocess.STDOUT,
                    )
                )
        deadline = time.monotonic() + _START_S
        while "idle" not in self.call("sinfo", "-h", "-o", "%T", check=False):
            assert time.monotonic() < deadline, self.logs()
            time.sleep(0.2)
        return self

    def __exit__(self, *_: object) -> None:
        self.call("scancel", f"--user={getpass.getuser()}", check=False)
        deadline = time.monotonic() + _START_S
        while self.call("squeue", "-h", check=False) and time.monotonic() < deadline:
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()

    def call(self, name: str, *arguments: str, check: bool = True, path: str | None = None) -> str:
        """Return what a command of Slurm prints; PATH is that of this process, unless given."""
        done = subprocess.run(
            [str(_program(name)), *arguments],
            env=self._environment | ({} if path is None else {"PATH": path}),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert not check or done.returncode == 0, done.stdout + done.stderr + self.logs()
        return done.stdout.strip()

    def submit(self, script: Path, folder: Path, *options: str) -> str:
        """Submit a job script with the programs of its folder, and return the number of the job."""
        commands = str(_program("srun"))
        path = os.pathsep.join([str(script.parent), str(Path(commands).parent), os.environ.get("PATH", "")])
        return self.call("sbatch", "--parsable", f"--chdir={folder}", *options, str(script), path=path)

    def field(self, job: str, name: str) -> str:
        """Return a field of a job, such as JobState."""
        words = self.call("scontrol", "show", "job", "-o", job).split()
        return next(word.partition("=")[2] for word in words if word.startswith(f"{name}="))

    def logs(self) -> str:
        """Return the logs of the daemons."""
        return "".join(path.read_text(errors="replace") for path in self._folder.glob("*.out"))


def _configuration(folder: Path, libraries: Path | None) -> str:
    """Return slurm.conf: <https://slurm.schedmd.com/slurm.conf.html>."""
    ports = []
    for _ in range(2):
        with socket.create_server(("127.0.0.1", 0)) as free:
            ports.append(free.getsockname()[1])
    user, host = getpass.getuser(), socket.gethostname().partition(".")[0]
    lines = [
        "ClusterName=loopfeed-tests",
        f"SlurmctldHost={host}(127.0.0.1)",
        f"SlurmUser={user}",
        f"SlurmdUser={user}",
        "AuthType=auth/none",
        "CredType=cred/none",
        # A job that went back into the queue starts again after this time: two minutes, by default.
        "AuthInfo=cred_expire=5",
        f"SlurmctldPort={ports[0]}",
        f"SlurmdPort={ports[1]}",
        f"StateSaveLocation={folder}/state",
        f"SlurmdSpoolDir={folder}/spool",
        f"SlurmctldPidFile={folder}/slurmctld.pid",
        f"SlurmdPidFile={folder}/slurmd.pid",
        # Signals reach every process of a step, as with cgroups.
        "ProctrackType=proctrack/linuxproc",
        "TaskPlugin=task/none",
        "SelectType=select/cons_tres",
        "SelectTypeParameters=CR_CPU",
        "SwitchType=switch/none",
        "MpiDefault=none",
        "JobAcctGatherType=jobacct_gather/none",
        "AccountingStorageType=accounting_storage/none",
        "ReturnToService=2",
        "KillWait=5",
        "SlurmdParameters=config_overrides",
        "SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1",
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN",
        f"PartitionName=main Nodes={host} Default=YES MaxTime=INFINITE State=UP",
    ]
    if libraries is not None:
        lines.append(f"PluginDir={libraries}")
    return "\n".join(lines) + "\n"
