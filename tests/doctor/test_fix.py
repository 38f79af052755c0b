"""`doctor --fix`: which advice can be tested, and what a test says, on engines of known speed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from headrace.bench.engines import EngineFailure
from headrace.bench.offline import measure_offline
from headrace.bench.statistics import Interval
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.doctor.diagnosis import Diagnosis
from headrace.doctor.findings import Advice, Finding
from headrace.doctor.fix import FixResult, Trial, proposals, try_advice, verdict_of
from tests.bench.engines_for_tests import FakeEngine
from tests.doctor.builders import live

WORKLOAD = build(WorkloadSpec(name="random", num_requests=4, input_len=8, output_len=4))
SLOTS = Advice(text="raise it", certainty="predicted", setting="max_num_seqs", value=64, gain=1.5)
POLICY = Advice(
    text="start what can finish", certainty="certain", setting="capacity_policy", value="guaranteed_no_evict"
)
A_CORE = Advice(text="give it a core", certainty="bound")


def finding(*advice: Advice, rule: str = "slots-full", severity: Any = "problem") -> Finding:
    return Finding(severity=severity, title="t", numbers=(), why="w", advice=advice, rule=rule, limit="slots")


def diagnosis(*findings: Finding, **settings: Any) -> Diagnosis:
    evidence = live(settings={"max_num_seqs": 8, **settings})
    return Diagnosis(evidence, "problems found", findings[0], findings, 1, ())


def trial(seconds: Callable[[Mapping[str, Any], Workload], float], **changes: Any) -> Trial:
    facts: dict[str, Any] = {
        "engine": FakeEngine(seconds),
        "settings": {"max_num_seqs": 8},
        "workload": WORKLOAD,
        "measure": lambda running, workload: measure_offline(running, workload, num_rounds=1),
        "serves": False,
        "known_settings": frozenset({"max_num_seqs", "capacity_policy"}),
    }
    return Trial(**{**facts, **changes})


def result_of(tmp_path: Path, of: Trial, *findings: Finding, **options: Any) -> FixResult:
    return try_advice(diagnosis(*findings), of, journal=lambda place: tmp_path / f"{place}.journal", **options)


def varied(seconds_of: Callable[[Mapping[str, Any]], float]) -> Callable[[Mapping[str, Any], Workload], float]:
    """Seconds that vary by up to 2 %, the same way in each run."""
    turns = count()
    return lambda settings, workload: seconds_of(settings) * (1 + 0.01 * (next(turns) * 7 % 5 - 2))


def test_a_change_that_helps_is_shown_with_its_interval(tmp_path: Path) -> None:
    of = trial(varied(lambda settings: 0.5 if settings["max_num_seqs"] == 64 else 1.0))
    result = result_of(tmp_path, of, finding(SLOTS))
    (one,) = result.tested
    assert one.verdict == "better" and result.best is one
    assert one.ratio is not None and one.ratio.low < 2.0 < one.ratio.high and one.ratio.low > 1.9
    assert result.headline.startswith("max_num_seqs=64 instead of 8: 2.0")
    assert result.headline.endswith("output tokens/s, shown in 5 interleaved rounds")


def test_rounds_of_both_alternate(tmp_path: Path) -> None:
    of = trial(varied(lambda settings: 1.0))
    result_of(tmp_path, of, finding(SLOTS), num_rounds=6)
    assert isinstance(of.engine, FakeEngine)
    slots = [started.settings_in_force()["max_num_seqs"].value for started in of.engine.started]
    assert slots == [8, 64, 64, 8, 8, 64, 64, 8, 8, 64, 64, 8]


def test_a_change_without_effect_shows_no_difference(tmp_path: Path) -> None:
    result = result_of(tmp_path, trial(varied(lambda settings: 1.0)), finding(SLOTS))
    assert result.tested[0].verdict == "no difference shown" and result.best is None
    assert "no difference shown in 5 interleaved rounds" in result.headline


def test_a_change_that_hurts_is_not_taken(tmp_path: Path) -> None:
    of = trial(varied(lambda settings: 2.0 if settings["max_num_seqs"] == 64 else 1.0))
    result = result_of(tmp_path, of, finding(SLOTS))
    assert result.tested[0].verdict == "worse" and "keep 8" in result.headline


def test_only_the_first_advice_is_tested_unless_all_are_asked_for(tmp_path: Path) -> None:
    def of() -> Trial:
        return trial(varied(lambda settings: 0.5 if "capacity_policy" in settings else 1.0))

    first = result_of(tmp_path / "a", of(), finding(SLOTS, POLICY))
    assert [each.proposal.advice for each in first.tested] == [SLOTS]
    every = result_of(tmp_path / "b", of(), finding(SLOTS, POLICY), tries_all=True)
    assert [each.verdict for each in every.tested] == ["no difference shown", "better"]
    assert every.headline.startswith("capacity_policy=guaranteed_no_evict instead of the default: 2.0")


def test_all_ends_with_the_first_change_that_helps(tmp_path: Path) -> None:
    of = trial(varied(lambda settings: 0.5 if settings.get("max_num_seqs") == 64 else 1.0))
    result = result_of(tmp_path, of, finding(SLOTS, POLICY), tries_all=True)
    assert [each.proposal.advice for each in result.tested] == [SLOTS]


def test_a_change_that_does_not_start_is_reported(tmp_path: Path) -> None:
    def seconds(settings: Mapping[str, Any], workload: Workload) -> float:
        if settings["max_num_seqs"] == 64:
            raise EngineFailure("oom", "out of memory")
        return 1.0

    result = result_of(tmp_path, trial(seconds), finding(SLOTS))
    assert result.tested[0].verdict == "not measured"
    assert "changed, it failed" in result.headline and "oom" in result.headline


def test_an_interrupted_test_has_no_ratio_and_goes_on_later(tmp_path: Path) -> None:
    turns = count()

    def interrupted(settings: Mapping[str, Any], workload: Workload) -> float:
        if next(turns) == 9:
            raise KeyboardInterrupt
        return 1.0

    result = result_of(tmp_path, trial(interrupted), finding(SLOTS))
    assert result.was_stopped and result.tested[0].ratio is None
    again = result_of(tmp_path, trial(lambda settings, workload: 1.0), finding(SLOTS))
    assert not again.was_stopped
    assert sum(row["num_reused"] for row in again.tested[0].record["configs"]) == 3


def test_advice_that_is_no_setting_is_named_with_the_reason(tmp_path: Path) -> None:
    result = result_of(tmp_path, trial(lambda settings, workload: 1.0), finding(A_CORE))
    assert not result.tested and result.headline == "No advice has a setting that can be tested."
    assert [(each.advice, each.obstacle) for each in result.untestable] == [(A_CORE, "it is no setting of the engine")]


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        (finding(Advice(text="t", certainty="certain", setting="max_num_seqs")), "names no value"),
        (finding(Advice(text="t", certainty="certain", setting="pipeline_parallel_size", value=1)), "has no setting"),
        (finding(Advice(text="t", certainty="certain", setting="max_num_seqs", value=8)), "already"),
        (finding(SLOTS, rule="queue"), "is no speed"),
        (finding(SLOTS, severity="mistake"), "do not start"),
    ],
)
def test_advice_that_cannot_be_tested_has_a_reason(what: Finding, reason: str) -> None:
    (proposal,) = proposals(diagnosis(what), frozenset({"max_num_seqs"}))
    assert reason in proposal.obstacle


def test_advice_of_problems_comes_before_that_of_limits() -> None:
    found = proposals(diagnosis(finding(POLICY, severity="limit"), finding(SLOTS)))
    assert [each.advice for each in found] == [SLOTS, POLICY]


def test_of_a_latency_less_is_better() -> None:
    assert verdict_of(Interval(0.5, 0.4, 0.6), is_higher_better=False) == "better"
    assert verdict_of(Interval(2.0, 1.5, 2.5), is_higher_better=False) == "worse"
    assert verdict_of(Interval(1.0, 0.9, 1.1), is_higher_better=False) == "no difference shown"
    assert verdict_of(None, is_higher_better=True) == "not measured"


def test_a_document_has_the_test_and_the_diagnosis(tmp_path: Path) -> None:
    seen = diagnosis(finding(SLOTS, A_CORE))
    result = result_of(tmp_path, trial(varied(lambda settings: 1.0)), finding(SLOTS, A_CORE))
    document = result.as_json(seen)
    assert document["schema"] == "headrace.doctor-fix/1" and document["diagnosis"]["schema"] == "headrace.doctor/1"
    (one,) = document["tested"]
    assert one["before"] == 8 and one["value"] == 64 and one["ratio"]["low"] < one["ratio"]["high"]
    assert one["predicted_gain"] == 1.5 and len(one["sweep"]["configs"]) == 2
    assert document["not_testable"][0]["reason"] == "it is no setting of the engine"
