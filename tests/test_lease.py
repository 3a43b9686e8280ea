"""The lease of a stored run: one holder at a time, an end without a release, and stores that ignore conditions."""

import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import asdict, dataclass, field, replace

import pytest
import tensorstore as ts

from loopfeed.engine.records.stored.lease import (
    LEASE,
    LEASE_S,
    Holder,
    Lease,
    StoredRunInUseError,
    _parse,
    _process_identity,
)
from loopfeed.preprocess.shards.location import Location, ShardError, open_location
from loopfeed.preprocess.storage_options import DEFAULT_TIMEOUT_S

NOW = 1_000.0


class Clock:
    """A monotonic clock that goes on while something sleeps, and then calls a function."""

    def __init__(self, now=NOW, meanwhile=lambda: None):
        self.now, self.num_sleeps, self._meanwhile = now, 0, meanwhile

    def __call__(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.num_sleeps += 1
        self._meanwhile()


@pytest.fixture
def location():
    # The time limit of a remote store.
    return replace(open_location("memory://run", context=ts.Context()), timeout_s=DEFAULT_TIMEOUT_S)


@pytest.fixture(autouse=True)
def dates_that_say_nothing(monkeypatch):
    """Have the date jump by years at each look."""
    jumps = itertools.cycle([2e9, 5e8, 3e9, 0.0])
    monkeypatch.setattr("loopfeed.engine.records.stored.lease.time.time", lambda: next(jumps))


def lease_of(location, now=NOW, *, clock=None):
    clock = Clock(now) if clock is None else clock
    return Lease(location, clock=clock, sleep=clock.sleep)


def held(location) -> Holder:
    holder = _parse(location.read(LEASE))
    assert holder is not None
    return holder


def put(location, **changes):
    """Make the lease that of another holder."""
    location.write(LEASE, json.dumps(asdict(replace(held(location), launch="another", **changes))).encode())


def as_other(location, **values):
    return {name: getattr(location, name) for name in ("spec", "display", "context", "timeout_s")} | values


def test_a_held_lease_is_refused_until_it_is_released(location):
    first, second = lease_of(location), lease_of(location)
    first.acquire(pytest.fail)
    message = (
        rf"memory://run/ is in use by process {os.getpid()} on host {os.uname().nodename}: wait for it to end, or stop "
        r"it; if it was killed, try again in 180 seconds, or delete memory://run/writer.json"
    )
    for attempt in (second.acquire, second.check_free):
        with pytest.raises(StoredRunInUseError, match=message):
            attempt(pytest.fail)
    second.release()  # of another holder: nothing
    first.renew()
    first.release()
    second.acquire(pytest.fail)
    assert held(location).launch == second.launch


def test_a_lease_expires_after_its_last_renewal(location):
    clock = Clock()
    first = lease_of(location, clock=clock)
    first.acquire(pytest.fail)
    clock.now += LEASE_S - 1
    first.renew()
    with pytest.raises(StoredRunInUseError, match="try again in 1 second,"):
        lease_of(location, NOW + 2 * LEASE_S - 2).acquire(pytest.fail)
    second = lease_of(location, NOW + 2 * LEASE_S)
    second.acquire(pytest.fail)
    # The first one was only paused: it must not go on.
    with pytest.raises(StoredRunInUseError, match="is in use by process"):
        first.renew()
    first.release()
    assert held(location).launch == second.launch


def test_a_holder_that_died_on_this_machine_is_followed_at_once(location):
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        lease_of(location).acquire(pytest.fail)
        put(location, pid=process.pid, process=_process_identity(process.pid))
        with pytest.raises(StoredRunInUseError, match=f"in use by process {process.pid} on host"):
            lease_of(location).check_free(pytest.fail)
        process.kill()
        # As a zombie too, because its parent may be the one that asks.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        lease_of(location).check_free(pytest.fail)
    finally:
        process.communicate()
    lease_of(location).acquire(pytest.fail)


def test_a_process_id_that_was_given_again_is_not_the_holder(location):
    lease_of(location).acquire(pytest.fail)
    put(location, process=f"{held(location).process}1")
    lease_of(location).check_free(pytest.fail)


# The monotonic clock of another machine, or of this one before it was started again, says nothing here; earlier
# releases gave no such time.
ELSEWHERE = [{"host": "another"}, {"process": "boot pid:[1] 2"}, {"renewed_clock": float("nan")}]


@pytest.mark.parametrize("clock", [0.0, NOW, 1e9])
@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_a_lease_that_nobody_renews_is_taken_over_after_it_was_watched(location, elsewhere, clock):
    lease_of(location).acquire(pytest.fail)
    put(location, **({"renewed_clock": clock} | elsewhere))
    said: list[str] = []
    watch = Clock()
    second = lease_of(location, clock=watch)
    second.acquire(said.append)
    assert held(location).launch == second.launch
    assert LEASE_S <= watch.now - NOW < LEASE_S + 5
    assert len(said) == 1
    assert said[0].startswith("memory://run/ was in use by process ")
    assert (
        "waiting up to 180 seconds to see whether it still is; if it was killed, you can delete memory://run/"
        in said[0]
    )


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_a_lease_that_is_renewed_elsewhere_is_refused_as_soon_as_that_is_seen(location, elsewhere):
    lease_of(location).acquire(pytest.fail)
    put(location, pid=os.getpid(), **elsewhere)
    watch: Clock = Clock(meanwhile=lambda: watch.num_sleeps == 5 and put(location, renewals=7, **elsewhere))
    before = held(location).launch
    for attempt in ("check_free", "acquire"):
        watch.num_sleeps = 0
        with pytest.raises(StoredRunInUseError, match=r"is in use by process .*if it was killed, delete memory://run/"):
            getattr(lease_of(location, clock=watch), attempt)(lambda _: None)
        assert watch.num_sleeps == 5
        put(location, renewals=1, **elsewhere)
    assert held(location).launch == before == "another"


def test_a_lease_renewed_at_the_last_moment_is_not_taken(location):
    """The clock is read before the lease: what is renewed within the time counts."""
    lease_of(location).acquire(pytest.fail)
    put(location, host="another")
    watch: Clock = Clock(meanwhile=lambda: watch.now >= NOW + LEASE_S and put(location, host="another", renewals=9))
    with pytest.raises(StoredRunInUseError):
        lease_of(location, clock=watch).acquire(lambda _: None)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"launch": 1}', b"\xff"])
