"""The summary of a log against the plain sums."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.commands.binned_losses import BinnedLosses
from loopfeed.engine.records.loss_log import LossRows

NAN = float("nan")


def rows_of(steps, losses=None, times=None) -> LossRows:
    step = np.array(steps, np.int64)
    loss = np.array(losses if losses is not None else [1.0] * len(step), np.float64)
    blank = np.full(len(step), NAN)
    times_s = np.array(times if times is not None else blank, np.float64)
    return LossRows(step, loss, blank, blank, blank, times_s, np.array([{}] * len(step), object))


LOSSES = st.lists(st.floats(-1e3, 1e3, width=32) | st.just(NAN) | st.just(math.inf), min_size=1, max_size=200)


@given(losses=LOSSES, cut=st.integers(0, 200), smoothing=st.floats(0, 0.99))
def test_a_short_history_has_every_point(losses, cut, smoothing):
    history = BinnedLosses(smoothing)
    history.add(rows_of([]))
    whole = rows_of(range(1, len(losses) + 1), losses)
    history.add(whole.take(slice(0, cut)))
    history.add(whole.take(slice(cut, None)))
    curve = history.curve()
    finite = np.where(np.isfinite(losses), losses, NAN)
    np.testing.assert_array_equal(curve.step, np.arange(1, len(losses) + 1))
    np.testing.assert_array_equal(curve.low, finite)
    np.testing.assert_array_equal(curve.high, finite)
    np.testing.assert_array_equal(curve.num_broken, ~np.isfinite(losses))
    # The definition as a weighted mean of everything so far, in place of the recurrence.
    for index in np.flatnonzero(np.isfinite(losses)):
        past = finite[: index + 1][np.isfinite(finite[: index + 1])]
        weights = smoothing ** np.arange(len(past) - 1, -1, -1.0)
        scale = np.abs(past).max()
        # Two orders of adding up to 200 float64 terms, each with a weight of at most 1.
        assert curve.smoothed[index] == pytest.approx(weights @ past / weights.sum(), abs=1e-12 * scale + 1e-300)


@given(
    num=st.integers(1, 700),
    gap=st.integers(1, 9),
    cut=st.integers(0, 700),
    num_bins=st.sampled_from([2, 4, 16, 64]),
    seed=st.integers(0, 99),
)
def test_long_histories_keep_extremes_counts_and_steps(num, gap, cut, num_bins, seed):
    generator = np.random.default_rng(seed)
    steps = np.cumsum(generator.integers(1, gap + 1, num))
    losses = np.where(generator.random(num) < 0.1, NAN, generator.normal(size=num))
    history = BinnedLosses(0.0, num_bins=num_bins)
    rows = rows_of(steps, losses)
    history.add(rows.take(slice(0, cut)))
    history.add(rows.take(slice(cut, None)))
    curve = history.curve()
    assert len(curve.step) <= num_bins
    assert np.all(np.diff(curve.step) > 0)
    assert curve.num_broken.sum() == np.isnan(losses).sum()
    finite = losses[np.isfinite(losses)]
    if len(finite):
        assert (np.nanmin(curve.low), np.nanmax(curve.high)) == (finite.min(), finite.max())
    # The width a bin has come to, and then every bin from its own rows.
    width = 1
    while steps[-1] // width - steps[0] // width >= num_bins:
        width *= 2
    bins = steps // width
    for index, number in enumerate(np.unique(bins)):
        inside = bins == number
        assert curve.step[index] == pytest.approx(steps[inside].mean())
        mine = losses[inside][np.isfinite(losses[inside])]
        if len(mine):
            assert (curve.low[index], curve.high[index]) == (mine.min(), mine.max())
            # Sums in another order: a few units in the last place of losses of order 1.
            assert curve.smoothed[index] == pytest.approx(mine.mean(), abs=1e-12)
        else:
            assert np.isnan(curve.low[index])


@given(
    num=st.integers(1, 600),
    last=st.integers(1, 700),
    num_bins=st.sampled_from([2, 4, 16]),
    chunk=st.integers(1, 300),
    start=st.sampled_from([0, 1, 10**6]),
)
def test_last_steps_keeps_those_and_at_most_a_bin_more(num, last, num_bins, chunk, start):
    steps = np.arange(start, start + num)
    history = BinnedLosses(0.9, last, num_bins)
    for index in range(0, num, chunk):
        history.add(rows_of(steps[index : index + chunk], steps[index : index + chunk]))
    curve = history.curve()
    wanted = steps[-last:]
    width = 1
    while num_bins // 2 * width < last:
        width *= 2
    assert np.nanmax(curve.high) == steps[-1]
    assert wanted[0] - width < np.nanmin(curve.low) <= wanted[0]
    assert len(curve.step) <= num_bins


@given(st.lists(st.tuples(st.integers(0, 60), st.floats(0, 9)), min_size=1, max_size=80), st.integers(1, 80))
def test_a_resumed_run_replaces_the_steps_it_does_again(pairs, chunk):
    history = BinnedLosses(0.0)
    truth: dict[int, float] = {}
    for step, loss in pairs:
        truth = {s: value for s, value in truth.items() if s < step} | {step: loss}
    for index in range(0, len(pairs), chunk):
        part = pairs[index : index + chunk]
        history.add(rows_of([s for s, _ in part], [value for _, value in part]))
    curve = history.curve()
    assert dict(zip(curve.step.tolist(), curve.high.tolist(), strict=True)) == truth
    assert history.last_step == pairs[-1][0]
