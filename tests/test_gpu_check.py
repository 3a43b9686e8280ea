"""scripts/gpu-check: what it looks for, how it divides its time, what it kills, and what its report says."""

import ast
import io
import json
import math
import os
import subprocess
import sys
import tarfile
import time
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from scripts.card_check import check as check_module
from scripts.card_check.check import Check, environment_of
from scripts.card_check.limited import run_limited
from scripts.card_check.parts import (
    Command,
    Conclusion,
    Part,
    Plan,
    all_measured,
    compare_losses,
    none_skipped,
)
from scripts.card_check.report import Report
from scripts.card_check.requirements import find_missing, find_unsupported, read_project, required
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
GPU_CHECK = ROOT / "scripts/gpu-check"
PROJECT = read_project(ROOT)
# Starts a child in a group of its own, which neither a signal to the group nor SIGTERM ends, and says which.
HANGS = """
import signal, subprocess, sys, time
child = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
print(subprocess.Popen([sys.executable, "-c", child], process_group=0).pid, flush=True)
"""


def python(program):
    return (sys.executable, "-c", program)


def part(name, *programs, share=1.0, limits=None, conclude=Conclusion):
    def commands(limit_s):
        if limits is not None:
            limits.append(limit_s)
        return tuple(Command(f"{name} {number}", python(program)) for number, program in enumerate(programs))

    return Part(name, share, commands, conclude)


def plan(folder, **values):
    fixed: dict[str, Any] = {"is_rehearsal": False, "is_timed": False, "repeats": 3, "case": "", "cifar": None}
    return Plan(out=folder / "out", work=folder / "work", **(fixed | {"has_torch_python": False} | values))


@pytest.fixture
def checked(tmp_path):
    """Return a function that runs parts and returns the check and its report."""

    def run(*parts, until=math.inf):
        made = plan(tmp_path)
        made.out.mkdir(exist_ok=True)
        report = Report(made.out / "report.txt")
        check = Check(made, parts, report, environment_of(is_rehearsal=True), until)
        check.run()
        return check, report.path.read_text(encoding="utf-8")

    return run


def is_running(process_id):
    try:
        return Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


# What it looks for


def test_every_dependency_is_looked_for_and_what_is_not_there_is_named():
    wanted = required(PROJECT)
    assert set(PROJECT["dependencies"]) - set(wanted) == {next(e for e in PROJECT["dependencies"] if e[:4] == "jax>")}
    assert PROJECT["optional-dependencies"]["cuda"][0] in wanted
    assert find_missing(wanted) == {}
    assert find_missing(["numpy>=2", "no-such-package>=1"]) == {"no-such-package>=1": "is not installed"}
    assert find_unsupported(["numpy>=99", "pytest>=8"])[0].endswith(", but numpy>=99 is supported")


def test_whatever_the_project_imports_at_once_is_a_dependency():
    homes = packages_distributions()
    known = {each.split(">")[0] for each in PROJECT["dependencies"]} | {"ml_dtypes"}  # without which jax has no import
    for package in ("engine", "preprocess", "models"):
        for path in (ROOT / package).rglob("*.py"):
            if path.stem == "dask_worker":  # on a cluster's worker, which has the extra
                continue
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
                for top in {name.partition(".")[0] for name in names}:
                    ours = top == "loopfeed" or top in sys.stdlib_module_names
                    assert ours or {each.lower() for each in homes[top]} & known, f"{path}: {top}"


# Time


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="sessions are found in /proc")
@pytest.mark.parametrize("ending", ["", "time.sleep(600)"], ids=["ends", "hangs"])
def test_a_command_is_killed_with_all_that_it_started(tmp_path, ending):
    log = tmp_path / "log"
    with log.open("wb") as file:
        outcome = run_limited(python(HANGS + ending), log=file, limit_s=4, environment=os.environ, folder=tmp_path)
    assert outcome.code == (None if ending else 0)
    child = int(log.read_text(encoding="utf-8"))
    wait_until(lambda: not is_running(child))


