"""The entry point of `python -m scripts.benchmarks`, which scripts/bench calls: `scripts.benchmarks.cli`."""

from scripts.benchmarks.cli import main

main(prog_name="scripts/bench")
