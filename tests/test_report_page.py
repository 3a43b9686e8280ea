"""The report page by content: what it says of a run, that all of it is text, and why something is absent."""

import base64
import hashlib
import io
import itertools
import json
import os
import re
import shutil
import zipfile
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from loopfeed import evaluate, report_run
from loopfeed.engine.commands.report_cli import main
from loopfeed.engine.records.folder_lock import FolderLock
from loopfeed.engine.runtime.record import (
    Goodput,
    LaunchRuntime,
    MemoryPeaks,
    RunGoodput,
    RuntimeReport,
    SlowOperation,
    Stall,
    Verdict,
)
from loopfeed.engine.runtime.runtime_file import encode_runtime
from tests.fake_source import fake_source
from tests.report_pages import parse, points, rows_of, section, table
from tests.report_runs import CLASSES, HOSTILE, NUM_EVALUATED, make_runs
from tests.toy import Linear

SECTIONS = [
    "results", "loss", "evaluations", "rate", "speed", "goodput", "profile", "weights", "confusion", "classes",
    "mistakes", "settings", "data", "environment",
]  # fmt: skip
PROFILE = """\
Phase,Action,Mean Duration,Duration Std Dev,Number of Calls,Samples/Second,Total Time,Percent of Total,Scope,Estimated
fit,epoch,1.5,0,1,,1.5,100.0,,0
train,<b>draw</b>,0.00025,0.0001,12,-40.5,0.003,12.5,,1
train,forward,0.0125,,12,320,0.15,10,<i>layer1</i>,0
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return a folder with data whose class has a hostile name, a run on it, and one with other settings."""
    folder = tmp_path_factory.mktemp("place")
    make_runs(folder)
    return folder


@pytest.fixture(scope="module")
def run(place):
    return place / "<b>run"


@pytest.fixture(scope="module")
def page(place, run):
    return parse(report_run(run, place / "one.html", model=Linear()).read_text())


@pytest.fixture
def copy(run, tmp_path):
    return shutil.copytree(run, tmp_path / "copy")


def report_of(run, tmp_path, **values):
    """Return the page about a run whose weights are not evaluated."""
    return parse(
        report_run(run, tmp_path / "report.html", overwrite=True, **({"evaluate": False} | values)).read_text()
    )


def absent_in(page, name):
    return " ".join(each.text for each in section(page, name).all("p", class_="absent"))


def test_all_sections_are_there_and_linked(page):
    assert [each.attributes["id"] for each in page.all("section")] == SECTIONS
    assert [each.attributes["href"] for each in page.one("nav").all("a")] == [f"#{name}" for name in SECTIONS]


def test_only_the_scripts_of_the_page_are_scripts_and_nothing_loads_from_elsewhere(page):
    scripts = [each for each in page.all("script") if each.attributes != {"type": "application/json"}]
    styles = page.all("style")
    assert (len(scripts), len(styles)) == (1, 1)
    (policy,) = [each for each in page.all("meta") if each.attributes.get("http-equiv") == "Content-Security-Policy"]
    digests = [base64.b64encode(hashlib.sha256(each.text.encode()).digest()).decode() for each in (*styles, *scripts)]
    assert str(policy.attributes["content"]).startswith(
        f"default-src 'none'; style-src 'sha256-{digests[0]}'; script-src 'sha256-{digests[1]}'; img-src data:; "
    )
    assert not page.all("link")
    assert not page.all("iframe")
    assert {str(each.attributes["src"]).partition(",")[0] for each in page.all("img")} == {"data:image/png;base64"}
    used = [name for each in page.all("section") for element in each.all("svg") for name in element.attributes]
    assert not any(name.startswith("on") or name == "style" for name in used)
    assert "url(" not in styles[0].text
    assert "http" not in styles[0].text + scripts[0].text


def test_hostile_names_are_texts(page):
    assert page.one("title").text == "Report of <b>run"
    assert HOSTILE in [row[0] for row in table(section(page, "classes"), "Top-1 accuracy of each class, lowest first")]
    assert page.one("h1").all("b") == []


