"""Service-level objectives: `ttft:p99<300ms;tpot:p95<40ms;success>=0.999`.

A latency condition holds when enough requests meet its limit: `ttft:p99<300ms` means that 99 % of the requests have
their first token within 300 ms. A request that was refused or failed meets no limit. The share that was seen in a
finite run is uncertain, so a condition is judged by its Wilson interval: met, missed, or not resolved by this run.

Goodput is the rate of requests that meet every latency limit at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from headrace.bench.outcomes import Outcome
from headrace.errors import ConfigError

Verdict = Literal["met", "missed", "unresolved"]

LATENCIES = ("ttft", "tpot", "itl", "e2e")
UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
CONFIDENCE_Z = 1.96  # 95 %
EXAMPLE = "ttft:p99<300ms;tpot:p95<40ms;success>=0.999"

_LATENCY = re.compile(r"(?P<name>[a-z0-9]+)(?::p(?P<percent>[0-9.]+))?<=?(?P<limit>[0-9.]+)(?P<unit>us|ms|s)")
_SUCCESS = re.compile(r"success>=?(?P<share>[0-9.]+)(?P<percent>%?)")


@dataclass(frozen=True, slots=True)
class LatencyCondition:
    """A share of requests must stay within a limit."""

    name: str
    share: float  # 0.99 for p99
    limit_s: float
    text: str

    def is_met_by(self, outcome: Outcome) -> bool:
        if not outcome.is_ok:
            return False
        if self.name == "itl":
            return max(outcome.itl_s, default=0.0) <= self.limit_s
        value = getattr(outcome, f"{self.name}_s")
        return value is None or value <= self.limit_s


@dataclass(frozen=True, slots=True)
class Judgement:
    """One condition of an SLO, against one run."""

    condition: str
    verdict: Verdict
    share: float  # of requests that met it
    low: float
    high: float
    wanted: float
    num_requests: int


@dataclass(frozen=True, slots=True)
class Slo:
    text: str
    conditions: tuple[LatencyCondition, ...]
    success: float | None  # share of requests that must be answered

    @classmethod
    def parse(cls, text: str) -> Slo:
        conditions, success = [], None
        for part in filter(None, (part.replace(" ", "").lower() for part in text.split(";"))):
            if found := _SUCCESS.fullmatch(part):
                success = _number(found["share"], part) / (100 if found["percent"] else 1)
                if not 0 < success <= 1:
                    raise ConfigError(f"in the SLO, {part!r}: success must be above 0 and at most 1")
            else:
                conditions.append(_latency(part))
        if not conditions and success is None:
            raise ConfigError(f"the SLO {text!r} has no condition; an example: {EXAMPLE!r}")
        return cls(text, tuple(conditions), success)

    def is_met_by(self, outcome: Outcome) -> bool:
        """Whether one request counts for goodput."""
        return outcome.is_ok and all(condition.is_met_by(outcome) for condition in self.conditions)

    def judge(self, outcomes: Sequence[Outcome]) -> list[Judgement]:
        judged = [
            _judgement(condition.text, sum(map(condition.is_met_by, outcomes)), len(outcomes), condition.share)
            for condition in self.conditions
        ]
        if self.success is not None:
            num_ok = sum(outcome.is_ok for outcome in outcomes)
            judged.append(_judgement(f"success>={self.success:g}", num_ok, len(outcomes), self.success))
        return judged


def overall(judged: Sequence[Judgement]) -> Verdict:
    verdicts = {judgement.verdict for judgement in judged}
    return "missed" if "missed" in verdicts else "unresolved" if "unresolved" in verdicts else "met"


def wilson(num_met: int, num_requests: int) -> tuple[float, float]:
    """The Wilson 95 % interval of a share."""
    if num_requests == 0:
        return 0.0, 1.0
    z2, share = CONFIDENCE_Z**2, num_met / num_requests
    middle = share + z2 / (2 * num_requests)
    half = CONFIDENCE_Z * math.sqrt(share * (1 - share) / num_requests + z2 / (4 * num_requests**2))
    scale = 1 + z2 / num_requests
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)


def _judgement(text: str, num_met: int, num_requests: int, wanted: float) -> Judgement:
    low, high = wilson(num_met, num_requests)
    verdict: Verdict = "met" if low >= wanted else "missed" if high < wanted else "unresolved"
    return Judgement(text, verdict, num_met / num_requests if num_requests else 0.0, low, high, wanted, num_requests)


def _latency(part: str) -> LatencyCondition:
    found = _LATENCY.fullmatch(part)
    if found is None or found["name"] not in LATENCIES:
        raise ConfigError(
            f"the SLO's {part!r} cannot be read: conditions are {', '.join(LATENCIES)} with a percentile and a limit, "
            f"and success, for example {EXAMPLE!r}"
        )
    percent = _number(found["percent"] or "50", part)
    if not 0 < percent < 100:
        raise ConfigError(f"in the SLO, {part!r}: the percentile must be between 0 and 100")
    return LatencyCondition(found["name"], percent / 100, _number(found["limit"], part) * UNITS[found["unit"]], part)


def _number(text: str, part: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"in the SLO, {part!r}: {text!r} is not a number") from None
