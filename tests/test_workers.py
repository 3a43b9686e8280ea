"""Workers: what they return or raise reaches whoever waits, in time, and none keeps a process."""

import contextvars
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref

import pytest

from loopfeed.preprocess import workers
from loopfeed.preprocess.workers import Pool, Worker, call_within, wait_for

LIMIT_S = 30.0
SHORT_S = 0.05


def test_a_worker_passes_on_what_its_function_returns_or_raises():
    assert Worker(lambda: threading.current_thread().name, "mine").start().result(LIMIT_S) == "mine"
    failing = Worker(lambda: 1 // 0, "fails").start()
    assert failing.wait(LIMIT_S)
    for raised in (failing.check, failing.result):
        with pytest.raises(ZeroDivisionError) as caught:
            raised()
        assert caught.value is failing.failure
    with pytest.raises(SystemExit):
        Worker(sys.exit, "exits").start().result(LIMIT_S)


def test_python_reports_what_nobody_asks_for(monkeypatch):
    reported: list[type[BaseException] | None] = []
    monkeypatch.setattr(threading, "excepthook", lambda report: reported.append(report.exc_type))
    assert Worker(lambda: 1 // 0, "alone").start(is_attended=False).wait(LIMIT_S)
    assert Worker(lambda: 1 // 0, "attended").start().wait(LIMIT_S)
    assert reported == [ZeroDivisionError]


def test_waits_end_at_their_limit_all_workers_together():
    release = threading.Event()
    stuck = [Worker(release.wait, f"stuck-{number}").start() for number in range(4)]
    started = time.monotonic()
    assert not stuck[0].wait(SHORT_S)
    with pytest.raises(TimeoutError, match="stuck-0 is still at work"):
        stuck[0].result(SHORT_S)
    assert not wait_for(stuck, SHORT_S)
    assert not call_within(SHORT_S, lambda: release.wait(LIMIT_S))
    assert time.monotonic() - started < LIMIT_S / 2
    assert all(each.is_at_work for each in stuck)
    release.set()
    assert wait_for(stuck, LIMIT_S)
    assert not any(each.is_at_work for each in stuck)


def test_an_interrupted_wait_does_not_take_a_worker_for_ended():
    def interrupt(*_):
        raise InterruptedError("by a signal")

    release, before = threading.Event(), signal.signal(signal.SIGALRM, interrupt)
    worker = Worker(release.wait, "busy").start()
    try:
        signal.setitimer(signal.ITIMER_REAL, 2 * SHORT_S)
        with pytest.raises(InterruptedError, match="by a signal"):
            worker.result(LIMIT_S)
        assert worker.is_at_work
        assert not worker.wait(SHORT_S)
    finally:
        signal.signal(signal.SIGALRM, before)
        release.set()
    assert worker.wait(LIMIT_S)


def test_a_call_within_a_limit_raises_what_it_raised():
    def fail():
        raise OSError("No space left")

    assert call_within(LIMIT_S, lambda: None)
    with pytest.raises(OSError, match="No space left"):
        call_within(LIMIT_S, fail)


@pytest.mark.usefixtures("no_spare_threads")
def test_a_worker_that_was_not_started_or_refused_is_not_waited_for(monkeypatch):
    def refuse(_):
        raise RuntimeError("can't start new thread")

    worker = Worker(lambda: None, "never")
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        worker.start()
    assert not worker.is_at_work
    assert worker.wait()


def test_a_worker_does_not_wait_for_itself():
    found: list[bool] = []
    worker = Worker(lambda: found.append(worker.wait()), "itself")
    worker.start().result(LIMIT_S)
    assert found == [False]


def test_a_worker_that_has_ended_keeps_nothing_that_its_function_refers_to():
    class Owner:
        def __init__(self):
            self.worker = Worker(self.work, "owned")

        def work(self):
            pass

    gc.disable()
    try:
        owner = Owner()
        owner.worker.start().result(LIMIT_S)
        left = weakref.ref(owner)
        del owner
        assert left() is None
    finally:
        gc.enable()


PROGRAM = """
import os, sys, threading
from loopfeed.preprocess.workers import Pool, Worker
stuck = Worker(threading.Event().wait, "stuck").start()
pool = Pool(2, "pool")
pool.submit(threading.Event().wait)
if os.fork() == 0:  # the child has no such thread, and waits for none
    assert not stuck.is_at_work and stuck.wait()
    os._exit(0)
assert os.wait()[1] == 0
print("done")
"""


def test_stuck_workers_keep_no_process_and_a_forked_one_does_not_wait_for_them():
    assert (
        subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, timeout=60, check=True).stdout == b"done\n"
    )


POOL_IN_A_FORK = """
import os
from loopfeed.preprocess.workers import Pool, Worker
pool = Pool(1, "pool")
assert pool.submit(int, "3").result(9) == 3
assert Worker(lambda: 3, "ended").start().result(9) == 3
if os.fork() == 0:
    os._exit(pool.submit(int, "4").result(9) * Worker(lambda: 3, "ended").start().result(9))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""


ONE_AT_THE_END = """
from loopfeed.preprocess.workers import Worker
class Late:
    def __del__(self, start=Worker):
        try:
            start(int, "late").start().wait(9)
        except RuntimeError as error:
            print("refused", flush=True)
Worker(int, "late").start().result(9)
late = Late()
"""


def test_a_call_is_refused_when_the_interpreter_ends_and_waited_for_by_nobody():
    done = subprocess.run([sys.executable, "-c", ONE_AT_THE_END], capture_output=True, text=True, timeout=8, check=True)
    assert done.stdout == "refused\n", done.stderr


def test_a_forked_process_has_threads_of_its_own():
    done = subprocess.run([sys.executable, "-c", POOL_IN_A_FORK], capture_output=True, text=True, timeout=60)
    assert done.stdout == "12\n", done.stderr


def test_a_pool_makes_all_calls_and_maps_in_order():
    with Pool(3, "pool") as pool:
        assert list(pool.map(lambda a, b: a * b, range(50), range(50))) == [number**2 for number in range(50)]
        failing = pool.submit(lambda: 1 // 0)
        slow = [pool.submit(time.sleep, 0.001) for _ in range(20)]
        assert len({thread.name for thread in threading.enumerate() if thread.name.startswith("pool-")}) == 3
    assert all(each.done() for each in slow)
    assert isinstance(failing.exception(), ZeroDivisionError)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pool-")]


@pytest.mark.usefixtures("no_spare_threads")
def test_a_pool_that_is_closed_or_has_no_threads_lets_the_caller_work(monkeypatch):
    closed, caller = Pool(2, "closed"), threading.current_thread()
    closed.close()
    assert closed.submit(threading.current_thread).result(0) is caller

    def refuse(_):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert Pool(2, "refused").submit(threading.current_thread).result(0) is caller


def test_calls_after_one_that_fails_are_not_made():
    release = threading.Event()
    made: list[int] = []

    def call(number):
        if number == 1:
            raise OSError("No space left on device")
        if number > 1:
            release.wait(LIMIT_S)
        made.append(number)

    with Pool(2, "pool") as pool:
        with pytest.raises(OSError, match="No space left"):
            list(pool.map(call, range(100)))
        release.set()
    assert len(made) <= 4


def test_a_call_that_is_cancelled_before_it_begins_is_not_made():
    release = threading.Event()
    made: list[int] = []
    pool = Pool(1, "pool")
    pool.submit(release.wait, LIMIT_S)
    pending = [pool.submit(made.append, number) for number in range(3)]
    assert pending[1].cancel()
    release.set()
    assert pool.close(LIMIT_S)
    assert made == [0, 2]


@pytest.mark.skipif(not workers._KEEPS_THREADS, reason="Python 3.13 and later cannot clear what a thread keeps")
def test_a_thread_makes_the_next_call_of_its_name_and_keeps_nothing_of_the_last():
    stuck, kept = threading.Event(), threading.Event()

    def call(work):
        return Worker(work, "caller").start()

    first = call(threading.current_thread).result(LIMIT_S)
    assert first.name == "spare caller"
    waiting = call(stuck.wait)
    assert first.name == "caller"
    assert waiting.is_at_work
    assert call(threading.current_thread).result(LIMIT_S) is not first
    stuck.set()
    assert waiting.result(LIMIT_S)
    call(kept.set).result(LIMIT_S)
    watched = weakref.ref(kept)
    del kept
    with pytest.raises(ZeroDivisionError):
        call(lambda: 1 // 0).result(LIMIT_S)
    assert watched() is None
    two = {first, call(threading.current_thread).result(LIMIT_S)}
    assert {call(threading.current_thread).result(LIMIT_S) for _ in range(9)} <= two
    assert not waiting.is_at_work
    assert waiting.wait()


def test_a_call_finds_neither_context_variables_nor_thread_locals_of_the_call_before():
    variable, local = contextvars.ContextVar("variable", default=0), threading.local()

    def call():
        found = variable.get(), getattr(local, "value", None), threading.get_ident()
        variable.set(1)
        local.value = threading.Event()
        watched.append(weakref.ref(local.value))
        return found

    watched: list[weakref.ref[threading.Event]] = []
    before, after = (Worker(call, "forgets").start().result(LIMIT_S) for _ in range(2))
    assert before[:2] == after[:2] == (0, None)
    assert not workers._KEEPS_THREADS or before == after
    assert [each() for each in watched] == [None, None]


@pytest.mark.parametrize(("limit", "value"), [("_MOST_SPARE_THREADS", 0), ("_KEEPS_THREADS", False)])
def test_no_more_than_so_many_threads_are_kept(monkeypatch, limit, value):
    monkeypatch.setattr(workers, limit, value)
    thread = Worker(threading.current_thread, "one of too many").start().result(LIMIT_S)
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_a_report_of_an_error_that_fails_too_keeps_the_thread(monkeypatch):
    monkeypatch.setattr(threading, "excepthook", lambda _: 1 // 0)
    assert Worker(lambda: 1 // 0, "unreported").start(is_attended=False).wait(LIMIT_S)
    assert Worker(lambda: 3, "unreported").start().result(LIMIT_S) == 3
