"""Plans of real runs: the verdict against programs compiled directly, what is measured, and what is said without it."""

import json
import os
import re
import sys
import threading
import time
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tensorstore as ts
from click.testing import CliRunner

from loopfeed.engine.commands.cli import main
from loopfeed.engine.commands.compile_for_cards import PROGRAM
from loopfeed.engine.config import TrainConfig
from loopfeed.engine.feed.shard_batches import ShardBatches
from loopfeed.engine.parts import UserParts
from loopfeed.engine.peers import SEES_ALL
from loopfeed.engine.processes import ThisProcess
from loopfeed.engine.run.train import plan_run
from loopfeed.engine.sizing import absent_cards, flow, planning
from loopfeed.engine.sizing.absent_cards import COMPILER_FOLDER, CardCompilerError, compile_for_cards
from loopfeed.engine.sizing.cards import SHARE_VARIABLE
from loopfeed.engine.sizing.flow import DECODE, READ, measure_flow, split_volume
from loopfeed.engine.sizing.plan import Analysed, Place
from loopfeed.engine.sizing.planning import Target, plan_for_cards, plan_here
from loopfeed.preprocess.shards.reader import open_split
from tests.card_compilation import CardCompiler
from tests.fake_source import fake_source, pack
from tests.toy import Linear, toy_batch, toy_config

ROOT = Path(__file__).parents[1]
COMPILER = Path(sys.prefix) / COMPILER_FOLDER


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    """Measure for a moment."""
    for name in ("MEASURE_S", "_COPY_S"):
        monkeypatch.setattr(flow, name, 0.01)
    monkeypatch.delenv(SHARE_VARIABLE, raising=False)


def ignore(_):
    pass


def test_the_memory_on_a_processor_is_that_of_its_program_and_what_is_beside_it(monkeypatch):
    monkeypatch.setattr(planning, "process_memory_bytes", lambda: 5_000_000)
    config, parts = toy_config(), UserParts(model=Linear(), batches=toy_batch)
    plan = plan_here(config, parts, ignore)
    direct = plan_run(config, model=Linear(), batches=toy_batch)
    code = direct.compiled.memory_bytes["code"]
    assert plan.memory.total_bytes == direct.compiled.peak_bytes + code + direct.run.ring_bytes + 5_000_000
    assert plan.memory.parts["batches read ahead"] == direct.run.ring_bytes
    assert plan.place.is_host_memory
    assert [line.partition(":")[0] for line in plan.memory.verdict] == ["fits"]
    # Linear's weights and bias, their momentum, and its one statistic, beside the counters of the state.
    assert 8 * direct.run.num_params < plan.snapshot_bytes < 8 * direct.run.num_params + 200


def test_the_devices_of_a_processor_share_the_memory_of_the_host():
    analysed = Analysed({"arguments": 100, "results": 90, "reused": 80, "temporaries": 1000, "code": 7}, None, 50)
    run: Any = SimpleNamespace(state_bytes=88)
    here = Place("the processor", 4, 4, 10_000, "", is_host_memory=True, is_here=True)
    need = planning._need(here, run, analysed, {"this process so far": 3})
    assert sum(need.values()) == 4 * (100 + 10 + 1000 + 7) + 88 + 50 + 3
    cards = replace(here, is_host_memory=False)
    assert sum(planning._need(cards, run, analysed, {}).values()) == 100 + 10 + 1000 + 7 + 88


def test_a_run_that_does_not_fit_is_told_the_largest_batch_that_does(monkeypatch, tmp_path):
    pack(fake_source(12, size=4), tmp_path)
    config = TrainConfig(data=str(tmp_path), batch=104, steps=3, compilation_cache="off")
    parts = UserParts(model=Linear())

    direct = plan_run(replace(config, batch=96), model=Linear())
    need = direct.compiled.peak_bytes + direct.compiled.memory_bytes["code"] + direct.run.ring_bytes
    monkeypatch.setattr(planning, "process_memory_bytes", lambda: None)
    monkeypatch.setattr(planning, "host_memory_bytes", lambda: need)
    heard: list[str] = []
    plan = plan_here(config, parts, heard.append)
    assert plan.memory.verdict[1] == "the largest --batch that fits is 96 (104 does not)"
    assert [line for line in heard if line.startswith("compiling for")] == ["compiling for --batch 96"]


