"""The ring of samples: bounded, monotonic across resets, and quantiles as Prometheus computes them."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.monitor import table
from headrace.monitor.conditions import Source
from headrace.monitor.history import Column, History, quantiles

KV = Source(table.KV_USE)
TOKENS = Source(table.GENERATED_TOKENS)
FIRST = Source(table.FIRST_TOKEN_SECONDS)
NUM_BUCKETS = len(table.FIRST_TOKEN_SECONDS.bounds or ()) + 1


def history_of(*tokens: float | None, span_s: float = 3600.0) -> History:
    """One sample every ten seconds; the KV cache use is a hundredth of the step's number."""
    history = History([KV, TOKENS, FIRST], span_s=span_s)
    for step, count in enumerate(tokens):
        counts = [0] * NUM_BUCKETS
        counts[7] = 10 * step  # (0.08, 0.1]
        readings = {KV: step / 100, TOKENS: count, FIRST: counts}
        history.record(readings, now=10.0 * step, wall_time=1e9 + 10 * step)
    return history


def test_rates_are_differences_of_samples() -> None:
    history = history_of(0, 100, 200, 600)
    grown = history.growth(TOKENS, 20)
    assert grown is not None
    assert (grown.total, grown.seconds) == (500, 20)
    earlier = history.growth(TOKENS, 10, ago_s=10)
    assert earlier is not None
    assert (earlier.total, earlier.seconds) == (100, 10)


def test_there_is_no_rate_of_one_sample() -> None:
    assert history_of(5).growth(TOKENS, 60) is None
    assert history_of().growth(TOKENS, 60) is None
    assert history_of().latest(KV) is None
    assert history_of().quantile(FIRST, 0.5, 60) is None


def test_there_is_no_rate_of_two_samples_at_the_same_time() -> None:
    history = history_of(0, 1)
    history.record({KV: 0.0, TOKENS: 9, FIRST: [0] * NUM_BUCKETS}, now=10.0, wall_time=1e9)
    assert history.growth(TOKENS, 0) is None
    assert history.table({"tokens": Column(TOKENS)})["tokens"] == [None, 0.1, None]


def test_a_counter_that_starts_again_from_zero_keeps_growing() -> None:
    grown = history_of(0, 100, 200, 30, 50).growth(TOKENS, 60)
    assert grown is not None
    assert grown.total == 250


def test_a_counter_without_a_value_keeps_its_last_one() -> None:
    grown = history_of(0, 100, None, 130).growth(TOKENS, 60)
    assert grown is not None
    assert grown.total == 130


def test_a_gauge_without_a_value_has_none() -> None:
    history = history_of(0, 1)
    history.record({KV: None, TOKENS: 2, FIRST: [0] * NUM_BUCKETS}, now=20, wall_time=20)
    assert history.latest(KV) is None
    assert history.table({"kv": Column(KV)})["kv"] == [0.0, 0.01, None]


def test_memory_is_bounded_and_the_newest_samples_are_kept() -> None:
    history = history_of(*range(1000), span_s=100.0)
    assert len(history) == history.max_samples == 12
    assert history.seconds == 110.0
    assert history.num_bytes == history_of(span_s=100.0).num_bytes
    assert history.latest(KV) == 9.99
    grown = history.growth(TOKENS, 100)
    assert grown is not None
    assert grown.total == 10


def test_the_table_has_rates_gauges_and_quantiles() -> None:
    columns = {"tokens_per_s": Column(TOKENS), "kv": Column(KV), "ttft_p50": Column(FIRST, 0.5, window_s=20)}
    shown = history_of(0, 100, 300).table(columns)
    assert shown["time"] == [1e9, 1e9 + 10, 1e9 + 20]
    assert shown["tokens_per_s"] == [None, 10.0, 20.0]
    assert shown["kv"] == [0.0, 0.01, 0.02]
    assert shown["ttft_p50"] == [None, pytest.approx(0.09), pytest.approx(0.09)]


def test_the_table_of_an_empty_history_is_empty() -> None:
    assert history_of().table({"kv": Column(KV), "tokens": Column(TOKENS), "p": Column(FIRST, 0.5)}) == {
        "time": [],
        "kv": [],
        "tokens": [],
        "p": [],
    }