def test_a_part_that_fails_or_hangs_is_reported_and_the_others_go_on(checked, tmp_path, monkeypatch):
    monkeypatch.setattr(check_module, "_LEAST_S", 0.0)
    (tmp_path / "card.json").write_text("{}", encoding="utf-8")
    sees = f"print(open({str(tmp_path / 'out/report.txt')!r}).read().splitlines()[-1])"
    check, report = checked(
        part("bad", "import sys; print('no kernel'); sys.exit(3)", "print('still run')"),
        part("hangs", "import time; print('begun', flush=True); time.sleep(600)", share=3e-6),
        part("good", sees),
        part("wrong", "print('ran')", conclude=lambda: Conclusion(("they differ",), False)),
        part("unreadable", conclude=lambda: all_measured(tmp_path / "card.json")),
        until=time.monotonic() + 4e6,  # of which the part that hangs gets three seconds
    )
    assert check.failed == ["bad", "hangs", "wrong", "unreadable"]
    lines = report.splitlines()
    heads = [line.split(":")[0] for line in lines if line.startswith("== ") and ";" in line]
    assert heads == ["== bad", "== hangs", "== good", "== wrong", "== unreadable"]
    assert lines[lines.index("no kernel") - 1].startswith("-- bad 0: exit code 3")
    assert "still run" in lines
    assert "== not finished: good, wrong, unreadable" in lines  # as the part "good" saw it
    assert "they differ" in lines
    assert "its results cannot be read: KeyError: 'benches'" in lines


# What is concluded


@pytest.mark.parametrize(
    ("fast", "slow", "is_right", "words"),
    [
        ([2.0, 1.0], [2.0, 1.0], True, "the first 2 are the same to the bit"),
        ([2.0, 1.0], [2.0, 1.0005], True, "the first 1 are the same to the bit"),
        ([2.0, 1.0], [2.0, 1.01], False, "largest relative difference: 0.0099"),
        ([2.0], [2.0, 1.0], False, "cuda: 1 losses, callback: 2 losses"),
        ([float("nan")], [float("nan")], False, "finite"),
        ([], [], False, "both must have all of them"),
        ([1.0] * 20 + [2.0], [1.0] * 20 + [3.0], True, "0 in the first 20 (must be ≤ 0.001), 0.33 in all"),
    ],
)
def test_two_transports_make_the_same_steps(fast, slow, is_right, words):
    found = compare_losses(fast, slow, "cuda", "callback")
    assert found.is_right is is_right
    assert words in " ".join(found.lines)


@pytest.mark.parametrize(
    ("body", "on_card", "rehearsed"),
    [("<testcase/>", True, False), ("<testcase><skipped/></testcase>", False, True), ("", False, False)],
)
def test_tests_that_are_skipped_on_a_card_have_failed(tmp_path, body, on_card, rehearsed):
    results = tmp_path / "results.xml"
    assert not none_skipped(results, is_rehearsal=False).is_right
    results.write_text(f"<testsuites><testsuite>{body}</testsuite></testsuites>", encoding="utf-8")
    assert none_skipped(results, is_rehearsal=False).is_right is on_card
    assert none_skipped(results, is_rehearsal=True).is_right is rehearsed


@pytest.mark.parametrize(
    ("reason", "is_right", "line"),
    [
        (
            "exit code 1; log ends with:\n    ModuleNotFoundError: No module named 'torch'",
            True,
            "PyTorch is not installed",
        ),
        ("ended with exit code 1\n    out of memory", False, "ended with exit code 1"),
        (None, False, "no reason was given"),
    ],
)
def test_a_candidate_without_figures_is_named_and_only_pytorch_may_be_absent(tmp_path, reason, is_right, line):
    rows = [{"name": "ours", "speed": {"median": 1}, "reason": None}, {"name": "b", "speed": None, "reason": reason}]
    document = {"benches": [{"cases": [{"candidates": rows}]}]}
    (tmp_path / "card.json").write_text(json.dumps(document), encoding="utf-8")
    assert all_measured(tmp_path / "card.json") == Conclusion((f"not measured: b: {line}",), is_right)
    assert not all_measured(tmp_path / "none.json").is_right


