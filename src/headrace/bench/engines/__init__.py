"""Engines behind one interface: Headrace in process or its server, vLLM, any OpenAI-compatible address."""

from __future__ import annotations

from headrace.bench.engines.base import (
    Engine,
    EngineFailure,
    FailureKind,
    OfflineRun,
    RunningEngine,
    SettingInForce,
)

__all__ = ["Engine", "EngineFailure", "FailureKind", "OfflineRun", "RunningEngine", "SettingInForce"]
