"""The rooms: what each may import, without cycles, and the path of one batch through them."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "preprocess", "models")

# From the ground up: a room imports itself and rooms that stand before it here, types included.
FLOORS = (
    # preprocess: images to shards, and back
    "preprocess.control_groups",
    "preprocess.cores",
    "preprocess.memory",
    "preprocess.printable",
    "preprocess.file_kinds",
    "preprocess.system_errors",
    "preprocess.json_digest",
    "preprocess.regular_file",
    "preprocess.unicode_form",
    "preprocess.suggestions",
    "preprocess.quantities",
    "preprocess.system_entries",
    "preprocess.claimed_size",
    "preprocess.links",
    "preprocess.stop_signals",
    "preprocess.file_lock",
    "preprocess.synced_folders",
    "preprocess.pixels",
    "preprocess.read_meter",
    "preprocess.storage_options",
    "preprocess.shards",
    "preprocess.sources",
    "preprocess.decoding",
    "preprocess.packing",
    "preprocess.demo",
    "preprocess.commands",
    # models: pure functions
    "models.user_cache",
    "models.trusted_folder",
    "models.xla_threads",
    "models.names",
    "models.model",
    "models.paths",
    "models.kernels",
    "models.layers",
    "models.families",
    "models.registry",
    "models.summaries",
    "models.image_sizes",
    "models.torchvision_names",
    # engine: shards to weights
    "engine.adapters",
    "engine.keys",
    "engine.scopes",
    "engine.settings",
    "engine.given_values",
    "engine.patterns",
    "engine.replicas",
    "engine.hlo",
    "engine.signal_bursts",
    "engine.xla_threads",
    "engine.peers",
    "engine.processes",
    "engine.durations",
    "engine.images",
    "engine.config",
    "engine.locations",
    "engine.owners",
    "engine.named_parts",
    "engine.control",
    "engine.feed",
    "engine.objective",
    "engine.updates",
    "engine.crossing",
    "engine.program",
    "engine.profile",
    "engine.stream",
    "engine.records",
    "engine.loggers",
    "engine.runtime",
    "engine.recipes",
    "engine.run",
    "engine.sizing",
    "engine.inspection",
    "engine.evaluation",
    "engine.replay",
    "engine.report_page",
    "engine.commands",
)
# What the program may know of: no sinks, no records, no files.
PROGRAM_MAY_KNOW = {
    "engine.config",
    "engine.owners",
    "engine.control",
    "engine.crossing",
    "engine.durations",
    "engine.feed",
    "engine.given_values",
    "engine.images",
    "engine.keys",
    "engine.objective",
    "engine.patterns",
    "engine.replicas",
    "engine.program",
    "engine.scopes",
    "engine.settings",
    "engine.updates",
    "models.kernels",
    "models.layers",
    "models.names",
    "models.xla_threads",
    "models.user_cache",
    "models.trusted_folder",
    # How much memory the slots of the batches may take.
    "preprocess.control_groups",
    "preprocess.memory",
    "preprocess.quantities",
    "preprocess.read_meter",
    "preprocess.storage_options",
    "preprocess.suggestions",
    "preprocess.unicode_form",
}


def modules() -> dict[str, Path]:
    """Return the path of every module of the packages by its dotted name, without the package modules themselves."""
    found = {}
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            if name not in PACKAGES:
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
    return {name for name in found if name.partition(".")[0] in PACKAGES}


IMPORTS = {name: imports(path) - {name} for name, path in MODULES.items()}


def room(module: str) -> str:
    return ".".join(module.split(".")[:2])


def reached(module: str) -> set[str]:
    """Return every module of the project that importing this one imports."""
    found: set[str] = set()
    ahead = [module]
    while ahead:
        new = IMPORTS[ahead.pop()] - found
        found |= new
        ahead += new
    return found


def test_every_room_is_in_the_list() -> None:
    assert {room(module) for module in MODULES} == set(FLOORS)


@pytest.mark.parametrize("module", MODULES)
def test_imports_name_modules_and_run_down(module: str) -> None:
    """Nothing imports a package's public face either: that one imports everything."""
    assert IMPORTS[module] <= MODULES.keys()
    above = {name for name in IMPORTS[module] if FLOORS.index(room(name)) > FLOORS.index(room(module))}
    assert above == set()


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert [module for module in MODULES if module in reached(module)] == []


def test_the_program_knows_nothing_of_files() -> None:
    known = {name for module in MODULES if room(module) == "engine.program" for name in reached(module)}
    assert {room(name) for name in known} <= PROGRAM_MAY_KNOW


def test_the_walk_of_a_batch_in_the_docs_is_that_of_the_code() -> None:
    """Each station's modules are there, named once, and are reached from the command that the batch goes through."""
    page = (ROOT / "docs/walk.md").read_text(encoding="utf-8")
    stations = {
        int(number): set(re.findall(r"`([\w.]+)`", modules))
        for number, modules in re.findall(r"^\| (\d+) [^|]*\|([^|]*)\|$", page, re.MULTILINE)
    }
    assert sorted(stations) == list(range(1, 13))
    named = re.findall(r"`((?:engine|models|preprocess)\.[\w.]+)`", page)
    assert len(named) == len(set(named))
    assert set(named) <= MODULES.keys()
    offline, in_training = reached("preprocess.commands.cli"), reached("engine.run.train")
    assert stations[1] | stations[2] | stations[3] | stations[4] <= offline
    assert set().union(*(stations[number] for number in range(5, 13))) <= in_training
    # What the program itself does, it imports; models come to it as functions.
    pulled = {name for name in stations[7] if name in ("engine.crossing.infeed", "engine.control.word")}
    own = pulled | stations[8] | {"engine.objective.cross_entropy"} | stations[10] | {"engine.crossing.outfeed"}
    assert own <= reached("engine.program.loop")
