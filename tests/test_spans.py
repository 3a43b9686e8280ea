"""Spans: histograms of durations: counts and sums exact, percentiles within a bucket."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from loopfeed.engine.spans import Span, Times


@given(st.lists(st.floats(1e-6, 1000), min_size=1, max_size=200))
def test_percentiles_are_upper_bounds_of_their_bucket(values):
    durations = Span()
    for value in values:
        durations.add(value)
    found = durations.summary()
    assert (found.count, found.max_s) == (len(values), max(values))
    assert np.isclose(found.total_s, sum(values))
    for percent, bound in ((50, found.p50_s), (90, found.p90_s), (99, found.p99_s)):
        exact = np.percentile(values, percent, method="inverted_cdf")
        assert exact <= bound <= exact * 1.25


def test_no_durations_and_waits_of_nothing():
    durations = Span()
    assert durations.summary() == Times()
    for _ in range(3):
        durations.add(0.0)
    assert durations.summary() == Times(count=3)


def test_what_is_longer_than_all_buckets_is_counted():
    durations = Span()
    durations.add(1e6)
    assert durations.summary() == Times(1, 1e6, 1e6, 1e6, 1e6, 1e6)
