from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from headrace.scrape.page import Sample, finite, growth, samples


def one(line: str) -> Sample:
    (sample,) = samples(line)
    return sample


@given(st.text(min_size=1))
def test_any_label_value_is_read_as_prometheus_writes_it(value: str) -> None:
    registry = CollectorRegistry()
    Gauge("x", "help", ["model_name", "other"], registry=registry).labels(value, "b").set(1.5)
    page = generate_latest(registry).decode(errors="surrogatepass")
    (sample,) = samples(page)
    assert sample == ("x", {"model_name": value, "other": "b"}, 1.5)


def test_a_value_may_be_nan_or_infinite_and_have_a_timestamp() -> None:
    assert math.isnan(one('x{a="b"} NaN').value)
    assert one("x +Inf").value == math.inf
    assert one('x{a="}",} 3 1700000000000').value == 3
    assert finite(samples('x{a="1"} NaN\nx{a="2"} +Inf\nx{a="3"} 2\n')) == [("x", {"a": "3"}, 2.0)]


def test_an_exemplar_is_not_taken_for_the_value() -> None:
    assert one('x_bucket{le="1"} 3 # {trace_id="abc"} 0.5') == ("x_bucket", {"le": "1"}, 3.0)


@pytest.mark.parametrize("line", ["", "# HELP x y", "<html>", "x", "x{a=", 'x{a="b"} what', "{} 3"])
def test_other_lines_are_skipped(line: str) -> None:
    assert list(samples(line)) == []


def page(text: str) -> list[Sample]:
    return finite(samples(text))


def grown(before: str, after: str) -> dict[str, float]:
    return {
        sample.name + "".join(sample.labels.values()): sample.value for sample in growth(page(before), page(after))[0]
    }


def test_growth_is_counted_for_each_label_set() -> None:
    before = 'a_total{x="1"} 5\na_total{x="2"} 7\ng 3'
    assert grown(before, 'a_total{x="1"} 6\na_total{x="2"} 17\ng 9') == {"a_total1": 1, "a_total2": 10}


def test_a_series_that_appears_began_at_0() -> None:
    assert grown('a_total{x="1"} 5', 'a_total{x="1"} 5\na_total{x="2"} 3') == {"a_total1": 0, "a_total2": 3}


def test_an_engine_whose_counters_fell_began_again_and_others_did_not() -> None:
    before = 'a_total{engine="0"} 50\na_total{engine="1"} 50\nb_total{engine="0"} 1\n'
    after = 'a_total{engine="0"} 4\na_total{engine="1"} 60\nb_total{engine="0"} 3\n'
    found = growth(page(before), page(after))
    assert found.is_restart
    # b grew, but its engine is a new one: all 3 are of this interval.
    assert [sample.value for sample in found.samples] == [4, 10, 3]


def test_another_process_began_at_0_even_if_its_counters_are_higher() -> None:
    found = growth(page("process_start_time_seconds 100\na_total 5"), page("process_start_time_seconds 200\na_total 8"))
    assert found.is_restart and [sample.value for sample in found.samples] == [8]


def test_without_change_nothing_restarted() -> None:
    text = "process_start_time_seconds 100\na_total 5\nh_sum -3"
    found = growth(page(text), page(text.replace("-3", "-4")))
    assert not found.is_restart and [sample.value for sample in found.samples] == [0, 0]
