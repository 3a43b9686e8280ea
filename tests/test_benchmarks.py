"""The benchmark suite: its arithmetic, the order of its rounds, and the handling of failing candidates."""

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

import pytest
from click.testing import CliRunner

from scripts.benchmarks import bench as bench_module
from scripts.benchmarks.bench import Bench, Candidate, Case, Settings, Unit
from scripts.benchmarks.cases import BENCHES
from scripts.benchmarks.cli import main
from scripts.benchmarks.peers import PEERS
from scripts.benchmarks.report import describe_run, write_json
from scripts.benchmarks.report import main as markdown
from scripts.benchmarks.session import CaseResult, Quartiles, Row, compare, measure, quartiles, run_case
from scripts.benchmarks.worker import Ready, Sample, Worker, WorkerError
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
IMAGES_PER_S = Unit("images/s")
CANDIDATES = ROOT / "scripts/benchmarks/candidates"
# A candidate that pretends: a unit takes as many seconds as its argument says.
HONEST = """
    import sys
    from protocol import Channel
    channel = Channel()
    print("this goes to the log", flush=True)
    channel.ready(10, versions={"clock": "1"}, facts={"first loss": float(sys.argv[1])})
    channel.serve(lambda units: (units * float(sys.argv[2]), {"waited": 7.0}))
"""
DEAD = "import sys; print('no such card', file=sys.stderr); sys.exit(3)"
DIES_LATER = """
    import os, sys
    print('{"ready": true, "amount": 1, "versions": {}, "facts": {}}', flush=True)
    sys.stdin.readline()
    print("out of memory", file=sys.stderr, flush=True)
    os.kill(os.getpid(), 9)
"""
HANGS = """
    import subprocess, sys, time
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(600)
"""
RUBBISH = "print('hello'); input()"


@pytest.fixture
def settings(tmp_path):
    return Settings(tmp_path, repeats=3)


@pytest.fixture
def scripts(tmp_path, monkeypatch):
    """Write scripts of candidates beside the protocol, and start them from there."""
    folder = tmp_path / "candidates"
    folder.mkdir()
    (folder / "protocol.py").write_text((CANDIDATES / "protocol.py").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(bench_module, "CANDIDATES", folder)

    def write(**sources):
        for name, source in sources.items():
            (folder / f"{name}.py").write_text(textwrap.dedent(source), encoding="utf-8")

    return write


def start(tmp_path, source, **values):
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(source), encoding="utf-8")
    environment = os.environ | {"PYTHONPATH": str(CANDIDATES)}
    return Worker(
        [sys.executable, str(script), *values.get("arguments", ())],
        tmp_path / "log",
        environment=environment,
        cwd=tmp_path,
    )


