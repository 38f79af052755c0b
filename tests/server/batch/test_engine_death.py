"""The server's engine dies while a batch runs: its supervisor restarts it, and the batch goes on."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from headrace.engine.async_engine import AsyncEngine
from headrace.engine.process.supervisor import Supervision
from headrace.engine.start import start_engine_process
from tests.server.batch.batch_server import config_of, create, line, results, serving_batches, wait_for


@pytest.mark.processes
def test_a_batch_goes_on_when_the_engine_was_killed(tiny_directory: Path, tmp_path: Path) -> None:
    config = config_of(tiny_directory)
    engine = AsyncEngine.over(lambda deliver: start_engine_process(config, deliver, supervision=Supervision()))
    lines = [line(str(number), max_tokens=40, ignore_eos=True) for number in range(40)]
    try:
        with serving_batches(engine, config, tmp_path) as server, server.client() as client:
            batch = create(client, lines)
            while not client.batches.retrieve(batch.id).request_counts.completed:  # type: ignore[union-attr]
                pass
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            batch = wait_for(client, batch.id, "completed", "failed")
            assert batch.status == "completed" and batch.request_counts.completed == 40
            assert results(client, batch.output_file_id).keys() == {each["custom_id"] for each in lines}
            assert engine.num_restarts == 1
    finally:
        asyncio.run(engine.close())
