"""Evidence of a server from two snapshots of its series: two scrapes of /metrics, or a server's own store."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.doctor.evidence import Evidence
from headrace.doctor.readers.histograms import Cumulative, Histogram, growth
from headrace.errors import HeadraceError
from headrace.monitor.alerts import OVERLOAD_REASONS
from headrace.plan.gpus import Gpu
from headrace.plan.shape import ModelShape
from headrace.scrape.names import common_names
from headrace.scrape.page import Sample

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
    "draft_tokens": "spec_decode_num_draft_tokens_total",
    "accepted_tokens": "spec_decode_num_accepted_tokens_total",
}
_FINISHED = ("headrace:requests_finished_total", "vllm:request_success_total")
_REFUSED = "headrace:requests_refused_total"
_ENGINE_TIME = "headrace:engine_seconds_total"
_EVICTED = "headrace:evicted_tokens_total"
_RESTARTS = "headrace:engine_restarts_total"
_COUNTED = {  # field of the evidence: common name of bench's reader
    "num_preemptions": "num_preemptions",
    "prompt_tokens": "num_prompt_tokens",
    "output_tokens": "num_generated_tokens",
    "prefix_queried_tokens": "prefix_queried_tokens",
    "prefix_hit_tokens": "prefix_hit_tokens",
    "recomputed_tokens": "num_recomputed_tokens",
    "num_steps": "num_steps",
}


# Sums over the engines of a server. Requests that were answered, refused or failed are the server's.
_PER_ENGINE = (
    *("num_steps", "num_requests", "prompt_tokens", "output_tokens", "num_running", "num_waiting", "num_preemptions"),
    *("recomputed_tokens", "prefix_queried_tokens", "prefix_hit_tokens", "host_seconds", "wait_seconds"),
    *("draft_tokens", "accepted_tokens", "evicted_tokens"),
)


class ScrapeError(HeadraceError):
    """Snapshots that cannot be used."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The series of a server at one moment: samples by name, and histograms by name without `_bucket`."""

    samples: Mapping[str, Sequence[Sample]]
    histograms: Mapping[str, Cumulative]

    @classmethod
    def of_page(cls, found: Iterable[Sample]) -> Snapshot:
        """From the samples of a page of /metrics."""
        samples: dict[str, list[Sample]] = {}
        for sample in found:
            samples.setdefault(sample.name, []).append(sample)
        histograms = {}
        for name, buckets in samples.items():
            if name.endswith("_bucket"):
                counts: dict[float, float] = {}
                for bucket in buckets:
                    if "le" in bucket.labels:
                        bound = float(bucket.labels["le"])
                        counts[bound] = counts.get(bound, 0.0) + bucket.value
                plain = name.removesuffix("_bucket")
                total = sum(each.value for each in samples.get(f"{plain}_sum", ()))
                histograms[plain] = Cumulative(counts, total)
        return cls(samples, histograms)

    def sum(self, name: str) -> float:
        return sum(sample.value for sample in self.samples.get(name, ()))

    def sum_where(self, name: str, label: str, value: str) -> float | None:
        """None if there is no such sample."""
        found = [sample.value for sample in self.samples.get(name, ()) if sample.labels.get(label) == value]
        return sum(found) if found else None

    @property
    def engine(self) -> str | None:
        prefixes = {name.partition(":")[0] for name in self.samples if ":" in name}
        return next((name for name in ("headrace", "vllm", "sglang") if name in prefixes), None)

    @property
    def counters(self) -> dict[str, float]:
        """Under common names, summed over the engines of a server."""
        return common_names({name: self.sum(name) for name in self.samples})

    @property
    def num_engines(self) -> int:
        """Engines that say how much they run."""
        return max(len({each.group for each in self.samples.get(name, ())}) for name in _GAUGES["num_running"])

    @property
    def num_restarts(self) -> float:
        return self.sum(_RESTARTS)


