"""One measurement of one config: change the running engine or start one, check it, measure it, classify a failure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, Literal

from headrace.bench.engines import Engine, EngineFailure, RunningEngine
from headrace.bench.sweep.check import check_answer, not_in_force
from headrace.bench.sweep.result import Failure
from headrace.bench.sweep.run import Check, death_of, failure_of
from headrace.bench.workloads import Workload
from headrace.tune.goal import Goal, SloMissedError

Phase = Literal["race", "confirm", "noise"]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Trial:
    """One measurement that ended well. `start_s` is None if the running engine changed its settings."""

    phase: Phase
    rung: int
    round: int
    num_requests: int
    value: float
    figures: Mapping[str, float]
    at: str
    seconds: float
    start_s: float | None
    load: Mapping[str, Any] | None = None
    levels: list[Mapping[str, Any]] | None = None
    level: int | None = None

    def as_json(self) -> dict[str, Any]:
        fields = asdict(self)
        if self.levels is None:
            del fields["levels"]
        return fields


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What a running engine says of itself."""

    in_force: Mapping[str, Any] = field(default_factory=dict)  # name: {value, source, reason}
    launch_command: str | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    model: Mapping[str, Any] = field(default_factory=dict)

    @property
    def values(self) -> dict[str, Any]:
        return {name: setting["value"] for name, setting in self.in_force.items()}


@dataclass(frozen=True, slots=True)
class Asked:
    """What is to be measured."""

    phase: Phase
    rung: int
    round: int
    num_requests: int
    level: int | None = None


class TrialRunner:
    """Owns the running engine. `close` stops it."""

    def __init__(
        self,
        engine: Engine,
        workload: Workload,
        goal: Goal,
        *,
        clock: Clock,
        check: Check = check_answer,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._engine = engine
        self._workload = workload
        self._goal = goal
        self._clock = clock
        self._check = check
        self._say = say
        self._running: RunningEngine | None = None
        self._settings: dict[str, Any] | None = None

    def run(self, settings: Mapping[str, Any], asked: Asked) -> tuple[Trial, EngineFacts] | Failure:
        """Measure a config. Any failure is returned, and the engine that failed is stopped."""
        began = self._clock()
        ready = self._ready(settings)
        if isinstance(ready, Failure):
            self.close()
            return ready
        engine, start_s = ready
        outcome = self._measured(engine, asked, is_fresh=start_s is not None)
        if isinstance(outcome, Failure):
            self.close()
            return outcome
        trial = Trial(
            asked.phase,
            asked.rung,
            asked.round,
            outcome.num_requests,
            outcome.value,
            outcome.figures,
            datetime.now(UTC).isoformat(timespec="seconds"),
            self._clock() - began,
            start_s,
            outcome.load,
            None if outcome.levels is None else list(outcome.levels),
            outcome.level,
        )
        return trial, _facts(engine)

    def close(self) -> None:
        """Stop the engine, if one runs."""
        engine, self._running, self._settings = self._running, None, None
        if engine is not None:
            engine.stop_safely(self._say)

    def _ready(self, settings: Mapping[str, Any]) -> tuple[RunningEngine, float | None] | Failure:
        """An engine with these settings, and how long its start took; None if one was running."""
        engine = self._reused(settings)
        if engine is not None:
            return engine, None
        self.close()
        try:
            engine = self._engine.start(settings, serves=self._goal.serves)
        except Exception as error:  # noqa: BLE001  a config that fails in any way is a result, and the search goes on
            return failure_of("start", error)
        self._running, self._settings = engine, dict(settings)
        try:
            wrong = not_in_force(settings, engine.settings_in_force())
            if wrong:
                return Failure("settings", "not in force", "; ".join(wrong), engine.log_tail())
            self._check(engine, self._workload)
        except Exception as error:  # noqa: BLE001
            return failure_of("answer", error, engine)
        return engine, engine.start_s

    def _reused(self, settings: Mapping[str, Any]) -> RunningEngine | None:
        """The running engine with these settings, if it can have them. A doubt means a restart, never a failure."""
        engine = self._running
        if engine is None:
            return None
        try:
            if not engine.is_alive():
                return None
            if self._settings != dict(settings):
                if not engine.reconfigure(settings) or not_in_force(settings, engine.settings_in_force()):
                    return None
                self._settings = dict(settings)
        except Exception:  # noqa: BLE001
            return None
        return engine

    def _measured(self, engine: RunningEngine, asked: Asked, *, is_fresh: bool) -> Any:
        part = self._workload.first(asked.num_requests) if not self._goal.serves else self._workload
        try:
            self._goal.warm_up(engine, part, is_fresh=is_fresh)
            measured = self._goal.measure(engine, part, asked.level)
            if not engine.is_alive():
                return death_of(engine)
        except SloMissedError as error:
            return Failure("measurement", "slo", str(error), engine.log_tail())
        except Exception as error:  # noqa: BLE001
            return self._failure(engine, error)
        if not measured.value > 0:
            return Failure("measurement", "no answers", "no request was answered", engine.log_tail())
        return measured

    def _failure(self, engine: RunningEngine, error: Exception) -> Failure:
        if not isinstance(error, EngineFailure) and not engine.is_alive():
            return death_of(engine)
        return failure_of("measurement", error, engine)


def _facts(engine: RunningEngine) -> EngineFacts:
    in_force = {name: asdict(setting) for name, setting in engine.settings_in_force().items()}
    return EngineFacts(in_force, engine.launch_command(), engine.versions(), engine.model_facts())
