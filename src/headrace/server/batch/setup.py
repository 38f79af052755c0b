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
from headrace.server.batch.runner import BatchRunner
from headrace.server.batch.service import WINDOW_S, BatchService
from headrace.server.batch.store import BatchStore
from headrace.server.options import ServerOptions

PRIORITY = 2**31 - 1  # after every other request: clients can choose smaller numbers only
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
        max_requests=options.max_batch_requests,
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

    def start_for(self, owner: str) -> list[Start]:
        """The engines for a job of one key: those that are ready now, or all. Each is a worker of the job."""
        phases = [state.phase for state in self._engine.states]
        ready = [number for number, phase in enumerate(phases) if phase == "ready"]
        return [partial(self._start, owner, number) for number in ready or range(len(phases))]

    def _start(self, owner: str, number: int, config: EngineConfig, deliver: Deliver) -> Engine:
        while (state := self._engine.states[number]).phase in ("starting", "restarting"):
            if self.closing.wait(READY_S):
                raise ResumableJobError("the server stops")
        salt = f"batch-{owner}" if owner and self._is_salted else None
        engine = self._engine.share(
            deliver, priority=PRIORITY, cache_salt=salt, max_sequences=state.settings.max_num_seqs, engine=number
        )
        return replace(engine, model_name=self._model_name)
