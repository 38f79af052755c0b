"""What a diagnosis says: the bottleneck first, then by gain; nothing wrong; not enough evidence."""

from __future__ import annotations

import json
from io import StringIO

import pytest

from headrace.bench.report.terminal import print_report
from headrace.doctor.diagnosis import diagnose
from headrace.doctor.evidence import ClientCost, Evidence
from headrace.doctor.report import report_of, rules_table
from headrace.doctor.rules import RULES
from tests.doctor.builders import ON_H200, job, live, offline, online, planned

HEALTHY = [
    live(),
    live(**ON_H200),
    live(num_running=3.0, output_tokens=1_500.0),
    online(),
    offline(gpu_utilization=0.97),
    job(limited_by_seconds={"decode": 90.0, "prefill": 10.0}),
    live(engine="vllm", host_seconds=None, wait_seconds=None, recomputed_tokens=None),
]


@pytest.mark.parametrize("evidence", HEALTHY)
def test_a_healthy_engine_has_nothing_wrong(evidence: Evidence) -> None:
    diagnosis = diagnose(evidence)
    assert diagnosis.problems == []
    assert diagnosis.outcome == "nothing wrong"
    assert "Nothing wrong in what could be judged" in diagnosis.headline


def test_a_limit_of_a_healthy_engine_is_named_too() -> None:
    diagnosis = diagnose(live(**ON_H200))
    assert diagnosis.limit is not None and diagnosis.limit.limit == "decode"
    assert diagnosis.headline.startswith("Limited by decode: decode is bound by memory bandwidth.")


def test_a_server_that_is_hardly_used_is_limited_by_its_load() -> None:
    diagnosis = diagnose(live(num_running=3.0))
    assert diagnosis.limit is not None and diagnosis.limit.limit == "load"
    assert [finding.rule for finding in diagnosis.findings] == ["small-load"]  # not decode, which does not bind yet


def test_two_causes_at_once_are_both_named_the_bottleneck_first() -> None:
    seen = live(num_preemptions=50.0, recomputed_tokens=20_000.0, host_seconds=6.0, wait_seconds=4.0, num_waiting=10.0)
    diagnosis = diagnose(seen)
    assert [finding.rule for finding in diagnosis.problems] == ["cache-preempting", "host"]
    assert diagnosis.limit is not None and diagnosis.limit.rule == "cache-preempting"
    assert diagnosis.headline.startswith("Limited by cache: ") and "Try: " in diagnosis.headline


def test_host_time_of_an_engine_without_steps_is_no_bottleneck() -> None:
    idle = live(
        num_running=0.0, num_steps=0.0, prompt_tokens=0.0, output_tokens=0.0, host_seconds=0.01, wait_seconds=0.0
    )
    assert diagnose(idle).outcome == "not enough evidence"


def test_the_client_comes_before_the_engine() -> None:
    seen = online(client=ClientCost(loop_lag_p99_ms=40.0), host_seconds=6.0, wait_seconds=4.0, num_refused=40.0)
    rules = [finding.rule for finding in diagnose(seen).problems]
    assert rules[0] == "client" and set(rules) == {"client", "host", "refusals"}


def test_other_findings_are_ranked_by_predicted_gain() -> None:
    seen = live(
        num_preemptions=50.0,
        recomputed_tokens=20_000.0,
        host_seconds=6.0,
        wait_seconds=4.0,
        num_refused=40.0,
        token_gap_p99_s=0.5,
    )
    first, second, *others = diagnose(seen).problems
    assert (first.rule, second.rule) == ("cache-preempting", "host")  # a gain that is known before those that are not
    assert {finding.rule for finding in others} == {"refusals", "stalls"}


def test_rules_without_their_facts_are_not_judged_and_never_good() -> None:
    bare = Evidence(source="live", origin="x", engine="vllm", output_tokens=5_000.0, prompt_tokens=9_000.0)
    diagnosis = diagnose(bare)
    assert {each.rule for each in diagnosis.not_judged} >= {"cache-preempting", "host", "decode", "stalls"}
    assert next(each.missing for each in diagnosis.not_judged if each.rule == "cache-preempting") == ("preemptions",)


def test_without_the_essential_facts_there_is_not_enough_evidence() -> None:
    diagnosis = diagnose(Evidence(source="live", origin="x", num_running=4.0))
    assert diagnosis.outcome == "not enough evidence"
    assert diagnosis.reason == "preemptions, prompt tokens, generated tokens not known"


def test_a_problem_is_reported_even_where_the_rest_is_unknown() -> None:
    seen = Evidence(source="online", origin="x", client=ClientCost(cpu_share=0.99))
    assert diagnose(seen).outcome == "problems found"


def test_the_terminal_shows_numbers_thresholds_guides_and_what_is_missing() -> None:
    stream = StringIO()
    print_report(report_of(diagnose(live(num_preemptions=50.0, recomputed_tokens=20_000.0, host_seconds=None))), stream)
    text = stream.getvalue()
    for part in ("Limited by cache", "20,000 (11.8% of all computed)", "C3, D1", "lower max_num_seqs", "up to 1.13x"):
        assert part in text
    assert "host and wait time of a step" in text and "Not judged: 1 rules" in text


def test_the_document_has_the_same_as_json() -> None:
    document = json.loads(json.dumps(diagnose(live(token_gap_p99_s=0.5)).as_json()))
    assert (document["outcome"], document["limited_by"]) == ("problems found", "decode")
    stalls = next(finding for finding in document["findings"] if finding["rule"] == "stalls")
    assert stalls["advice"][0]["setting"] == "max_num_batched_tokens" and stalls["guide"] == "A7, D3"


def test_the_figures_are_shown_and_what_is_not_known_is_left_out() -> None:
    stream = StringIO()
    print_report(report_of(diagnose(live(queue_p95_s=0.25))), stream)
    text = stream.getvalue()
    assert "queue time, p95" in text and "0.25 s" in text and "generated tokens/s" in text
    assert "GPU utilisation" not in text
    figures = diagnose(live()).as_json()["figures"]
    assert figures["output_tokens_per_s"] == 10_000 and "gpu_utilization" not in figures


def test_the_rules_are_listed_once_each() -> None:
    table = rules_table()
    assert len({rule.id for rule in RULES}) == len(RULES)
    assert all(f"| `{rule.id}` |" in table for rule in RULES)


def test_a_command_is_judged_without_measurements() -> None:
    diagnosis = diagnose(planned("vllm serve qwen3-8b --max-num-queued-reqs 512"))
    assert diagnosis.outcome == "nothing wrong"
