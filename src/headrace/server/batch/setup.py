"""Builds the Batch API of a server: the store, and jobs that share the server's engine."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.client import Deliver
from headrace.engine.start import Engine
from headrace.errors import ResumableJobError
from headrace.jobs.recovery.job_engine import Start
from headrace.server.batch.records import PRIORITIES, Batch
from headrace.server.batch.runner import BatchRunner
from headrace.server.batch.service import WINDOW_S, BatchService
from headrace.server.batch.store import BatchStore
from headrace.server.options import ServerOptions
from headrace.types import BACKGROUND_PRIORITY

# After every other request, for which clients can choose smaller numbers only. The priority of a batch is added.
PRIORITY = BACKGROUND_PRIORITY - PRIORITIES[0]
READY_S = 0.2  # between two checks whether the engine is back


def with_priorities(config: EngineConfig, options: ServerOptions) -> EngineConfig:
    """With a batch directory, interactive requests go before those of batches."""
    return config if options.batch_dir is None else replace(config, scheduling_policy="priority")


def open_store(options: ServerOptions) -> BatchStore | None:
    return None if options.batch_dir is None else BatchStore(Path(options.batch_dir).expanduser())


def build_service(
    store: BatchStore,
    engine: AsyncEngine,
    options: ServerOptions,
    *,
    config: EngineConfig,
    model_name: str,
    window_s: int = WINDOW_S,
) -> BatchService:
    shared = _SharedEngine(engine, options, model_name)
    runner = BatchRunner(
        store,
        config,
        shared.start_for,
        model_name=model_name,
        other_names=options.model_names[1:],
        adapters=lambda: engine.adapters,
        max_requests=options.max_batch_requests,
        parser_names=options.parser_names,
        on_close=shared.closing.set,
    )
    return BatchService(store, runner, options, window_s=window_s)


class _SharedEngine:
    """Gives jobs the server's engines. When one dies, its supervisor restarts it, and its worker waits here."""

    def __init__(self, engine: AsyncEngine, options: ServerOptions, model_name: str) -> None:
        self._engine = engine
        self._is_salted = options.cache_salt_per_key
        self._model_name = model_name
        self.closing = threading.Event()

    def start_for(self, batch: Batch) -> list[Start]:
        """The engines for the job of a batch: those that are ready now, or all. Each is a worker of the job."""
        phases = [state.phase for state in self._engine.states]
        ready = [number for number, phase in enumerate(phases) if phase == "ready"]
        return [partial(self._start, batch, number) for number in ready or range(len(phases))]

    def _start(self, batch: Batch, number: int, config: EngineConfig, deliver: Deliver) -> Engine:
        while (state := self._engine.states[number]).phase in ("starting", "restarting", "asleep"):
            if self.closing.wait(READY_S):
                raise ResumableJobError("the server stops")
        engine = self._engine.share(
            deliver,
            priority=PRIORITY + batch.priority,
            cache_salt=f"batch-{batch.owner}" if batch.owner and self._is_salted else None,
            max_sequences=state.settings.max_num_seqs,
            engine=number,
        )
        return replace(engine, model_name=self._model_name)
