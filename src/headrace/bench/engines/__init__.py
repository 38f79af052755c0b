"""Engines behind one interface: Headrace in process or its server, vLLM, any OpenAI-compatible address.

    base.py              Engine.start(settings, serves=...) ─▶ RunningEngine; EngineFailure with its kind
    headrace_engine.py   LLM in a worker (headrace_worker.py), or `headrace serve`
    vllm_engine.py       LLM in a worker (vllm_worker.py), or `vllm serve` (vllm_launch.py), with vLLM's interpreter;
                         vllm_installation.py finds it and its settings, vllm_settings.py maps their names
    openai_engine.py     a server that already runs
    processes.py         child processes that cannot be orphaned; failures classified by exit code and log
    workers.py           commands to a worker          http.py, metrics.py   what a server says about itself
    shapes.py            model shapes with random weights

In process means: in a worker's process, so that its memory is returned and its crash is one failed start.
"""

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
