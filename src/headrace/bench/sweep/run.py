"""Runs a sweep. What was measured is on disk before the next thing starts, so nothing can take it away."""

from __future__ import annotations

import json
import re
import secrets
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from headrace.bench.engines.base import Engine, EngineFailure, RunningEngine
from headrace.bench.levels import levels_of
from headrace.bench.record import SCHEMA, rounded
from headrace.bench.sweep.check import check_answer, not_in_force, not_reported
from headrace.bench.sweep.configs import HASH_LEN, SweepConfig
from headrace.bench.sweep.journal import Journal, JournalError
from headrace.bench.sweep.result import (
    DEFAULT_RANK,
    RANKABLE,
    Failure,
    Measured,
    SweepResult,
    check_rank,
    ranked,
    round_figures,
)
from headrace.bench.values import found, is_number, number, seconds
from headrace.bench.workloads import Workload
from headrace.errors import ConfigError
from headrace.hardware.describe import current_commit, machine_facts, package_versions

Measure = Callable[[RunningEngine, Workload], dict[str, Any]]
Check = Callable[[RunningEngine, Workload], None]

# Failures to start that are no fault of one config: if all so far failed alike, the others will too.
COMMON_KINDS = ("not_installed", "timeout", "crash", "unreachable")
# Failures that say nothing of the config, so that a later run tries again.
PASSING_KINDS = ("not_installed", "unreachable")
NUM_ALIKE = 2


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """What to run. `common` are settings of all configs; `identity` is what a stored round must share to be used again
    besides config and workload: model digest, engine version, kind of measurement, load, SLO."""

    configs: Sequence[SweepConfig]
    engine: Engine
    workload: Workload
    measure: Measure  # one round
    serves: bool
    num_rounds: int = 1
    is_interleaved: bool = False
    rank_by: str = DEFAULT_RANK
    common: Mapping[str, Any] = field(default_factory=dict)
    identity: Mapping[str, Any] = field(default_factory=dict)
    check: Check = check_answer
    retries_failed: bool = False

    def __post_init__(self) -> None:
        check_rank(self.rank_by)
        if self.num_rounds < 1:
            raise ConfigError(f"--rounds must be at least 1, got {self.num_rounds}")
        if not self.configs:
            raise ConfigError("a sweep needs at least one config")

    def settings_of(self, config: SweepConfig) -> dict[str, Any]:
        return {**self.common, **config.settings}


def run_sweep(sweep: Sweep, journal_path: Path, say: Callable[[str], None] = lambda line: None) -> SweepResult:
    """Run what the journal does not have yet, and rank everything.

    Ctrl-C and a full disk end the sweep early: the result then has what was measured, and says how to go on.
    """
    with Journal(journal_path) as journal:
        running = _Running(sweep, journal, say)
        stopped: str | None = None
        try:
            running.reuse()
            stopped = running.run()
        except KeyboardInterrupt:
            stopped = "interrupted"
        except JournalError as error:
            stopped = f"{error}; free some space"
        return running.result(stopped)


