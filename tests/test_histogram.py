from __future__ import annotations

import bisect

from hypothesis import given
from hypothesis import strategies as st

from headrace.histogram import Histogram, HistogramCounts


def test_a_value_on_a_bound_belongs_to_it_and_one_above_all_to_the_rest() -> None:
    histogram = Histogram((1, 2, 5))
    for value in (0.5, 1.0, 1.5, 5.0, 6.0):
        histogram.observe(value)
    assert histogram.snapshot() == HistogramCounts((2, 1, 1, 1), 14.0)


def test_a_snapshot_stays_as_it_was() -> None:
    histogram = Histogram((1,))
    before = histogram.snapshot()
    histogram.observe_many(3.0, 4)
    assert before == HistogramCounts((0, 0), 0.0)
    assert histogram.snapshot() == HistogramCounts((0, 4), 12.0)


@given(st.lists(st.integers(0, 20)))
def test_cumulative_counts_up_to_a_bound_are_the_values_not_above_it(values: list[int]) -> None:
    histogram = Histogram((1, 8, 16))
    for value in values:
        histogram.observe(value)
    counts = histogram.snapshot()
    assert counts.num_values == len(values)
    for position, bound in enumerate(histogram.bounds):
        assert sum(counts.counts[: position + 1]) == bisect.bisect_right(sorted(values), bound)