def test_evaluations_are_those_of_the_log(page, run):
    log = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    (top1,) = points(section(page, "evaluations"), "Accuracy")["lines"]  # three classes have no top-5
    assert top1 == {"x": [4, 8, 12], "y": pytest.approx([100 * line["top1"] for line in log], rel=1e-4)}
    (loss,) = points(section(page, "evaluations"), "Loss of the evaluations")["lines"]
    assert loss["y"] == pytest.approx([line["loss"] for line in log], rel=1e-4)
    assert [row[0] for row in table(section(page, "evaluations"), "Evaluations")] == ["step", "4", "8", "12"]
    best = max(log, key=lambda line: line["top1"])
    tiles = {each.one("dt").text: each.one("dd").text for each in section(page, "results").one("dl").all("div")}
    assert tiles["best evaluation"] == f"top-1 {100 * best['top1']:.2f} % (step {best['step']})"
    assert tiles["step"] == "12 / 12"
    assert "Run done after 12 steps." in section(page, "results").text


def test_confusions_classes_and_mistakes_are_those_of_an_evaluation(page, run):
    result = evaluate(run, model=Linear(), per_class=True, predictions=True)
    found = result.predictions
    assert found is not None
    names = [each.name for each in CLASSES]
    rows = table(
        section(page, "confusion"),
        "Number of images: a row for each class, a column for what its images were taken for",
    )
    counts = [
        [
            sum(found.labels[index] == label and found.classes[index, 0] == taken for index in range(NUM_EVALUATED))
            for taken in range(3)
        ]
        for label in range(3)
    ]
    assert rows == [["", *names], *([name, *map(str, row)] for name, row in zip(names, counts, strict=True))]
    accuracies = {
        row[0]: row[2] for row in table(section(page, "classes"), "Top-1 accuracy of each class, lowest first")[1:]
    }
    assert accuracies == {each.name: f"{100 * each.top1:.2f} %" for each in result.classes}
    wrong = [index for index in range(NUM_EVALUATED) if found.classes[index, 0] != found.labels[index]]
    wrong.sort(key=lambda index: -found.probabilities[index, 0])
    items = section(page, "mistakes").all("li")
    source = fake_source(NUM_EVALUATED, seed=1)
    assert [each.all("span")[2].text for each in items] == [f"image {index}: {source.key(index)}" for index in wrong]
    for index, item in zip(wrong, items, strict=True):
        label, taken = names[found.labels[index]], names[found.classes[index, 0]]
        assert item.all("span")[0].text == f"{label} taken for {taken}"
        assert item.all("span")[1].text == f"probability {100 * found.probabilities[index, 0]:.2f} %"
        image = item.one("img")
        assert image.attributes["alt"] == f"Image {index}: {label}, taken for {taken}"
        content = base64.b64decode(str(image.attributes["src"]).partition(",")[2])
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(content))), source.images[index])


def test_settings_have_their_origin_and_what_they_resolved_to(page):
    chosen = table(section(page, "settings"), "Settings that are not left at their defaults")
    assert ["steps", "12", "caller"] in chosen
    assert not [row for row in chosen if row[0] == "momentum"]
    every = {row[0]: row[1:] for row in table(section(page, "settings"), "All settings")}
    assert every["momentum"] == ["0.9", "default"]
    assert every["model"] == ["auto → linear", "default"]
    assert every["num_classes"] == ["default → 3", "default"]


def test_several_runs_are_side_by_side(place, run, tmp_path):
    page = parse(report_run([run, place / "other"], tmp_path / "two.html", model=Linear()).read_text())
    rows = table(section(page, "results"), "The runs")
    assert [row[0] for row in rows] == ["run", "A · <b>run", "B · other"]
    assert table(section(page, "settings"), "Settings that differ")[1:] == [
        ["seed", "0", "3"],
        ["learning_rate", "default", "0.5"],
    ]
    lines = points(section(page, "loss"), "Loss of the training")["lines"]
    assert len(lines) == 4
    assert len(points(section(page, "evaluations"), "Top-1 accuracy")["lines"]) == 2
    assert [each.text for each in section(page, "confusion").all("h3")] == ["A · <b>run", "B · other"]
    assert "The same data set as A." in section(page, "data").text