class _Running:
    """Owns the state of one sweep: what is measured, what failed."""

    def __init__(self, sweep: Sweep, journal: Journal, say: Callable[[str], None]) -> None:
        self.sweep = sweep
        self.journal = journal
        self.say = say
        self.started_at = datetime.now(UTC)
        self.machine = machine_facts()
        self.identity = _hash(
            {
                "engine": sweep.engine.name,
                "serves": sweep.serves,
                "workload": sweep.workload.spec.hash,
                "num_requests": len(sweep.workload.requests),
                "machine": [
                    self.machine["cpu"],
                    self.machine["num_cores"],
                    [gpu["name"] for gpu in self.machine["gpus"]],
                ],
                "common": dict(sweep.common),
                **sweep.identity,
            }
        )
        self.measured: dict[str, dict[int, Measured]] = {config.hash: {} for config in sweep.configs}
        self.failures: dict[str, Failure] = {}
        self.seconds_per_round: list[float] = []
        self.num_kept = 0  # rounds that the journal has
        self._kept: RunningEngine | None = None  # of the last visit, if the next one may take it over

    def reuse(self) -> None:
        """Take over what the journal has of these configs, this workload, engine and machine."""
        for entry in self.journal.entries:
            key, place = entry["config_hash"], entry["round"]
            if entry["identity"] != self.identity or key not in self.measured or place >= self.sweep.num_rounds:
                continue
            if "failure" not in entry:
                self.measured[key][place] = Measured(
                    entry["record"], entry["launch_command"], entry["start_s"], entry["not_reported"], is_reused=True
                )
                self.failures.pop(key, None)  # of an earlier try
            elif not self.sweep.retries_failed and entry["failure"]["kind"] not in PASSING_KINDS:
                self.failures[key] = Failure(**entry["failure"])
        self.num_kept = num_reused = sum(map(len, self.measured.values()))
        if num_reused or self.failures:
            self.say(
                f"{num_reused} of {len(self.sweep.configs) * self.sweep.num_rounds} rounds and "
                f"{len(self.failures)} failed configs are in {self.journal.path}"
                + ("; --retry-failed runs those again" if self.failures else "")
            )

    def run(self) -> str | None:
        """Run what is missing. Returns why it ended early, if it did."""
        try:
            return self._run()
        finally:
            self._stop_kept()

    def _run(self) -> str | None:
        for place, (config, rounds) in enumerate(self._visits(), 1):
            todo = [each for each in rounds if each not in self.measured[config.hash]]
            if not todo or config.hash in self.failures:
                continue
            self.say(f"[{place}/{self._num_visits()}] {config.name}: starting{self._time_left()}")
            failure = self._visit(config, todo)
            if failure is not None:
                self._append(config, todo[0], {"failure": asdict(failure)})
                self.failures[config.hash] = failure
                first_line = next(iter(failure.message.splitlines()), "")
                self.say(f"  failed ({failure.stage}, {failure.kind}): {first_line}")
                if reason := self._common_failure():
                    return reason
        return None

    def result(self, stopped: str | None) -> SweepResult:
        measured = {key: [rounds[place] for place in sorted(rounds)] for key, rounds in self.measured.items()}
        rows = ranked(
            self.sweep.configs,
            measured,
            self.failures,
            rank_by=self.sweep.rank_by,
            is_interleaved=self.sweep.is_interleaved,
        )
        if stopped is not None:
            total = len(self.sweep.configs) * self.sweep.num_rounds
            stopped += (
                f". {self.num_kept} of {total} rounds are kept in {self.journal.path}; the same command continues"
            )
        return SweepResult(
            rows, self.sweep.rank_by, self.sweep.num_rounds, self.sweep.is_interleaved, stopped, self._facts(measured)
        )

    def _visits(self) -> Iterator[tuple[SweepConfig, list[int]]]:
        """Configs with the rounds of one start. Interleaved, each round is a start of its own, or a change of settings
        where the engine can, and every second pass goes backwards (A B B A), so that a slow drift of the machine hits
        all configs alike."""
        configs, num_rounds = self.sweep.configs, self.sweep.num_rounds
        if not self.sweep.is_interleaved:
            yield from ((config, list(range(num_rounds))) for config in configs)
            return
        for place in range(num_rounds):
            yield from ((config, [place]) for config in (configs if place % 2 == 0 else list(reversed(configs))))

    def _num_visits(self) -> int:
        return len(self.sweep.configs) * (self.sweep.num_rounds if self.sweep.is_interleaved else 1)

    def _visit(self, config: SweepConfig, todo: list[int]) -> Failure | None:
        """Start, check and measure one config. Rounds that ended well are in the journal when this returns."""
        settings = self.sweep.settings_of(config)
        began = time.monotonic()
        try:
            engine = self._engine_with(settings)
        except Exception as error:  # noqa: BLE001  a config that fails in any way is a row, and the others still run
            return failure_of("start", error)
        is_good = False
        try:
            failure = self._checked(engine, settings)
            for place in todo if failure is None else ():
                outcome = self._measured(engine)
                if isinstance(outcome, Failure):
                    failure = outcome
                    break
                self._keep(config, place, engine, outcome)
                self.seconds_per_round.append(time.monotonic() - began)
                began = time.monotonic()
            is_good = failure is None
        finally:
            if is_good and self.sweep.is_interleaved:
                self._kept = engine
            else:
                engine.stop_safely(self.say)
        return failure

    def _engine_with(self, settings: Mapping[str, Any]) -> RunningEngine:
        """The engine of the last visit with other settings, if it can change them, or else a new one."""
        kept = self._kept
        if kept is not None and kept.is_alive():
            try:
                is_changed = kept.reconfigure(settings)
            except EngineFailure as error:
                if error.kind == "bad_setting" and kept.is_alive():
                    raise
                is_changed = False  # a fresh start shows whether the settings are to blame
            if is_changed:
                self._kept = None  # the visit decides whether the next one gets it
                return kept
        self._stop_kept()
        return self.sweep.engine.start(settings, serves=self.sweep.serves)

    def _stop_kept(self) -> None:
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.stop_safely(self.say)

    def _checked(self, engine: RunningEngine, settings: Mapping[str, Any]) -> Failure | None:
        try:
            wrong = not_in_force(settings, engine.settings_in_force())
            if wrong:
                return Failure("settings", "not in force", "; ".join(wrong), engine.log_tail())
            self.sweep.check(engine, self.sweep.workload)
        except Exception as error:  # noqa: BLE001
            return failure_of("answer", error, engine)
        return None

    def _measured(self, engine: RunningEngine) -> dict[str, Any] | Failure:
        try:
            record = self.sweep.measure(engine, self.sweep.workload)
            if not engine.is_alive():
                return death_of(engine)
        except Exception as error:  # noqa: BLE001
            return failure_of("measurement", error, engine)
        if not has_answers(record):
            return Failure(
                "measurement", "no answers", "no request was answered" + _first_error(record), engine.log_tail()
            )
        return record

    def _keep(self, config: SweepConfig, place: int, engine: RunningEngine, record: dict[str, Any]) -> None:
        settings = self.sweep.settings_of(config)
        unknown = not_reported(settings, engine.settings_in_force())
        one = Measured(record, engine.launch_command(), engine.start_s, unknown)
        self.measured[config.hash][place] = one
        kept = {"record": rounded(record), "launch_command": one.launch_command, "start_s": one.start_s}
        self._append(config, place, {**kept, "not_reported": list(unknown)})
        self.num_kept += 1
        figures, level = round_figures(record, self.sweep.rank_by)
        label = RANKABLE[self.sweep.rank_by].label
        shown = f"{number(figures.get(self.sweep.rank_by))} {label}" + (f" at {level}" if level else "")
        self.say(f"  {config.name}, round {place + 1} of {self.sweep.num_rounds}: {shown}")

    def _append(self, config: SweepConfig, place: int, entry: dict[str, Any]) -> None:
        facts = {
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "name": config.name,
            "settings": dict(config.settings),
        }
        self.journal.append({"identity": self.identity, "config_hash": config.hash, "round": place, **facts, **entry})

    def _common_failure(self) -> str | None:
        """Why going on is useless: all configs so far failed to start, alike, for a reason that is not their own."""
        if (
            any(self.measured.values())
            or len(self.failures) < NUM_ALIKE
            or len(self.failures) == len(self.sweep.configs)
        ):
            return None
        reasons = {
            (failure.stage, failure.kind, re.sub(r"\d+", "#", failure.message)) for failure in self.failures.values()
        }
        if len(reasons) > 1 or any(stage != "start" or kind not in COMMON_KINDS for stage, kind, _ in reasons):
            return None
        message = next(iter(self.failures.values())).message
        return (
            f"all {len(self.failures)} configs so far failed to start for the same reason, which is not a setting: "
            f"{message}. Correct it, then use --retry-failed"
        )

    def _time_left(self) -> str:
        if not self.seconds_per_round:
            return ""
        missing = sum(
            self.sweep.num_rounds - len(self.measured[config.hash])
            for config in self.sweep.configs
            if config.hash not in self.failures
        )
        mean = sum(self.seconds_per_round) / len(self.seconds_per_round)
        return f"; about {seconds(mean * missing)} left"

    def _facts(self, measured: Mapping[str, Sequence[Measured]]) -> dict[str, Any]:
        """What the record says besides its rows."""
        record = next((each.record for rounds in measured.values() for each in rounds), {})
        return {
            "schema": SCHEMA,
            "kind": "sweep",
            "id": f"{self.started_at:%Y%m%d-%H%M%S}-{secrets.token_hex(3)}",
            "started_at": self.started_at.isoformat(timespec="seconds"),
            "command": shlex.join(["headrace", *sys.argv[1:]]),
            "engine": {"name": self.sweep.engine.name, "versions": found(record, "engine", "versions") or {}},
            "model": record.get("model") or {},
            "workload": self.sweep.workload.facts,
            "load": record.get("load"),
            "slo": self.sweep.identity.get("slo"),
            "machine": self.machine,
            "versions": package_versions(),
            "commit": current_commit(),
            "common_settings": dict(self.sweep.common),
            "warnings": [],
        }


