"""`headrace top` on a real server with a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor import ServerMetrics
from headrace.scrape.client import ServerClient
from headrace.top.view import plain_text
from headrace.top.watch import Watch
from tests.server.serving import MODEL, serving


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
