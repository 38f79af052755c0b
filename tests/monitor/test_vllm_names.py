"""Names, types, labels and buckets that dashboards, alerts and gateways made for vLLM need."""

from __future__ import annotations

from math import inf

import pytest

from headrace.engine.core import EngineStats
from headrace.monitor import ServerMetrics
from headrace.sched import SchedulerStats
from tests.monitor.pages import Page, page_of

# Metrics that the queries of vLLM's dashboards (grafana.json, performance_statistics, query_statistics, vllm_overview,
# vllm_kv_cache, vllm_service_status), of its production stack and of older guides name, with the labels that they
# select or group by.
QUERIED = {
    "vllm:e2e_request_latency_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:e2e_request_latency_seconds_sum": {"model_name", "engine"},
    "vllm:e2e_request_latency_seconds_count": {"model_name", "engine"},
    "vllm:time_to_first_token_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:time_to_first_token_seconds_sum": {"model_name", "engine"},
    "vllm:time_to_first_token_seconds_count": {"model_name", "engine"},
    "vllm:inter_token_latency_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:inter_token_latency_seconds_sum": {"model_name", "engine"},
    "vllm:inter_token_latency_seconds_count": {"model_name", "engine"},
    "vllm:time_per_output_token_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:request_time_per_output_token_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:num_requests_running": {"model_name", "engine"},
    "vllm:num_requests_waiting": {"model_name", "engine"},
    "vllm:num_requests_waiting_by_reason": {"model_name", "engine", "reason"},
    "vllm:num_requests_swapped": {"model_name", "engine"},
    "vllm:kv_cache_usage_perc": {"model_name", "engine"},
    "vllm:gpu_cache_usage_perc": {"model_name", "engine"},
    "vllm:cpu_cache_usage_perc": {"model_name", "engine"},
    "vllm:prompt_tokens_total": {"model_name", "engine"},
    "vllm:prompt_tokens_cached_total": {"model_name", "engine"},
    "vllm:prompt_tokens_by_source_total": {"model_name", "engine", "source"},
    "vllm:generation_tokens_total": {"model_name", "engine"},
    "vllm:num_generate_tokens_total": {"model_name", "engine"},
    "vllm:num_generation_tokens_total": {"model_name", "engine"},
    "vllm:num_prompt_tokens_total": {"model_name", "engine"},
    "vllm:request_success_total": {"model_name", "engine", "finished_reason"},
    "vllm:request_prompt_tokens_bucket": {"model_name", "engine", "le"},
    "vllm:request_generation_tokens_bucket": {"model_name", "engine", "le"},
    "vllm:request_max_num_generation_tokens_sum": {"model_name", "engine"},
    "vllm:request_params_n_bucket": {"model_name", "engine", "le"},
    "vllm:request_params_max_tokens_bucket": {"model_name", "engine", "le"},
    "vllm:request_prefill_kv_computed_tokens_bucket": {"model_name", "engine", "le"},
    "vllm:request_num_preemptions_bucket": {"model_name", "engine", "le"},
    "vllm:request_queue_time_seconds_sum": {"model_name", "engine"},
    "vllm:request_queue_time_seconds_bucket": {"model_name", "engine", "le"},
    "vllm:request_prefill_time_seconds_sum": {"model_name", "engine"},
    "vllm:request_decode_time_seconds_sum": {"model_name", "engine"},
    "vllm:request_inference_time_seconds_sum": {"model_name", "engine"},
    "vllm:iteration_tokens_total_bucket": {"model_name", "engine", "le"},
    "vllm:prefix_cache_queries_total": {"model_name", "engine"},
    "vllm:prefix_cache_hits_total": {"model_name", "engine"},
    "vllm:gpu_prefix_cache_queries_total": {"model_name", "engine"},
    "vllm:gpu_prefix_cache_hits_total": {"model_name", "engine"},
    "vllm:num_preemptions_total": {"model_name", "engine"},
    "vllm:admission_rejections_total": {"model_name", "reason"},
    "vllm:engine_sleep_state": {"model_name", "engine", "sleep_state"},
    "vllm:avg_prompt_throughput_toks_per_s": {"model_name", "engine"},
    "vllm:avg_generation_throughput_toks_per_s": {"model_name", "engine"},
    "http_requests_total": {"handler", "method", "status"},
}
FIRST_TOKEN = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75]
FIRST_TOKEN += [1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640, 2560, inf]
TOKEN_GAP = [0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, inf]
PHASE = [0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680, inf]
LENGTHS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, inf]
BOUNDS = {
    "vllm:time_to_first_token_seconds": FIRST_TOKEN,
    "vllm:inter_token_latency_seconds": TOKEN_GAP,
    "vllm:time_per_output_token_seconds": TOKEN_GAP,
    "vllm:request_time_per_output_token_seconds": TOKEN_GAP,
    "vllm:e2e_request_latency_seconds": PHASE,
    "vllm:request_queue_time_seconds": PHASE,
    "vllm:request_prefill_time_seconds": PHASE,
    "vllm:request_decode_time_seconds": PHASE,
    "vllm:request_inference_time_seconds": PHASE,
    "vllm:iteration_tokens_total": [1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, inf],
    "vllm:request_prompt_tokens": LENGTHS,
    "vllm:request_generation_tokens": LENGTHS,
    "vllm:request_max_num_generation_tokens": LENGTHS,
    "vllm:request_params_max_tokens": LENGTHS,
    "vllm:request_prefill_kv_computed_tokens": LENGTHS,
    "vllm:request_params_n": [1, 2, 5, 10, 20, inf],
    "vllm:request_num_preemptions": [1, 2, 3, 4, 5, 10, 20, inf],
}


