"""SLO strings: what they mean and when a run is too short to tell."""

from __future__ import annotations

import pytest

from headrace.bench.outcomes import Outcome
from headrace.bench.slo import Slo, overall, wilson
from headrace.errors import ConfigError


def outcome(ttft_s: float = 0.1, *, tokens: int = 11, per_token_s: float = 0.01, status: str = "ok") -> Outcome:
    end = ttft_s + per_token_s * (tokens - 1)
    chunks = [ttft_s + i * per_token_s for i in range(tokens)]
    return Outcome(
        index=0,
        due_s=0.0,
        sent_s=0.0,
        end_s=end,
        first_s=ttft_s if status == "ok" else None,
        status=status,  # type: ignore[arg-type]
        num_output_tokens=tokens,
        chunk_s=chunks,
    )


def test_conditions_are_read_with_their_shares_and_limits() -> None:
    slo = Slo.parse("ttft:p99<300ms; tpot:p95 < 40ms;e2e<2s;success>=0.999")
    assert [(c.name, c.share, c.limit_s) for c in slo.conditions] == [
        ("ttft", 0.99, 0.3),
        ("tpot", 0.95, 0.04),
        ("e2e", 0.5, 2.0),
    ]
    assert slo.success == 0.999
    assert Slo.parse("success>=99%").success == 0.99


@pytest.mark.parametrize(
    "text",
    ["", "ttft", "ttft:p99>300ms", "ttft:p99<300", "tttf:p99<3ms", "ttft:p0<1s", "ttft:p99<1.2.3s", "success>=2"],
)
def test_an_unreadable_condition_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError):
        Slo.parse(text)


def test_one_slow_request_in_a_thousand_meets_p99_and_two_percent_miss_it() -> None:
    slo = Slo.parse("ttft:p99<300ms")
    few = [outcome()] * 1999 + [outcome(1.0)]
    many = [outcome()] * 1900 + [outcome(1.0)] * 100
    assert overall(slo.judge(few)) == "met"
    assert overall(slo.judge(many)) == "missed"


def test_a_short_run_does_not_resolve_a_high_percentile() -> None:
    assert overall(Slo.parse("ttft:p99<300ms").judge([outcome()] * 100)) == "unresolved"
    assert overall(Slo.parse("ttft:p99<300ms").judge([outcome()] * 500)) == "met"


def test_a_refused_request_meets_nothing() -> None:
    slo = Slo.parse("ttft:p50<300ms;success>=0.9")
    judged = slo.judge([outcome()] * 100 + [outcome(0.001, status="refused")] * 300)
    assert [j.verdict for j in judged] == ["missed", "missed"]
    assert not slo.is_met_by(outcome(0.001, status="refused"))


def test_goodput_needs_every_limit_at_once() -> None:
    slo = Slo.parse("ttft:p50<300ms;tpot:p50<5ms")
    assert not slo.is_met_by(outcome(0.1, per_token_s=0.01))
    assert slo.is_met_by(outcome(0.1, per_token_s=0.001))


def test_itl_is_the_worst_gap_of_a_request() -> None:
    slow = outcome(per_token_s=0.01)
    slow.chunk_s[-1] += 1.0
    assert not Slo.parse("itl:p50<500ms").is_met_by(slow)
    assert Slo.parse("itl:p50<500ms").is_met_by(outcome(per_token_s=0.01))


def test_the_wilson_interval_is_that_of_the_textbook_and_everything_without_requests() -> None:
    low, high = wilson(95, 100)
    assert (round(low, 4), round(high, 4)) == (0.8882, 0.9785)
    assert wilson(0, 0) == (0.0, 1.0)