def failure_of(stage: str, error: Exception, engine: RunningEngine | None = None) -> Failure:
    """Any error of a config, with its class."""
    tail = engine.log_tail() if engine is not None else ""
    if isinstance(error, EngineFailure):
        return Failure(stage, error.kind, str(error), error.log_tail or tail)
    if isinstance(error, ConfigError):
        return Failure(stage, "bad_setting", str(error), tail)
    is_memory = isinstance(error, MemoryError) or "out of memory" in str(error).lower()
    return Failure(stage, "oom" if is_memory else "error", f"{type(error).__name__}: {error}", tail)


def death_of(engine: RunningEngine) -> Failure:
    reason = engine.failure()
    if reason is None:  # it died, says who measured, but its process is there
        return Failure("measurement", "crash", f"{engine.name} died under load", engine.log_tail())
    return Failure("measurement", reason.kind, f"died under load: {reason}", reason.log_tail)


def has_answers(record: Mapping[str, Any]) -> bool:
    """Whether anything was answered; a record that does not count answers is taken at its word."""
    if record.get("rounds"):
        return any(each.get("output_tokens_per_s") != 0 for each in record["rounds"])
    counts = [found(level, "summary", "num_ok") for level in levels_of(record)]
    known = [count for count in counts if is_number(count)]
    return not known or any(known)


def _first_error(record: Mapping[str, Any]) -> str:
    errors = [error for level in levels_of(record) for error in found(level, "summary", "errors") or {}]
    return f": {errors[0]}" if errors else ""


def _hash(facts: Mapping[str, Any]) -> str:
    return sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:HASH_LEN]
