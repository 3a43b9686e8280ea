"""Runs `scripts.benchmarks.cli` by `python -m scripts.benchmarks`, as scripts/bench does."""

from scripts.benchmarks.cli import main

main(prog_name="scripts/bench")
