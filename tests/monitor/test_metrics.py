from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families

from headrace.engine.core import EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.histogram import Histogram
from headrace.monitor import RequestTimes, ServerMetrics
from headrace.monitor.series import token_bounds
from headrace.monitor.store import MAX_LABEL_VALUES
from headrace.monitor.table import SERIES
from headrace.sched import SchedulerStats
from headrace.sched.stats import TOKEN_GAP_BOUNDS
from tests.monitor.pages import Page, page_of

PROMETHEUS_ACCEPTS = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,*/*;q=0.2"
)
TIMES = RequestTimes(
    arrived=100.0,
    queued_until=101.0,
    first_token=103.0,
    last_token=107.0,
    finished=108.0,
    num_prompt=30,
    num_cached=16,
    num_generated=5,
)
SETTINGS = fake_settings(
    device="cuda",
    dtype="bfloat16",
    kv_dtype="float8_e4m3fn",
    load_format="auto",
    num_threads=2,
    max_model_len=4096,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    num_blocks=1234,
    enable_prefix_caching=False,
)


def test_a_finished_request_is_counted_in_the_histogram_of_each_phase() -> None:
    metrics = ServerMetrics("m")
    metrics.finished(TIMES, "length")
    page = page_of(metrics)
    sums = {
        "time_to_first_token_seconds": 3.0,
        "request_queue_time_seconds": 1.0,
        "request_prefill_time_seconds": 2.0,
        "request_decode_time_seconds": 4.0,
        "request_inference_time_seconds": 6.0,
        "e2e_request_latency_seconds": 8.0,
        "request_time_per_output_token_seconds": 1.0,
        "request_prompt_tokens": 30.0,
        "request_prefill_kv_computed_tokens": 14.0,
        "request_generation_tokens": 5.0,
        "request_max_num_generation_tokens": 5.0,
        "request_num_preemptions": 0.0,
    }
    for name, total in sums.items():
        for prefix in ("headrace", "vllm"):
            assert page.value(f"{prefix}:{name}_sum") == total
            assert page.value(f"{prefix}:{name}_count") == 1.0
    assert page.value("headrace:requests_finished_total", reason="length") == 1.0
    assert page.value("vllm:request_success_total", finished_reason="length") == 1.0
    assert page.value("vllm:request_success_total", finished_reason="stop") == 0.0


def test_an_alias_with_fewer_buckets_has_the_same_cumulative_counts() -> None:
    metrics = ServerMetrics("m")
    gaps = Histogram(TOKEN_GAP_BOUNDS)
    for gap in (0.0005, 0.004, 0.01, 0.02, 500.0):
        gaps.observe(gap)
    metrics.observe(EngineStats(SchedulerStats(token_gaps=gaps.snapshot()), 0.0, 0.0))
    page = page_of(metrics)
    own = {le: page.value("headrace:inter_token_latency_seconds_bucket", le=le) for le in ("0.001", "0.01", "80.0")}
    assert own == {"0.001": 1.0, "0.01": 3.0, "80.0": 4.0}
    for name in ("vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds"):
        shown = {le: page.value(f"{name}_bucket", le=le) for le in ("0.01", "0.025", "80.0", "+Inf")}
        assert shown == {"0.01": 3.0, "0.025": 4.0, "80.0": 4.0, "+Inf": 5.0}
        assert page.value(f"{name}_sum") == pytest.approx(500.0345)


def test_the_bounds_of_every_alias_are_bounds_of_its_series() -> None:
    for series in SERIES:
        for alias in series.aliases:
            assert set(alias.bounds or ()) <= set(series.bounds or ())


def test_a_request_that_never_started_has_only_its_total_latency() -> None:
    metrics = ServerMetrics("m")
    metrics.finished(RequestTimes(arrived=1.0, finished=3.0, num_prompt=7), "abort")
    page = page_of(metrics)
    assert page.value("headrace:e2e_request_latency_seconds_sum") == 2.0
    for name in ("time_to_first_token", "request_queue_time", "request_decode_time", "request_time_per_output_token"):
        assert page.value(f"headrace:{name}_seconds_count") == 0.0
    assert page.value("headrace:requests_finished_total", reason="abort") == 1.0


def test_a_first_token_is_counted_once() -> None:
    metrics = ServerMetrics("m")
    metrics.first_token(3.0)
    metrics.finished(replace(TIMES, first_token_is_counted=True), "stop")
    assert page_of(metrics).value("headrace:time_to_first_token_seconds_count") == 1.0


def test_the_time_per_token_of_several_answers_is_that_of_the_longest() -> None:
    metrics = ServerMetrics("m")
    metrics.finished(replace(TIMES, n=2, num_generated=13, num_longest=9), "stop")
    page = page_of(metrics)
    assert page.value("headrace:request_time_per_output_token_seconds_sum") == 0.5
    assert page.value("headrace:request_max_num_generation_tokens_sum") == 9.0


def test_requests_and_refusals_are_counted() -> None:
    metrics = ServerMetrics("m")
    metrics.received(n=3, max_tokens=20)
    metrics.received(n=1, max_tokens=None)
    for reason in ("queue_full", "queue_full", "queue_tokens", "auth"):
        metrics.refused(reason)
    metrics.restarted()
    page = page_of(metrics)
    assert page.value("headrace:requests_received_total") == 2.0
    assert page.value("vllm:request_params_n_sum") == 4.0
    assert page.value("vllm:request_params_max_tokens_count") == 1.0
    assert page.value("headrace:requests_refused_total", reason="auth") == 1.0
    assert page.value("vllm:admission_rejections_total", reason="max_num_queued_reqs") == 2.0
    assert page.value("vllm:admission_rejections_total", reason="max_num_queued_tokens") == 1.0
    assert len(page.labels("vllm:admission_rejections_total")) == 2
    assert page.value("headrace:engine_restarts_total") == 1.0


def test_http_responses_are_counted_by_route_and_status_class() -> None:
    metrics = ServerMetrics("m")
    for status in (200, 201, 503):
        metrics.answered("/v1/models", "GET", status)
    page = page_of(metrics)
    assert page.value("http_requests_total", handler="/v1/models", method="GET", status="2xx") == 2.0
    assert page.value("headrace:http_requests_total", status="5xx") == 1.0


def test_labels_cannot_grow_without_bound() -> None:
    metrics = ServerMetrics("m")
    for number in range(MAX_LABEL_VALUES + 50):
        metrics.refused(f"reason {number}")
        metrics.finished(TIMES, f"reason {number}")
    page = page_of(metrics)
    assert len(page.labels("headrace:requests_refused_total")) == MAX_LABEL_VALUES + 1
    assert page.value("headrace:requests_finished_total", reason="other") == MAX_LABEL_VALUES + 50


def test_settings_and_version_are_labels() -> None:
    page = page_of(ServerMetrics("m", SETTINGS, memory_share=0.9))
    (cache,) = page.labels("vllm:cache_config_info")
    assert cache == {
        "block_size": "16",
        "num_gpu_blocks": "1234",
        "cache_dtype": "float8_e4m3fn",
        "enable_prefix_caching": "False",
        "kv_cache_size_tokens": "19744",
        "kv_cache_max_concurrency": "4.82",
        "gpu_memory_utilization": "0.9",
        "engine": "0",
    }
    (config,) = page.labels("headrace:config_info")
    assert (config["max_num_seqs"], config["quantization"], config["model_name"]) == ("256", "None", "m")
    assert page.value("headrace:build_info") == 1.0
    assert page.bounds("headrace:request_prompt_tokens")[-2:] == [2000.0, float("inf")]


def test_token_bounds_end_at_the_context_length() -> None:
    assert token_bounds(100) == (1, 2, 5, 10, 20, 50, 100)
    assert token_bounds(99) == (1, 2, 5, 10, 20, 50)


def test_any_model_name_is_escaped() -> None:
    name = 'a"b\\c\nd é {e="f"}'
    metrics = ServerMetrics(name)
    assert {labels["model_name"] for labels in page_of(metrics).labels("vllm:prompt_tokens_total")} == {name}


@pytest.mark.parametrize("accept", [None, "", "*/*", "text/plain;version=0.0.4", "text/html, nonsense;;version=x"])
def test_the_page_is_prometheus_text(accept: str | None) -> None:
    body, content_type = ServerMetrics("m").render(accept)
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert "vllm:generation_tokens_total" in Page(body.decode()).text


