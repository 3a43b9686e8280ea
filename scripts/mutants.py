"""Seeded mutants of the sources, and whether a test notices each. scripts/mutants runs this script.

A mutant differs from the source in one expression. The tests of a module are those that import it, found by reading
their imports: the file named after it first, then those that import few other modules.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from itertools import accumulate
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("engine", "models", "preprocess")
MODULES = [os.fspath(path.relative_to(ROOT)) for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]
OPPOSITES = ((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn))
TURNED: dict[type[ast.cmpop], type[ast.cmpop]] = {old: new for pair in OPPOSITES for old, new in (pair, pair[::-1])}
NOT_COMMUTATIVE = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult, ast.LShift, ast.RShift)


@dataclass(frozen=True)
class Mutant:
    """One changed expression, on line `line` of `path`, relative to the root; `start, stop` are bytes of the file."""

    path: str
    line: int
    start: int
    stop: int
    before: str
    after: str


def variants_of(node: ast.expr) -> Iterator[ast.expr]:
    """Yield the expressions that may take the place of one; none of most."""
    match changed := copy.deepcopy(node):
        case ast.Compare(ops=[op]) if type(op) in TURNED:
            yield ast.Compare(changed.left, [TURNED[type(op)]()], changed.comparators)
        case ast.BoolOp():
            yield ast.BoolOp(ast.Or() if isinstance(changed.op, ast.And) else ast.And(), changed.values)
        case ast.UnaryOp(op=ast.Not()):
            yield changed.operand
        case ast.BinOp(op=op, left=left) if isinstance(op, NOT_COMMUTATIVE) and not isinstance(left, ast.Constant):
            yield ast.BinOp(changed.right, op, left)
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            yield ast.Constant(value + 1)
            yield ast.BinOp(changed, ast.Sub(), ast.Constant(1))


def expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the expressions that run below a node: no annotations, decorators or parts of f-strings."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list", "type_params") or isinstance(value, ast.JoinedStr):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield from [child] if isinstance(child, ast.expr) else []
                yield from expressions(child)


def mutants_of(path: str) -> Iterator[Mutant]:
    """Yield every mutant of a module."""
    source = (ROOT / path).read_bytes()
    starts = [0, *accumulate(len(line) for line in source.splitlines(keepends=True))]
    for node in expressions(ast.parse(source)):
        start = starts[node.lineno - 1] + node.col_offset
        stop = starts[(node.end_lineno or 1) - 1] + (node.end_col_offset or 0)
        for variant in variants_of(node):
            yield Mutant(path, node.lineno, start, stop, ast.unparse(node), f"({ast.unparse(variant)})")


def imported_modules(path: Path) -> frozenset[str]:
    """Return the names that a file imports, with the modules that they may be or come from, such as "engine.config"."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.ImportFrom):
            names |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return frozenset(name.removeprefix("loopfeed.") for name in names if name.startswith("loopfeed"))


def tests_of(path: str, tests: dict[str, frozenset[str]], modules: dict[str, frozenset[str]]) -> list[str]:
    """Return the files of tests that concern a module, given what each file and module imports; most specific first."""
    module = _dotted(path)
    users = {name for name, imports in modules.items() if module in imports}
    found = []
    for name, imports in tests.items():
        distance = 0 if module in imports else 1 if imports & users else 2 if "train" in imports else 3
        is_named = name.removeprefix("tests/test_").removesuffix(".py") == module.rpartition(".")[2]
        if distance < 3 or is_named:
            found.append((not is_named, distance, len(imports), name))
    return [name for *_, name in sorted(found)]


def _dotted(path: str) -> str:
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


