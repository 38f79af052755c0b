from __future__ import annotations

import io

import pytest
from rich.cells import cell_len
from rich.console import Console

from headrace.engine.core import EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor import ServerMetrics
from headrace.sched import SchedulerStats
from headrace.top.view import plain_text, rich_view
from headrace.top.watch import Reading, Watch
from tests.doctor.pages import HeadraceServer, vllm_page
from tests.hardware.readers import HandReader
from tests.top.servers import Clock, FakeServer, gone

FIRING = {"labels": {"alertname": "Backlog"}, "annotations": {"summary": "60 wait"}, "state": "firing"}


def watched(server: FakeServer) -> tuple[Reading, Watch]:
    """The last reading of a server's pages."""
    clock = Clock()
    watch = Watch(server, clock=clock)
    reading = watch.read()
    while server.pages:
        clock.now += 2.0
        reading = watch.read()
    return reading, watch


def drawn(reading: Reading, watch: Watch, width: int = 80, height: int = 50) -> list[str]:
    console = Console(file=io.StringIO(), width=width, height=height, highlight=False)
    console.print(rich_view(reading, list(watch.history), width=width, height=height, interval_s=2.0))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return [line.rstrip() for line in text.splitlines()]


def busy_server(model: str = "m") -> FakeServer:
    source, reader = HeadraceServer(), HandReader()
    source._metrics = ServerMetrics(model, gpus=GpuMonitor(open=reader.open, clock=lambda: 0.0))
    reader.read(
        utilization=0.97, power_w=612.0, temperature_c=58.0, memory_bytes=81 * 2**30, memory_total_bytes=140 * 2**30
    )
    pages = []
    for _ in range(3):
        source.work(num_generated_tokens=10_000, num_prompt_tokens=2000)
        source.finish(num_prompt=100, num_generated=10)
        pages.append(source.scrape(num_running=256, num_waiting=40, num_blocks_held=610))
    server = FakeServer(*pages)
    server.documents["/bottleneck"] = {"headline": "Limited by slots: raise max_num_seqs."}
    server.documents["/alerts"] = {"data": {"alerts": [FIRING]}}
    return server


def one_with(lines: list[str], label: str) -> str:
    (line,) = [line for line in lines if line.strip("│ ").startswith(label)]
    return line


def test_a_busy_server_is_shown_whole() -> None:
    lines = drawn(*watched(busy_server()))
    assert "http://gpu-7:8000 · Headrace 0.1.0 · m · up" in lines[0]
    assert "Limited by slots: raise max_num_seqs." in one_with(lines, "bottleneck")
    assert "Backlog: 60 wait" in one_with(lines, "alert")
    assert "5,000 tokens/s" in one_with(lines, "generated") and "▇" not in one_with(lines, "refused")
    assert "61 %" in one_with(lines, "KV cache") and "█" in one_with(lines, "KV cache")
    assert "p50" in one_with(lines, "TTFT")
    assert "97 %" in one_with(lines, "GPU 0") and "81.0 of 140.0 GiB" in one_with(lines, "memory")
    assert any("612 W, 58 °C" in line for line in lines)


@pytest.mark.parametrize(("width", "height"), [(80, 24), (80, 50), (140, 40), (200, 50), (100, 24)])
def test_it_fits_the_terminal(width: int, height: int) -> None:
    lines = drawn(*watched(busy_server("m" * 200)), width=width, height=height)
    assert len(lines) <= height
    assert max(map(cell_len, lines)) <= width
    assert any("GPU 0" in line for line in lines)


def test_panels_stand_side_by_side_on_a_wide_terminal() -> None:
    lines = drawn(*watched(busy_server()), width=140)
    assert any("throughput" in line and "latency" in line for line in lines)


def test_a_vllm_server_is_shown_with_what_it_lacks() -> None:
    pages = [vllm_page({"generation_tokens": n}, {"num_requests_running": 3}, gaps={0.02: n}) for n in (0, 1000)]
    reading, watch = watched(FakeServer(*pages))
    lines = drawn(reading, watch)
    assert "vLLM · m · answers" in lines[0]
    assert "not exported" in one_with(lines, "step") and "500 tokens/s" in one_with(lines, "generated")
    assert "step time, host share" in plain_text(reading)


def test_a_server_that_is_gone_is_said_to_be_with_what_it_did_before() -> None:
    server = busy_server()
    server.pages.append(gone())
    reading, watch = watched(server)
    lines = drawn(reading, watch)
    assert "not readable" in lines[0]
    assert any("connection refused" in line for line in lines)
    assert any("throughput, before" in line for line in lines)
    assert "not readable: http://gpu-7:8000: connection refused" in plain_text(reading)


def test_a_server_that_was_never_there_is_shown_without_figures() -> None:
    lines = drawn(*watched(FakeServer(gone())))
    assert "not readable" in lines[0] and not any("throughput" in line for line in lines)


def test_an_engine_that_is_down_and_restarts_are_shown() -> None:
    metrics = ServerMetrics("m")
    metrics.restarted()
    metrics.observe(None)
    reading, watch = watched(FakeServer(metrics.render()[0].decode()))
    assert "ENGINE DOWN, restarts 1" in drawn(reading, watch)[0]


def test_one_engine_of_several_that_is_down_is_named() -> None:
    metrics = ServerMetrics("m", fake_settings(), others=[fake_settings()])
    metrics.observe(EngineStats(SchedulerStats(num_running=3), 0.0, 0.0), None)
    reading, watch = watched(FakeServer(metrics.render()[0].decode()))
    assert reading.figures is not None and reading.figures.is_up and reading.figures.running == 3
    assert "ENGINE 1 DOWN" in drawn(reading, watch)[0]


@pytest.mark.parametrize("name", ["[red]x[/red]", "a\x1b[31mb", "two\nlines", "模型" * 40, 'q"\\'])
def test_odd_model_names_do_not_break_the_view(name: str) -> None:
    reading, watch = watched(busy_server(name))
    lines = drawn(reading, watch)
    assert max(map(cell_len, lines)) <= 80 and "\x1b" not in "".join(lines)
    if name.startswith("[red]"):
        assert "[red]x[/red]" in lines[0]
    assert plain_text(reading).count("\n") > 10


def test_no_gpu_is_said_and_not_shown_as_0() -> None:
    metrics = ServerMetrics("m", gpus=GpuMonitor.of_device("cpu"))
    reading, _ = watched(FakeServer(metrics.render()[0].decode()))
    assert "GPU         none: the engine runs on the CPU" in plain_text(reading)


def test_several_engines_have_a_row_each() -> None:
    first = vllm_page({"generation_tokens": 5}, {"num_requests_running": 3, "kv_cache_usage_perc": 0.25})
    pages = [first + first.replace('engine="0"', f'engine="{other}"') for other in (1,)]
    reading, watch = watched(FakeServer(*pages))
    lines = drawn(reading, watch)
    assert "running 3, waiting –, KV 25 %" in one_with(lines, "m · 0")
    assert one_with(lines, "m · 1")
    assert "6" in one_with(lines, "running")
