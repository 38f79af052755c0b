"""The server's engine dies while a batch runs: its supervisor restarts it, and the batch goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace.config import EngineConfig
from headrace.engine.async_engine import AsyncEngine
from headrace.engine.client import Deliver
from headrace.engine.process.supervisor import EngineSupervisor, Supervision
from headrace.engine.start import Engine
from tests.engine.cores import HANG_FILE
from tests.engine.process.process_tools import wait_until
from tests.server.batch.batch_server import config_of, create, line, results, serving_batches, wait_for
from tests.server.fake_serve import engine_over

ROOT = Path(__file__).parents[3]


def start(config: EngineConfig, deliver: Deliver) -> Engine:
    """An engine in a process of its own, which computes nothing and hangs in the middle of the batch."""
    client = EngineSupervisor(deliver, Supervision(), core="tests.engine.cores:hangs_once")
    client.start(config)
    client.wait_until_ready()
    return engine_over(client, config)


@pytest.mark.processes
def test_a_batch_goes_on_when_the_engine_was_killed(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hang_file = tmp_path / "hang"
    hang_file.touch()
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv(HANG_FILE, str(hang_file))
    config = config_of(tiny_directory)
    engine = AsyncEngine.over(lambda deliver: start(config, deliver))
    lines = [line(str(number), max_tokens=40, ignore_eos=True) for number in range(40)]
    try:
        with serving_batches(engine, config, tmp_path) as server, server.client() as client:
            batch = create(client, lines)
            wait_until(lambda: not hang_file.exists())
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            batch = wait_for(client, batch.id, "completed", "failed")
            assert batch.status == "completed" and batch.request_counts.completed == 40
            assert results(client, batch.output_file_id).keys() == {each["custom_id"] for each in lines}
            assert engine.num_restarts == 1
    finally:
        asyncio.run(engine.close())
