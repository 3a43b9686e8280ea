"""The rooms: what each may import, without cycles, and the path of one batch through them."""

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "preprocess", "models")

# From the ground up: a room imports itself and rooms that stand before it here, types included.
FLOORS = (
    # preprocess: images to shards, and back
    "loopfeed.preprocess.workers",
    "loopfeed.preprocess.control_groups",
    "loopfeed.preprocess.printable",
    "loopfeed.preprocess.shown_values",
    "loopfeed.preprocess.suggestions",
    "loopfeed.preprocess.file_kinds",
    "loopfeed.preprocess.system_errors",
    "loopfeed.preprocess.claimed_size",
    "loopfeed.preprocess.json_digest",
    "loopfeed.preprocess.regular_file",
    "loopfeed.preprocess.quantities",
    "loopfeed.preprocess.system_entries",
    "loopfeed.preprocess.stop_signals",
    "loopfeed.preprocess.file_lock",
    "loopfeed.preprocess.synced_folders",
    "loopfeed.preprocess.pixels",
    "loopfeed.preprocess.extents",
    "loopfeed.preprocess.read_meter",
    "loopfeed.preprocess.storage_options",
    "loopfeed.preprocess.shards",
    "loopfeed.preprocess.sources",
    "loopfeed.preprocess.decoding",
    "loopfeed.preprocess.packing",
    "loopfeed.preprocess.demo",
    "loopfeed.preprocess.commands",
    # models: pure functions
    "loopfeed.models.trusted_folder",
    "loopfeed.models.xla_threads",
    "loopfeed.models.names",
    "loopfeed.models.model",
    "loopfeed.models.kernels",
    "loopfeed.models.layers",
    "loopfeed.models.families",
    "loopfeed.models.registry",
    "loopfeed.models.torchvision_names",
    # engine: shards to weights
    "loopfeed.engine.adapters",
    "loopfeed.engine.keys",
    "loopfeed.engine.scopes",
    "loopfeed.engine.settings",
    "loopfeed.engine.stages",
    "loopfeed.engine.given_values",
    "loopfeed.engine.patterns",
    "loopfeed.engine.replicas",
    "loopfeed.engine.hlo",
    "loopfeed.engine.xla_threads",
    "loopfeed.engine.peers",
    "loopfeed.engine.processes",
    "loopfeed.engine.spans",
    "loopfeed.engine.images",
    "loopfeed.engine.config",
    "loopfeed.engine.owners",
    "loopfeed.engine.named_parts",
    "loopfeed.engine.python_arguments",
    "loopfeed.engine.python_calls",
    "loopfeed.engine.control",
    "loopfeed.engine.feed",
    "loopfeed.engine.objective",
    "loopfeed.engine.updates",
    "loopfeed.engine.crossing",
    "loopfeed.engine.program",
    "loopfeed.engine.parts",
    "loopfeed.engine.profile",
    "loopfeed.engine.stream",
    "loopfeed.engine.records",
    "loopfeed.engine.charts",
    "loopfeed.engine.compilation",
    "loopfeed.engine.data",
    "loopfeed.engine.loggers",
    "loopfeed.engine.runtime",
    "loopfeed.engine.recipes",
    "loopfeed.engine.run",
    "loopfeed.engine.sizing",
    "loopfeed.engine.inspection",
    "loopfeed.engine.evaluation",
    "loopfeed.engine.opened_run",
    "loopfeed.engine.export",
    "loopfeed.engine.replay",
    "loopfeed.engine.report_page",
    "loopfeed.engine.commands",
)
# What the program may know of: no sinks, no records, no files.
PROGRAM_MAY_KNOW = {
    "loopfeed.engine.config",
    "loopfeed.engine.owners",
    "loopfeed.engine.control",
    "loopfeed.engine.crossing",
    "loopfeed.engine.spans",
    "loopfeed.engine.feed",
    "loopfeed.engine.given_values",
    "loopfeed.engine.images",
    "loopfeed.engine.keys",
    "loopfeed.engine.objective",
    "loopfeed.engine.patterns",
    "loopfeed.engine.replicas",
    "loopfeed.engine.program",
    "loopfeed.engine.scopes",
    "loopfeed.engine.settings",
    "loopfeed.engine.stages",
    "loopfeed.engine.updates",
    "loopfeed.models.kernels",
    "loopfeed.models.layers",
    "loopfeed.models.names",
    "loopfeed.models.xla_threads",
    "loopfeed.models.trusted_folder",
    # What a wrong name may have meant.
    "loopfeed.preprocess.shown_values",
    "loopfeed.preprocess.suggestions",
    # Where whole pictures are on their canvases.
    "loopfeed.preprocess.extents",
    # How much memory the slots of the batches may take.
    "loopfeed.preprocess.workers",
    "loopfeed.preprocess.control_groups",
    "loopfeed.preprocess.quantities",
    "loopfeed.preprocess.read_meter",
    "loopfeed.preprocess.storage_options",
    "loopfeed.preprocess.printable",
}


