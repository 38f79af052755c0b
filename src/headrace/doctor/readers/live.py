"""Evidence of a live server: two scrapes of /metrics, a few seconds apart. Lifetime counters are never used alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

from headrace.bench.engines import metrics
from headrace.bench.engines.base import EngineFailure
from headrace.bench.engines.http import HttpError, ServerClient
from headrace.bench.engines.metrics import Sample
from headrace.doctor.evidence import Evidence
from headrace.doctor.readers.histograms import growth
from headrace.errors import HeadraceError, ModelError
from headrace.plan.catalogue import find_entry
from headrace.plan.shape import ModelShape
from headrace.plan.source import shape_of_config

DEFAULT_INTERVAL_S = 10.0
# Series by preference: ours have finer buckets than the aliases of the same server.
_GAUGES = {
    "num_running": ("headrace:num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs"),
    "num_waiting": ("headrace:num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    "kv_use": (
        "headrace:kv_cache_usage",
        "vllm:kv_cache_usage_perc",
        "vllm:gpu_cache_usage_perc",
        "sglang:token_usage",
    ),
}
_DRAFTS = {
    "draft_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
}
_FINISHED = ("headrace:requests_finished_total", "vllm:request_success_total")
_ENGINE_TIME = "headrace:engine_seconds_total"
_RESTARTS = "headrace:engine_restarts_total"
_COUNTED = {  # field of the evidence: common name of bench's reader
    "num_preemptions": "num_preemptions",
    "prompt_tokens": "num_prompt_tokens",
    "output_tokens": "num_generated_tokens",
    "prefix_queried_tokens": "prefix_queried_tokens",
    "prefix_hit_tokens": "prefix_hit_tokens",
    "recomputed_tokens": "num_recomputed_tokens",
    "num_steps": "num_steps",
    "num_refused": "num_refused",
}


class ScrapeError(HeadraceError):
    """A page that cannot be used."""


def read_live(
    address: str,
    *,
    interval_s: float = DEFAULT_INTERVAL_S,
    api_key: str | None = None,
    wait: Callable[[float], None] = sleep,
) -> Evidence:
    """Scrape twice. Raises ScrapeError, or EngineFailure if there is no answer."""
    client = ServerClient(address, api_key=api_key)
    before, started = _page(client), monotonic()
    wait(interval_s)
    after, ended = _page(client), monotonic()
    return evidence_of_pages(before, after, seconds=max(1e-9, ended - started), origin=client.address)


def evidence_of_pages(before: str, after: str, *, seconds: float, origin: str) -> Evidence:
    """What happened between two scrapes of one server."""
    old, new = list(metrics.samples(before)), list(metrics.samples(after))
    engine = _engine_of(new)
    if engine is None:
        raise ScrapeError(f"{origin}/metrics has no series of Headrace, vLLM or SGLang")
    earlier, later = metrics.counters(before), metrics.counters(after)
    lost = [name for name, value in later.items() if value < earlier.get(name, 0.0)]
    if lost or _sum(new, _RESTARTS) > _sum(old, _RESTARTS):
        what = f"{lost[0]} fell" if lost else "the engine was restarted"
        raise ScrapeError(f"{origin}: {what} between the two scrapes, so the server restarted; run doctor again")
    facts: dict[str, Any] = {
        # A series that appears in the interval began at 0.
        **{field: later[name] - earlier.get(name, 0.0) for field, name in _COUNTED.items() if name in later},
        **{field: _gauge(old, new, names, field) for field, names in _GAUGES.items()},
        **{field: _maybe_growth(old, new, name) for field, name in _DRAFTS.items()},
        **_from_histograms(old, new),
    }
    settings = {name: setting.value for name, setting in metrics.settings(after).items()}
    finished = _first_growth(old, new, _FINISHED)
    failed = _growth_where(old, new, _FINISHED[0], "reason", ("error",))
    return Evidence(
        source="live",
        origin=origin,
        engine=engine,
        seconds=seconds,
        **facts,
        num_requests=finished,
        num_answered=None if finished is None else finished - (failed or 0.0),
        num_failed=failed,
        host_seconds=_growth_where(old, new, _ENGINE_TIME, "part", ("host",)),
        wait_seconds=_growth_where(old, new, _ENGINE_TIME, "part", ("wait",)),
        settings=settings,
        model=_model_of(new),
        is_on_cpu=settings["device"] == "cpu" if "device" in settings else None,
    )


def _page(client: ServerClient) -> str:
    try:
        return client.get("/metrics").decode(errors="replace")
    except HttpError as error:
        if error.status in (401, 403):
            raise ScrapeError(f"{client.address}/metrics needs a key: set --api-key-env to its variable") from None
        hint = "; is this a server of OpenAI's API without metrics?" if error.status == 404 else ""
        raise ScrapeError(f"{client.address}/metrics answers with status {error.status}{hint}") from None
    except EngineFailure as error:
        raise ScrapeError(str(error)) from error


def _engine_of(samples: Sequence[Sample]) -> str | None:
    prefixes = {sample.name.partition(":")[0] for sample in samples if ":" in sample.name}
    return next((name for name in ("headrace", "vllm", "sglang") if name in prefixes), None)


def _model_of(samples: Sequence[Sample]) -> ModelShape | None:
    """The shape of the served model, if its name is a built-in one."""
    name = next((sample.labels["model_name"] for sample in samples if sample.labels.get("model_name")), None)
    try:
        entry = None if name is None else find_entry(name)
    except ModelError:
        return None
    return None if entry is None else shape_of_config(entry.hub_id, entry.config)


def _from_histograms(old: Sequence[Sample], new: Sequence[Sample]) -> dict[str, float | None]:
    def of(name: str, *others: str) -> tuple[str, ...]:
        return (f"headrace:{name}", f"vllm:{name}", *others)

    gaps = growth(of("inter_token_latency_seconds", "vllm:time_per_output_token_seconds"), old, new)
    first = growth(of("time_to_first_token_seconds"), old, new)
    queue = growth(of("request_queue_time_seconds"), old, new)
    prompts = growth(of("request_prompt_tokens"), old, new)
    answers = growth(of("request_generation_tokens"), old, new)
    steps = growth(("headrace:batch_tokens", "vllm:iteration_tokens_total"), old, new)
    lag = growth(("headrace:event_loop_lag_seconds",), old, new)
    return {
        "token_gap_p50_s": None if gaps is None else gaps.quantile(0.5),
        "token_gap_p99_s": None if gaps is None else gaps.quantile(0.99),
        "ttft_p95_s": None if first is None else first.quantile(0.95),
        "queue_p95_s": None if queue is None else queue.quantile(0.95),
        "prompt_len": None if prompts is None else prompts.mean,
        "longest_prompts": None if prompts is None else prompts.quantile(0.95),
        "output_len": None if answers is None else answers.mean,
        "tokens_per_step": None if steps is None else steps.mean,
        "event_loop_lag_p75_s": None if lag is None else lag.quantile(0.75),
        "event_loop_lag_p95_s": None if lag is None else lag.quantile(0.95),
    }


def _gauge(old: Sequence[Sample], new: Sequence[Sample], names: Sequence[str], field: str) -> float | None:
    """Of the two scrapes, the higher cache use and the mean of other gauges; engines are added, cache use is not."""
    for name in names:
        pages = [[sample.value for sample in page if sample.name == name] for page in (old, new)]
        if all(pages):
            if field == "kv_use":
                return max(max(values) for values in pages)
            return sum(map(sum, pages)) / 2
    return None


def _maybe_growth(old: Sequence[Sample], new: Sequence[Sample], name: str) -> float | None:
    return _sum(new, name) - _sum(old, name) if any(sample.name == name for sample in new) else None


def _first_growth(old: Sequence[Sample], new: Sequence[Sample], names: Sequence[str]) -> float | None:
    found = (_maybe_growth(old, new, name) for name in names)
    return next((value for value in found if value is not None), None)


def _growth_where(
    old: Sequence[Sample], new: Sequence[Sample], name: str, label: str, values: tuple[str, ...]
) -> float | None:
    picked = [[s for s in page if s.name == name and s.labels.get(label) in values] for page in (old, new)]
    return _sum(picked[1], name) - _sum(picked[0], name) if picked[1] else None


def _sum(samples: Sequence[Sample], name: str) -> float:
    return sum(sample.value for sample in samples if sample.name == name)
