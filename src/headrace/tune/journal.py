"""The journal of a search: one fsynced line for each trial that ended, well or not. Resuming is replaying.

The search asks for each trial by its key. A trial that the journal has is not run again, so that the same command goes
through the same decisions up to the point where it was interrupted.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace.bench.sweep.configs import SweepConfig
from headrace.bench.sweep.journal import Journal
from headrace.bench.sweep.result import Failure
from headrace.bench.sweep.run import PASSING_KINDS
from headrace.tune.trial import Asked, EngineFacts, Trial

SCHEMA = "headrace.tune/1"


@dataclass(frozen=True, slots=True)
class Entry:
    """One trial, and how much of the budget was spent when it had ended."""

    outcome: Trial | Failure
    facts: EngineFacts | None
    spent_s: float


def key_of(config: SweepConfig, asked: Asked, attempt: int = 0) -> str:
    again = f"/again {attempt}" if attempt else ""
    return f"{asked.phase}/{asked.rung}/{asked.round}/{asked.num_requests}/{config.hash}{again}"


class TrialJournal:
    """The trials of one search. Those of another one (model, workload, machine, engine, flags) are ignored."""

    def __init__(self, path: Path, identity: str, *, retries_failed: bool = False) -> None:
        self._journal = Journal(path, SCHEMA)
        self.path = path
        self._identity = identity
        self._retries_failed = retries_failed
        self._found: dict[str, dict[str, Any]] = {
            entry["key"]: entry for entry in self._journal.entries if entry["identity"] == identity
        }

    @property
    def num_trials(self) -> int:
        return sum("trial" in entry or "failure" in entry for entry in self._found.values())

    def find(self, key: str) -> Entry | None:
        entry = self._found.get(key)
        if entry is None:
            return None
        if "failure" in entry:
            failure = Failure(**entry["failure"])
            if self._retries_failed or failure.kind in PASSING_KINDS:
                return None
            return Entry(failure, None, entry["spent_s"])
        return Entry(Trial(**entry["trial"]), EngineFacts(**entry["facts"]), entry["spent_s"])

    def add(self, key: str, config: SweepConfig, entry: Entry) -> None:
        outcome = entry.outcome
        kept: dict[str, Any] = {"name": config.name, "settings": dict(config.settings), "spent_s": entry.spent_s}
        if isinstance(outcome, Failure):
            kept["failure"] = asdict(outcome)
        else:
            kept |= {"trial": outcome.as_json(), "facts": asdict(entry.facts) if entry.facts else {}}
        self._append(key, kept)

    def note(self, key: str) -> Any:
        """A decision that rests on more than trials, such as the shortlist: plan measures this machine for it."""
        return self._found.get(key, {}).get("note")

    def add_note(self, key: str, value: Any) -> None:
        self._append(key, {"note": value})

    def close(self) -> None:
        self._journal.close()

    def _append(self, key: str, kept: dict[str, Any]) -> None:
        entry = {"identity": self._identity, "key": key, **kept}
        self._journal.append(entry)
        self._found[key] = entry
