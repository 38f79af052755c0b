"""Comparing records: matching, intervals, verdicts, warnings and the gate for CI."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.compare import Comparison, Difference, compare, compare_paths, parse_limit
from headrace.bench.record import RecordError, write_record
from headrace.bench.report.comparison import comparison_report
from headrace.bench.report.page import page
from headrace.errors import ConfigError
from tests.bench.records import base_record, level, offline_record, online_record, outcomes


def side(*records: dict[str, Any]) -> list[tuple[dict[str, Any], None]]:
    return [(record, None) for record in records]


def figure(comparison: Comparison, name: str, match: int = 0) -> Difference:
    return next(each for each in comparison.matches[match].differences if each.name == name)


def test_a_clear_gain_over_rounds_is_better() -> None:
    found = figure(
        compare(side(offline_record((1000, 1010, 990))), side(offline_record((1200, 1210, 1195)))),
        "output_tokens_per_s",
    )
    assert found.verdict == "better"
    assert found.ratio == pytest.approx(1.2, abs=0.01)
    assert found.interval is not None and 1.1 < found.interval[0] < 1.2 < found.interval[1] < 1.3
    assert found.basis == "3 and 3 rounds, not paired"


def test_noise_is_no_difference() -> None:
    found = figure(
        compare(side(offline_record((1000, 1050, 950))), side(offline_record((1020, 980, 1060)))), "output_tokens_per_s"
    )
    assert found.verdict == "no difference shown"


def test_one_round_has_no_interval_and_says_so() -> None:
    found = figure(compare(side(offline_record((1000,))), side(offline_record((1200,)))), "output_tokens_per_s")
    assert found.interval is None
    assert found.verdict == "no interval: one round"
    assert found.ratio == pytest.approx(1.2)


def test_records_of_a_set_are_rounds_and_interleaved_ones_are_paired() -> None:
    sides: list[list[dict[str, Any]]] = [[], []]
    rng = random.Random(0)
    for i in range(6):
        speed = 1000 * rng.lognormvariate(0, 0.1)  # the machine's speed changes from pair to pair
        for place in (0, 1) if i % 2 == 0 else (1, 0):
            when = f"2026-11-16T12:{2 * i + (place != i % 2):02}:00+00:00"
            rate = speed * (1.05 if place else 1.0) * (1 + 0.001 * rng.random())
            sides[place].append(offline_record((rate,), started_at=when, id=f"{i}{place}"))
    found = figure(compare(side(*sides[0]), side(*sides[1])), "output_tokens_per_s")
    assert found.basis == "6 and 6 rounds, paired"
    assert found.verdict == "better"
    later = [record | {"started_at": "2026-11-17T" + record["started_at"][11:]} for record in sides[1]]
    apart = figure(compare(side(*sides[0]), side(*later)), "output_tokens_per_s")
    assert apart.basis == "6 and 6 rounds, not paired"
    assert apart.verdict == "no difference shown"


def test_latency_percentiles_of_one_run_each_have_an_interval_over_requests(tmp_path: Path) -> None:
    for name, ttft in (("a", 0.05), ("b", 0.08)):
        rows = outcomes(400, seed=ord(name), ttft_s=ttft)
        write_record(online_record([level(16, rows)], id=name), tmp_path / name / "record.json", [rows])
    comparison = compare_paths(tmp_path / "a", tmp_path / "b" / "record.json")
    ttft_p50, tpot, itl = (figure(comparison, name) for name in ("ttft_p50", "tpot_p50", "itl_p50"))
    assert ttft_p50.verdict == "worse" and ttft_p50.ratio == pytest.approx(1.6, rel=0.1)
    assert "requests of one run each" in ttft_p50.basis
    assert tpot.verdict == itl.verdict == "no difference shown"
    assert figure(comparison, "output_tokens_per_s").verdict == "no interval: one round"
    assert comparison.matches[0].uses_steady


def test_without_rows_a_percentile_of_one_run_has_no_interval() -> None:
    found = figure(compare(side(online_record()), side(online_record())), "ttft_p95")
    assert found.verdict == "no interval: one round"
    assert "no request rows" in found.basis


def test_levels_are_matched_by_their_load() -> None:
    before = online_record([level(1, outcomes(50)), level(16, outcomes(100))])
    after = online_record([level(16, outcomes(100)), level(64, outcomes(100))])
    comparison = compare(side(before), side(after))
    assert [match.label for match in comparison.matches] == ["chat, 16 concurrent"]
    assert comparison.only_before == ["chat, 1 concurrent"]
    assert comparison.only_after == ["chat, 64 concurrent"]


def test_a_whole_run_is_not_compared_with_a_steady_window() -> None:
    rows = outcomes()
    comparison = compare(side(online_record([level(4, rows)])), side(online_record([level(4, rows, steady=None)])))
    assert not comparison.matches[0].uses_steady
    assert figure(comparison, "output_tokens_per_s").ratio == pytest.approx(1.0)


def test_nothing_in_common_is_an_error_that_names_both() -> None:
    with pytest.raises(RecordError, match=r"chat, 1 concurrent against chat, 64 concurrent"):
        compare(side(online_record([level(1, outcomes(9))])), side(online_record([level(64, outcomes(9))])))


def test_a_set_that_mixes_engines_is_refused() -> None:
    other = offline_record()
    other["engine"] = other["engine"] | {"name": "vllm"}
    with pytest.raises(RecordError, match="2 different engines"):
        compare(side(offline_record(), other), side(offline_record()))


def test_every_fact_that_differs_is_named_with_both_values() -> None:
    before, after = offline_record(), offline_record()
    after["machine"] = after["machine"] | {"cpu": "Another CPU"}
    after["versions"] = after["versions"] | {"torch": "2.12.0"}
    after["model"] = after["model"] | {"digest": "d2"}
    after["engine"] = after["engine"] | {
        "settings": {"enable_chunked_prefill": {"value": True}, "max_num_seqs": {"value": 64}}
    }
    warnings = compare(side(before), side(after), names=("old", "new")).warnings
    assert "different machine: cpu is A CPU in old, Another CPU in new" in warnings
    assert "different version: torch is 2.11.0 in old, 2.12.0 in new" in warnings
    assert any(warning.startswith("different model: digest") for warning in warnings)
    assert "different setting: enable_chunked_prefill is false in old, true in new" in warnings
    assert "different setting: block_size is 16 in old, not available in new" in warnings
    assert not any("max_num_seqs" in warning for warning in warnings)


def test_another_workload_is_compared_with_a_warning() -> None:
    after = offline_record(workload={"name": "decode", "hash": "ffff", "seed": 2})
    warnings = compare(side(offline_record()), side(after)).warnings
    assert warnings[0].startswith("the workloads differ")
    assert "different workload: name is chat in A, decode in B" in warnings


def test_equal_records_differ_in_nothing() -> None:
    comparison = compare(side(offline_record()), side(offline_record()))
    assert comparison.facts == [] and comparison.warnings == []
    assert {each.verdict for each in comparison.matches[0].differences} == {"no difference shown"}


def test_a_side_that_refuses_is_warned_about_and_worse() -> None:
    after = online_record([level(16, outcomes(150, num_refused=50))])
    comparison = compare(side(online_record()), side(after))
    assert "B did not answer 50 of 200 requests of chat, 16 concurrent" in comparison.warnings[0]
    assert figure(comparison, "success_share").verdict == "worse"


@pytest.mark.parametrize("text, limit", [("5%", 0.05), ("0.05", 0.05), (" 12.5 % ", 0.125), ("0", 0.0)])
def test_a_limit_is_a_share_or_percent(text: str, limit: float) -> None:
    assert parse_limit(text) == pytest.approx(limit)


@pytest.mark.parametrize("text", ["five", "-1%", "100%", "5"])
def test_a_limit_that_is_no_share_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"such as 5% or 0\.05"):
        parse_limit(text)


def test_the_gate_fails_only_on_losses_that_are_shown_and_beyond_the_limit() -> None:
    def failures(*rates: float, limit: float = 0.05) -> list[str]:
        return compare(side(offline_record((1000, 1005, 995))), side(offline_record(rates))).failures(limit)

    assert failures(900, 905, 895)[0] == "chat, offline: output tokens/s is 10.0 % worse"
    assert failures(980, 981, 979) == []  # shown, but within the limit
    assert failures(700, 1000, 1000) == []  # beyond the limit, but not shown
    assert failures(1100, 1105, 1095) == []
    assert "noise is not known" in failures(900)[0]


def test_the_gate_fails_if_a_load_is_missing_or_nothing_was_answered() -> None:
    before = online_record([level(1, outcomes(50)), level(16, outcomes(50))])
    missing = compare(side(before), side(online_record([level(1, outcomes(50))])))
    assert missing.failures(0.05) == ["chat, 16 concurrent: measured in A only"]
    dead = compare(side(before), side(online_record([level(1, outcomes(50)), level(16, outcomes(0, num_refused=50))])))
    lines = dead.failures(0.05)
    assert any("output tokens/s is 100.0 % worse" in line for line in lines)
    assert any("TTFT p50 is not available in B" in line for line in lines)


def test_a_comparison_is_shown_without_markup_of_its_records() -> None:
    rows = outcomes()
    before, after = online_record([level(4, rows)]), online_record([level(4, outcomes(num_refused=3))])
    after["model"] = {"name": "<b>other</b>"}
    comparison = compare(side(before), side(after), names=("<a>", "b"))
    html = page(comparison_report(comparison))
    assert "&lt;b&gt;other&lt;/b&gt;" in html and "<b>other</b>" not in html


def test_two_sweeps_are_compared_config_by_config() -> None:
    def row(name: str, *rates: float, status: str = "ok") -> dict[str, Any]:
        return {"name": name, "status": status, "rounds": [{"output_tokens_per_s": rate} for rate in rates]}

    before = base_record("sweep", configs=[row("a", 100, 101, 99), row("b", 50, 51, 49)])
    after = base_record("sweep", configs=[row("a", 120, 121, 119), row("b", status="failed")])
    comparison = compare(side(before), side(after))
    assert figure(comparison, "output_tokens_per_s").verdict == "better"
    assert [match.label for match in comparison.matches] == ["chat, a"]
    assert comparison.failures(0.05) == ["chat, b: measured in A only"]


def test_how_long_a_load_was_kept_up_is_a_difference_and_no_other_load() -> None:
    short, long = level(4, outcomes(50)), level(4, outcomes(90))
    short["load"], long["load"] = {**short["load"], "num_requests": 50}, {**long["load"], "num_requests": 90}
    comparison = compare(side(online_record([short])), side(online_record([long])))
    assert "different load: num_requests at 4 concurrent is 50 in A, 90 in B" in comparison.warnings