def test_the_runtime_gives_goodput_verdict_and_launches(copy, tmp_path):
    verdict = Verdict("reading", "the loop waited 60 % of the time", "read with more threads")
    launch = LaunchRuntime(
        started=1_800_000_000.0, ended=1_800_000_090.0, start_step=0, end_step=12, state="done", versions={},
        devices="1 × <cpu>", goodput=Goodput(steps=60.0, waiting=30.0), verdict=verdict,
        stalls=(Stall(7, 1.25, "read", "<b>c/0"),), memory=MemoryPeaks(host=123_400_000),
        slow_operations=(SlowOperation("convolution", "forward/<i>", "f32[8,10]", "it is naive", 3),),
    )  # fmt: skip
    goodput = RunGoodput(steps=60.0, waiting=30.0, lost=10.0, lost_steps=3, gaps=7.0)
    (copy / "runtime.json").write_bytes(encode_runtime(RuntimeReport((launch,), goodput)))
    page = report_of(copy, tmp_path)
    rows = {row[0]: row[2:] for row in table(section(page, "goodput"), "1 min 40 s of 1 launch")}
    assert rows["steps"] == ["60.0 %", "1 min 00 s"]
    assert rows["lost"] == ["10.0 %", "10.0 s"]
    assert "3 steps were made again after a resume. Between the launches, 7 s passed" in section(page, "goodput").text
    assert f"Verdict: {verdict.line}" in section(page, "results").text
    assert table(section(page, "goodput"), "The longest waits for batches")[1:] == [["7", "1.25 s", "read", "<b>c/0"]]
    slow = table(section(page, "goodput"), "Operations without a fast kernel")[1:]
    assert slow == [["forward/<i>", "convolution", "f32[8,10]", "3", "it is naive"]]
    assert rows_of(section(page, "goodput"), "Memory") == {"process": "123 MB"}
    (row,) = table(section(page, "environment"), "Launches")[1:]
    assert row == ["1", "2027-01-15 08:00:00 UTC", "1 min 30 s", "0 → 12", "done", "1 × <cpu>"]


def test_the_profile_has_its_rows_and_bars(copy, tmp_path):
    (copy / "profile.csv").write_text(PROFILE)
    found = section(report_of(copy, tmp_path), "profile")
    assert table(found, "Phases and actions")[1:] == [
        ["fit", "epoch", "1.50 s", "–", "1", "–", "1.50 s", "100.0 %", ""],
        ["train", "<b>draw</b>*", "250 µs", "100 µs", "12", "−40", "3.00 ms", "12.5 %", ""],
    ]
    assert table(found, "Parts of the model inside the actions")[1:] == [
        ["train", "forward", "<i>layer1</i>", "12.5 ms", "–", "12", "320", "150 ms", "10.0 %", ""]
    ]
    assert [each.attributes["width"] for each in found.all("rect", class_="fill")] == ["100.00%", "12.50%", "10.00%"]
    assert "measured in the traced steps only" in found.text


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("Phase,Action\n", "has no rows"),
        ("Phase,Action\nfit,epoch\n", "a row has no Mean Duration"),
        (PROFILE + "train\n", "a row has no Action"),
        ("\0\xff", "has no rows"),
    ],
)
def test_a_damaged_profile_says_so(copy, tmp_path, content, why):
    (copy / "profile.csv").write_text(content)
    assert why in absent_in(report_of(copy, tmp_path), "profile")


MISSING = {
    "config.json": {"settings": "must contain config.json", "weights": "cannot be read", "data": "cannot be read"},
    "loss.jsonl": {"loss": "has no losses yet", "rate": "has no losses yet", "speed": "has no losses yet"},
    "eval.jsonl": {"evaluations": "the run has not been evaluated yet"},
    "result.json": {"profile": "was not profiled"},
}  # fmt: skip


@pytest.mark.parametrize("name", MISSING)
def test_each_section_says_why_it_is_absent(copy, tmp_path, name):
    (copy / name).unlink()
    page = report_of(copy, tmp_path)
    for place, why in MISSING[name].items():
        assert why in absent_in(page, place), place
    assert [each.attributes["id"] for each in page.all("section")] == SECTIONS


DAMAGED = [b"\xff\0{", b"[1, 2]", b'{"step": 1e999, "launches": {}}\n', b"[" * 100_000]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        *(("config.json", content) for content in DAMAGED),
        ("result.json", b'{"stopped_by": ["x"], "error": 3}'),
        *zip(
            ("loss.jsonl", "eval.jsonl", "result.json", "control.jsonl", "runtime.json"),
            itertools.cycle(DAMAGED),
            strict=False,
        ),
    ],
)
def test_damaged_files_never_break_the_page(copy, tmp_path, name, content):
    (copy / name).write_bytes(content)
    assert [each.attributes["id"] for each in report_of(copy, tmp_path).all("section")] == SECTIONS