def is_running(pid):
    """Return whether a process exists and is not a zombie."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0] not in "ZX"
    except ProcessLookupError:
        return False
    except FileNotFoundError:  # no /proc, or gone by now
        return not Path("/proc/self").exists()


# The arithmetic, against numbers worked out by hand


def test_quartiles_are_interpolated_between_the_values():
    # Of 1 2 3 4: positions 0.75, 1.5 and 2.25 of 0 … 3.
    assert quartiles([4, 1, 3, 2]) == Quartiles(1.75, 2.5, 3.25)
    assert quartiles([5]) == Quartiles(5, 5, 5)
    assert quartiles([]) is None
    assert Quartiles(90, 100, 120).spread == 0.15


def measured(candidate, seconds, **values):
    """Return a row of a candidate whose rounds of one unit, an amount of 6, took so many seconds."""
    return Row(candidate, Ready(6, {}, {}, 1.0), None, 1, [Sample(s, {"v": s}) for s in seconds], **values)


def test_the_base_is_divided_by_each_other_candidate():
    ours = measured(Candidate("ours", "", target=1.5), [1.0, 2.0, 4.0])
    theirs = measured(Candidate("theirs", "", target=1.5), [2.0, 2.0, 2.0])
    compare([ours, theirs], 1e-4)
    assert ours.ratio is None
    assert ours.speed == Quartiles(2.25, 3, 4.5)  # of 6, 3 and 1.5
    assert theirs.ratio == Quartiles(0.75, 1, 1.5)  # of 2, 1 and 0.5
    assert (ours.is_met, theirs.is_met) == (None, False)
    assert ours.medians() == {"v": 2}


# The order of the rounds


def test_rounds_interleave_all_candidates():
    order: list[tuple[str, int]] = []

    def fake(name, num_units, timeout_s):
        order.append((name, num_units))
        return Sample(0.5 * num_units, {})

    rows = [Row(Candidate(name, ""), run=partial(fake, name)) for name in "abc"]
    measure(rows, repeats=4, round_s=1.0)
    assert [name for name, _ in order[3:]] == list(chain("abc", "bca", "cab", "abc"))
    assert {count for _, count in order[3:]} == {2}  # units of half a second, rounds of one
    assert [len(row.samples) for row in rows] == [4, 4, 4]


# Processes


def test_a_worker_describes_itself_and_answers(tmp_path):
    with start(tmp_path, HONEST, arguments=("2.5", "0.25")) as worker:
        ready = worker.wait_ready(20)
        assert (ready.amount, ready.versions, ready.facts) == (10, {"clock": "1"}, {"first loss": 2.5})
        assert worker.run(4, 20) == Sample(1.0, {"waited": 7.0})
    assert "this goes to the log" in (tmp_path / "log").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (DEAD, r"(?s)ended with exit code 3.*no such card"),
        (RUBBISH, "sent something other than an answer: b'hello'"),
        ("print('[1, 2]'); input()", r"sent something other than a ready message: \[1, 2\]"),
        (HANGS, "took more than 0.5 s to be ready"),
    ],
)
def test_a_worker_that_is_not_ready_reports_the_reason(tmp_path, source, message):
    worker = start(tmp_path, source)
    with pytest.raises(WorkerError, match=message):
        worker.wait_ready(0.5 if source == HANGS else 20)
    assert not is_running(worker.process_id)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ('print(\'{"seconds": 0, "values": {}}\', flush=True)', "sent something other than seconds"),
        ("print('{', flush=True)", "sent something other than an answer"),
        ("import time; time.sleep(600)", "took more than 0.5 s to do 2 units"),
        ("sys.exit(4)", "ended with exit code 4"),
    ],
)
def test_a_worker_that_does_not_answer_is_an_error_with_a_reason(tmp_path, answer, message):
    said = '{"ready": true, "amount": 1, "versions": {}, "facts": {}}'
    source = f"import sys\nprint('{said}', flush=True)\nsys.stdin.readline()\n{answer}\ninput()\n"
    with start(tmp_path, source) as worker:
        worker.wait_ready(20)
        with pytest.raises(WorkerError, match=message):
            worker.run(2, 0.5 if "sleep" in answer else 20)


def test_candidates_are_paused_between_their_turns(tmp_path):
    # It counts all the time, and says how far it has come.
    source = """
        import sys, threading, time
        from protocol import Channel
        channel, counted = Channel(), [1.0]
        def count():
            while True:
                counted[0] += 1
                time.sleep(0.001)
        threading.Thread(target=count, daemon=True).start()
        channel.ready(1)
        channel.serve(lambda units: (counted[0], {}))
    """
    with start(tmp_path, source) as worker:
        worker.wait_ready(20)
        before = worker.run(1, 20).seconds
        time.sleep(0.5)
        # Half a second would be some hundreds; the moments around a stop are few.
        assert worker.run(1, 20).seconds < before + 100


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_candidates_end_with_a_bench_that_is_killed(tmp_path):
    source = f"""
        import os, sys, time
        from pathlib import Path
        from scripts.benchmarks.worker import Worker
        tmp = Path({str(tmp_path)!r})
        candidate = "import os, protocol; c = protocol.Channel(); c.ready(os.getpid()); c.serve(lambda units: 1.0)"
        (tmp / "candidate.py").write_text(candidate)
        environment = os.environ | {{"PYTHONPATH": {str(CANDIDATES)!r}}}
        worker = Worker([sys.executable, str(tmp / "candidate.py")], tmp / "log", environment=environment, cwd=tmp)
        print(int(worker.wait_ready(20).amount), flush=True)
        time.sleep(0.3)  # until it has stopped
        os.kill(os.getpid(), 9)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == -9, done.stderr
    wait_until(lambda: not is_running(int(done.stdout)))


def test_failed_candidates_are_rows_with_the_reason_and_the_others_continue(scripts, settings):
    scripts(honest=HONEST, dead=DEAD, dies_later=DIES_LATER, hangs=HANGS, rubbish=RUBBISH)
    candidates = (
        Candidate("honest", "honest.py", (2.5, 0.5)),
        Candidate("dead", "dead.py"),
        Candidate("rubbish", "rubbish.py"),
        Candidate("hangs", "hangs.py", prepare_timeout_s=0.5),
        Candidate("dies later", "dies_later.py"),
        Candidate("other", "honest.py", (2.6, 0.25), target=0.5),
    )
    case = Case("a case", IMAGES_PER_S, candidates, round_s=1.0)
    said: list[str] = []
    result = run_case(case, settings, say=said.append)
    rows = {row.candidate.name: row for row in result.rows}
    assert [row.candidate.name for row in result.rows] == [candidate.name for candidate in candidates]
    for name, reason in (
        ("dead", "exit code 3"),
        ("rubbish", "something other"),
        ("hangs", "took more than 0.5 s"),
        ("dies later", "was killed by signal 9"),
    ):
        assert reason in rows[name].reason
        assert rows[name].speed is None
    assert rows["honest"].speed == Quartiles(20, 20, 20)
    assert rows["other"].ratio == Quartiles(0.5, 0.5, 0.5)
    assert rows["other"].is_met
    assert rows["other"].differs == "first loss 2.6 instead of 2.5"
    assert "a case: round 3 of 3" in said


# What is told


