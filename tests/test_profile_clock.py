"""The host's clock of a launch, by a clock that is set by hand, and the rows that it gives with traced batches."""

import math

import pytest

from loopfeed.engine.crossing.pushed import PushedEvaluation, PushedLosses, PushedSnapshot
from loopfeed.engine.profile.attribution import TracedBatch
from loopfeed.engine.profile.capture import Window
from loopfeed.engine.profile.clock import HostClock
from loopfeed.engine.profile.profiler import Course
from loopfeed.engine.profile.rows import Measured, make_profile
from loopfeed.engine.scopes import NO_SCOPE, Scope

LOSSES, SNAPSHOT = PushedLosses(1, [0.5], [0.1], 0.0), PushedSnapshot(1, 1, None)
EVALUATION = PushedEvaluation(1, 8, 1, 1, 0.5, 0.0)


class Hands:
    """A clock that goes only when it is told to, and a launch that it times."""

    def __init__(self, **options):
        self.now = 100.0
        self.clock = HostClock(now=lambda: self.now, **options)

    def go(self, seconds):
        self.now += seconds

    def pull(self, phase, index, draw_s, batch_s, num_batches=1):
        self.clock.pull_began(phase, index)
        self.go(draw_s)
        self.clock.pull_ended(phase, num_batches)
        self.go(batch_s)

    def push(self, pushed, seconds):
        self.go(seconds)
        self.clock.pushed(pushed, self.now - seconds, self.now)


def summary(spread):
    return spread.count, pytest.approx(spread.total_s)