def test_processes_on_one_machine_share_its_memory_and_try_no_batches(monkeypatch, tmp_path):
    pack(fake_source(12, size=4), tmp_path)
    monkeypatch.setattr(planning, "process_memory_bytes", lambda: 5_000_000)
    config, parts = (
        TrainConfig(data=str(tmp_path), batch=8, steps=3, compilation_cache="off"),
        UserParts(model=Linear()),
    )
    alone = plan_here(config, parts, ignore).memory
    monkeypatch.setattr(planning, "this_process", lambda: ThisProcess(0, 3))
    monkeypatch.setenv(SEES_ALL, "1")
    monkeypatch.setattr(planning, "host_memory_bytes", lambda: alone.total_bytes)
    together = plan_here(config, parts, ignore).memory
    assert together.total_bytes == 3 * alone.total_bytes
    # Each would compile others, and wait for the rest.
    assert together.verdict[1] == "no smaller batch was tried: several processes make this plan"


def test_every_image_is_read_at_most_once_and_only_from_the_shards(tmp_path):
    pack(fake_source(50, size=64), tmp_path)
    folder = tmp_path / "train/pixels"
    places = flow._random_places(folder, 4096)
    assert len(set(places)) == len(places)
    sizes = {path: path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    assert sorted(places) == sorted((path, 4096 * i) for path, size in sizes.items() for i in range(size // 4096))
    # A pack of this size says nothing of a disk.
    with open_split(str(tmp_path), "train") as split:
        assert flow.measure_reading(split, num_threads=2, limit_s=1) is None


def test_reading_is_measured_in_bytes_of_the_shards(tmp_path, monkeypatch):
    pack(fake_source(50, size=64), tmp_path)
    monkeypatch.setattr(flow, "_LEAST_BYTES", 0)
    with open_split(str(tmp_path), "train") as split:
        read: list[int] = []
        whole = flow._read_piece

        def read_piece(*place):
            read.append(whole(*place))
            return read[-1]

        monkeypatch.setattr(flow, "_read_piece", read_piece)
        started = time.perf_counter()
        found = flow.measure_reading(split, num_threads=2, limit_s=5)
        took_s = time.perf_counter() - started
    assert found is not None
    # Each piece once, less those that were only looked at; then it ends, long before its limit.
    assert sum(read) == (50 - flow._PROBES) * 4 * 64 * 64
    assert found[0] >= sum(read) / took_s


@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="the system does not say what is in the page cache")
@pytest.mark.parametrize(
    ("answer", "is_cached"),
    [(4096, True), (BlockingIOError(), False), (OSError("not supported"), None)],
    ids=["cached", "not cached", "unknown"],
)
def test_whether_the_page_cache_was_measured_is_asked_after_its_pages_are_dropped(
    tmp_path, monkeypatch, answer, is_cached
):
    asked = []

    def look(_file, _buffers, start, flags):
        asked.append(("look", start))
        assert flags == os.RWF_NOWAIT
        if isinstance(answer, Exception):
            raise answer
        return answer

    (tmp_path / "shard").write_bytes(bytes(16384))
    monkeypatch.setattr(os, "preadv", look)
    monkeypatch.setattr(os, "posix_fadvise", lambda _file, start, size, _advice: asked.append(("drop", start)))
    places = [(tmp_path / "shard", 8192), (tmp_path / "shard", 0)]
    assert flow._is_cached(places, 8192) is is_cached
    assert asked[:2] == [("drop", 8192), ("look", 8192)]


def test_a_disk_that_does_not_answer_ends_a_measurement(monkeypatch):
    monkeypatch.setattr(flow, "_STUCK_S", 0.05)
    stuck = threading.Event()
    with pytest.raises(TimeoutError, match=r"reading the data set did not end within 0\.05 s: check the disk"):
        flow._rate_of(lambda: int(stuck.wait(20)), 1, 0.01)
    stuck.set()

    def fail():
        raise OSError("the disk is gone")

    with pytest.raises(OSError, match="the disk is gone"):
        flow._rate_of(fail, 2, 0.01)


@pytest.mark.parametrize(("spare", "fits"), [(10**12, True), (1000, False), (None, False)])
def test_storage_bounds_a_run_whose_pack_does_not_fit_into_memory(tmp_path, monkeypatch, spare, fits):
    pack(fake_source(50, size=64), tmp_path, codec="blosc")
    monkeypatch.setattr(flow, "measure_reading", lambda *_, **_times: (1e6, False))
    with open_split(str(tmp_path), "train") as split:
        source = ShardBatches(split, batch=8, seed=0)
        found = measure_flow(
            TrainConfig(), source, split_volume(split), spare_bytes=spare, link_bytes_per_s=None, wanted=None
        )
    stages = {stage.name: stage for stage in found.stages}
    assert stages[READ].is_bounding != fits
    pixels = sum(path.stat().st_size for path in (tmp_path / "train/pixels").rglob("*") if path.is_file())
    assert stages[READ].images_per_s == pytest.approx(1e6 / (pixels / 50))
    assert stages[READ].note == "2 threads, disk"
    assert stages[DECODE].image_bytes == 4 * 64 * 64
    assert stages[DECODE].images_per_s


def test_an_object_store_is_measured_with_decoding():
    context = ts.Context()
    pack(fake_source(50, size=64), "memory://bucket", context=context)
    with open_split("memory://bucket", "train", context=context) as split:
        volume = split_volume(split)
        source = ShardBatches(split, batch=8, seed=0)
        found = measure_flow(TrainConfig(), source, volume, spare_bytes=10**12, link_bytes_per_s=None, wanted=None)
    assert [stage.name for stage in found.stages[:2]] == [READ, DECODE]
    assert found.stages[0].images_per_s == found.stages[1].images_per_s
    assert all(stage.is_bounding for stage in found.stages)
    # There are no files to look at, but the manifest says how large those of raw images are.
    assert volume.stored_bytes >= 4 * 64 * 64
    assert volume.source == "the manifest"


def test_without_the_compiler_the_rest_of_the_plan_is_made(monkeypatch):
    monkeypatch.setattr(absent_cards, "find_card_compiler", lambda: None)
    config = TrainConfig(synthetic=True, image_size=32, num_classes=10, batch=512, steps=100, devices="64")
    target = Target("h100", 64, 8)
    plan = plan_for_cards(config, UserParts(), {}, target, ignore, program="", device_rate=1000)
    assert plan.memory.parts == {}
    assert re.fullmatch(
        r"not known: XLA's compiler for NVIDIA GPUs is not installed; it needs no GPU: (pip install '\.\[cuda\]', or "
        r"only the compiler: pip install --no-deps --target \S+/card-compiler jax-cuda13-pjrt==\S+ "
        r"jax-cuda13-plugin==\S+|"
        "it exists only for Linux: plan on a Linux machine)",
        plan.memory.verdict[0],
    )
    assert (plan.place.num_hosts, plan.place.devices_per_host) == (8, 8)
    assert plan.flow.bound == ("the devices", 8000)
    assert plan.volumes[0][1].num_images == 1_281_167
    # What the devices would refuse, is refused.
    with pytest.raises(ValueError, match="batch must be a multiple of the number of devices, 64, got 500"):
        plan_for_cards(replace(config, batch=500), UserParts(), {}, target, ignore, program="")


def request_for(settings: dict[str, Any], card: str, num_devices: int) -> dict[str, Any]:
    return {"settings": settings, "parts": {}, "card": card, "num_devices": num_devices, "devices_per_host": 8}


ANSWER: dict[str, Any] = {"memory_bytes": {"arguments": 1, "temporaries": 2}, "step_flops": None}


@pytest.mark.parametrize(
    ("program", "error", "message"),
    [
        (
            "import sys; sys.exit('no such GPU')",
            CardCompilerError,
            "XLA's compiler for NVIDIA GPUs failed: no such GPU",
        ),
        ("import os; os._exit(7)", CardCompilerError, "failed: it ended with code 7"),
        ("import time; time.sleep(60)", CardCompilerError, "XLA did not compile the program within 1 s: try a smaller"),
        (
            'import sys, pathlib; pathlib.Path(sys.argv[2]).write_text(\'{"refused": "a batch too odd"}\')',
            ValueError,
            "a batch too odd",
        ),
    ],
    ids=["fails", "dies", "hangs", "refuses"],
)
def test_a_compiler_that_fails_is_reported_in_one_line(monkeypatch, tmp_path, program, error, message):
    monkeypatch.setattr(absent_cards, "find_card_compiler", lambda: tmp_path)
    request = request_for(TrainConfig().to_json(), "h100", 1)
    with pytest.raises(error, match=re.escape(message)):
        compile_for_cards(request, program, time_limit_s=1 if "sleep" in program else 60)


def test_the_compiler_gets_the_request_and_computes_on_the_cpu(monkeypatch, tmp_path):
    monkeypatch.setattr(absent_cards, "find_card_compiler", lambda: tmp_path)
    monkeypatch.setenv("JAX_PLATFORMS", "cuda")
    program = (
        "import json, os, sys; asked = json.load(open(sys.argv[1])); assert os.environ['JAX_PLATFORMS'] == 'cpu'\n"
        "assert (asked['card'], asked['num_devices'], asked['devices_per_host']) == ('a100', 16, 8)\n"
        f"assert asked['compiler'] == {str(tmp_path)!r} and asked['settings']['batch'] == 48, asked\n"
        f"json.dump({{**json.loads({json.dumps(ANSWER)!r})}}, open(sys.argv[2], 'w'))"
    )
    request = request_for(TrainConfig(batch=48).to_json(), "a100", 16)
    assert compile_for_cards(request, program) == Analysed(**ANSWER)


@pytest.mark.integration
def test_the_compilers_process_does_not_take_packages_of_the_working_directory(monkeypatch, tmp_path):
    (tmp_path / "loopfeed").mkdir()
    (tmp_path / "loopfeed/__init__.py").write_text("raise SystemExit('the wrong package')")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setattr(absent_cards, "find_card_compiler", lambda: tmp_path)
    request = request_for({"batch": 0}, "h100", 1)
    with pytest.raises(ValueError, match="batch must lie in"):
        compile_for_cards(request, PROGRAM)


def test_only_the_program_that_was_asked_for_is_dumped(monkeypatch, tmp_path):
    monkeypatch.setenv(SHARE_VARIABLE, "0.0001")
    asked = []

    def compiled(request, _program):
        batch = request["settings"]["batch"]
        asked.append((batch, request["settings"]["dump_hlo"]))
        return Analysed({"temporaries": 100_000 * batch}, None)

    monkeypatch.setattr(planning, "compile_for_cards", compiled)
    config = TrainConfig(
        synthetic=True, image_size=32, num_classes=10, model="resnet8", batch=256, steps=9, dump_hlo=str(tmp_path)
    )
    plan = plan_for_cards(config, UserParts(), {}, Target("h100", 1, 8), ignore, program="")
    assert plan.memory.verdict[1].startswith("the largest --batch that fits is ")
    assert asked[0] == (256, str(tmp_path))
    assert {folder for _, folder in asked[1:]} == {None}


def test_the_compiler_is_found_beside_or_among_the_packages(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path / "packages")])
    assert absent_cards.find_card_compiler() is None
    (tmp_path / "packages/jax_plugins/xla_cuda12").mkdir(parents=True)
    assert absent_cards.find_card_compiler() == tmp_path / "packages"
    (tmp_path / "card-compiler/jax_plugins/xla_cuda13").mkdir(parents=True)
    assert absent_cards.find_card_compiler() == tmp_path / "card-compiler"


