"""Starts the workers of a job on this machine, all at once."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace

from headrace.config import EngineConfig
from headrace.engine.client import Deliver
from headrace.engine.shares import EngineShare
from headrace.engine.start import Engine, start_engine_process
from headrace.jobs.recovery.job_engine import JobEngine, Start
from headrace.startup import Report


def start_in_process(share: EngineShare, report: Report) -> Start:
    """Returns what starts an engine with this share in a process of its own."""

    def start(config: EngineConfig, deliver: Deliver) -> Engine:
        engine = start_engine_process(config, deliver, report=report, environment=share.environment)
        return replace(engine, settings=share.explained(engine.settings))

    return start


def start_workers(
    starts: Sequence[Start], configs: Sequence[EngineConfig], deliver: Deliver, *, have_processes: bool
) -> list[JobEngine]:
    """Start one worker for each config and wait for all of them. If one cannot start, the others are closed, and its
    error is raised."""
    if len(starts) == 1:
        return [JobEngine(starts[0], deliver, configs[0], has_own_process=have_processes)]
    with ThreadPoolExecutor(len(starts), "headrace-start") as executor:
        starting = [
            executor.submit(JobEngine, start, deliver, config, number=number, has_own_process=have_processes)
            for number, (start, config) in enumerate(zip(starts, configs, strict=True))
        ]
        try:
            return [each.result() for each in starting]
        except BaseException:
            _close_all(starting)
            raise


def _close_all(starting: Sequence[Future[JobEngine]]) -> None:
    for each in starting:
        each.cancel()
    wait(starting)
    for each in starting:
        with suppress(BaseException):
            each.result().close()
