"""A simulated engine: a speed surface over settings, seeded noise, failures, and a clock that only it advances."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from headrace.bench.engines import Engine, EngineFailure, OfflineRun, RunningEngine, SettingInForce
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.tune.goal import BatchGoal
from headrace.tune.result import TuneResult
from headrace.tune.run import run_tune
from headrace.tune.spec import Tune

Surface = Callable[[Mapping[str, Any]], float]  # speed of full settings, relative to the default's 1.0
Problem = Callable[[Mapping[str, Any]], EngineFailure | None]

DEFAULTS: dict[str, Any] = {
    "max_num_seqs": 128,
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "capacity_policy": "max_utilization",
    "block_size": 16,
}
TOKENS_PER_S = 10_000.0


def no_problem(settings: Mapping[str, Any]) -> EngineFailure | None:
    return None


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class SimulatedEngine(Engine):
    """`refuses` fails at start, `breaks` under load. Noise belongs to a config and the number of its measurement, so
    that a search that was interrupted sees what it would have seen."""

    surface: Surface
    noise: float = 0.03
    seed: int = 0
    refuses: Problem = no_problem
    breaks: Problem = no_problem
    start_s: float = 5.0
    can_reconfigure: bool = False
    clock: Clock = field(default_factory=Clock)
    name = "headrace"

    def __post_init__(self) -> None:
        self.started: list[dict[str, Any]] = []
        self.num_alive = 0
        self.num_measured = 0
        self.counts: Counter[str] = Counter()
        self.interrupt_after: int | None = None  # Ctrl-C while the measurement after so many runs

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        full = {**DEFAULTS, **settings}
        self.started.append(full)
        self.clock.now += self.start_s
        if (failure := self.refuses(full)) is not None:
            raise failure
        self.num_alive += 1
        return SimulatedRunning(self, settings)


class SimulatedRunning(RunningEngine):
    name = "headrace"
    model_name = "m"

    def __init__(self, engine: SimulatedEngine, settings: Mapping[str, Any]) -> None:
        self._engine = engine
        self.start_s = engine.start_s
        self._given = dict(settings)
        self._failure: EngineFailure | None = None

    def settings_in_force(self) -> dict[str, SettingInForce]:
        defaults = {name: SettingInForce(value, "default") for name, value in DEFAULTS.items()}
        return defaults | {name: SettingInForce(value, "given") for name, value in self._given.items()}

    def versions(self) -> dict[str, str]:
        return {"headrace": "0"}

    def reconfigure(self, settings: Mapping[str, Any]) -> bool:
        if self._engine.can_reconfigure and settings.get("block_size") == self._given.get("block_size"):
            self._given = dict(settings)
            return True
        return False

    def run_offline(self, workload: Workload) -> OfflineRun:
        engine, full = self._engine, {**DEFAULTS, **self._given}
        lens = [request.output_len for request in workload.requests]
        is_timed = max(lens) > 4  # a warm-up has short answers
        if is_timed and engine.num_measured == engine.interrupt_after:
            raise KeyboardInterrupt
        if is_timed and (failure := engine.breaks(full)) is not None:
            engine.clock.now += 60.0 if failure.kind == "timeout" else 1.0
            self._failure = failure
            raise failure
        key = json.dumps(self._given, sort_keys=True)
        rate = TOKENS_PER_S * engine.surface(full)
        if is_timed:
            engine.counts[key] += 1
            rng = Random(f"{engine.seed} {key} {engine.counts[key]}")
            rate *= 1.0 + engine.noise * rng.gauss(0.0, 1.0)
        took = sum(lens) / rate
        engine.clock.now += took
        if is_timed:
            engine.num_measured += 1
        return OfflineRun(took, lens, [request.num_prompt_tokens or 1 for request in workload.requests])

    def reset_prefix_cache(self) -> bool:
        return True

    def is_alive(self) -> bool:
        return self._failure is None

    def failure(self) -> EngineFailure | None:
        return self._failure

    def launch_command(self) -> str:
        return "headrace run " + json.dumps(self._given)

    def stop(self) -> None:
        self._engine.num_alive -= 1


@cache
def workload(num_requests: int = 600, output_len: int = 64, input_len: int = 256) -> Workload:
    return build(WorkloadSpec(name="random", num_requests=num_requests, input_len=input_len, output_len=output_len))


def a_tune(engine: SimulatedEngine, **changes: Any) -> Tune:
    given: dict[str, Any] = {
        "engine": engine,
        "workload": workload(),
        "goal": BatchGoal(),
        "budget_s": 1200.0,
        "known": list(DEFAULTS),
        "common": {},
        "check": lambda running, requests: None,
        "clock": engine.clock,
    }
    return Tune(**{**given, **changes})


def searched(engine: SimulatedEngine, path: Path, **changes: Any) -> TuneResult:
    return run_tune(a_tune(engine, **changes), path)


def speed_of(result: TuneResult, engine: SimulatedEngine) -> float:
    """The true speed of what was chosen."""
    chosen = result.chosen
    assert chosen is not None
    return engine.surface({**DEFAULTS, **chosen.candidate.config.settings})


def num_equivalents(result: TuneResult, total: int) -> float:
    """Trials, in runs of the whole workload."""
    return sum(trial.num_requests / total for state in result.configs for trial in state.trials)
