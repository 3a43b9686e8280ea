"""oneDNN's kernels as operations of a program."""
