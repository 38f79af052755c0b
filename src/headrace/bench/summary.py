"""Rates and percentiles of outcomes. Percentiles are pooled over requests, never averaged over runs.

Requests/s and tokens/s count answered work only. Refused, failed and timed-out requests are counted apart: a server
that refuses looks fast.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from headrace.bench.outcomes import STATUSES, Outcome, answered
from headrace.bench.slo import Slo, overall

PERCENTILES = (50, 90, 95, 99)
MIN_FOR_P99 = 1000  # requests; with fewer, p99 is little more than the maximum


def summarize(outcomes: Sequence[Outcome], seconds: float, slo: Slo | None = None) -> dict[str, Any]:
    """The figures of requests that ended within a window of this length."""
    ok = answered(outcomes)
    num_output = sum(outcome.num_output_tokens for outcome in ok)
    num_prompt = sum(outcome.num_prompt_tokens for outcome in ok)
    counts = Counter(outcome.status for outcome in outcomes)
    summary: dict[str, Any] = {
        "seconds": seconds,
        "num_requests": len(outcomes),
        **{f"num_{status}": counts[status] for status in STATUSES},  # type: ignore[index]
        "requests_per_s": len(ok) / seconds if seconds else 0.0,
        "output_tokens_per_s": num_output / seconds if seconds else 0.0,
        "total_tokens_per_s": (num_prompt + num_output) / seconds if seconds else 0.0,
        "num_prompt_tokens": num_prompt,
        "num_output_tokens": num_output,
        "ttft_ms": distribution(1e3 * outcome.ttft_s for outcome in ok),
        "tpot_ms": distribution(1e3 * value for outcome in ok if (value := outcome.tpot_s) is not None),
        "itl_ms": distribution(1e3 * gap for outcome in ok for gap in outcome.itl_s),
        "e2e_ms": distribution(1e3 * outcome.e2e_s for outcome in ok),
        "errors": dict(
            Counter(outcome.error or "no message" for outcome in outcomes if not outcome.is_ok).most_common(5)
        ),
    }
    if slo is not None:
        judged = slo.judge(outcomes)
        summary["slo"] = {
            "text": slo.text,
            "verdict": overall(judged),
            "conditions": [
                {"condition": j.condition, "verdict": j.verdict, "share": j.share, "interval": [j.low, j.high]}
                for j in judged
            ],
            "goodput_requests_per_s": sum(map(slo.is_met_by, outcomes)) / seconds if seconds else 0.0,
        }
    return summary


def warnings_of(summary: dict[str, Any]) -> list[str]:
    """What a reader of these figures must know."""
    warnings, total = [], summary["num_requests"]
    for status, meaning in (("refused", "429 or 503"), ("failed", "errors"), ("timeout", "no answer in time")):
        if count := summary[f"num_{status}"]:
            warnings.append(
                f"{count:,} of {total:,} requests were not answered ({meaning}); rates count answered requests only, "
                "and latencies are of the answered ones, which a server that refuses keeps low"
            )
    num_ok = summary["num_ok"]
    if 0 < num_ok < MIN_FOR_P99:
        warnings.append(
            f"p99 of {num_ok:,} requests is close to their maximum; {MIN_FOR_P99:,} or more make it reliable"
        )
    return warnings


def distribution(values: Iterable[float]) -> dict[str, float] | None:
    """Count, mean, percentiles and maximum; None if there is nothing."""
    found = sorted(values)
    if not found:
        return None
    return {
        "count": len(found),
        "mean": sum(found) / len(found),
        **{f"p{percent}": percentile(found, percent) for percent in PERCENTILES},
        "max": found[-1],
    }


def percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear interpolation between the closest ranks, as numpy does."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