def modules() -> dict[str, Path]:
    """Return the path of every module of the packages by its dotted name, without the package modules themselves."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(("loopfeed", *(parts[:-1] if parts[-1] == "__init__" else parts)))
            if name.count(".") > 1:
                found[name] = path
    return found


MODULES = modules()


def imports(path: Path) -> set[str]:
    """Return the project's modules that a file imports anywhere, including for types."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else str(node.module) for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "loopfeed"}


@cache
def imports_by_module() -> dict[str, set[str]]:
    return {name: imports(path) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    return ".".join(module.split(".")[:3])


def reached(module: str) -> set[str]:
    """Return every module of the project that importing this one imports."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        new = imports_by_module()[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_every_room_is_in_the_list() -> None:
    assert {room(module) for module in MODULES} == set(FLOORS)


def test_imports_name_modules_and_run_down() -> None:
    """Nothing imports a package's public face either: that one imports everything."""
    for module, imports in imports_by_module().items():
        assert imports <= MODULES.keys(), module
        above = {name for name in imports if FLOORS.index(room(name)) > FLOORS.index(room(module))}
        assert above == set(), module


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert [module for module in MODULES if module in reached(module)] == []


def test_the_program_knows_nothing_of_files() -> None:
    known = {name for module in MODULES if room(module) == "loopfeed.engine.program" for name in reached(module)}
    assert {room(name) for name in known} <= PROGRAM_MAY_KNOW


def test_the_walk_of_a_batch_in_the_docs_is_that_of_the_code() -> None:
    """Each station's modules are there, named once, and are reached from the command that the batch goes through."""
    page = (ROOT / "docs/walk.md").read_text(encoding="utf-8")
    stations = {
        int(number): set(re.findall(r"`([\w.]+)`", modules))
        for number, modules in re.findall(r"^\| (\d+) [^|]*\|([^|]*)\|$", page, re.MULTILINE)
    }
    assert sorted(stations) == list(range(1, 13))
    named = re.findall(r"`(loopfeed\.[\w.]+)`", page)
    assert len(named) == len(set(named))
    assert set(named) <= MODULES.keys()
    offline, in_training = reached("loopfeed.preprocess.commands.cli"), reached("loopfeed.engine.run.train")
    assert stations[1] | stations[2] | stations[3] | stations[4] <= offline
    assert set().union(*(stations[number] for number in range(5, 13))) <= in_training
    # What the program itself does, it imports; models come to it as functions.
    pulled = {
        name for name in stations[7] if name in ("loopfeed.engine.crossing.infeed", "loopfeed.engine.control.board")
    }
    own = (
        pulled
        | stations[8]
        | {"loopfeed.engine.objective.losses"}
        | stations[10]
        | {"loopfeed.engine.crossing.outfeed"}
    )
    assert own <= reached("loopfeed.engine.program.loop")


def test_threads_are_workers() -> None:
    """Elsewhere only the team of oneDNN starts threads, as `models` imports no other package."""
    starts = re.compile(r"\b(Thread|ThreadPoolExecutor|start_new_thread)\(|\(threading\.Thread\)")
    found = {module for module, path in MODULES.items() if starts.search(path.read_text(encoding="utf-8"))}
    assert found == {"loopfeed.preprocess.workers", "loopfeed.models.kernels.onednn.team"}


def test_the_stages_of_a_run_in_the_docs_are_the_headings_of_its_code() -> None:
    page = (ROOT / "docs/walk.md").read_text(encoding="utf-8")
    code = (ROOT / "engine/run/train.py").read_text(encoding="utf-8")
    stages = re.findall(r"^- \*\*(.*?)[.,]?\*\*", page, re.MULTILINE)
    assert re.findall(r"^ *# ---- (.*)$", code, re.MULTILINE) == stages
    assert len(stages) == 8