@pytest.mark.parametrize("accept", [PROMETHEUS_ACCEPTS, "application/openmetrics-text", "Application/OpenMetrics-Text"])
def test_the_page_is_openmetrics_with_the_same_names_if_requested(accept: str) -> None:
    metrics = ServerMetrics("m")
    metrics.refused("auth")
    body, content_type = metrics.render(accept)
    assert content_type == "application/openmetrics-text; version=1.0.0; charset=utf-8"
    assert body.endswith(b"# EOF\n")
    as_openmetrics = {s.name for family in openmetrics_families(body.decode()) for s in family.samples}
    as_text = {s.name for family in page_of(metrics).families.values() for s in family.samples}
    assert as_openmetrics == as_text


def test_process_metrics_are_exported_unless_a_registry_is_given() -> None:
    assert page_of(ServerMetrics("m")).value("process_open_fds") > 0
    registry = CollectorRegistry()
    assert "process_open_fds" not in page_of(ServerMetrics("m", registry=registry)).text
    assert registry.get_sample_value("headrace:engine_restarts_total", {"model_name": "m", "engine": "0"}) == 0.0


def test_scrapes_and_counting_do_not_disturb_each_other() -> None:
    metrics = ServerMetrics("m")
    with ThreadPoolExecutor(3) as scrapers:
        pages = [scrapers.submit(lambda: page_of(metrics)) for _ in range(12)]
        for number in range(100):
            metrics.refused(f"reason {number}")
            metrics.first_token(0.01)
        counts = [page.result().value("headrace:time_to_first_token_seconds_count") for page in pages]
    assert max(counts) <= 100.0 == page_of(metrics).value("headrace:time_to_first_token_seconds_count")


def test_server_errors_of_routes_that_run_the_model_are_counted_without_refusals() -> None:
    metrics = ServerMetrics("m")
    for handler, status in (
        ("/v1/completions", 500),
        ("/v1/completions", 504),
        ("/v1/completions", 503),
        ("/v1/completions", 429),
        ("/metrics", 500),
    ):
        metrics.answered(handler, "POST", status)
    page = page_of(metrics)
    assert page.value("headrace:http_errors_total", handler="/v1/completions") == 2
    assert (
        sum(page.value("headrace:http_errors_total", **labels) for labels in page.labels("headrace:http_errors_total"))
        == 2
    )


def test_the_use_of_a_queue_without_a_limit_is_not_exported() -> None:
    metrics = ServerMetrics("m")
    metrics.queue_usage(0.25)
    assert page_of(metrics).value("headrace:queue_usage") == 0.25
    metrics.queue_usage(None)
    assert page_of(metrics).labels("headrace:queue_usage") == []
