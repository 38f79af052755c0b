"""Figures of two pages: Headrace's by its own code, vLLM's with vLLM's names."""

from __future__ import annotations

import json

import pytest

from headrace.hardware.gpu_monitor import GpuMonitor
from headrace.monitor import ServerMetrics
from headrace.scrape.page import finite, growth, samples
from headrace.top.figures import Figures, alerts_of, engine_of, figures_of
from tests.doctor.pages import HeadraceServer, vllm_page
from tests.hardware.readers import HandReader


def figures(before: str, after: str, seconds: float = 2.0) -> Figures:
    old, new = finite(samples(before)), finite(samples(after))
    engine = engine_of(new)
    assert engine is not None
    return figures_of(engine, new, growth(old, new), seconds)


def first_figures(page: str) -> Figures:
    found = finite(samples(page))
    return figures_of(engine_of(found) or "", found, None, None)


def vllm(counted: float, **gauges: float) -> str:
    names = ("generation_tokens", "prompt_tokens", "num_preemptions", "prefix_cache_queries", "prefix_cache_hits")
    return vllm_page(
        dict.fromkeys(names, counted),
        {"num_requests_running": 3, "num_requests_waiting": 1, "kv_cache_usage_perc": 0.5, **gauges},
        gaps={0.02: int(counted)},
        finished=counted / 10,
    )


def test_a_headrace_page_has_every_figure() -> None:
    server = HeadraceServer()
    before = server.scrape()
    server.work(
        num_generated_tokens=1000, num_prompt_tokens=500, num_prefix_queried_tokens=400, num_prefix_hit_tokens=100
    )
    server.work(num_preemptions=4)
    server.finish(num_prompt=100, num_generated=10)
    server.finish(num_prompt=100, num_generated=10, reason="error")
    server.refuse(6)
    found = figures(before, server.scrape(num_running=8, num_waiting=2, num_blocks_held=250))
    assert (found.engine, found.models, found.is_up, found.restarts) == ("headrace", ("m",), True, 0)
    assert (found.generated_per_s, found.prompt_per_s, found.preemptions_per_s) == (500, 250, 2)
    assert (found.requests_per_s, found.errors_per_s, found.refused_per_s) == (1, 0.5, 3)
    assert (found.running, found.waiting, found.prefix_hit_share) == (8, 2, 0.25)
    assert found.ttft is not None and 0.1 <= found.ttft.p50 <= found.ttft.p95 <= 0.25
    assert found.itl is not None and 0.015 <= found.itl.p50 <= found.itl.p95 <= 0.025
    assert found.host_share == pytest.approx(0.1)
    assert found.missing == ("GPU",)  # this server has no monitor
    assert not found.has_restarted and found.engines == ()


def test_a_vllm_page_has_most_figures_and_the_others_are_named() -> None:
    found = figures(vllm(0), vllm(1000))
    assert (found.engine, found.generated_per_s, found.prompt_per_s, found.requests_per_s) == ("vllm", 500, 500, 50)
    assert (found.running, found.waiting, found.kv_use, found.prefix_hit_share) == (3, 1, 0.5, 1.0)
    assert found.itl is not None and 0.01 < found.itl.p95 <= 0.025
    assert set(found.missing) == {
        *("refused", "errors", "TTFT", "step time", "host share", "GPU", "engine up", "restarts")
    }
    assert found.is_up is None and found.errors_per_s is None


def test_http_answers_with_5xx_are_the_errors_of_a_vllm_server() -> None:
    counted = 'http_requests_total{handler="/v1/completions",method="POST",status="2xx"} 50\n'
    failed = 'http_requests_total{handler="/v1/completions",method="POST",status="5xx"} 4\n'
    assert figures(vllm(0) + counted, vllm(1000) + counted).errors_per_s == 0
    found = figures(vllm(0) + counted, vllm(1000) + counted + failed)
    assert found.errors_per_s == 2 and "errors" not in found.missing


def test_the_first_scrape_has_gauges_and_no_rates() -> None:
    found = first_figures(vllm(1000))
    assert (found.running, found.kv_use) == (3, 0.5)
    assert (found.generated_per_s, found.itl, found.prefix_hit_share, found.errors_per_s) == (None, None, None, None)
    assert not found.has_restarted


def test_an_idle_interval_has_rates_of_0_and_no_latencies() -> None:
    server = HeadraceServer()
    server.work(num_generated_tokens=10)
    server.finish(num_prompt=1, num_generated=10)
    found = figures(server.scrape(), server.scrape())
    assert (found.generated_per_s, found.requests_per_s, found.errors_per_s) == (0, 0, 0)
    assert (found.ttft, found.itl, found.step_s, found.host_share, found.prefix_hit_share) == (None,) * 5


