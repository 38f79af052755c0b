"""What rules are and what they find."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from headrace.doctor.evidence import Evidence, Source

# mistake: the engine refuses it, or does something else than was meant. problem: it costs speed or is a risk.
# limit: what binds an engine that works as it should. note: worth knowing, nothing to repair.
Severity = Literal["mistake", "problem", "limit", "note"]
# predicted: from plan's model of the device. bound: no change can gain more. rule of thumb: the guides'; test it.
Certainty = Literal["predicted", "bound", "rule of thumb", "certain"]

SEVERITIES: tuple[Severity, ...] = ("mistake", "problem", "limit", "note")
MEASURED: tuple[Source, ...] = ("live", "offline", "online", "sweep", "job")
ALL: tuple[Source, ...] = (*MEASURED, "command")


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One change. `gain` is the predicted growth of throughput as a share; None: it cannot be estimated."""

    text: str
    certainty: Certainty
    setting: str | None = None  # under vLLM's name, so that it can be tested
    value: Any = None
    gain: float | None = None
    why: str = ""  # where the gain comes from


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What a rule found. `numbers` are those that triggered it, as names and texts."""

    severity: Severity
    title: str
    numbers: tuple[tuple[str, str], ...]
    why: str
    advice: tuple[Advice, ...] = ()
    correction: str = ""  # where a rule of the guides is wrong
    rule: str = ""  # the rule's id, guide and threshold are filled in by the rule
    guide: str = ""
    threshold: str = ""
    limit: str | None = None

    @property
    def gain(self) -> float | None:
        """The largest predicted gain of its advice."""
        return max((advice.gain for advice in self.advice if advice.gain is not None), default=None)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"numbers": dict(self.numbers), "gain": self.gain}


Check = Callable[[Evidence], Finding | None]


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule.

    `limit` is the bottleneck that it names, with the words of a job's bottleneck where that has one; None: it names
    none. `needs` are the facts without which it cannot judge, unless `is_moot` says that there is nothing to judge.
    """

    id: str
    title: str
    guide: str  # the guides' rules that it applies; empty: ours
    threshold: str
    check: Check
    needs: tuple[str, ...] = ()
    is_moot: Callable[[Evidence], bool] = lambda evidence: False
    sources: tuple[Source, ...] = field(default=ALL)
    limit: str | None = None
    is_essential: bool = False  # without any of these, nothing can be said about a running engine
