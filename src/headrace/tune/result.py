"""The result of a search: the decision and everything that it rests on, as a record of kind "tune"."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headrace.bench.statistics import Interval
from headrace.bench.sweep.result import Failure
from headrace.bench.sweep.settings_file import settings_file
from headrace.bench.values import percent, times
from headrace.tune.confirm import Finding, Noise, Verdict
from headrace.tune.knobs import Knob
from headrace.tune.pruning import RuledOut
from headrace.tune.quality import Agreement
from headrace.tune.shortlist import Candidate
from headrace.tune.trial import EngineFacts, Trial

Status = Literal["ok", "failed", "ruled out", "not run"]


@dataclass
class ConfigState:
    """One config of a search. Owned by the search, which fills it."""

    candidate: Candidate
    trials: list[Trial] = field(default_factory=list)
    failure: Failure | None = None
    ruled_out: RuledOut | None = None
    facts: EngineFacts | None = None
    score: float | None = None
    is_finalist: bool = False

    @property
    def name(self) -> str:
        return self.candidate.config.name

    @property
    def status(self) -> Status:
        if self.failure is not None:
            return "failed"
        if self.ruled_out is not None:
            return "ruled out"
        return "ok" if self.trials else "not run"

    def as_json(self) -> dict[str, Any]:
        candidate = self.candidate
        return {
            "name": self.name,
            "hash": candidate.config.hash,
            "settings": dict(candidate.config.settings),
            "is_default": candidate.is_default,
            "origin": candidate.origin,
            "predicted": None if candidate.predicted is None else asdict(candidate.predicted),
            "status": self.status,
            "failure": None if self.failure is None else asdict(self.failure),
            "ruled_out_by": None if self.ruled_out is None else asdict(self.ruled_out),
            "score": self.score,
            "is_finalist": self.is_finalist,
            "trials": [_shown_trial(trial) for trial in self.trials],
        }


@dataclass(frozen=True, slots=True)
class Rung:
    rung: int
    num_requests: int
    entered: list[str]
    kept: list[str]
    added: list[str]


@dataclass(frozen=True, slots=True)
class Decision:
    """Which config to use, and how sure that is."""

    chosen: str
    against: str
    ratio: float | None
    low: float | None
    high: float | None
    is_shown: bool
    verdict: Verdict
    text: str


@dataclass(frozen=True, kw_only=True)
class TuneResult:
    facts: Mapping[str, Any]  # the first keys of the record: engine, model, workload, machine
    goal: str
    figure: str
    budget_s: float
    spent_s: float
    stopped: str | None
    is_resumable: bool  # it was interrupted: the same command goes on
    knobs: Sequence[Knob]
    configs: Sequence[ConfigState]
    rungs: Sequence[Rung]
    noise: Noise | None
    decision: Decision | None  # None: not even the default could be measured
    quality: Sequence[Agreement]

    @property
    def chosen(self) -> ConfigState | None:
        if self.decision is None:
            return None
        return next(state for state in self.configs if state.name == self.decision.chosen)

    def as_record(self) -> dict[str, Any]:
        chosen = self.chosen
        suffix, text = "", ""
        if chosen is not None:
            settings = {**self.facts["common_settings"], **chosen.candidate.config.settings}
            suffix, text = settings_file(self.facts["engine"]["name"], settings)
        facts = None if chosen is None else chosen.facts
        return {
            **self.facts,
            "goal": self.goal,
            "figure": self.figure,
            "budget_s": self.budget_s,
            "spent_s": self.spent_s,
            "stopped": self.stopped,
            "knobs": [knob.as_json() for knob in self.knobs],
            "configs": [state.as_json() for state in self.configs],
            "rungs": [asdict(rung) for rung in self.rungs],
            "noise": None if self.noise is None else self.noise.as_json(),
            "decision": None if self.decision is None else asdict(self.decision),
            "quality": [asdict(each) for each in self.quality],
            "settings_in_force": {} if facts is None else dict(facts.in_force),
            "launch_command": None if facts is None else facts.launch_command,
            "settings_file": None if chosen is None else {"suffix": suffix, "text": text},
        }


def decide(
    default: ConfigState,
    others: Sequence[ConfigState],
    finding: Finding | None,
    noise: Noise | None,
) -> Decision:
    """The decision on what was confirmed; otherwise on the race, and it says so."""
    if finding is None or finding.verdict == "not confirmed":
        return _unconfirmed(default, others)
    best = next(state for state in others if state.candidate.config.hash == finding.best)
    found, verdict = finding.interval, finding.verdict
    shown = f"{times(found.value)} [{found.low:.2f}, {found.high:.2f}]"
    if verdict == "tuned":
        text = f"tuned against default: {shown}"
    elif verdict == "the default is best":
        text = f"the default is best: the best other config is {shown} of it"
    else:
        floor = "" if noise is None else f"; the noise floor is {percent(noise.floor)}"
        text = f"no difference shown: the best other config is {shown} of the default, which is kept{floor}"
    chosen = best if finding.is_shown else default
    return _decision(chosen, default, found, verdict, text)


def _unconfirmed(default: ConfigState, others: Sequence[ConfigState]) -> Decision:
    scored = [state for state in others if state.status == "ok" and state.score is not None]
    best = max(scored, key=lambda state: state.score or 0.0, default=None)
    if best is None:
        return _decision(default, default, None, "not confirmed", "not confirmed: only the default was measured")
    score = best.score or 0.0
    if score <= 1.0:
        text = f"not confirmed: no config was ahead of the default in the race; the next one is at {times(score)}"
        return _decision(default, default, None, "not confirmed", text, ratio=score)
    text = f"not confirmed: {times(score)} of the default in the race ({best.name}), without an interval"
    return _decision(best, default, None, "not confirmed", text, ratio=score)


def _decision(
    chosen: ConfigState,
    default: ConfigState,
    found: Interval | None,
    verdict: Verdict,
    text: str,
    *,
    ratio: float | None = None,
) -> Decision:
    return Decision(
        chosen=chosen.name,
        against=default.name,
        ratio=ratio if found is None else found.value,
        low=None if found is None else found.low,
        high=None if found is None else found.high,
        is_shown=verdict == "tuned",
        verdict=verdict,
        text=text,
    )


def _shown_trial(trial: Trial) -> dict[str, Any]:
    shown = trial.as_json()
    del shown["level"]
    return shown
