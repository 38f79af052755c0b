"""What doctor says against rule A7 of the guides is what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.doctor.diagnosis import diagnose
from headrace.doctor.rules.steps import A7_CORRECTION, A7_WORST_GAPS_S
from tests.doctor.builders import live

ROOT = Path(__file__).parents[2]
NAME = "benchmarks/results/budget-gaps-cpu.json"
RECORD = json.loads((ROOT / NAME).read_text(encoding="utf-8"))


def test_the_numbers_are_those_of_the_record() -> None:
    medians = {int(budget): each["worst_gap_ms_median"] / 1e3 for budget, each in RECORD["by_budget"].items()}
    assert {budget: round(seconds, 1) for budget, seconds in medians.items()} == A7_WORST_GAPS_S


def test_a_larger_budget_had_the_longer_worst_gap_in_every_round() -> None:
    budgets = sorted(A7_WORST_GAPS_S)
    worst = {(run["budget"], run["round"]): run["worst_gap_ms"] for run in RECORD["runs"]}
    rounds = {number for _, number in worst}
    assert len(rounds) == 5 and len(worst) == len(budgets) * len(rounds)
    assert all(worst[budgets[0], number] < worst[budgets[-1], number] for number in rounds)


def test_the_correction_cites_the_record() -> None:
    assert NAME in A7_CORRECTION
    for budget, seconds in A7_WORST_GAPS_S.items():
        assert f"{seconds:g} s with {budget:,}" in A7_CORRECTION
    finding = next(each for each in diagnose(live(token_gap_p99_s=0.5)).findings if each.rule == "stalls")
    assert finding.correction == A7_CORRECTION


def test_the_page_has_the_same_numbers() -> None:
    page = (ROOT / "docs/doctor.md").read_text(encoding="utf-8")
    assert NAME in page
    for budget, each in RECORD["by_budget"].items():
        row = (
            f"{int(budget):,}",
            f"{each['worst_gap_ms_median'] / 1e3:.1f} s",
            f"{each['ttft_ms_median'] / 1e3:.1f} s",
        )
        assert f"| {' | '.join(row)} |" in page
