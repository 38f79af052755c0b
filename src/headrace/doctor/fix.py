"""`headrace doctor --fix`: tests advice. Each change is measured against the settings as they are, interleaved.

    Diagnosis ─▶ proposals: what can be set, and why the rest cannot be tested
    Trial (engine, settings, workload, load) ─▶ run_sweep: as it is, changed, changed, as it is, ... ─▶ Tested

A change counts as better only if the 95 % interval of the ratio leaves out 1.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from headrace.bench.engines.base import Engine
from headrace.bench.statistics import Interval, ratio_of_rounds
from headrace.bench.sweep.configs import SweepConfig
from headrace.bench.sweep.result import RANKABLE, SweepResult, SweepRow
from headrace.bench.sweep.run import Measure, Sweep, run_sweep
from headrace.bench.workloads import Workload
from headrace.doctor.diagnosis import Diagnosis
from headrace.doctor.findings import Advice, Finding

SCHEMA = "headrace.doctor-fix/1"
MIN_ROUNDS = 5
AS_IT_IS, CHANGED = "as it is", "changed"
THROUGHPUT = "output_tokens_per_s"
# What advice of a rule is meant to improve, where that is not throughput. Only a load over HTTP has latencies.
FIGURE_OF_RULE = {"stalls": "itl_p99", "chunked-short": "total_tokens_per_s", "prefill": "total_tokens_per_s"}

# Advice whose effect is no speed, so that a comparison of speed says nothing.
NO_SPEED = {
    "queue": "it trades waiting time for refusals, which is no speed",
    "refusals": "it trades refusals for waiting time, which is no speed",
    "memory-high": "it lowers the risk of an out-of-memory error, which is no speed",
}

Verdict = Literal["better", "worse", "no difference shown", "not measured"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """One advice of a finding. `obstacle`: why it cannot be tested; empty if it can."""

    rule: str
    advice: Advice
    obstacle: str = ""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What advice is tested on: the same engine, settings, workload and load as in the evidence."""

    engine: Engine
    settings: Mapping[str, Any]  # as they are
    workload: Workload
    measure: Measure  # one round
    serves: bool
    known_settings: frozenset[str] | None = None  # names that the engine has; None: any
    identity: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # what a reader must know of it


@dataclass(frozen=True, kw_only=True)
class Tested:
    """One change, measured. `ratio` is changed to as it is, of the figure."""

    proposal: Proposal
    before: Any  # the value as it is; None: not known
    figure: str
    verdict: Verdict
    num_rounds: int
    ratio: Interval | None = None
    reason: str = ""  # why it was not measured
    stopped: str | None = None  # why it ended early, and how to go on
    record: Mapping[str, Any] = field(default_factory=dict)  # of the sweep

    @property
    def headline(self) -> str:
        """Such as: max_num_seqs=64 instead of 8: 2.31x [2.20, 2.44] output tokens/s, shown in 5 interleaved rounds."""
        change = f"{changed_text(self.proposal.advice)} instead of {_shown(self.before)}"
        if self.ratio is None:
            return f"{change}: not measured: {self.reason or self.stopped}"
        label = RANKABLE[self.figure].label
        low, high = _bounds(self.ratio)
        rounds = f"in {self.num_rounds} interleaved rounds"
        outcome = {
            "better": f"shown {rounds}",
            "worse": f"worse, shown {rounds}: keep {_shown(self.before)}",
            "no difference shown": f"no difference shown {rounds}",
        }[self.verdict]
        return f"{change}: {self.ratio.value:.2f}x [{low}, {high}] {label}, {outcome}"

    def as_json(self) -> dict[str, Any]:
        advice = self.proposal.advice
        return {
            "rule": self.proposal.rule,
            "setting": advice.setting,
            "value": advice.value,
            "before": self.before,
            "headline": self.headline,
            "verdict": self.verdict,
            "figure": self.figure,
            "ratio": None if self.ratio is None else asdict(self.ratio),
            "predicted_gain": advice.gain,
            "num_rounds": self.num_rounds,
            "reason": self.reason,
            "stopped": self.stopped,
            "sweep": dict(self.record),
        }


@dataclass(frozen=True, kw_only=True)
class FixResult:
    tested: tuple[Tested, ...]
    untestable: tuple[Proposal, ...]
    notes: tuple[str, ...] = ()

    @property
    def best(self) -> Tested | None:
        return next((each for each in self.tested if each.verdict == "better"), None)

    @property
    def was_stopped(self) -> bool:
        return any(each.stopped is not None for each in self.tested)

    @property
    def headline(self) -> str:
        if self.tested:
            return (self.best or self.tested[0]).headline
        if self.untestable:
            return "No advice has a setting that can be tested."
        return "There is no advice to test."

    def as_json(self, diagnosis: Diagnosis) -> dict[str, Any]:
        return {
            "schema": SCHEMA,
            "headline": self.headline,
            "notes": list(self.notes),
            "tested": [each.as_json() for each in self.tested],
            "not_testable": [
                {"rule": each.rule, "text": each.advice.text, "reason": each.obstacle} for each in self.untestable
            ],
            "diagnosis": diagnosis.as_json(),
        }


def proposals(diagnosis: Diagnosis, known: frozenset[str] | None = None) -> list[Proposal]:
    """All advice, that of the first problem first, as the headline names it. A change is proposed once."""
    found: list[Proposal] = []
    seen: set[tuple[str, str]] = set()
    order = [*diagnosis.problems, *(each for each in diagnosis.findings if each not in diagnosis.problems)]
    for finding in order:
        for advice in finding.advice:
            key = (str(advice.setting or advice.text), json.dumps(advice.value, default=str))
            if key not in seen:
                seen.add(key)
                found.append(Proposal(finding.rule, advice, _obstacle(diagnosis, finding, advice, known)))
    return found


