"""How many threads XLA has on the processor: decided when jax makes its devices, and not changed later."""

import os

from preprocess.cores import num_allowed_cores, num_cores

_NUM_THREADS = "PJRT_NPROC"  # XLA reads it; oneDNN's kernels, whose threads are XLA's, follow it


def fit_threads_to_quota() -> None:
    """Have XLA make a thread for each core that a container's quota allows; does nothing once jax has its devices.

    XLA itself counts the cores on which the scheduler may put it, of which a container may have the time of a few.
    """
    # Imported here, because commands that do not train must answer without jax.
    from jax._src import xla_bridge

    if not xla_bridge.backends_are_initialized() and num_cores() < num_allowed_cores():
        os.environ.setdefault(_NUM_THREADS, str(num_cores()))