def test_an_unreadable_lease_is_refused_with_its_name(location, content):
    location.write(LEASE, content)
    with pytest.raises(StoredRunInUseError, match=r"run/writer.json does not name this process .*: if no other"):
        lease_of(location).acquire(pytest.fail)


def test_a_bucket_that_does_not_exist_is_named(location, monkeypatch):
    """TensorStore reads nothing there, and a conditional write fails as if another process had written."""

    def fail(*_):
        raise ValueError("NOT_FOUND: NoSuchBucket: The specified bucket does not exist")

    monkeypatch.setattr(Location, "write_if", lambda *_: None)
    monkeypatch.setattr(ts.KvStore, "list", fail)
    with pytest.raises(ShardError, match=r"^memory://run/: can't list it: NOT_FOUND: NoSuchBucket: .* does not exist;"):
        lease_of(location).acquire(pytest.fail)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 10**400, "soon"])
@pytest.mark.parametrize("name", ["renewed", "lasts_s"])
def test_a_lease_with_an_impossible_time_is_refused_with_its_name(location, name, value):
    lease = lease_of(location)
    lease.acquire(pytest.fail)
    location.write(LEASE, json.dumps(asdict(held(location)) | {name: value}).encode())
    for attempt in (lambda: lease_of(location).check_free(pytest.fail), lease.renew):
        with pytest.raises(StoredRunInUseError, match=r"run/writer.json does not name this process .*: if no other"):
            attempt()


@dataclass(frozen=True)
class Meeting(Location):
    """A location whose readers wait for each other, so that all of them find the lease free."""

    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(4, timeout=30))

    def read_stamped(self, key):
        found = super().read_stamped(key)
        if found[0] is None:
            self.barrier.wait()
        return found


@pytest.mark.timeout(60)
def test_of_those_that_start_at_the_same_moment_one_gets_the_lease(location):
    meeting = Meeting(**as_other(location))
    results: list[object] = []

    def start():
        lease = lease_of(meeting)
        try:
            lease.acquire(lambda _: None)
            results.append(lease.launch)
        except StoredRunInUseError as error:
            results.append(error)

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result for result in results if isinstance(result, str)] == [held(location).launch]
    assert sum(isinstance(result, StoredRunInUseError) for result in results) == 3


@dataclass(frozen=True)
class Ignoring(Location):
    """A remote location that ignores conditions."""

    @property
    def is_remote(self):
        return True

    def write_if(self, key, value, generation):
        self.write(key, value)
        return b"generation"

    def refuses_to_replace(self, key, value):
        self.write(key, value)
        return False


def test_a_store_that_ignores_conditions_is_named_once_and_a_held_lease_is_refused_all_the_same(location):
    said: list[str] = []
    ignoring = Ignoring(**as_other(location))
    first = lease_of(ignoring)
    first.acquire(said.append)
    first.renew()
    assert len(said) == 1
    assert said[0].startswith("warning: the store of memory://run/ ignores conditional writes")
    with pytest.raises(StoredRunInUseError, match="in use by process"):
        lease_of(ignoring).acquire(said.append)
    put(location)
    with pytest.raises(StoredRunInUseError, match="in use by process"):
        first.renew()


def test_a_lost_answer_does_not_lose_the_lease(location):
    @dataclass(frozen=True)
    class Losing(Location):
        lost: list[int] = field(default_factory=list)

        def write_if(self, key, value, generation):
            written = super().write_if(key, value, generation)
            self.lost.append(1)
            return None if len(self.lost) % 2 else written

    lease = lease_of(Losing(**as_other(location)))
    lease.acquire(pytest.fail)
    lease.renew()
    assert held(location).launch == lease.launch


def test_a_lease_that_lasts_for_hours_is_not_waited_for(location):
    lease_of(location).acquire(pytest.fail)
    put(location, host="another", lasts_s=1e6)
    with pytest.raises(StoredRunInUseError, match=r"if it was killed, delete memory://run/writer.json"):
        lease_of(location).acquire(pytest.fail)
