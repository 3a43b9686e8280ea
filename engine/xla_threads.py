"""The threads that XLA makes with its devices on the processor: how many, and whether they are in this process."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from loopfeed.models.xla_threads import NUM_THREADS_VARIABLE, choose_num_threads, chosen_num_threads
from loopfeed.preprocess.control_groups import num_allowed_cores, num_cores

_was_forked = False


def _has_devices() -> bool:
    """Return whether jax has made its devices; it is not imported for this, because commands answer without it."""
    return "jax" in sys.modules and sys.modules["jax._src.xla_bridge"].backends_are_initialized()


@contextmanager
def fitting_threads() -> Iterator[None]:
    """Inside the block, devices that jax makes get the threads that `spare_thread` or a container's quota asks for.

    XLA itself counts the cores on which the scheduler may put it, of which a container may have the time of a few. The
    environment has the number only until the block ends: processes that this one starts are not to have it.
    """
    if _has_devices():
        yield
        return
    if num_cores() < num_allowed_cores():
        choose_num_threads(num_cores())
    count = chosen_num_threads()
    if count is None or NUM_THREADS_VARIABLE in os.environ:
        yield
        return
    os.environ[NUM_THREADS_VARIABLE] = str(count)
    try:
        yield
    finally:
        os.environ.pop(NUM_THREADS_VARIABLE, None)


def spare_thread(num_devices: int) -> None:
    """Have XLA make more threads than the program's devices occupy; does nothing once jax has its devices.

    A program that waits for a batch keeps a thread of XLA for each device. If the source of the batches computes with
    jax, and there is no other thread, both wait for ever.

    Args:
        num_devices: on how many parts of the processor the program runs.
    """
    if not _has_devices() and num_cores() <= num_devices:
        choose_num_threads(num_devices + 1)


def check_not_forked() -> None:
    """Raise RuntimeError in a process that was forked after jax had made its devices: XLA's threads are not in it.

    What is computed there never ends. A fork before this module was imported is not noticed.
    """
    if _was_forked:
        raise RuntimeError(
            "this process was forked from one in which jax was in use already, and has none of its threads, so that it "
            "would wait for ever: start it with multiprocessing.get_context('spawn'), or use jax in it alone"
        )


def _note_fork() -> None:
    global _was_forked
    # jax's own question for it would wait for a lock, which a thread that is not in this process may hold.
    bridge = sys.modules.get("jax._src.xla_bridge")
    _was_forked = bool(getattr(bridge, "_backends", None))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_note_fork)
