"""The benchmark's case beside a busy process: the process, the share of the cores, and the rows of a result."""

import math
import signal
import sys
import textwrap
from itertools import count
from pathlib import Path

import pytest

from scripts.benchmarks import bench as bench_module
from scripts.benchmarks.bench import Candidate, Case, Settings, Unit
from scripts.benchmarks.neighbour import Neighbour
from scripts.benchmarks.report import case_text
from scripts.benchmarks.session import Quartiles, Row, compare, run_case
from scripts.benchmarks.worker import Ready, Sample
from tests.waiting import wait_until

CANDIDATES = Path(__file__).parents[1] / "scripts/benchmarks/candidates"
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


class FakeNeighbour(Neighbour):
    """A neighbour that has half a second of a core whenever one looks."""

    def __init__(self):
        self.sent, self.times_s = [], count(0, 0.5)

    def send(self, number):
        self.sent.append(number)

    def cpu_s(self):
        return next(self.times_s)


def state_of(pid):
    """Return the state of a process, such as "T" if it is stopped; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def beside_candidates(target=None):
    beside = Candidate("ours, beside", "honest.py", beside="ours", target=target)
    return Candidate("ours", "honest.py", (0.5,)), beside


def test_the_neighbour_is_busy_only_while_the_work_runs(monkeypatch):
    clock = count(100.0, 2.0)
    monkeypatch.setattr("scripts.benchmarks.neighbour.time.perf_counter", lambda: next(clock))
    neighbour = FakeNeighbour()

    def run(num_units, timeout_s):
        assert neighbour.sent == [signal.SIGCONT]
        return Sample(1.5 * num_units, {"waited": timeout_s})

    assert neighbour.run_beside(run, 2, 7.0) == Sample(3.0, {"waited": 7.0, "neighbour's cores": 0.25})
    assert neighbour.sent == [signal.SIGCONT, signal.SIGSTOP]
    monkeypatch.setattr(neighbour, "cpu_s", lambda: math.nan)  # the system does not tell
    neighbour.sent.clear()
    assert neighbour.run_beside(run, 2, 7.0) == Sample(3.0, {"waited": 7.0})


@needs_proc
def test_a_neighbour_computes_between_its_signals_and_is_killed():
    with Neighbour() as neighbour:
        pid = neighbour.process_id
        wait_until(lambda: state_of(pid) == "T")
        before_s = neighbour.cpu_s()
        neighbour.send(signal.SIGCONT)
        wait_until(lambda: neighbour.cpu_s() > before_s + 0.05)
        neighbour.send(signal.SIGSTOP)
        wait_until(lambda: state_of(pid) == "T")
    assert state_of(pid) == ""


@pytest.mark.parametrize(("target", "is_met"), [(None, None), (1.0, True), (1.01, False)])
def test_a_row_beside_is_compared_with_its_share_of_the_speed_alone(monkeypatch, target, is_met):
    monkeypatch.setattr("scripts.benchmarks.session.num_cores", lambda: 2)
    seconds = ([1.0, 2.0, 4.0], [2.0, 2.0, 6.0])
    alone, beside = (
        Row(candidate, Ready(6, {}, {}, 1.0), None, 1, [Sample(s, {}) for s in row_seconds])
        for candidate, row_seconds in zip(beside_candidates(target), seconds, strict=True)
    )
    compare([alone, beside], 1e-4)
    assert (alone.kept, beside.ratio) == (None, None)
    # 1/2, 1 and 2/3 of the speed alone, each of two thirds
    assert beside.kept == pytest.approx(Quartiles((3 / 4 + 1) / 2, 1.0, (1 + 3 / 2) / 2))
    assert beside.is_met is is_met


HONEST = """
    import sys
    from protocol import Channel
    channel = Channel()
    channel.ready(10, facts={"threads": 2})
    channel.serve(lambda units: units * float(sys.argv[1]))
"""
DIES = """
    import os, sys
    from protocol import Channel
    Channel().ready(1)
    sys.stdin.readline()
    os.kill(os.getpid(), 9)
"""


@pytest.fixture
def run_beside(tmp_path, monkeypatch):
    """Run the case with the source of its candidate; return the result and what was said."""
    (tmp_path / "protocol.py").write_text((CANDIDATES / "protocol.py").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(bench_module, "CANDIDATES", tmp_path)
    monkeypatch.setattr("scripts.benchmarks.session.num_cores", lambda: 2)

    def run(source):
        (tmp_path / "honest.py").write_text(textwrap.dedent(source), encoding="utf-8")
        said: list[str] = []
        case = Case("a case", Unit("images/s"), beside_candidates(), round_s=1.0)
        return run_case(case, Settings(tmp_path, repeats=2), say=said.append), said

    return run


def test_a_candidate_is_measured_beside_the_neighbour_in_the_same_process(run_beside):
    result, said = run_beside(HONEST)
    assert [line for line in said if "preparing" in line] == ["a case: preparing ours"]
    alone, beside = result.rows
    assert (alone.speed, beside.speed) == (Quartiles(20, 20, 20), Quartiles(20, 20, 20))
    assert beside.kept == pytest.approx(Quartiles(1.5, 1.5, 1.5))
    printed = case_text("b", result.to_json())
    assert "| ours, beside |       20 | ±0.0 % | keeps 1.50 [1.50–1.50] of its share |" in printed
    assert printed.count("threads 2") == 1
    if result.load_before is not None:
        assert f"### b: a case (load {result.load_before[0]:g} before, " in printed


def test_a_candidate_that_dies_alone_has_a_reason_beside_too(run_beside):
    result, _ = run_beside(DIES)
    assert ["was killed by signal 9" in row.reason for row in result.rows] == [True, True]
