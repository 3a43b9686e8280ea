"""How many threads XLA makes with its devices on the processor, if it was told; kernels that run on them follow it."""

import os

NUM_THREADS_VARIABLE = "PJRT_NPROC"
"""The environment variable in which XLA reads how many threads to make with its devices."""

_chosen: int | None = None


def choose_num_threads(count: int) -> None:
    """Choose how many threads XLA is to make, unless the environment or an earlier call says so."""
    global _chosen
    if _chosen is None and NUM_THREADS_VARIABLE not in os.environ:
        _chosen = count


def chosen_num_threads() -> int | None:
    """Return the number that `choose_num_threads` chose; None if it chose none."""
    return _chosen


def given_num_threads() -> int | None:
    """Return how many threads XLA was told to make, by `choose_num_threads` or the environment; None if by neither."""
    if _chosen is not None:
        return _chosen
    given = os.environ.get(NUM_THREADS_VARIABLE, "")
    return int(given) if given.isdecimal() and int(given) else None