class Copy:
    """A temporary copy of the working tree, in which one module at a time is changed."""

    def __init__(self, folder: Path, limit_s: float) -> None:
        self._folder, self._limit_s, self._clock = folder, limit_s, int(time.time())
        listed = subprocess.run(["git", "ls-files", "-coz", "--exclude-standard"], cwd=ROOT, capture_output=True)
        for name in listed.stdout.decode().split("\0"):
            if name and (ROOT / name).exists():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, folder / name, follow_symlinks=False)

    def write(self, path: str, content: bytes) -> None:
        """Write a module, with a time of its own, by which Python knows that its bytecode is old."""
        self._clock += 1
        (self._folder / path).write_bytes(content)
        os.utime(self._folder / path, (self._clock, self._clock))

    def run(self, tests: list[str], *options: str) -> tuple[int | None, str]:
        """Run tests; return pytest's exit status, None if it took too long, and the first test that failed."""
        command = [sys.executable, "-m", "pytest", "-xq", "--tb=no", "-rfE", "-p", "no:cacheprovider", *options, *tests]
        pipe, environment = subprocess.PIPE, os.environ | {"PYTHONPATH": os.fspath(self._folder / "src")}
        with subprocess.Popen(
            command, cwd=self._folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True
        ) as process:
            try:
                output, _ = process.communicate(timeout=self._limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return None, ""
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", output, re.MULTILINE)
        return process.returncode, failed[1] if failed else ""


def judge(mutant: Mutant, tests: list[str], known: str, tree: Copy) -> tuple[str, str]:
    """Return the verdict on a mutant, and the test that noticed it."""
    source = (ROOT / mutant.path).read_bytes()
    tree.write(mutant.path, source[: mutant.start] + mutant.after.encode() + source[mutant.stop :])
    try:
        status, failed = tree.run([known]) if known else (0, "")
        if status != 1:  # 4: there is no such test any more
            status, failed = tree.run(tests or ["--co", "-k", "none"], "-m", "not integration")
    finally:
        tree.write(mutant.path, source)
    if status is None:
        return "slow", ""
    if status in (0, 5):  # 5: there is no test
        return "survived", ""
    passes = not failed or tree.run([failed], *(() if "::" in failed else ("--collect-only",)))[0] == 0
    return "killed" if passes else "doubtful", failed


def main() -> None:
    """Run the mutants that the command line asks for."""
    parser = argparse.ArgumentParser(prog="scripts/mutants", allow_abbrev=False)
    for name, default in (("count", 100), ("seed", 0), ("files", 6), ("limit-s", 300)):
        parser.add_argument(f"--{name}", type=int, default=default)
    for name in ("only", "tests"):
        parser.add_argument(f"--{name}", action="append", default=[])
    for name in ("json", "known"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    chosen = [path for path in MODULES if any(fnmatch(path, pattern) for pattern in options.only or "*")]
    mutants = [mutant for path in chosen for mutant in mutants_of(path)]
    mutants = random.Random(options.seed).sample(mutants, min(options.count, len(mutants)))
    earlier = json.loads(options.known.read_text(encoding="utf-8")) if options.known else []
    killers = {(each["path"], each["after"], each["before"]): each["test"] for each in earlier}
    files = {path for pattern in options.tests or ["test_*.py"] for path in (ROOT / "tests").glob(pattern)}
    tests = {f"tests/{path.name}": imported_modules(path) for path in sorted(files)}
    modules = {_dotted(path): imported_modules(ROOT / path) for path in MODULES}
    results: list[dict[str, object]] = []
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = None if options.list else Copy(Path(folder), options.limit_s)
        for mutant in mutants:
            begin, found = time.monotonic(), tests_of(mutant.path, tests, modules)[: options.files]
            verdict, test = "listed", " ".join(found)
            if tree is not None:
                verdict, test = judge(mutant, found, killers.get((mutant.path, mutant.after, mutant.before), ""), tree)
            results.append(asdict(mutant) | {"verdict": verdict, "test": test})
            change = f"{mutant.path}:{mutant.line}: {mutant.before} → {mutant.after}"
            print(f"{verdict:9} {time.monotonic() - begin:4.0f} s  {change}  {test}", flush=True)
            if options.json:
                options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False), encoding="utf-8")
    verdicts = [str(each["verdict"]) for each in results]
    print(", ".join(f"{verdicts.count(name)} {name}" for name in sorted(set(verdicts))))


if __name__ == "__main__":
    main()
