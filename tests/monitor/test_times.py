"""Latencies of requests, measured from their events: an engine with a fake runner and a manual clock."""

from __future__ import annotations

import numpy as np

from headrace.engine.core import EngineCore
from headrace.monitor import RequestMeter, ServerMetrics
from headrace.runner.fake import FakeRunner
from headrace.sched import Scheduler, SchedulerLimits
from headrace.steps import StepResult
from headrace.types import Request, SamplingParams
from tests.monitor.pages import Page, page_of

WORD = "Cinnamon"


class SlowRunner(FakeRunner):
    """A runner whose steps take one second of the server's clock."""

    def __init__(self, server: Server) -> None:
        super().__init__(max_num_seqs=2)
        self.server = server

    def collect(self, ticket: StepResult) -> StepResult:
        self.server.now += 1.0
        return ticket


class Server:
    """Submits requests to an engine with two slots and passes their events to the meters."""

    def __init__(self) -> None:
        self.now = 0.0
        limits = SchedulerLimits(
            max_num_seqs=2, max_num_batched_tokens=64, max_model_len=64, num_blocks=64, block_size=4
        )
        self.core = EngineCore(Scheduler(limits, clock=self.clock), SlowRunner(self), depth=0)
        self.metrics = ServerMetrics("m", clock=self.clock)
        self.meters: dict[str, RequestMeter] = {}
        self.num_open: dict[str, int] = {}
        self.lengths: dict[str, list[int]] = {}

    def clock(self) -> float:
        return self.now

    def ask(self, name: str, prompt_len: int = 8, **params: int) -> None:
        prompt = np.arange(prompt_len, dtype=np.int32)
        self.submit(Request(name, prompt, SamplingParams(**params), watched=True))  # type: ignore[arg-type]

    def submit(self, request: Request) -> None:
        name, params = request.request_id, request.params
        self.metrics.received(n=params.n, max_tokens=params.max_tokens)
        self.meters[name] = RequestMeter(self.metrics, request, arrived=self.now, clock=self.clock)
        self.num_open[name] = params.n
        self.lengths[name] = [0] * params.n
        self.core.add(request)

    def step(self) -> None:
        events = self.core.step()
        for event in events:
            self.meters[event.request_id].take(event)
            self.lengths[event.request_id][event.index] += len(event.token_ids)
            self.num_open[event.request_id] -= event.finish_reason is not None
            if not self.num_open[event.request_id]:
                self.meters[event.request_id].finish(event.finish_reason or "stop", self.lengths[event.request_id])

    def drain(self) -> Page:
        while self.core.has_work:
            self.step()
        self.metrics.observe(self.core.stats)
        return page_of(self.metrics)


def test_latencies_are_sums_of_step_times() -> None:
    server = Server()
    for name in ("one", "two", "three"):  # the third waits for a slot
        server.ask(name, max_tokens=4)
    page = server.drain()
    for name, total in {
        "time_to_first_token": 1.0 + 1.0 + 5.0,
        "request_queue_time": 0.0 + 0.0 + 4.0,
        "request_prefill_time": 3.0,
        "request_decode_time": 9.0,
        "request_inference_time": 12.0,
        "e2e_request_latency": 4.0 + 4.0 + 8.0,
        "request_time_per_output_token": 3.0,
    }.items():
        assert page.value(f"vllm:{name}_seconds_sum") == total
        assert page.value(f"vllm:{name}_seconds_count") == 3.0
    assert page.value("vllm:inter_token_latency_seconds_sum") == 9.0
    assert page.value("vllm:inter_token_latency_seconds_count") == 9.0
    assert page.value("vllm:request_success_total", finished_reason="length") == 3.0


def test_per_request_metrics_agree_with_the_engines_counters() -> None:
    server = Server()
    server.ask("one", prompt_len=9, max_tokens=6)
    server.drain()
    server.ask("two", prompt_len=9, max_tokens=3, n=2)
    page = server.drain()
    assert page.value("vllm:generation_tokens_total") == page.value("vllm:request_generation_tokens_sum") == 12.0
    assert page.value("vllm:prompt_tokens_total") == page.value("vllm:request_prompt_tokens_sum") == 18.0
    assert page.value("vllm:prefix_cache_hits_total") == 8.0
    assert page.value("vllm:request_prefill_kv_computed_tokens_sum") == 10.0
    assert page.value("vllm:request_max_num_generation_tokens_sum") == 9.0
    num_computed = server.core.stats.scheduler.num_batched_tokens
    assert page.value("headrace:batch_tokens_sum") == num_computed
    assert page.value("vllm:iteration_tokens_total_sum") == num_computed + 3.0  # the last token of an answer
    assert page.value("vllm:num_requests_running") == page.value("vllm:num_requests_waiting") == 0.0


def test_a_request_aborted_in_the_queue_has_no_queue_time() -> None:
    server = Server()
    for name in ("one", "two", "three"):
        server.ask(name, max_tokens=4)
    server.step()
    for event in server.core.abort("three"):
        server.meters["three"].take(event)
    server.meters["three"].finish("abort")
    server.meters["three"].finish("error")
    page = server.drain()
    assert page.value("vllm:request_success_total", finished_reason="abort") == 1.0
    assert page.value("vllm:request_success_total", finished_reason="error") == 0.0
    assert page.value("vllm:e2e_request_latency_seconds_count") == 3.0
    assert page.value("vllm:request_queue_time_seconds_count") == 2.0


def test_a_first_token_is_counted_before_the_request_ends() -> None:
    server = Server()
    server.ask("one", max_tokens=50)
    server.step()
    page = page_of(server.metrics)
    assert page.value("vllm:time_to_first_token_seconds_count") == 1.0
    assert page.value("vllm:e2e_request_latency_seconds_count") == 0.0


def test_an_answer_ended_by_the_front_has_its_decode_time() -> None:
    server = Server()
    server.ask("one", max_tokens=50)
    for _ in range(4):
        server.step()
    server.meters["one"].finish("stop", server.lengths["one"])
    page = page_of(server.metrics)
    assert page.value("vllm:request_decode_time_seconds_sum") == 3.0
    assert page.value("vllm:request_generation_tokens_sum") == 4.0
    assert page.value("vllm:request_success_total", finished_reason="stop") == 1.0


def test_metrics_contain_no_text_or_tokens_of_requests() -> None:
    server = Server()
    params = SamplingParams(stop=[WORD], max_tokens=2)
    server.submit(Request(WORD, np.array([48_879] * 5, np.int32), params, cache_salt=WORD, watched=True))
    page = server.drain()
    assert page.value("headrace:requests_finished_total", reason="length") == 1.0
    assert WORD not in page.text
    assert "48879" not in page.text