def made_result():
    candidates = (
        Candidate("ours", "a.py"),
        Candidate("theirs", "b.py", peer="torch", target=2.0),
        Candidate("x", "c.py"),
    )
    rows = [
        Row(candidates[0], Ready(10, {"jax": "1"}, {}, 3.0), None, 2, [Sample(1.0, {"waited": 1}), Sample(2.0, {})]),
        Row(candidates[1], Ready(10, {}, {"threads": 2}, 3.0), None, 2, [Sample(2.0, {}), None]),
        Row(candidates[2], reason="would not install"),
    ]
    compare(rows, 1e-4)
    return CaseResult(Case("a case", IMAGES_PER_S, candidates), rows)


def test_json_has_every_sample_and_the_environment(tmp_path, settings):
    result = made_result()
    write_json(tmp_path / "out.json", describe_run(settings), [(Bench("b", "", lambda _: []), result)])
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert document.keys() == {
        "format_version", "date", "commit", "hardware", "versions", "environment", "settings", "peers", "benches",
    }  # fmt: skip
    assert document["hardware"].keys() == {
        "cpu", "instruction_sets", "cores", "memory_bytes", "load_average", "system", "cards",
    }  # fmt: skip
    assert {"python", "jax", "jaxlib", "numpy", "tensorstore", "pillow"} <= document["versions"].keys()
    assert document["peers"]["torch"]["pins"] == list(PEERS["torch"].requirements)
    (measured,) = document["benches"]
    ours, theirs, failed = measured["cases"][0]["candidates"]
    assert (ours["samples_s"], ours["speeds"], ours["values"]) == ([1.0, 2.0], [20.0, 10.0], [{"waited": 1}, {}])
    assert theirs["samples_s"] == [2.0, None]
    assert theirs["base_is_times_as_fast"] == {"q1": 2.0, "median": 2.0, "q3": 2.0}
    assert (theirs["target"], theirs["is_met"]) == (2.0, True)
    assert (failed["reason"], failed["speed"]) == ("would not install", None)


def test_a_document_becomes_markdown_tables(tmp_path, settings):
    path = tmp_path / "out.json"
    write_json(path, describe_run(settings), [(Bench("b", "", lambda _: []), made_result())])
    done = CliRunner().invoke(markdown, [str(path)])
    assert done.exit_code == 0, done.output
    lines = done.output.splitlines()
    assert any(line.startswith("### b: ") for line in lines)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| ")]
    header, rule, ours, theirs, failed = rows
    assert len({len(row) for row in rows}) == 1
    assert {cell.strip("-") for cell in rule} == {"", ":"}
    assert header[0] == "candidate"
    assert (ours[3], theirs[3], theirs[4]) == ("", "2.00 × [2.00–2.00]", "≥ 2 × met")
    assert failed[-1] == "would not install"
    assert "Versions: ours: jax 1." in lines


# The benches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nothing"], "NAME must be one of step, loop"),
        (["step", "--case", "resnet1234"], "--case must be part of the name of one of step's cases"),
        (["step", "--json", "/no/such/folder/out.json"], "--json must name a file in an existing folder"),
    ],
)
def test_wrong_usage_is_refused(arguments, message):
    done = CliRunner().invoke(main, arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_every_candidate_exists_and_peers_are_optional(settings):
    for bench in BENCHES:
        for case in bench.chosen_cases(replace(settings, peers=True)):
            for candidate in case.candidates:
                assert (CANDIDATES / candidate.script).is_file()
                assert not candidate.peer or candidate.peer in PEERS
        assert not [each for case in bench.chosen_cases(settings) for each in case.candidates if each.peer]


def test_names_of_a_case_are_unique():
    with pytest.raises(ValueError, match="unique names, got 'a' twice"):
        Case("c", IMAGES_PER_S, (Candidate("a", "a.py"), Candidate("a", "b.py")))


def test_a_bench_whose_base_was_not_measured_has_failed(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.benchmarks.cli.FOLDER", tmp_path / ".bench")
    monkeypatch.setattr("scripts.benchmarks.cases.describe_cards", list)
    done = CliRunner().invoke(main, ["card", "--case", "resnet8", "--repeats", "1"])
    assert done.exit_code == 1
    assert "its data could not be created: nvidia-smi lists no card" in " ".join(done.output.split())
    assert "the base candidate failed in card, resnet8 32 px b512 bfloat16" in " ".join(done.output.split())


def test_the_cheapest_benchmark_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("scripts.benchmarks.cli.FOLDER", tmp_path / ".bench")
    out = tmp_path / "out.json"
    done = CliRunner().invoke(
        main, ["infeed", "--case", "4 bytes", "--repeats", "1", "--round-s", "0.05", "--json", str(out)]
    )
    assert done.exit_code == 0, done.output
    assert "limit: copy, 1 thread" in done.output
    (case,) = json.loads(out.read_text(encoding="utf-8"))["benches"][0]["cases"]
    assert [each["reason"] for each in case["candidates"]] == [None] * len(case["candidates"])