SMALL = [
    "--synthetic",
    "--model",
    "resnet8",
    "--image-size",
    "8",
    "--num-classes",
    "10",
    "--batch",
    "8",
    "--steps",
    "4",
]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--target", "h100"], "--target is only for --dry-run: give that too, or leave it out"),
        (["--rate", "100"], "--rate is only for --dry-run: give that too, or leave it out"),
        (["--dry-run", "--devices-per-host", "4"], "--devices-per-host is only for --target: give that too"),
        (["--dry-run", "--target", "h100", "--spawn", "2"], "--target plans for other machines, but --spawn starts"),
        (
            ["--dry-run", "--target", "h100", "--devices", "cpu:4"],
            "with --target, --devices must be a number, got cpu:4",
        ),
        (
            ["--dry-run", "--target", "h100", "--devices", "12"],
            "so --devices must be a multiple of --devices-per-host, 8, got 12: change one of them",
        ),
        (["--dry-run", "--target", "h1000"], "'h1000' is not one of"),
        (["--dry-run", "--rate", "0"], "0.0 is not in the range"),
        (["--dry-run", "--rate", "nan"], "--rate must be a number of images per second, got nan"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(options, message, monkeypatch):
    monkeypatch.setattr(os, "_exit", ignore)
    result = CliRunner().invoke(main, [*SMALL, *options])
    assert message in result.output
    assert "step 1/" not in result.output


PAGE = (ROOT / "docs/howto/sizing.md").read_text(encoding="utf-8")
COMMANDS = [line.split()[1:] for line in re.findall(r"^run-train .*$", PAGE, re.MULTILINE)]


def run_command(arguments: list[str]) -> list[str]:
    result = CliRunner().invoke(main, [*arguments, "--traceback"])
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    return lines[next(number for number, line in enumerate(lines) if line.startswith("plan for ")) :]


def test_the_pages_command_for_this_machine_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(planning, "_analysed", lambda _: Analysed({"temporaries": 10**7}, None, 10**6))
    pack(fake_source(12, size=16), tmp_path / "data/shards")
    monkeypatch.chdir(tmp_path)
    printed = run_command(COMMANDS[0])
    assert "  80 images/s, bound by: the devices" in printed
    assert "run: 9 steps, 1,152 images; no evaluation" in printed
    files = sum(path.stat().st_size for path in (tmp_path / "data/shards/train").rglob("*") if path.is_file())
    assert f"  {'shards of train':<36}{files / 1e6:>13,.1f} MB  12 images" in printed


def test_the_page_shows_what_its_command_for_gpus_prints(monkeypatch):
    """With the numbers of the compiler, and of the machine that the page is from."""
    memory = {"arguments": 204_668_837, "results": 204_672_241, "reused": 204_668_761, "temporaries": 2_797_053_720}
    asked = []

    def compiled(request, _program):
        asked.append(
            (request["card"], request["num_devices"], request["devices_per_host"], request["settings"]["batch"])
        )
        return Analysed(memory | {"code": 0}, None)

    monkeypatch.setattr(planning, "compile_for_cards", compiled)
    monkeypatch.setattr(flow, "measure_copying", lambda _: 6.0959e9)
    printed = run_command(COMMANDS[1])
    shown = PAGE.partition("--rate 3000\n")[2].partition("```")[0].splitlines()
    assert printed == [line[4:] for line in shown]
    assert asked == [("h100", 256, 8, 8192)]
    assert len(COMMANDS) == 2


def run_plan(*options: str) -> str:
    result = CliRunner().invoke(main, ["--synthetic", "--steps", "4", "--dry-run", "--traceback", *options])
    assert result.exit_code == 0, result.output
    return result.output


NEEDS_COMPILER = pytest.mark.skipif(
    not (COMPILER / f".installed-{version('jaxlib')}").exists(),
    reason="XLA's compiler for NVIDIA cards is not here: scripts/test --integrations brings it, on Linux",
)


@pytest.mark.integration
@NEEDS_COMPILER
@pytest.mark.timeout(900)  # five programs, each of some seconds on an idle machine
def test_the_memory_of_gpus_is_that_of_a_direct_compilation(monkeypatch):
    """`run-train --dry-run --target` as on docs/howto/sizing.md, with a small network and little memory."""
    monkeypatch.setenv(SHARE_VARIABLE, "0.001")
    monkeypatch.chdir(ROOT)
    sizes = {"batch": 256, "image_size": 96, "num_classes": 4}
    small = [word for name, size in sizes.items() for word in (f"--{name.replace('_', '-')}", str(size))]
    small += ["--model", "tests.normed_network:Normed"]
    printed = run_plan(*small, "--target", "h100", "--devices", "2", "--rate", "30")
    assert "plan for 2 × NVIDIA H100 80GB HBM3\n" in printed
    assert "  does not fit: jax takes 0.001 (XLA_PYTHON_CLIENT_MEM_FRACTION) of 84.9 GB, 0.1 GB\n" in printed
    assert "  60 images/s, bound by: the devices\n" in printed
    found = float(re.findall(r"^  temporaries +([\d.]+) MB$", printed, re.MULTILINE)[0])
    with CardCompiler(COMPILER) as compiler:
        direct = compiler.compile(sizes | {"steps": 4}, number=2, is_normed=True)["temporaries"]
    assert found == pytest.approx(direct / 1e6, abs=0.05)  # printed to 0.1 MB
    fits, too_large = map(int, re.findall(r"largest --batch that fits is (\d+) \((\d+) does not\)", printed)[0])
    assert 64 <= fits < too_large <= fits * 1.13 < 256


@pytest.mark.integration
@NEEDS_COMPILER
def test_a_model_of_ones_own_is_compiled_for_gpus(monkeypatch):
    monkeypatch.chdir(ROOT)
    toy = ("--model", "tests.toy:Linear", "--image-size", "4", "--num-classes", "3", "--batch", "64")
    printed = run_plan(*toy, "--target", "a100")
    assert "plan for NVIDIA A100-SXM4-80GB\n  linear, 147 parameters, batch 64 of 4 × 4 px, float32\n" in printed
    assert "  fits: jax takes 0.75 (XLA_PYTHON_CLIENT_MEM_FRACTION) of 85.1 GB, 63.8 GB\n" in printed
