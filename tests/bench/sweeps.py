"""Sweeps over an engine that starts nothing, for tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.bench.engines.base import Engine, EngineFailure, OfflineRun, RunningEngine, SettingInForce
from headrace.bench.sweep import Sweep, SweepConfig, SweepResult, parse_configs, run_sweep
from headrace.bench.workloads import Workload, WorkloadSpec, build
from headrace.config import EngineConfig
from headrace.errors import ConfigError
from tests.bench.records import offline_record

KNOWN = list(EngineConfig.__dataclass_fields__)
WORKLOAD = build(WorkloadSpec(name="random", num_requests=4, input_len=8, output_len=4))


class FakeRunning(RunningEngine):
    name = "fake"
    start_s: float | None = 1.5
    model_name = "tiny"

    def __init__(self, owner: FakeEngine, settings: Mapping[str, Any]) -> None:
        self.owner = owner
        self.settings = dict(settings)

    def settings_in_force(self) -> dict[str, SettingInForce]:
        values = {**self.settings, **self.owner.overridden}
        return {name: SettingInForce(value, "given") for name, value in values.items() if name != "silent"}

    def versions(self) -> dict[str, str]:
        return {"fake": "1.0"}

    def run_offline(self, workload: Workload) -> OfflineRun:
        self.owner.event("answer")
        return OfflineRun(0.1, [0 if self.owner.is_mute else 4] * len(workload.requests), [8] * len(workload.requests))

    def reconfigure(self, settings: Mapping[str, Any]) -> bool:
        if not self.owner.can_reconfigure:
            return False
        self.owner.event("reconfigure")
        self.owner.check(settings)
        self.settings, self.start_s = dict(settings), None
        return True

    def is_alive(self) -> bool:
        return self.settings.get("block_size") != 13

    def log_tail(self) -> str:
        return "the last line of the log"

    def launch_command(self) -> str | None:
        return "fake serve " + " ".join(f"--{name} {value}" for name, value in self.settings.items())

    def stop(self) -> None:
        self.owner.event("stop")
        self.owner.running.discard(self)


class FakeEngine(Engine):
    """Refuses max_num_seqs below 1 as Headrace does, and runs out of memory above 1,000. Counts what happens."""

    name = "fake"

    def __init__(self) -> None:
        self.events: list[str] = []
        self.running: set[RunningEngine] = set()
        self.overridden: dict[str, Any] = {}
        self.start_error: Exception | None = None
        self.is_mute = False
        self.interrupt_at: int | None = None
        self.can_reconfigure = False

    def event(self, name: str) -> None:
        self.events.append(name)
        if self.interrupt_at is not None and len(self.events) > self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> RunningEngine:
        self.event("start")
        if self.start_error is not None:
            raise self.start_error
        self.check(settings)
        running = FakeRunning(self, settings)
        self.running.add(running)
        return running

    def check(self, settings: Mapping[str, Any]) -> None:
        value = settings.get("max_num_seqs", 64)
        if value is False or value < 1:
            message = f"max_num_seqs must be an integer of at least 1, got {value!r}"
            raise EngineFailure("bad_setting", message) if self.can_reconfigure else ConfigError(message)
        if value > 1000:
            raise EngineFailure("oom", "needs 90.0 GiB, 80.0 GiB free", "torch.OutOfMemoryError")


def measure(engine: RunningEngine, workload: Workload) -> dict[str, Any]:
    assert isinstance(engine, FakeRunning)
    engine.owner.event("measure")
    num = engine.owner.events.count("measure")
    if engine.settings.get("block_size") == 7:
        raise EngineFailure("crash", "the engine died under load", "Segmentation fault")
    return offline_record((10.0 * engine.settings.get("max_num_seqs", 64) + num % 3,))


def configs(*settings: dict[str, Any]) -> list[SweepConfig]:
    return parse_configs(json.dumps(list(settings)), "configs.json", known=[*KNOWN, "silent"])


def sweep(*settings: dict[str, Any], engine: FakeEngine | None = None, **options: Any) -> Sweep:
    full = {"measure": measure, "serves": False, "workload": WORKLOAD, **options}
    return Sweep(configs=configs(*settings), engine=engine or FakeEngine(), **full)


def run(path: Path, *settings: dict[str, Any], **options: Any) -> SweepResult:
    return run_sweep(sweep(*settings, **options), path / "sweep.journal")
