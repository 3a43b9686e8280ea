"""Benchmarks of Feedloop beside what else does the same work: every figure is a ratio of one interleaved run."""
