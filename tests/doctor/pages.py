"""Pages of /metrics: Headrace's by its own code, vLLM's with the names, labels and buckets of vLLM 0.32.0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.engine.core import EngineStats
from headrace.engine.fake_settings import fake_settings
from headrace.histogram import Histogram
from headrace.monitor import RequestTimes, ServerMetrics
from headrace.sched import SchedulerStats
from headrace.sched.stats import BATCH_TOKENS_BOUNDS, TOKEN_GAP_BOUNDS

SETTINGS = fake_settings(
    device="cuda", max_num_seqs=256, max_num_batched_tokens=8192, num_blocks=1000, enable_prefix_caching=True
)
LABELS = 'engine="0",model_name="m"'
GAP_BOUNDS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000)


class HeadraceServer:
    """Counts as a server does. A scrape shows everything since its start."""

    def __init__(self, memory_share: float | None = 0.92) -> None:
        self._metrics = ServerMetrics("m", SETTINGS, memory_share=memory_share)
        self._gaps, self._steps = Histogram(TOKEN_GAP_BOUNDS), Histogram(BATCH_TOKENS_BOUNDS)
        self._counts: dict[str, int] = {}
        self._host = self._wait = 0.0

    def work(
        self, *, num_steps: int = 100, gap_s: float = 0.02, host_s: float = 0.1, wait_s: float = 0.9, **counts: int
    ) -> None:
        """Steps of 100 tokens, one gap for each generated token."""
        counts["num_steps"] = num_steps
        for name, count in counts.items():
            self._counts[name] = self._counts.get(name, 0) + count
        self._gaps.observe_many(gap_s, counts.get("num_generated_tokens", 0))
        self._steps.observe_many(100, num_steps)
        self._host, self._wait = self._host + host_s, self._wait + wait_s

    def finish(self, *, num_prompt: int, num_generated: int, reason: str = "stop") -> None:
        self._metrics.finished(
            RequestTimes(
                arrived=0.0,
                queued_until=0.1,
                first_token=0.2,
                last_token=1.0,
                finished=1.0,
                num_prompt=num_prompt,
                num_cached=0,
                num_generated=num_generated,
            ),
            reason,
        )

    def refuse(self, count: int, reason: str = "queue_full") -> None:
        for _ in range(count):
            self._metrics.refused(reason)

    def lag(self, seconds: float) -> None:
        self._metrics.loop_lag(seconds)

    def restart(self) -> None:
        self._metrics.restarted()

    def scrape(self, **gauges: Any) -> str:
        scheduler = SchedulerStats(
            **self._counts,
            num_blocks=1000,
            block_size=16,
            batch_tokens=self._steps.snapshot(),
            token_gaps=self._gaps.snapshot(),
            **gauges,
        )
        self._metrics.observe(EngineStats(scheduler, self._host, self._wait, started_at=1.0))
        return self._metrics.render()[0].decode()


def histogram(name: str, bounds: Sequence[float], values: Mapping[float, int]) -> list[str]:
    lines = [f"# HELP {name} A histogram.", f"# TYPE {name} histogram"]
    for bound in (*bounds, float("inf")):
        count = sum(number for value, number in values.items() if value <= bound)
        shown = "+Inf" if bound == float("inf") else f"{float(bound)}"
        lines.append(f'{name}_bucket{{{LABELS},le="{shown}"}} {float(count)}')
    lines.append(f"{name}_count{{{LABELS}}} {float(sum(values.values()))}")
    lines.append(f"{name}_sum{{{LABELS}}} {sum(value * number for value, number in values.items())}")
    return lines


def vllm_page(
    counters: Mapping[str, float],
    gauges: Mapping[str, float],
    *,
    gaps: Mapping[float, int] | None = None,
    prompts: Mapping[float, int] | None = None,
    answers: Mapping[float, int] | None = None,
    finished: float = 0.0,
    info: str = 'block_size="16",cache_dtype="auto",enable_prefix_caching="True",gpu_memory_utilization="0.92",'
    'num_gpu_blocks="1000"',
) -> str:
    """A page of a server that has counted this since its start."""
    lines = ["# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig", "# TYPE x gauge"]
    lines.append(f'vllm:cache_config_info{{{info},engine="0"}} 1.0')
    for name, value in gauges.items():
        lines += [f"# TYPE vllm:{name} gauge", f"vllm:{name}{{{LABELS}}} {value}"]
    for name, value in counters.items():
        lines += [f"# TYPE vllm:{name} counter", f"vllm:{name}_total{{{LABELS}}} {value}"]
        lines.append(f"vllm:{name}_created{{{LABELS}}} 1.76e+09")
    lines.append(f'vllm:request_success_total{{{LABELS},finished_reason="stop"}} {finished}')
    lines.append(f'vllm:request_success_total{{{LABELS},finished_reason="length"}} 0.0')
    lines += histogram("vllm:inter_token_latency_seconds", GAP_BOUNDS, gaps or {})
    lines += histogram("vllm:request_prompt_tokens", TOKEN_BOUNDS, prompts or {})
    lines += histogram("vllm:request_generation_tokens", TOKEN_BOUNDS, answers or {})
    return "\n".join(lines) + "\n"
