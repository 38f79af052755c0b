"""Metrics of several engines: one sample for each, read as one by the server itself."""

from __future__ import annotations

from headrace.engine.core import EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.monitor import ServerMetrics, table
from headrace.monitor.conditions import Source
from headrace.monitor.times import RequestTimes
from headrace.sched import SchedulerStats
from tests.monitor.pages import page_of


def two_engines() -> ServerMetrics:
    return ServerMetrics("m", fake_settings(num_blocks=64), others=[fake_settings(num_blocks=32)])


def stats(**scheduler: int) -> EngineStats:
    return EngineStats(SchedulerStats(num_blocks=100, block_size=16, **scheduler), 1.0, 2.0, started_at=1.0)


def read(metrics: ServerMetrics, *series: table.Series) -> list[object]:
    return list(metrics.read([Source(each) for each in series]).values())


def test_series_of_engines_have_their_label_and_those_of_the_server_none() -> None:
    metrics = two_engines()
    metrics.observe(stats(num_running=3, num_generated_tokens=10), stats(num_running=4, num_generated_tokens=5))
    metrics.refused("queue_full")
    page = page_of(metrics)
    assert [page.value("vllm:num_requests_running", engine=number) for number in ("0", "1")] == [3.0, 4.0]
    assert [page.value("vllm:generation_tokens_total", engine=number) for number in ("0", "1")] == [10.0, 5.0]
    assert [label["num_gpu_blocks"] for label in page.labels("vllm:cache_config_info")] == ["64", "32"]
    (refused,) = [one for one in page.labels("headrace:requests_refused_total") if one["reason"] == "queue_full"]
    assert refused == {"model_name": "m", "reason": "queue_full"}
    assert page.text.count("# TYPE headrace:num_requests_running ") == 1


def test_a_request_is_counted_for_the_engine_that_ran_it() -> None:
    metrics = two_engines()
    metrics.finished(RequestTimes(arrived=0.0, finished=2.0, first_token=1.0, num_prompt=7, engine=1), "stop")
    page = page_of(metrics)
    assert [page.value("vllm:request_success_total", engine=n, finished_reason="stop") for n in "01"] == [0.0, 1.0]
    assert [page.value("vllm:time_to_first_token_seconds_count", engine=n) for n in "01"] == [0.0, 1.0]


def test_the_server_adds_counters_and_takes_the_worst_cache_use_and_the_worst_state() -> None:
    metrics = two_engines()
    full, idle = stats(num_running=3, num_blocks_held=90, num_generated_tokens=10), stats(num_generated_tokens=5)
    metrics.observe(full, idle)
    assert read(metrics, table.RUNNING, table.GENERATED_TOKENS, table.ENGINE_UP) == [3.0, 15.0, 1.0]
    assert metrics.load == (3.0, 0.0, 0.9)
    metrics.observe(full, None)
    assert read(metrics, table.RUNNING, table.GENERATED_TOKENS, table.ENGINE_UP) == [3.0, 15.0, 0.0]
    values = metrics.copy()
    assert values.numbers[table.GENERATED_TOKENS.name] == {(): 15.0}
    assert values.numbers[table.BUSY_SECONDS.name] == {("host",): 2.0, ("wait",): 4.0}


def test_restarts_are_those_of_one_engine() -> None:
    metrics = two_engines()
    metrics.restarted(engine=1)
    page = page_of(metrics)
    assert [page.value("headrace:engine_restarts_total", engine=number) for number in ("0", "1")] == [0.0, 1.0]