def test_counters_that_fell_are_counted_from_0() -> None:
    found = figures(vllm(1_000_000), vllm(1000))
    assert found.has_restarted
    assert found.generated_per_s == 500
    assert found.itl is not None and 0.01 < found.itl.p50 <= 0.025


def test_a_restarted_engine_is_shown_though_headrace_keeps_its_counters() -> None:
    server = HeadraceServer()
    before = server.scrape()
    server.restart()
    found = figures(before, server.scrape())
    assert found.has_restarted and found.restarts == 1


def test_nan_and_infinite_values_do_not_spread() -> None:
    broken = vllm(1000).replace("vllm:num_preemptions_total{", 'vllm:num_preemptions_total{x="y",')
    broken += 'vllm:generation_tokens_total{engine="9",model_name="m"} NaN\n'
    broken += 'vllm:kv_cache_usage_perc{engine="9",model_name="m"} +Inf\n'
    found = figures(vllm(0), broken)
    assert (found.generated_per_s, found.kv_use) == (500, 0.5)
    json.dumps(found.as_json(), allow_nan=False)


def test_a_page_of_nothing_but_nan_has_unknown_figures() -> None:
    found = figures('vllm:num_requests_running{engine="0"} 1\n', "vllm:num_requests_running NaN\nvllm:x 1\n")
    assert found.running is None


def test_engines_and_models_are_added_and_listed() -> None:
    def page(first: int, second: int) -> str:
        other = vllm(second, num_requests_running=5, kv_cache_usage_perc=0.9).replace(
            'model_name="m"', 'model_name="n"'
        )
        return vllm(first) + other

    found = figures(page(0, 0), page(1000, 3000))
    assert found.models == ("m", "n")
    assert (found.generated_per_s, found.running, found.kv_use) == (2000, 8, 0.9)
    assert [(row.model, row.engine, row.generated_per_s, row.running, row.kv_use) for row in found.engines] == [
        ("m", "0", 500, 3, 0.5),
        ("n", "0", 1500, 5, 0.9),
    ]


def test_one_engine_that_restarts_does_not_change_the_other() -> None:
    def page(first: int, second: int) -> str:
        return vllm(first) + vllm(second).replace('engine="0"', 'engine="1"')

    found = figures(page(5000, 100), page(200, 300))
    assert found.has_restarted
    assert [row.generated_per_s for row in found.engines] == [100, 100]


@pytest.mark.parametrize("name", ['a "b"', "c:\\models\\x", "two\nlines", "模型 🚀", "\u2028", "}", 'x",y="z'])
def test_odd_model_names_are_read_as_they_are(name: str) -> None:
    page = ServerMetrics(name).render()[0].decode()
    assert first_figures(page).models == (name,)


def test_an_engine_that_is_down_lacks_no_series() -> None:
    metrics = ServerMetrics("m", gpus=GpuMonitor.of_device("cpu"))
    metrics.observe(None)
    page = metrics.render()[0].decode()
    found = figures(page, page)
    assert found.is_up is False and found.running is None
    assert found.missing == ()
    assert found.gpu_missing == "the engine runs on the CPU" and found.gpus == ()


def test_gpus_have_the_figures_that_they_report() -> None:
    reader = HandReader()
    metrics = ServerMetrics("m", gpus=GpuMonitor(open=reader.open, clock=lambda: 0.0))
    for index in (10, 2):
        reader.read(index, utilization=0.5, power_w=100.0 + index, memory_bytes=1.0, memory_total_bytes=4.0)
    found = first_figures(metrics.render()[0].decode())
    assert [(gpu.gpu, gpu.name, gpu.power_watts) for gpu in found.gpus] == [
        ("2", "NVIDIA H200", 102.0),
        ("10", "NVIDIA H200", 110.0),
    ]
    assert found.gpus[0].temperature_celsius is None
    assert "GPU" not in found.missing and found.gpu_missing is None


@pytest.mark.parametrize("document", [None, [], {}, {"data": None}, {"data": {"alerts": [3]}}, "x"])
def test_a_document_that_has_no_alerts_shows_none(document: object) -> None:
    assert alerts_of(document) == []


def test_other_pages_have_no_engine() -> None:
    assert engine_of(samples("process_cpu_seconds_total 3\n")) is None
