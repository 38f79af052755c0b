"""`headrace top` on a real server with a tiny model."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from headrace.cli.main import main
from headrace.config import EngineConfig
from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor import ServerMetrics
from headrace.scrape.client import ServerClient
from headrace.server.bottleneck import SNAPSHOT_S
from headrace.top.view import plain_text
from headrace.top.watch import Watch
from tests.server.serving import MODEL, serving
from tests.server.whole_server import LimitedEngine, Running, with_server


def test_a_real_server_has_all_figures_of_what_it_generated(tiny_directory: Path) -> None:
    with serving(str(tiny_directory), max_num_seqs=8, num_gpu_blocks_override=256) as server:
        settings = server.services.engine.settings
        server.services.metrics = ServerMetrics(MODEL, settings, gpus=GpuMonitor.of_device(settings.device))
        watch = Watch(ServerClient(server.url))
        assert watch.read().failure is None
        for _ in range(2):
            body = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "ignore_eos": True}
            assert server.post("/v1/completions", body).status_code == 200
        server.wait_until(lambda: server.is_idle)
        reading = watch.read()
    figures = reading.figures
    assert figures is not None and figures.seconds is not None
    assert figures.generated_per_s == pytest.approx(10 / figures.seconds)
    assert figures.requests_per_s == pytest.approx(2 / figures.seconds)
    assert figures.ttft is not None and figures.itl is not None
    assert figures.step_s is not None and 0 < (figures.host_share or 0) <= 1
    assert (figures.is_up, figures.running, figures.missing) == (True, 0, ())
    assert "none: the engine runs on the CPU" in plain_text(reading)
    assert Watch(ServerClient(server.url)).read().failure is not None  # it is gone now


def test_the_command_shows_what_the_server_says_about_itself(
    tiny_directory: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole server: its metrics, GET /bottleneck and GET /alerts, in the shapes that top reads."""
    monkeypatch.delenv("HEADRACE_API_KEY", raising=False)
    now = [0.0]
    engine = LimitedEngine.of(EngineConfig(model=str(tiny_directory), max_num_seqs=4, num_gpu_blocks_override=256))

    async def top(made: Running, *options: str) -> str:
        url = str(made.client.base_url)
        assert await asyncio.to_thread(main, ["top", url, "--once", "--interval", "0.01", *options]) == 0
        return capsys.readouterr().out

    async def body(made: Running) -> None:
        watch, monitor = made.server.bottleneck, made.server.self_monitor
        await watch.tick()
        monitor.sample()
        quiet = json.loads(await top(made, "--json"))
        assert quiet["bottleneck"].startswith("Not enough evidence: ")
        assert quiet["alerts"] == []

        await asyncio.gather(*(made.complete(max_tokens=60, ignore_eos=True) for _ in range(4)))
        now[0] += SNAPSHOT_S
        await watch.tick()
        made.server.metrics.restarted()
        monitor.sample()
        told = json.loads(await top(made, "--json"))
        assert told["figures"]["missing"] == {}
        assert told["figures"]["gpu_missing"] == "the engine runs on the CPU"
        document = (await made.client.get("/bottleneck")).json()
        assert document["outcome"] != "not enough evidence"
        assert told["bottleneck"] == document["headline"]
        assert told["alerts"] == ["HeadraceEngineRestarted (warning): engine restarts in 10 min: 1; threshold: 0"]
        assert "HeadraceEngineRestarted (warning)" in await top(made)

    try:
        with_server(engine, body, clock=lambda: now[0])
    finally:
        asyncio.run(engine.close())
