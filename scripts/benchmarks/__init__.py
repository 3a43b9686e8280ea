"""Benchmarks of Loopfeed against alternatives that do the same work; all figures are ratios from an interleaved run."""
