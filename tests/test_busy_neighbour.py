"""The benchmark's case beside a busy process: the process, the share of the cores, and the rows of a result."""

import sys
import textwrap
from pathlib import Path

import pytest

from scripts.benchmarks import bench as bench_module
from scripts.benchmarks.bench import IMAGES_PER_S, Candidate, Case, Settings
from scripts.benchmarks.markdown import case_text
from scripts.benchmarks.measure import Measured, Quartiles
from scripts.benchmarks.neighbour import BesideNeighbour, Neighbour
from scripts.benchmarks.session import CaseResult, Row, run_case, summarise
from scripts.benchmarks.worker import Sample
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
CANDIDATES = ROOT / "scripts/benchmarks/candidates"
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class FakeNeighbour(Neighbour):
    """A neighbour that has a quarter of a core while it is busy."""

    def __init__(self, clock):
        self.clock, self.calls = clock, []

    def resume(self):
        self.calls.append("resume")

    def pause(self):
        self.calls.append("pause")

    def cpu_s(self):
        return self.clock() / 4


class FakeRunner:
    """A runner that takes two seconds of a clock, or fails."""

    def __init__(self, sleep, error=None):
        self.sleep, self.error = sleep, error

    def run(self, num_units, timeout_s):
        self.sleep(2.0)
        if self.error is not None:
            raise self.error
        return Sample(1.5 * num_units, {"waited": timeout_s})


@pytest.fixture
def clock(monkeypatch):
    """A clock that only a call of its second function moves on."""
    now = [100.0]
    monkeypatch.setattr("scripts.benchmarks.neighbour.time.perf_counter", lambda: now[0])

    def sleep(seconds):
        now[0] += seconds

    return (lambda: now[0]), sleep


def state_of(pid):
    """Return the state of a process, such as "T" if it is stopped; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def beside_case(**values):
    candidates = (Candidate("ours", "honest.py", ("0.5",)), Candidate("ours, beside", "honest.py", beside="ours"))
    return Case("a case", IMAGES_PER_S, "ours", candidates, round_s=1.0, **values)


def test_the_neighbour_is_busy_only_while_the_work_runs(clock):
    now, sleep = clock
    neighbour = FakeNeighbour(now)
    sample = BesideNeighbour(FakeRunner(sleep), neighbour).run(2, 7.0)
    assert sample == Sample(3.0, {"waited": 7.0, "neighbour's cores": 0.25})
    assert neighbour.calls == ["resume", "pause"]


@needs_proc
def test_a_neighbour_computes_between_resume_and_pause_and_is_killed():
    with Neighbour() as neighbour:
        pid = neighbour.process_id
        wait_until(lambda: state_of(pid) == "T")
        before_s = neighbour.cpu_s() or 0.0
        neighbour.resume()
        wait_until(lambda: (neighbour.cpu_s() or 0.0) > before_s + 0.05)
        neighbour.pause()
        wait_until(lambda: state_of(pid) == "T")
    assert state_of(pid) == ""


def test_a_row_beside_is_compared_with_its_share_of_the_speed_alone(monkeypatch):
    monkeypatch.setattr("scripts.benchmarks.session.num_cores", lambda: 2)
    case = beside_case()
    seconds = {"ours": [1.0, 2.0, 4.0], "ours, beside": [2.0, 2.0, 6.0]}
    rows = [Row(each, Measured(6, 1, [Sample(s, {}) for s in seconds[each.name]]), None) for each in case.candidates]
    summarise(case, rows)
    alone, beside = rows
    assert (alone.kept, beside.ratio) == (None, None)
    # 1/2, 1 and 2/3 of the speed alone, each of two thirds
    assert beside.kept == pytest.approx(Quartiles((3 / 4 + 1) / 2, 1.0, (1 + 3 / 2) / 2))
    assert beside.is_met is None
    for target, is_met in ((1.0, True), (1.01, False)):
        beside.candidate = Candidate("ours, beside", "honest.py", beside="ours", target=target)
        assert beside.is_met is is_met


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Write candidates: one whose unit takes as many seconds as its argument says, and one that is dead."""
    folder = tmp_path / "candidates"
    folder.mkdir()
    (folder / "protocol.py").write_text((CANDIDATES / "protocol.py").read_text(encoding="utf-8"), encoding="utf-8")
    honest = """
        import sys
        from protocol import Channel
        channel = Channel()
        channel.ready(10, facts={"threads": 2})
        channel.serve(lambda units: units * float(sys.argv[1]))
    """
    (folder / "honest.py").write_text(textwrap.dedent(honest), encoding="utf-8")
    monkeypatch.setattr(bench_module, "CANDIDATES", folder)
    monkeypatch.setattr("scripts.benchmarks.session.num_cores", lambda: 2)
    return folder


def test_a_candidate_is_measured_beside_the_neighbour_in_the_same_process(scripts, tmp_path):
    settings = Settings(tmp_path, repeats=2)
    said: list[str] = []
    result = run_case(beside_case(), settings, say=said.append)
    assert [line for line in said if "preparing" in line] == ["a case: preparing ours"]
    alone, beside = result.rows
    assert (alone.speed, beside.speed) == (Quartiles(20, 20, 20), Quartiles(20, 20, 20))
    assert beside.kept == pytest.approx(Quartiles(1.5, 1.5, 1.5))
    printed = case_text("b", result.to_json())
    assert "| ours, beside |       20 | ±0.0 % | keeps 1.50 [1.50–1.50] of its share |" in printed
    assert printed.count("threads 2") == 1
    if result.load_before is not None:
        assert f"### b: a case (load {result.load_before[0]:g} before, " in printed


def test_a_candidate_that_dies_alone_has_a_reason_beside_too(scripts, tmp_path):
    dies = """
        import os, sys
        from protocol import Channel
        Channel().ready(1)
        sys.stdin.readline()
        os.kill(os.getpid(), 9)
    """
    (scripts / "honest.py").write_text(textwrap.dedent(dies), encoding="utf-8")
    result = run_case(beside_case(), Settings(tmp_path, repeats=1), say=lambda _: None)
    assert isinstance(result, CaseResult)
    assert ["was killed by signal 9" in row.measured.reason for row in result.rows] == [True, True]