@pytest.fixture(scope="module")
def page() -> Page:
    """The page of a server that has just started. HTTP counters need one response to exist."""
    metrics = ServerMetrics("some-model")
    metrics.observe(EngineStats(SchedulerStats(num_blocks=10, block_size=16), 0.0, 0.0))
    metrics.answered("/health", "GET", 200)
    return page_of(metrics)


@pytest.mark.parametrize("name", QUERIED)
def test_each_queried_series_is_exported_with_its_labels(name: str, page: Page) -> None:
    samples = page.labels(name)
    assert samples
    for labels in samples:
        assert set(labels) == QUERIED[name]
        assert labels.get("model_name", "some-model") == "some-model"
        assert labels.get("engine", "0") == "0"


@pytest.mark.parametrize("name", QUERIED)
def test_each_queried_series_has_the_expected_type(name: str, page: Page) -> None:
    (family,) = [f for f in page.families.values() if any(s.name == name for s in f.samples)]
    if name.endswith(("_bucket", "_sum", "_count")):
        assert family.type == "histogram"
    elif name.endswith("_total"):
        assert family.type == "counter"
    else:
        assert family.type == "gauge"


@pytest.mark.parametrize("name", BOUNDS)
def test_buckets_equal_vllms(name: str, page: Page) -> None:
    assert page.bounds(name) == BOUNDS[name]


def test_every_histogram_under_a_vllm_name_is_compared(page: Page) -> None:
    shown = {n for n, family in page.families.items() if n.startswith("vllm:") and family.type == "histogram"}
    assert shown - {"vllm:time_in_queue_requests"} == set(BOUNDS)


def test_finish_reasons_equal_vllms(page: Page) -> None:
    reasons = {labels["finished_reason"] for labels in page.labels("vllm:request_success_total")}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}


def test_the_sleep_state_of_the_engine_is_awake(page: Page) -> None:
    assert page.value("vllm:engine_sleep_state", sleep_state="awake") == 1.0
    assert page.value("vllm:engine_sleep_state", sleep_state="discard_all") == 0.0