def a_launch():
    """Two stretches of two steps, an evaluation of two batches after each, and a snapshot after the second step."""
    hands = Hands(epoch_of=lambda pull: pull // 3)
    train, valid = hands.clock.train, hands.clock.valid
    hands.go(7)  # before the first draw
    for stretch in range(2):
        for step in range(2):
            hands.pull(train, 2 * stretch + step, draw_s=1, batch_s=10)
            hands.push(LOSSES, 0.5)
            hands.go(0.5)
        if stretch == 0:
            hands.push(SNAPSHOT, 3)
            hands.go(2)
        for batch in range(2):
            hands.pull(valid, 2 * stretch + batch, draw_s=0.25, batch_s=4)
        hands.push(EVALUATION, 1)
        hands.go(0.125)
    hands.clock.finish()
    return hands.clock, hands.now - 100


def test_the_time_of_the_loop_is_divided_into_draws_batches_and_snapshots():
    clock, _ = a_launch()
    assert summary(clock.train.draws) == (4, 4)
    assert summary(clock.train.batches) == (4, 4 * 11 + 2)
    assert summary(clock.train.steps) == (4, 4 * 12 + 2)
    assert summary(clock.snapshots) == (1, 3)
    assert summary(clock.train.stretches) == (2, 4 * 12 + 2 + 3)
    assert summary(clock.valid.draws) == (4, 1)
    assert summary(clock.valid.batches) == (4, 4 * 4 + 2)
    assert summary(clock.valid.stretches) == (2, 2 * 9.5)
    # Batches 0 to 2 with the first evaluation and the snapshot, and batch 3 with the second.
    assert summary(clock.epochs) == (2, 3 * 12 + 5 + 9.5 + 0.125 + (12 + 9.5 + 0.125))


def test_a_pull_of_several_batches_is_divided_evenly():
    hands = Hands()
    hands.pull(hands.clock.train, 0, draw_s=2, batch_s=8, num_batches=4)
    hands.clock.finish()
    steps = hands.clock.train.steps
    assert (steps.count, steps.mean_s, steps.std_s) == (4, 2.5, None)


def test_where_the_device_waits_by_itself_its_waits_are_the_draws():
    hands = Hands(draws_on_device=True)
    for step in range(3):
        hands.pull(hands.clock.train, step, draw_s=0.01, batch_s=5.99)
        hands.clock.add_wait(2.0)
    hands.clock.finish()
    times = hands.clock.train
    assert times.steps.mean_s == pytest.approx(6)
    assert (times.draws.count, times.draws.mean_s) == (3, 2.0)
    assert times.batch_mean_s == pytest.approx(4)


def traced(phase, **milliseconds):
    """Return a traced batch with so many ms of each action, of its scopes (forward__stage1), and of none ("rest")."""
    parts = {}
    for name, duration in milliseconds.items():
        action, _, path = name.partition("__")
        parts[NO_SCOPE if action == "rest" else Scope(phase, action, path.replace("_", "/"))] = duration * 1e6
    return TracedBatch(phase, parts)


def profile_of(*batches):
    clock, fit_s = a_launch()
    return make_profile(Measured(clock, fit_s, batches, {"train": 1, "valid": 0}, {"train": 8.0, "valid": 4.0}))


BATCHES = (
    traced("train", draw=2, forward__stage1_a=2, forward__stage2=4, backward__stage2=6, rest=0.5, opt_step=3.5),
    traced("train", draw=8, forward__stage1_a=4, forward__stage2=4, backward__stage2=6, rest=1.5, opt_step=4.5),
)


def test_the_rows_of_the_traced_actions_add_up_to_the_batch_of_the_clock():
    profile = profile_of(*BATCHES)
    batch = profile.row("train", "batch")
    parts = [row for row in profile.rows if row.phase == "train" and row.is_estimated]
    assert [row.action for row in parts] == ["forward", "backward", "opt_step", "unattributed"]
    assert math.fsum(row.total_s for row in parts) == pytest.approx(batch.total_s) == pytest.approx(46)
    # 7 ms of 18 ms of a batch without its draw.
    assert profile.row("train", "forward").mean_s == pytest.approx(46 / 4 * 7 / 18)
    assert profile.row("train", "forward").std_s == pytest.approx(46 / 4 * 1 / 18)
    assert profile.row("train", "unattributed").percent == pytest.approx(100 * 46 / 18 / batch_time())


def test_the_batches_of_a_pull_share_its_time_and_their_deviation_is_unknown():
    pulls = [TracedBatch(each.phase, each.parts_ns, num_batches=2) for each in BATCHES]
    profile, single = profile_of(*pulls), profile_of(*BATCHES)
    for row, other in zip(profile.rows, single.rows, strict=True):
        assert row.mean_s == pytest.approx(other.mean_s)
        if row.is_estimated:
            assert row.std_s is None
    (steps,) = profile.traced
    assert (steps.count, steps.mean_s) == (4, pytest.approx((18 + 28) / 4 / 1e3))


def batch_time():
    return a_launch()[1]


def test_the_phases_and_the_rest_add_up_to_the_fit():
    rows = {row.action: row for row in profile_of().rows if row.phase == "fit"}
    assert list(rows) == ["fit", "epoch", "train", "valid", "unattributed"]
    parts = rows["train"].total_s + rows["valid"].total_s + rows["unattributed"].total_s
    assert parts == pytest.approx(rows["fit"].total_s) == pytest.approx(batch_time())
    assert rows["fit"].percent == 100
    assert rows["train"].calls == rows["valid"].calls == 2


def test_step_is_draw_and_batch_and_the_rate_of_draw_is_what_it_costs():
    profile = profile_of()
    step, draw, batch = (profile.row("train", action) for action in ("step", "draw", "batch"))
    assert step.mean_s == pytest.approx(draw.mean_s + batch.mean_s)
    assert step.samples_per_s == pytest.approx(8 / step.mean_s)
    assert draw.samples_per_s == pytest.approx(step.samples_per_s - batch.samples_per_s)
    assert draw.samples_per_s < 0
    assert profile.row("train", "snapshot").total_s == 3
    assert profile.row("valid", "batch").samples_per_s == pytest.approx(4 / 4.5)


def test_without_a_trace_the_rows_are_those_of_the_host():
    profile = profile_of()
    assert {row.action for row in profile.rows if row.phase == "valid"} == {"step", "draw", "batch"}
    assert (profile.scopes, profile.traced) == ((), ())


def test_the_table_of_scopes_has_the_stages_and_doubling_one_changes_no_other():
    rows = {(row.action, row.scope): row.total_s for row in profile_of(*BATCHES).scopes}
    assert list(rows) == [("forward", "stage1"), ("forward", "stage2"), ("backward", "stage2")]
    doubled = [
        TracedBatch(each.phase, {scope: time * (1 + ("stage1" in scope.path)) for scope, time in each.parts_ns.items()})
        for each in BATCHES
    ]
    after = {(row.action, row.scope): row.total_s for row in profile_of(*doubled).scopes}
    # Only the shares change, because the clock's batch is the same.
    assert after["forward", "stage1"] / after["forward", "stage2"] == pytest.approx(
        2 * rows["forward", "stage1"] / rows["forward", "stage2"]
    )
    assert after["backward", "stage2"] / after["forward", "stage2"] == pytest.approx(
        rows["backward", "stage2"] / rows["forward", "stage2"]
    )


@pytest.mark.parametrize(
    ("course", "windows"),
    [
        (Course(0, 100, 1, 8), {"train": Window(10, 30)}),
        (Course(0, 6, 1, 8), {"train": Window(2, 30)}),
        (Course(0, 200, 2, 8), {"train": Window(20, 60)}),
        (Course(0, 200, 1, 8, chunk=16), {"train": Window(10, 30, chunk=16)}),
        (Course(50, 50, 1, 8), {}),
        (Course(0, 100, 1, 8, steps=range(3, 5)), {"train": Window(3, 2, is_chosen=True)}),
        (Course(0, 100, 2, 8, steps=range(3, 5)), {"train": Window(6, 4, is_chosen=True)}),
        # Of a resumed run, the part of the window that is left, if any is.
        (Course(4, 100, 1, 8, steps=range(3, 9)), {"train": Window(0, 5, is_chosen=True)}),
        (Course(9, 100, 1, 8, steps=range(3, 9)), {}),
        (Course(0, 3, 1, 8, steps=range(3, 9)), {}),
        (Course(0, 100, 1, 8, eval_every_steps=40), {"train": Window(10, 30), "valid": Window(40, 10)}),
        (Course(50, 100, 1, 8, eval_every_steps=40), {"train": Window(10, 30), "valid": Window(30, 10)}),
        (Course(0, 30, 1, 8, eval_every_steps=40), {"train": Window(10, 30), "valid": Window(30, 10)}),
        (Course(0, 30, 1, 8, eval_every_steps=0), {"train": Window(10, 30), "valid": Window(30, 10)}),
    ],
)  # fmt: skip
def test_the_windows_that_are_traced(course, windows):
    assert course.windows() == windows


@pytest.mark.parametrize(
    ("course", "why"),
    [
        (Course(0, 60, 1, 8, steps=range(100, 200)), "the run has only 60 steps, counted from 0; choose steps from 0"),
        (Course(0, 120, 2, 8, steps=range(60, 61)), "the run has only 60 steps"),
        (Course(80, 100, 1, 8, steps=range(3, 9)), "the run resumes at step 80; choose steps from 80 to 100"),
        (Course(80, 100, 1, 8, steps=range(3, 81)), None),
        (Course(60, 60, 1, 8, steps=range(3, 9)), None),
        (Course(0, 60, 1, 8), None),
    ],
)  # fmt: skip
def test_a_chosen_window_outside_of_the_launch_is_reported_before_it(course, why):
    warning = course.window_warning()
    assert (why in warning and "--profile-steps" in warning) if why else warning is None


def test_a_pull_that_ends_the_loop_is_no_step():
    hands = Hands()
    hands.pull(hands.clock.train, 0, draw_s=1, batch_s=2)
    hands.pull(hands.clock.train, 1, draw_s=50, batch_s=3, num_batches=0)
    hands.clock.finish()
    assert summary(hands.clock.train.steps) == (1, 3)
    assert hands.clock.train.draws.count == hands.clock.train.batches.count == 1