def test_the_table_has_only_the_samples_after_a_number() -> None:
    history = history_of(0, 100, 300, 600, span_s=20.0)
    columns = {"tokens": Column(TOKENS), "kv": Column(KV), "p50": Column(FIRST, 0.5), "share": Column(TOKENS, per=KV)}
    everything = history.table(columns)
    assert history.num_recorded == 4
    for after in range(4):
        assert history.table(columns, after=after) == {name: values[after:] for name, values in everything.items()}
    for after in (4, 99):  # the number may be of another server
        assert history.table(columns, after=after) == {name: [] for name in everything}
    long = history_of(*range(50), span_s=20.0)
    assert len(long) == 4
    assert long.table({"tokens": Column(TOKENS)}, after=48, span_s=999) == {
        "time": [1e9 + 480, 1e9 + 490],
        "tokens": [0.1, 0.1],
    }


def test_a_share_is_a_growth_divided_by_another() -> None:
    hits, queries = Source(table.PREFIX_HITS), Source(table.PREFIX_QUERIES)
    share = {"share": Column(hits, per=queries, window_s=10.0)}
    history = History([hits, queries])
    for step, (hit, queried) in enumerate(((0, 0), (0, 0), (10, 40), (30, 60))):
        history.record({hits: hit, queries: queried}, now=10.0 * step, wall_time=0.0)
    assert history.table(share)["share"] == [None, None, 0.25, 1.0]
    assert history.now(share, {hits: 35, queries: 70}, now=40.0)["share"] == 0.5
    assert history.now(share, {hits: 30, queries: 60}, now=40.0)["share"] is None


def test_values_of_this_moment_are_those_of_one_more_sample() -> None:
    history = history_of(0, 100, 200)
    counts = [0] * NUM_BUCKETS
    counts[7], counts[8] = 20, 60  # since the first sample: 20 up to 0.1 s, and 60 up to 0.25 s
    columns = {"tokens": Column(TOKENS), "kv": Column(KV), "p50": Column(FIRST, 0.5)}
    found = history.now(columns, {TOKENS: 260, KV: 0.5, FIRST: counts}, now=25.0)
    assert found["tokens"] == pytest.approx(160 / 15)  # since the sample ten seconds ago or more
    assert found["kv"] == 0.5
    assert found["p50"] == pytest.approx(0.1 + 0.15 * (40 - 20) / 60)
    assert len(history) == 3


def test_values_of_this_moment_survive_a_reset_and_a_missing_value() -> None:
    history = history_of(0, 100, 30)
    column = {"tokens": Column(TOKENS), "kv": Column(KV)}
    assert history.now(column, {TOKENS: 50, KV: None}, now=30.0) == {"tokens": 2.0, "kv": None}
    assert history.now(column, {TOKENS: 10, KV: None}, now=30.0)["tokens"] == 1.0  # it was reset again
    assert history.now(column, {TOKENS: None, KV: None}, now=30.0)["tokens"] is None
    assert history_of().now(column, {TOKENS: 1, KV: None}, now=30.0)["tokens"] is None
    assert history_of(5).now(column, {TOKENS: 6, KV: None}, now=0.0)["tokens"] is None


def test_the_table_shows_its_span_only() -> None:
    assert len(history_of(*range(100)).table({"kv": Column(KV)}, span_s=50)["time"]) == 6


@pytest.mark.parametrize(
    ("counts", "quantile", "value"),
    [
        ([10, 0, 0, 0], 0.5, 0.5),  # the first bucket begins at 0
        ([0, 10, 0, 0], 0.5, 1.5),
        ([5, 5, 0, 0], 0.95, 1.9),
        ([5, 0, 5, 0], 0.75, 3.0),
        ([0, 0, 0, 3], 0.5, 4.0),  # above all bounds: the highest
        ([0, 0, 0, 0], 0.5, np.nan),
    ],
)
def test_quantiles_are_linear_within_a_bucket(counts: list[int], quantile: float, value: float) -> None:
    found = quantiles(np.array([counts], float), (1.0, 2.0, 4.0), quantile)
    np.testing.assert_allclose(found, [value])
