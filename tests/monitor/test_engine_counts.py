from __future__ import annotations

import pytest

from headrace.engine.core import STEP_SECONDS_BOUNDS, EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.histogram import Histogram
from headrace.kv import TierStats
from headrace.monitor import ServerMetrics
from headrace.sched import SchedulerStats
from tests.monitor.pages import page_of


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def stats_of(started_at: float, num_steps: int, **scheduler: int) -> EngineStats:
    """An engine whose steps took 10 ms, 1 ms of it on the host."""
    steps, host = Histogram(STEP_SECONDS_BOUNDS), Histogram(STEP_SECONDS_BOUNDS)
    steps.observe_many(0.01, num_steps)
    host.observe_many(0.001, num_steps)
    return EngineStats(
        SchedulerStats(num_steps=num_steps, num_blocks=100, **scheduler),
        host_seconds=0.001 * num_steps,
        wait_seconds=0.009 * num_steps,
        step_seconds=steps.snapshot(),
        step_host_seconds=host.snapshot(),
        started_at=started_at,
    )


def test_the_counters_of_tiers_are_exported_under_vllms_names_too() -> None:
    metrics = ServerMetrics("m")
    tiers = TierStats(num_stored=5, num_loaded=4, num_disk_hits=1, num_written=3, num_read=2, num_dropped=6)
    tokens = {"num_prompt_tokens": 90, "num_prefix_hit_tokens": 80, "num_tier_queried_tokens": 74}
    sizes = {"num_host_blocks": 8, "num_host_blocks_used": 2, "host_block_bytes": 100}
    metrics.observe(stats_of(1.0, 50, tiers=tiers, num_tier_hit_tokens=64, num_evicted_tokens=48, **tokens, **sizes))
    page = page_of(metrics)
    for name, value in {"external_prefix_cache_hits_total": 64.0, "external_prefix_cache_queries_total": 74.0}.items():
        assert page.value(f"headrace:{name}") == page.value(f"vllm:{name}") == value
    moved = {"GPU_to_CPU": 500.0, "CPU_to_GPU": 400.0, "CPU_to_disk": 300.0, "disk_to_CPU": 200.0}
    for kind, value in moved.items():
        assert page.value("vllm:kv_offload_total_bytes_total", transfer_type=kind) == value
    sources = {"local_compute": 10.0, "local_cache_hit": 16.0, "external_kv_transfer": 64.0}
    for source, value in sources.items():
        assert page.value("vllm:prompt_tokens_by_source_total", source=source) == value
    assert page.value("headrace:kv_offload_loaded_blocks_total", tier="disk") == 1.0
    assert page.value("headrace:kv_offload_dropped_blocks_total", reason="host_busy") == 6.0
    assert page.value("vllm:kv_offload_cpu_cache_usage_perc") == 0.25
    assert page.value("headrace:evicted_tokens_total") == 48.0


def test_the_counters_and_gauges_of_an_engine_are_exported() -> None:
    metrics = ServerMetrics("m")
    metrics.observe(
        stats_of(
            1.0,
            50,
            num_running=3,
            num_waiting=2,
            num_blocks_held=25,
            num_preemptions=4,
            num_prompt_tokens=70,
            num_prefix_queried_tokens=70,
            num_prefix_hit_tokens=32,
            num_generated_tokens=150,
            num_recomputed_tokens=9,
        )
    )
    page = page_of(metrics)
    expected = {
        "num_requests_running": 3.0,
        "num_requests_waiting": 2.0,
        "num_preemptions_total": 4.0,
        "prefix_cache_queries_total": 70.0,
        "prefix_cache_hits_total": 32.0,
        "prompt_tokens_total": 70.0,
        "generation_tokens_total": 150.0,
    }
    for name, value in expected.items():
        assert page.value(f"headrace:{name}") == page.value(f"vllm:{name}") == value
    assert page.value("headrace:kv_cache_usage") == page.value("vllm:kv_cache_usage_perc") == 0.25
    assert page.value("vllm:gpu_cache_usage_perc") == 0.25
    assert page.value("vllm:gpu_prefix_cache_hits_total") == 32.0
    assert page.value("vllm:num_requests_swapped") == 0.0
    assert page.value("vllm:prompt_tokens_by_source_total", source="local_compute") == 38.0
    assert page.value("vllm:num_requests_waiting_by_reason", reason="capacity") == 2.0
    assert page.value("headrace:recomputed_tokens_total") == 9.0
    assert page.value("headrace:steps_total") == 50.0
    assert page.value("headrace:step_seconds_bucket", le="0.01") == 50.0
    assert page.value("headrace:step_host_seconds_sum") == pytest.approx(0.05)
    assert page.value("headrace:engine_seconds_total", part="wait") == pytest.approx(0.45)


