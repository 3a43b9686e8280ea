"""Loggers of experiments, TensorBoard and Weights & Biases, as sinks that never stop or delay a run."""
