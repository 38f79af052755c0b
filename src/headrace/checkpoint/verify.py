"""Verifies a checkpoint: measures again, judges each figure, and names everything else that differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.bench.compare import FactDifference
from headrace.bench.engines import Engine
from headrace.bench.values import percent
from headrace.checkpoint.document import EDITED, Checkpoint
from headrace.checkpoint.facts import differences
from headrace.checkpoint.judge import BY_NAME, Judgement, judge
from headrace.checkpoint.rerun import Options, Say, measure_again

Outcome = Literal["holds", "does not hold", "not verified"]


@dataclass(frozen=True)
class Verification:
    """`reasons` say why it does not hold, or could not be verified."""

    outcome: Outcome
    judgements: list[Judgement]
    differences: list[FactDifference]
    reasons: list[str]
    warnings: list[str] = field(default_factory=list)
    facts: Mapping[str, Any] = field(default_factory=dict)  # as in a new checkpoint


def verify(
    checkpoint: Checkpoint,
    options: Options | None = None,
    *,
    say: Say = lambda line: None,
    engine: Engine | None = None,
) -> Verification:
    """Measure again. Raises CheckpointError or EngineFailure if it cannot be measured at all."""
    facts = measure_again(checkpoint, options or Options(), say, engine)
    return compared(checkpoint, facts)


def compared(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> Verification:
    """Judge a new measurement."""
    judged, reasons = [], []
    if facts.get("failure"):
        reasons.append(f"the engine failed under the recorded load: {facts['failure'].get('message')}")
    now = {each["load"]: each for each in facts["verification"]["loads"]}
    for recorded in checkpoint.facts["verification"]["loads"]:
        label = recorded["load"]
        measured = now.get(label, {"rounds": []})
        for name in checkpoint.facts["verification"].get("judged") or []:
            if name in BY_NAME and (found := judge(label, name, recorded["rounds"], measured["rounds"])) is not None:
                judged.append(found)
        if recorded.get("slo") == "met" and measured.get("slo") == "missed":
            reasons.append(f"{label}: the SLO was met and is missed now")
    reasons += [_why(each) for each in judged if each.verdict in ("worse", "missing")]
    warnings = [EDITED] if checkpoint.was_edited else []
    if checkpoint.at("model", "digest") is None:
        warnings.append("the checkpoint has no digest of the model's files: changed files are not noticed")
    if reasons:
        outcome: Outcome = "does not hold"
    elif not judged or all(each.verdict == "too noisy" for each in judged):
        outcome = "not verified"
        reasons.append(_too_noisy(judged) if judged else "no figure was recorded that could be judged")
    else:
        outcome = "holds"
        warnings += [_too_noisy([each]) for each in judged if each.verdict == "too noisy"]
    return Verification(outcome, judged, differences(checkpoint.facts, facts), reasons, warnings, facts)


def _why(judgement: Judgement) -> str:
    name = f"{judgement.load}: {judgement.figure.label}"
    if judgement.ratio is None:
        return f"{name} was recorded and is not available now"
    loss = 1 - judgement.ratio if judgement.figure.is_higher_better else judgement.ratio - 1
    return f"{name} is {percent(loss)} worse, and the tolerance is {percent(judgement.tolerance)}"


def _too_noisy(judged: list[Judgement]) -> str:
    names = ", ".join(f"{each.figure.label} (± {percent(each.tolerance, 0)})" for each in judged)
    return f"the recorded rounds differ too much to judge {names}; make a checkpoint with more rounds"