# From the command


def gpu_check(*arguments, cwd=ROOT, **environment):
    variables = os.environ | {"PYTHON": sys.executable} | environment
    return subprocess.run(
        [GPU_CHECK, *arguments], env=variables, cwd=cwd, capture_output=True, text=True, timeout=580, check=False
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--fast",), "unrecognized arguments: --fast; see scripts/gpu-check --help"),
        (("--out",), "--out: expected one argument"),
        (("--repeats", "some"), "--repeats: must be a whole number ≥ 1, got 'some'"),
        (("--minutes", "0"), "--minutes: must be from 1 to 1440, got '0'"),
        (("--minutes", "nan"), "--minutes: must be from 1 to 1440, got 'nan'"),
        (("--cifar", ""), "--cifar must be a folder with train and test (or val), or a tar archive of one"),
        (("--cifar", "README.md"), "got 'README.md'; see data/README.md"),
    ],
)
def test_wrong_usage_is_refused(arguments, words):
    done = gpu_check(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_a_missing_package_or_card_is_named_before_anything_starts(tmp_path):
    done = gpu_check("--out", "report", cwd=tmp_path)
    assert done.returncode == 2
    assert "sees no NVIDIA card" in done.stderr or "jax found no device with JAX_PLATFORMS=cuda,cpu" in done.stderr
    assert "nvidia-smi must list a card with driver 580 or newer" in done.stderr
    (tmp_path / "google_crc32c.py").write_text("raise ImportError('no such library')\n", encoding="utf-8")
    done = gpu_check("--out", "report", cwd=tmp_path, PYTHONPATH=".")
    assert done.returncode == 2
    assert "google-crc32c>=1.6,<2 cannot be imported (ImportError: no such library)" in done.stderr
    assert "--target .site" in done.stderr
    assert not (tmp_path / "report").exists()


@pytest.fixture
def archive(tmp_path):
    """Return an archive as that of CIFAR-10, with a few images."""
    path = tmp_path / "cifar10.tar.gz"
    with tarfile.open(path, "w:gz") as made:
        for index in range(32):
            file = io.BytesIO()
            Image.new("RGB", (32, 32), (8 * index, 90, 40)).save(file, "JPEG")
            member = tarfile.TarInfo(f"cifar10/{'train' if index < 16 else 'test'}/c{index % 2}/{index:04d}.jpg")
            member.size = file.tell()
            file.seek(0)
            made.addfile(member, file)
    return path


@pytest.mark.integration
@pytest.mark.timeout(600)
def test_a_rehearsal_runs_every_part(archive, tmp_path):
    done = gpu_check("--rehearse", "--minutes", "18", "--cifar", archive.name, "--out", "report", cwd=tmp_path)
    report = (tmp_path / "report/report.txt").read_text(encoding="utf-8")
    assert done.returncode == 0, report
    lines = report.splitlines()
    assert lines[1].startswith("REHEARSAL on the processor")
    heads = [line for line in lines if line.startswith("== ")]
    assert [line.split(";")[0] for line in heads] == [
        *(f"== {name}: right" for name in ("transports", "tests", "benchmarks", "cifar", "trace")),
        "== all of the parts that ran are right",
    ]
    assert "inplace: 24 losses, callback: 24 losses; the first 24 are the same to the bit" in lines
    assert "the losses of both runs are the same to the bit" in lines
    # All that is carried away from a machine that is lent: eight files.
    assert len(list((tmp_path / "report").iterdir())) <= 8
