"""The decision of a checkpoint: what was chosen, against what, and how sure that is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.bench.compare import Figure
from headrace.bench.statistics import ratio_of_rounds
from headrace.bench.values import is_number
from headrace.checkpoint.judge import BY_NAME, values_of

Row = Mapping[str, Any]
NOT_COMPARED = "measured as it was started; no other settings were compared"


def decision(reason: str, text: str | None = None, **others: Any) -> dict[str, Any]:
    """`reason` is what the measurement shows, `text` what the operator decides; without one, the same."""
    return {"text": text or reason, "reason": reason, **others}


def decision_of_sweep(record: Mapping[str, Any], best: Row, text: str | None) -> dict[str, Any]:
    """The best config against the runner-up and the engine's own choices, if they were measured."""
    figure = BY_NAME[record["rank_by"]]
    ranked = [row for row in record["configs"] if row.get("rank") is not None and row is not best]
    default = next((row for row in ranked if not any(v is not None for v in row["settings"].values())), None)
    roles = {"runner-up": ranked[0] if ranked else None, "default": default}
    compared = [
        _against(best, row, role, figure, is_paired=bool(record.get("is_interleaved")))
        for role, row in roles.items()
        if row is not None and not (role == "runner-up" and row is default)
    ]
    failed = [row["name"] for row in record["configs"] if row["status"] == "failed"]
    shown = [_sentence(each, figure) for each in compared] or ["no other config could be measured"]
    reason = f"{best['name']!r} is the best of {len(ranked) + 1} measured configs by {figure.label}: {'; '.join(shown)}"
    if failed:
        reason += f". Failed: {', '.join(failed)}"
    return decision(reason, text, chosen=best["name"], alternatives=compared, failed=failed)


def decision_of_tune(record: Mapping[str, Any], chosen: Row, text: str | None) -> dict[str, Any]:
    """The chosen config against the default and the other finalists, over the rounds of the confirmation."""
    made, figure = record["decision"], BY_NAME[record["figure"]]
    others = [row for row in record["configs"] if row is not chosen and (row["is_default"] or row["is_finalist"])]
    others.sort(key=lambda row: not row["is_default"])
    compared = [_against_tuned(record, chosen, row) for row in others if row["status"] == "ok"]
    failed = [row["name"] for row in record["configs"] if row["status"] == "failed"]
    num_measured = sum(bool(row.get("trials")) for row in record["configs"])
    reason = f"{made['text']}. {chosen['name']!r} is the choice of {num_measured} measured configs by {figure.label}"
    noise = record.get("noise")
    reason += f"; noise floor {100 * noise['floor']:.1f} %" if noise else "; the noise floor was not measured"
    if failed:
        reason += f". Failed: {', '.join(failed)}"
    return decision(
        reason,
        text or made["text"],
        chosen=chosen["name"],
        verdict=made["verdict"],
        alternatives=compared,
        failed=failed,
        noise=noise,
    )


def rounds_of(row: Row) -> dict[int, float]:
    """The confirmed values of a tune's config by round."""
    trials = [trial for trial in row.get("trials") or [] if trial.get("phase") == "confirm"]
    return {trial["round"]: float(trial["value"]) for trial in trials if is_number(trial.get("value"))}


def _against_tuned(record: Mapping[str, Any], chosen: Row, other: Row) -> dict[str, Any]:
    made = record["decision"]
    if other["name"] == made["against"] and is_number(made.get("low")) and is_number(made.get("high")):
        ratio: float | None = made["ratio"]
        interval: list[float] | None = [made["low"], made["high"]]
    else:
        sides = rounds_of(other), rounds_of(chosen)
        common = [number for number in sides[0] if number in sides[1]]
        known = ratio_of_rounds(*([side[number] for number in common] for side in sides), is_paired=True)
        ratio = None if known is None else known.value
        interval = None if known is None else [known.low, known.high]
    return {
        "name": other["name"],
        "role": "default" if other["is_default"] else "finalist",
        "figure": record["figure"],
        "ratio": ratio,
        "interval": interval,
        "is_shown": interval is not None and not interval[0] <= 1.0 <= interval[1],
    }


def _against(best: Row, other: Row, role: str, figure: Figure, *, is_paired: bool) -> dict[str, Any]:
    rounds: list[Sequence[Mapping[str, Any]]] = [other["rounds"], best["rounds"]]
    interval = ratio_of_rounds(*(values_of(figure.name, each) for each in rounds), is_paired=is_paired)
    ratio = best["value"] / other["value"] if other.get("value") else None
    return {
        "name": other["name"],
        "role": role,
        "figure": figure.name,
        "ratio": ratio,
        "interval": None if interval is None else [interval.low, interval.high],
        "is_shown": interval is not None and not interval.holds(1.0),
    }


def _sentence(compared: Mapping[str, Any], figure: Figure) -> str:
    name = f"the {compared['role']}" + (f" {compared['name']!r}" if compared["name"] != compared["role"] else "")
    if compared["ratio"] is None:
        return f"{name} has no {figure.label}"
    ratio = f"{compared['ratio']:.2f}x"
    if compared["interval"] is None:
        return f"{ratio} that of {name} (one round each: noise is not known)"
    low, high = compared["interval"]
    doubt = "" if compared["is_shown"] else ", no difference shown"
    return f"{ratio} [{low:.2f}, {high:.2f}] that of {name}{doubt}"
