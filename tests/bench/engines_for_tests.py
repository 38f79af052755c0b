"""Engines without a model, for tests of what measures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from headrace.bench.engines import Engine, EngineFailure, OfflineRun, RunningEngine, SettingInForce
from headrace.bench.workloads import Workload

Seconds = Callable[[Workload], float]


class FakeRunning(RunningEngine):
    """Answers at once and says how long it took."""

    name = "fake"
    start_s = 1.5
    model_name = "m"

    def __init__(self, seconds: Seconds, address: str | None = None, settings: Mapping[str, Any] | None = None) -> None:
        self.address = address
        self.runs: list[Workload] = []
        self.num_resets = 0
        self.is_stopped = False
        self._seconds = seconds
        self._settings = dict(settings or {})

    def settings_in_force(self) -> dict[str, SettingInForce]:
        return {name: SettingInForce(value, "given") for name, value in self._settings.items()}

    def versions(self) -> dict[str, str]:
        return {"fake": "1"}

    def run_offline(self, workload: Workload) -> OfflineRun:
        self.runs.append(workload)
        lens = [request.output_len for request in workload.requests]
        return OfflineRun(
            self._seconds(workload), lens, [request.num_prompt_tokens or 1 for request in workload.requests]
        )

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return True

    def stop(self) -> None:
        self.is_stopped = True


class FakeEngine(Engine):
    """`seconds(settings, workload)` may raise EngineFailure."""

    name = "fake"

    def __init__(
        self, seconds: Callable[[Mapping[str, Any], Workload], float], refuses: Callable[[Any], bool] | None = None
    ):
        self._seconds = seconds
        self._refuses = refuses or (lambda settings: False)
        self.started: list[FakeRunning] = []

    def start(self, settings: Mapping[str, Any], *, serves: bool) -> FakeRunning:
        if self._refuses(settings):
            raise EngineFailure("oom", "out of memory")
        running = FakeRunning(lambda workload: self._seconds(settings, workload), settings=settings)
        self.started.append(running)
        return running