def _obstacle(diagnosis: Diagnosis, finding: Finding, advice: Advice, known: frozenset[str] | None) -> str:
    if advice.setting is None:
        return "it is no setting of the engine"
    if advice.value is None:
        return f"it names no value of {advice.setting}"
    if finding.rule in NO_SPEED:
        return NO_SPEED[finding.rule]
    if known is not None and advice.setting not in known:
        return f"{diagnosis.evidence.engine or 'the engine'} has no setting {advice.setting} here"
    if finding.severity == "mistake":
        return "the settings as they are do not start, so there is nothing to compare with"
    if diagnosis.evidence.settings.get(advice.setting) == advice.value:
        return f"{advice.setting} has this value already"
    return ""


def try_advice(
    diagnosis: Diagnosis,
    trial: Trial,
    *,
    num_rounds: int = MIN_ROUNDS,
    tries_all: bool = False,
    journal: Callable[[int], Path],
    say: Callable[[str], None] = lambda line: None,
) -> FixResult:
    """Test the first advice that can be tested; with `tries_all`, the next ones too until one is shown to help.

    `journal` gives the path of the n-th test's journal: a test that was interrupted goes on there.
    """
    found = proposals(diagnosis, trial.known_settings)
    untestable = tuple(each for each in found if each.obstacle)
    testable = [each for each in found if not each.obstacle]
    tested: list[Tested] = []
    for place, proposal in enumerate(testable if tries_all else testable[:1]):
        say(f"testing {changed_text(proposal.advice)} ({proposal.rule}): {num_rounds} interleaved rounds of both")
        tested.append(_tested(diagnosis, trial, proposal, num_rounds, journal(place), say))
        if tested[-1].verdict == "better" or tested[-1].stopped is not None:
            break
    return FixResult(tested=tuple(tested), untestable=untestable, notes=trial.notes)


def _tested(
    diagnosis: Diagnosis,
    trial: Trial,
    proposal: Proposal,
    num_rounds: int,
    journal: Path,
    say: Callable[[str], None],
) -> Tested:
    advice = proposal.advice
    assert advice.setting is not None
    figure = FIGURE_OF_RULE.get(proposal.rule, THROUGHPUT)
    if not trial.serves and not RANKABLE[figure].is_higher_better:
        figure = THROUGHPUT
    settings = dict(trial.settings)
    now = {advice.setting: settings.pop(advice.setting)} if advice.setting in settings else {}
    sweep = Sweep(
        configs=[SweepConfig(AS_IT_IS, now), SweepConfig(CHANGED, {advice.setting: advice.value})],
        engine=trial.engine,
        workload=trial.workload,
        measure=trial.measure,
        serves=trial.serves,
        num_rounds=num_rounds,
        is_interleaved=True,
        rank_by=figure,
        common=settings,
        identity=trial.identity,
    )
    result = run_sweep(sweep, journal, say)
    rows = {row.name: row for row in result.rows}
    sides = [[each[figure] for each in rows[name].rounds if figure in each] for name in (AS_IT_IS, CHANGED)]
    ratio = ratio_of_rounds(sides[0], sides[1], is_paired=True)
    before = _value_before(rows[AS_IT_IS], advice.setting, diagnosis)
    if result.stopped is not None or any(row.failure for row in rows.values()):
        ratio = None  # rounds that are not complete are no interleaved comparison
    return Tested(
        proposal=proposal,
        before=before,
        figure=figure,
        verdict=verdict_of(ratio, is_higher_better=RANKABLE[figure].is_higher_better),
        num_rounds=num_rounds,
        ratio=ratio,
        reason="" if ratio is not None else _reason(rows, sides, result),
        stopped=result.stopped,
        record=result.as_record(),
    )


def verdict_of(ratio: Interval | None, *, is_higher_better: bool) -> Verdict:
    if ratio is None:
        return "not measured"
    if ratio.holds(1.0):
        return "no difference shown"
    return "better" if (ratio.value > 1.0) == is_higher_better else "worse"


def changed_text(advice: Advice) -> str:
    return f"{advice.setting}={_shown(advice.value)}"


def _value_before(row: SweepRow, setting: str, diagnosis: Diagnosis) -> Any:
    """As the engine reported it in the test, else as in the evidence."""
    reported = row.in_force.get(setting)
    if isinstance(reported, Mapping) and "value" in reported:
        return reported["value"]
    return row.settings.get(setting, diagnosis.evidence.settings.get(setting))


def _reason(rows: Mapping[str, SweepRow], sides: Sequence[Sequence[float]], result: SweepResult) -> str:
    for name in (AS_IT_IS, CHANGED):
        failure = rows[name].failure
        if failure is not None:
            return f"{name}, it failed ({failure.stage}, {failure.kind}): {failure.message}"
    return "" if result.stopped else f"too few rounds ({len(sides[0])} and {len(sides[1])}) have the figure"


def _bounds(ratio: Interval) -> tuple[str, str]:
    """With as many digits as tell a bound from 1, so that a difference that is shown also reads as one."""
    for digits in (2, 3, 4):
        low, high = f"{ratio.low:.{digits}f}", f"{ratio.high:.{digits}f}"
        if ratio.holds(1.0) or float(low) > 1 or float(high) < 1:
            break
    return low, high


def _shown(value: Any) -> str:
    if value is None:
        return "the default"
    return value if isinstance(value, str) else json.dumps(value, default=str)
