"""The benchmark's case beside a busy process: the process, the share of the cores, and the rows of a result."""

import os
import sys
import textwrap
from pathlib import Path

import pytest

from scripts.benchmarks import bench as bench_module
from scripts.benchmarks.bench import Candidate, Case, Settings, Unit
from scripts.benchmarks.report import case_text
from scripts.benchmarks.session import Quartiles, Row, compare, run_case
from scripts.benchmarks.worker import Ready, Sample, Worker, WorkerError
from tests.waiting import wait_until

CANDIDATES = Path(__file__).parents[1] / "scripts/benchmarks/candidates"
needs_proc = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


def state_of(pid):
    """Return the state of a process, such as "T" if it is stopped; "" if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return ""


def beside_candidates(target=None):
    beside = Candidate("ours, beside", "honest.py", (0.5,), beside="ours", target=target)
    return Candidate("ours", "honest.py", (0.5,)), beside


def start(tmp_path, source):
    (tmp_path / "candidate.py").write_text(textwrap.dedent(source), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(CANDIDATES), "LOOPFEED_BENCH_NEIGHBOUR": "1"}
    command = [sys.executable, str(tmp_path / "candidate.py")]
    return Worker(command, tmp_path / "log", environment=environment, cwd=tmp_path)


@needs_proc
def test_the_neighbour_is_busy_only_while_the_work_runs_and_is_killed(tmp_path):
    source = """
        import time
        from protocol import Channel
        channel = Channel()
        channel.ready(1, facts={})
        def run(units):
            time.sleep(0.3)
            return 0.3, {"neighbour": channel._neighbour}
        channel.serve(run)
    """
    with start(tmp_path, source) as worker:
        worker.wait_ready(20)
        values = worker.run(1, 20).values
        neighbour = int(values["neighbour"])
        assert 0 < values["neighbour's cores"] < 1.5
        wait_until(lambda: state_of(neighbour) == "T")
    wait_until(lambda: state_of(neighbour) in ("", "Z"))


@needs_proc
def test_the_neighbour_ends_with_its_candidate(tmp_path):
    source = """
        import os, protocol
        channel = protocol.Channel()
        channel.ready(1)
        print(channel._neighbour, flush=True)
        channel.serve(lambda units: os._exit(3))
    """
    worker = start(tmp_path, source)
    worker.wait_ready(20)
    with pytest.raises(WorkerError, match="exit code 3"):
        worker.run(1, 20)
    neighbour = int((tmp_path / "log").read_text())
    wait_until(lambda: state_of(neighbour) in ("", "Z"))


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


def test_a_candidate_is_measured_alone_and_beside_a_neighbour(tmp_path, monkeypatch):
    (tmp_path / "protocol.py").write_text((CANDIDATES / "protocol.py").read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "honest.py").write_text(textwrap.dedent(HONEST), encoding="utf-8")
    monkeypatch.setattr(bench_module, "CANDIDATES", tmp_path)
    monkeypatch.setattr("scripts.benchmarks.session.num_cores", lambda: 2)
    case = Case("a case", Unit("images/s"), beside_candidates(), round_s=1.0)
    result = run_case(case, Settings(tmp_path, repeats=2), say=lambda _: None)
    alone, beside = result.rows
    assert (alone.speed, beside.speed) == (Quartiles(20, 20, 20), Quartiles(20, 20, 20))
    assert beside.kept == pytest.approx(Quartiles(1.5, 1.5, 1.5))
    assert "neighbour's cores" not in alone.medians()
    printed = case_text("b", result.to_json())
    assert "| ours, beside |       20 | ±0.0 % | keeps 1.50 [1.50–1.50] of its share |" in printed
    assert printed.count("threads 2") == 1
    if result.load_before is not None:
        assert f"### b: a case (load {result.load_before[0]:g} before, " in printed