def test_the_state_of_a_run_is_said(copy, tmp_path):
    end = json.loads((copy / "result.json").read_text())

    def state(**values):
        (copy / "result.json").write_text(json.dumps(end | values))
        return section(report_of(copy, tmp_path), "results").all("p")[0].text

    assert state(error=f"ValueError: {HOSTILE}") == f"Run failed after 12 steps: ValueError: {HOSTILE}."
    assert state(stopped_by="top1") == "Run done, top-1 reached, after 12 steps."
    lines = (copy / "loss.jsonl").read_text().splitlines(keepends=True)
    (copy / "loss.jsonl").write_text("".join(lines[:7]))
    assert state(stopped_by="SIGINT", steps_done=7) == "Run stopped by SIGINT after 7 of 12 steps."
    lock = FolderLock(copy)
    (copy / "result.json").unlink()
    lock.acquire()
    assert "The run is in progress." in section(report_of(copy, tmp_path), "results").text
    lock.release()
    for name in ("config.json", "loss.jsonl", "eval.jsonl"):
        os.utime(copy / name, (0, 0))
    found = section(report_of(copy, tmp_path), "results")
    assert "The run was killed: its process has ended, or written nothing for 10 minutes" in found.text
    assert "killed" in found.one("dl").text


def test_a_long_run_is_divided_into_bins_and_the_page_stays_small(copy, tmp_path):
    lines = [json.dumps({"step": step, "loss": 1 + 1 / step, "lr": 0.1}) for step in range(1, 20_001)]
    (copy / "loss.jsonl").write_text("\n".join(lines) + "\n")
    out = report_run(copy, tmp_path / "report.html", evaluate=False)
    found = section(parse(out.read_text()), "loss")
    assert "The steps are divided into bins, of up to 21 steps" in found.text
    smoothed, raw = points(found, "Loss of the training")["lines"]
    assert len(raw["x"]) == len(smoothed["x"]) <= 1000
    assert out.stat().st_size < 400_000
    several = report_run([copy] * 6, tmp_path / "several.html", evaluate=False)
    assert several.stat().st_size < 1_000_000


def test_weights_that_cannot_be_evaluated_say_why(place, run, copy, tmp_path):
    assert "was trained with a model (" in absent_in(report_of(run, tmp_path, evaluate=True), "weights")
    assert "as was requested (--no-evaluate)" in absent_in(report_of(run, tmp_path), "confusion")
    gone = report_of(run, tmp_path, evaluate=True, model=Linear(), data=place / "nowhere")
    for name in ("weights", "confusion", "classes", "mistakes", "data"):
        assert re.search(rf"{place / 'nowhere'}(, which)? does not exist", absent_in(gone, name)), name

    class Exploding(Linear):
        def apply(self, params, batch_stats, images, train):
            raise ZeroDivisionError("division by zero")

    exploded = report_of(run, tmp_path, evaluate=True, model=Exploding())
    assert "the weights were not evaluated: division by zero" in absent_in(exploded, "weights")


def test_a_run_folder_of_an_old_release_has_a_page(tmp_path):
    with zipfile.ZipFile(Path(__file__).parent / "recorded/run_3218942.zip") as recorded:
        recorded.extractall(tmp_path)
    page = report_of(tmp_path / "run", tmp_path)
    assert points(section(page, "loss"), "Loss of the training")["lines"]


def test_a_file_is_not_replaced_unless_asked(run, tmp_path):
    out = tmp_path / "report.html"
    out.write_text("mine")
    with pytest.raises(ValueError, match=r"must be a new file, but .*report\.html exists: choose another path"):
        report_run(run, out, evaluate=False)
    assert out.read_text() == "mine"
    report_run(run, out, evaluate=False, overwrite=True)
    assert out.read_text().startswith("<!DOCTYPE html>")
    with pytest.raises(ValueError, match="must be in an existing folder"):
        report_run(run, tmp_path / "none/report.html")
    with pytest.raises(ValueError, match="is a folder: choose another path"):
        report_run(run, tmp_path, overwrite=True)


@pytest.mark.parametrize(("runs", "message"), [([], "1 to 26 run folders, got 0"), (["x"] * 27, "got 27")])
def test_the_number_of_runs_has_a_limit(runs, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        report_run(runs, tmp_path / "report.html")


def test_the_command_names_the_file_and_refuses_in_one_line(run, tmp_path, monkeypatch):
    codes: list[int] = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "_exit", codes.append)
    done = CliRunner().invoke(main, [str(run), "--model", "tests.toy:Linear"])
    assert (done.exit_code, codes) == (0, [])
    assert re.fullmatch(r"report\.html \(0\.\d\d MB\)\n", done.stdout)
    assert done.stderr.startswith("weights: ")
    refused = CliRunner().invoke(main, [str(run), "--no-evaluate"])
    assert codes == [2]
    assert refused.stderr.startswith("report-run: the page must be a new file, but report.html exists")
