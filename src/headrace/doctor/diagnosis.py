"""Runs the rules on evidence: the bottleneck first, other findings by predicted gain, and what could not be judged."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from headrace.doctor.evidence import Evidence
from headrace.doctor.findings import SEVERITIES, Finding, Rule
from headrace.doctor.rules import RULES

Outcome = Literal["problems found", "nothing wrong", "not enough evidence"]
MIN_TOKENS = 100  # prompt and generated ones: fewer in an interval say nothing about an engine


@dataclass(frozen=True, slots=True)
class NotJudged:
    """A rule that could not be applied, and the facts that it lacks."""

    rule: str
    title: str
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`limit` names the bottleneck; it is also the first of `findings`."""

    evidence: Evidence
    outcome: Outcome
    limit: Finding | None
    findings: tuple[Finding, ...]
    num_judged: int
    not_judged: tuple[NotJudged, ...]
    reason: str = ""  # why there is not enough evidence

    @property
    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.severity in ("mistake", "problem")]

    @property
    def headline(self) -> str:
        """One sentence, as for the log of a server: limited by X; try Y."""
        if self.outcome == "not enough evidence":
            return f"Not enough evidence: {self.reason}."
        text = f"Limited by {self.limit.limit}: {self.limit.title}." if self.limit is not None else ""
        if not self.problems:
            return f"{text} Nothing wrong in what could be judged ({self.num_judged} rules).".lstrip()
        first = self.problems[0]
        text = text or f"{first.title[0].upper()}{first.title[1:]}."
        advice = next((finding.advice[0] for finding in [first, *self.findings] if finding.advice), None)
        return text if advice is None else f"{text} Try: {advice.text}".rstrip("?") + "."

    def as_json(self) -> dict[str, Any]:
        return {
            "schema": "headrace.doctor/1",
            "source": self.evidence.source,
            "origin": self.evidence.origin,
            "engine": self.evidence.engine,
            "outcome": self.outcome,
            "headline": self.headline,
            "limited_by": None if self.limit is None else self.limit.limit,
            "findings": [finding.as_json() for finding in self.findings],
            "figures": self.evidence.figures(),
            "settings": dict(self.evidence.settings),
            "num_judged": self.num_judged,
            "not_judged": [asdict(each) for each in self.not_judged],
            "remarks": list(self.evidence.remarks),
        }


def diagnose(evidence: Evidence) -> Diagnosis:
    steps = diagnosing(evidence)
    while True:
        try:
            next(steps)
        except StopIteration as end:
            diagnosis: Diagnosis = end.value
            return diagnosis


def diagnosing(evidence: Evidence) -> Generator[None, None, Diagnosis]:
    """The same, but yields after each rule: an event loop can do other work between them."""
    found: list[Finding] = []
    not_judged: list[NotJudged] = []
    judged: list[Rule] = []
    for rule in RULES:
        if evidence.source not in rule.sources:
            continue
        missing = [] if rule.is_moot(evidence) else evidence.missing(rule.needs)
        if missing:
            not_judged.append(NotJudged(rule.id, rule.title, tuple(missing)))
            continue
        judged.append(rule)
        finding = rule.check(evidence)
        if finding is not None:
            found.append(replace(finding, rule=rule.id, guide=rule.guide, threshold=rule.threshold, limit=rule.limit))
        yield
    reason = _too_little(evidence, judged)
    if reason and not any(finding.severity in ("mistake", "problem") for finding in found):
        return Diagnosis(evidence, "not enough evidence", None, (), len(judged), tuple(not_judged), reason)
    limit = next((finding for finding in found if finding.limit is not None), None)
    ranked = _ranked(found, limit)
    is_wrong = any(finding.severity in ("mistake", "problem") for finding in ranked)
    outcome: Outcome = "problems found" if is_wrong else "nothing wrong"
    return Diagnosis(evidence, outcome, limit, tuple(ranked), len(judged), tuple(not_judged))


def _too_little(evidence: Evidence, judged: Sequence[Rule]) -> str:
    """Why nothing can be said about a running engine; empty if something can."""
    if not evidence.is_measured:
        return ""
    if evidence.output_tokens is not None or evidence.prompt_tokens is not None:
        tokens = (evidence.output_tokens or 0.0) + (evidence.prompt_tokens or 0.0)
        if tokens < MIN_TOKENS:
            return f"the engine computed {tokens:,.0f} tokens in this interval; measure under load"
    if not any(rule.is_essential for rule in judged):
        wanted = dict.fromkeys(evidence.missing(("num_preemptions", "prompt_tokens", "output_tokens", "num_running")))
        return f"{', '.join(wanted)} not known"
    return ""


def _ranked(found: Sequence[Finding], limit: Finding | None) -> list[Finding]:
    """The bottleneck, then by severity and predicted gain. What has no estimate comes after what has one."""
    rest = [finding for finding in found if finding is not limit]
    # Limits behind the bottleneck bind only once that is gone: they are not shown as limits.
    rest = [finding for finding in rest if finding.severity != "limit"]
    rest.sort(key=lambda finding: (SEVERITIES.index(finding.severity), -(finding.gain if finding.gain else 0.0)))
    return rest if limit is None else [limit, *rest]
