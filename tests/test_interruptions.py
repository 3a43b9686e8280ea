"""An exception that another thread sets for the one that trains, wherever that is: the folder is free after it."""

import ctypes
import threading
from typing import Any, cast

import pytest

from loopfeed import train
from loopfeed.engine.records.folder_lock import FolderLock, is_locked
from tests.toy import Linear, toy_batch, toy_config

STEPS = 10**7


class StopError(Exception):
    """What a supervisor of threads sets, such as that of a notebook or of a test's time limit."""


def interrupt(thread, kind):
    set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
    assert set_exception(ctypes.c_ulong(thread), ctypes.py_object(kind)) == 1


def is_free(folder):
    try:
        with FolderLock(folder):
            return True
    except ValueError:
        return False


@pytest.mark.parametrize("kind", [KeyboardInterrupt, StopError])
def test_a_run_that_is_interrupted_in_its_steps_ends_and_can_be_resumed(tmp_path, kind):
    main = threading.get_ident()
    config = toy_config(run_dir=str(tmp_path), steps=STEPS)

    def at_step(record):
        if record.step == 20:
            interrupt(main, kind)

    with pytest.raises(kind):
        train(config, model=cast(Any, Linear()), batches=toy_batch, sinks=[at_step])
    assert is_free(tmp_path)
    assert not [thread for thread in threading.enumerate() if thread.name in ("worker", "feeder-0")]
    last: list[int] = []
    ended = toy_config(run_dir=str(tmp_path), steps=5, overwrite=True)
    train(ended, model=cast(Any, Linear()), batches=toy_batch, sinks=[lambda record: last.append(record.step)])
    assert last == [1, 2, 3, 4, 5]


def test_a_run_that_is_interrupted_before_its_steps_leaves_the_folder_free(tmp_path):
    main, num_notices = threading.get_ident(), 0
    for number in range(100):
        seen: list[str] = []

        def notify(line, seen=seen, number=number):
            seen.append(line)
            if len(seen) == number + 1 and threading.get_ident() == main:
                interrupt(main, StopError)

        folder = tmp_path / str(number)
        try:
            config = toy_config(run_dir=str(folder), steps=2)
            train(config, model=cast(Any, Linear()), batches=toy_batch, notify=notify)
        except StopError:
            num_notices += 1
            assert not folder.exists() or is_free(folder)
        else:
            break
    assert num_notices >= 3


def test_a_lock_is_free_once_nothing_refers_to_it(tmp_path):
    cycle: list[object] = []
    lock = FolderLock(tmp_path)
    lock.acquire()
    cycle += [lock, cycle]
    del lock, cycle
    # Only the collector of cycles finds it.
    with FolderLock(tmp_path):
        assert is_locked(tmp_path)
    assert not is_locked(tmp_path)