def evidence_of_snapshots(
    old: Snapshot,
    new: Snapshot,
    *,
    seconds: float,
    origin: str,
    settings: Mapping[str, Any],
    model: ModelShape | None = None,
    gpu: Gpu | None = None,
    num_engines: int | None = None,
) -> Evidence:
    """What happened between two snapshots of one server. Lifetime counters are never used alone. `num_engines`: those
    of the server; None: as its series say."""
    engine = new.engine
    if engine is None:
        raise ScrapeError(f"{origin}/metrics has no series of Headrace, vLLM or SGLang")
    earlier, later = old.counters, new.counters
    lost = [name for name, value in later.items() if value < earlier.get(name, 0.0)]
    if lost or new.num_restarts > old.num_restarts:
        what = f"{lost[0]} fell" if lost else "the engine was restarted"
        raise ScrapeError(f"{origin}: {what} between the two scrapes, so the server restarted; run doctor again")
    finished = next((each for each in (_growth(old, new, name) for name in _FINISHED) if each is not None), None)
    failed = _growth_where(old, new, _FINISHED[0], "reason", "error")
    facts: dict[str, Any] = {
        # A series that appears in the interval began at 0.
        **{field: later[name] - earlier.get(name, 0.0) for field, name in _COUNTED.items() if name in later},
        **{field: _gauge(old, new, names, field) for field, names in _GAUGES.items()},
        **{field: _drafts(old, new, name) for field, name in _DRAFTS.items()},
        **_from_histograms(old, new),
    }
    evidence = Evidence(
        source="live",
        origin=origin,
        engine=engine,
        seconds=seconds,
        **facts,
        num_requests=finished,
        num_answered=None if finished is None else finished - (failed or 0.0),
        num_failed=failed,
        num_refused=_num_refused(old, new),
        host_seconds=_growth_where(old, new, _ENGINE_TIME, "part", "host"),
        wait_seconds=_growth_where(old, new, _ENGINE_TIME, "part", "wait"),
        evicted_tokens=_growth(old, new, _EVICTED),
        settings=settings,
        model=model,
        gpu=gpu,
        is_on_cpu=settings["device"] == "cpu" if "device" in settings else None,
    )
    return _of_one_engine(evidence, num_engines or new.num_engines)


def _of_one_engine(evidence: Evidence, num_engines: int) -> Evidence:
    """The mean engine of a server with several. Rules compare with the settings and the device of one engine."""
    if num_engines < 2:
        return evidence
    known = {name: getattr(evidence, name) for name in _PER_ENGINE}
    divided = {name: value / num_engines for name, value in known.items() if value is not None}
    remark = f"the server has {num_engines} engines; tokens, sequences and times are those of one, the mean of all"
    return replace(evidence, **divided, remarks=(*evidence.remarks, remark))


def _from_histograms(old: Snapshot, new: Snapshot) -> dict[str, float | None]:
    def grown(*names: str) -> Histogram | None:
        return growth(names, old.histograms, new.histograms)

    def of(name: str, *others: str) -> Histogram | None:
        return grown(f"headrace:{name}", f"vllm:{name}", *others)

    gaps = of("inter_token_latency_seconds", "vllm:time_per_output_token_seconds")
    first = of("time_to_first_token_seconds")
    queue = of("request_queue_time_seconds")
    prompts = of("request_prompt_tokens")
    answers = of("request_generation_tokens")
    steps = grown("headrace:batch_tokens", "vllm:iteration_tokens_total")
    lag = grown("headrace:event_loop_lag_seconds")
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


def _gauge(old: Snapshot, new: Snapshot, names: Sequence[str], field: str) -> float | None:
    """Of the two snapshots, the higher cache use and the mean of other gauges; engines are added, cache use is not."""
    for name in names:
        pages = [[sample.value for sample in page.samples.get(name, ())] for page in (old, new)]
        if all(pages):
            if field == "kv_use":
                return max(max(values) for values in pages)
            return sum(map(sum, pages)) / 2
    return None


def _num_refused(old: Snapshot, new: Snapshot) -> float | None:
    """Because of too much load: a wrong key, path or parameter says nothing about the server's speed."""
    if _REFUSED in new.samples:
        return sum(_growth_where(old, new, _REFUSED, "reason", reason) or 0.0 for reason in OVERLOAD_REASONS)
    refused = new.counters.get("num_refused")
    return None if refused is None else refused - old.counters.get("num_refused", 0.0)


def _drafts(old: Snapshot, new: Snapshot, name: str) -> float | None:
    own = _growth(old, new, f"headrace:{name}")
    return _growth(old, new, f"vllm:{name}") if own is None else own


def _growth(old: Snapshot, new: Snapshot, name: str) -> float | None:
    return new.sum(name) - old.sum(name) if name in new.samples else None


def _growth_where(old: Snapshot, new: Snapshot, name: str, label: str, value: str) -> float | None:
    now = new.sum_where(name, label, value)
    return None if now is None else now - (old.sum_where(name, label, value) or 0.0)