def test_a_repeated_snapshot_is_counted_once() -> None:
    metrics = ServerMetrics("m")
    for _ in range(2):
        metrics.observe(stats_of(1.0, 50, num_generated_tokens=150))
    page = page_of(metrics)
    assert page.value("vllm:generation_tokens_total") == 150.0
    assert page.value("headrace:step_seconds_count") == 50.0


@pytest.mark.parametrize("num_steps", [10, 90], ids=["fewer steps than before", "more steps than before"])
def test_counters_continue_when_the_engine_is_replaced(num_steps: int) -> None:
    metrics = ServerMetrics("m")
    metrics.observe(stats_of(1.0, 50, num_generated_tokens=150))
    metrics.observe(None)
    metrics.observe(stats_of(2.0, num_steps, num_generated_tokens=200))
    page = page_of(metrics)
    assert page.value("vllm:generation_tokens_total") == 350.0
    assert page.value("headrace:steps_total") == 50.0 + num_steps
    assert page.value("headrace:step_seconds_count") == 50.0 + num_steps
    assert page.value("headrace:step_seconds_sum") == pytest.approx(0.01 * (50 + num_steps))


def test_an_unavailable_engine_has_no_gauges_but_keeps_its_counters() -> None:
    metrics = ServerMetrics("m")
    metrics.observe(stats_of(1.0, 50, num_generated_tokens=150, num_running=3))
    assert page_of(metrics).value("headrace:engine_up") == 1.0
    metrics.observe(None)
    page = page_of(metrics)
    assert page.value("headrace:engine_up") == 0.0
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "vllm:engine_sleep_state"):
        assert page.labels(name) == []
    assert page.value("vllm:generation_tokens_total") == 150.0


def test_rates_are_over_ten_seconds_however_many_scrapers() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", clock=clock)
    shown = []
    for second in range(1, 31):  # 100 tokens per second, then none
        clock.now += 1.0
        num_tokens = 100 * min(second, 15)
        for _ in range(3):  # three scrapers
            metrics.observe(stats_of(1.0, second, num_generated_tokens=num_tokens, num_prompt_tokens=2 * num_tokens))
        page = page_of(metrics)
        shown.append(page.value("vllm:avg_generation_throughput_toks_per_s"))
        assert page.value("vllm:avg_prompt_throughput_toks_per_s") == 2 * shown[-1]
    assert shown[:15] == [100.0] * 15
    assert shown[19] == 50.0
    assert shown[24:] == [0.0] * 6


def test_rates_are_since_the_last_scrape_when_scrapes_are_rare() -> None:
    clock = Clock()
    metrics = ServerMetrics("m", clock=clock)
    for minute in (1, 2):
        clock.now += 60.0
        metrics.observe(stats_of(1.0, minute, num_generated_tokens=600 * minute**2))
    assert page_of(metrics).value("vllm:avg_generation_throughput_toks_per_s") == 30.0


def test_a_load_of_four_fifths_of_the_slots_needs_one_server() -> None:
    metrics = ServerMetrics("m", fake_settings(max_num_seqs=6), others=[fake_settings(max_num_seqs=4)])
    shown = []
    for num_waiting in (0, 2, 14):
        metrics.observe(stats_of(1.0, 1, num_running=5), stats_of(1.0, 1, num_running=1, num_waiting=num_waiting))
        shown.append(page_of(metrics).value("headrace:replicas_needed"))
    assert shown == [0.75, 1.0, 2.5]
    metrics.observe(None, None)
    assert "\nheadrace:replicas_needed{" not in page_of(metrics).text, "no engine responds"
