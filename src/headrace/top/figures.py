"""What a server did between two scrapes. None is unknown; `missing` names what the server does not export."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headrace.scrape.histogram import Histogram
from headrace.scrape.names import COUNTERS
from headrace.scrape.page import Group, Growth, Sample

ENGINES = {"headrace": "Headrace", "vllm": "vLLM", "sglang": "SGLang"}

# Series by preference: ours have finer buckets than the aliases of the same server.
RUNNING = ("headrace:num_requests_running", "vllm:num_requests_running", "sglang:num_running_reqs")
WAITING = ("headrace:num_requests_waiting", "vllm:num_requests_waiting", "sglang:num_queue_reqs")
KV_USE = ("headrace:kv_cache_usage", "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
FINISHED = ("headrace:requests_finished_total", "vllm:request_success_total", "sglang:num_requests_total")
HTTP = ("headrace:http_requests_total", "http_requests_total")
FIRST_TOKEN = tuple(f"{engine}:time_to_first_token_seconds" for engine in ENGINES)
TOKEN_GAP = (
    *(f"{engine}:inter_token_latency_seconds" for engine in ENGINES),
    "vllm:time_per_output_token_seconds",
)
STEP = ("headrace:step_seconds",)
ENGINE_TIME = ("headrace:engine_seconds_total",)
ENGINE_UP = ("headrace:engine_up",)
RESTARTS = ("headrace:engine_restarts_total",)
GPU_TELEMETRY = ("headrace:gpu_telemetry_info",)


def _counter(name: str) -> tuple[str, ...]:
    return tuple(f"{series}_total" for series in COUNTERS[name])


# What a user reads, and the series of which a server must have one.
WANTED: dict[str, tuple[str, ...]] = {
    "generated tokens": _counter("num_generated_tokens"),
    "prompt tokens": _counter("num_prompt_tokens"),
    "requests": FINISHED,
    "refused": _counter("num_refused"),
    "errors": (FINISHED[0], FINISHED[1], *HTTP),  # with a label, see `_errors`
    "running": RUNNING,
    "waiting": WAITING,
    "TTFT": FIRST_TOKEN,
    "ITL": TOKEN_GAP,
    "step time": STEP,
    "host share": ENGINE_TIME,
    "KV cache": KV_USE,
    "preemptions": _counter("num_preemptions"),
    "prefix hits": _counter("prefix_queried_tokens"),
    "GPU": GPU_TELEMETRY,
    "engine up": ENGINE_UP,
    "restarts": RESTARTS,
}
_ABSENT_WHILE_DOWN = ("running", "waiting", "KV cache")  # Headrace removes the gauges of an engine that is down


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Of the interval, in seconds."""

    p50: float
    p95: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFigures:
    gpu: str
    name: str = ""
    utilization: float | None = None
    memory_used_bytes: float | None = None
    memory_total_bytes: float | None = None
    power_watts: float | None = None
    temperature_celsius: float | None = None
    sm_clock_hertz: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRow:
    """One model or engine of several on a page."""

    model: str
    engine: str
    generated_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    kv_use: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """All engines of a page together: rates and requests are added, of the use of KV caches the highest counts."""

    engine: str  # headrace, vllm or sglang
    version: str | None = None
    models: tuple[str, ...] = ()
    seconds: float | None = None  # of the interval; None: the first scrape, so that there are no rates yet
    generated_per_s: float | None = None
    prompt_per_s: float | None = None
    requests_per_s: float | None = None
    refused_per_s: float | None = None
    errors_per_s: float | None = None
    running: float | None = None
    waiting: float | None = None
    ttft: Percentiles | None = None  # None: no request got its first token in the interval
    itl: Percentiles | None = None
    kv_use: float | None = None
    preemptions_per_s: float | None = None
    prefix_hit_share: float | None = None
    step_s: float | None = None
    host_share: float | None = None
    is_up: bool | None = None  # any engine
    engines_down: tuple[str, ...] = ()  # where others are up
    restarts: float | None = None
    has_restarted: bool = False  # within the interval
    gpus: tuple[GpuFigures, ...] = ()
    gpu_missing: str | None = None  # why the server has no figures of GPUs
    engines: tuple[EngineRow, ...] = ()  # where there are several
    missing: tuple[str, ...] = ()  # what the server does not export, by the words of the view

    def as_json(self) -> dict[str, Any]:
        missing = {name: list(WANTED[name]) for name in self.missing}
        return asdict(self) | {"missing": missing}


def engine_of(page: Iterable[Sample]) -> str | None:
    """Whose series these are. A Headrace page has vLLM's names too."""
    prefixes = {sample.name.partition(":")[0] for sample in page if ":" in sample.name}
    return next((engine for engine in ENGINES if engine in prefixes), None)


def figures_of(engine: str, page: Sequence[Sample], grown: Growth | None, seconds: float | None) -> Figures:
    """`page` is the later scrape; `grown` what was added in the `seconds` before it. Both have finite values only."""
    now, added = _Series(page), _Series(grown.samples if grown is not None else ())

    def rate(names: Sequence[str]) -> float | None:
        total = added.total(names)
        return None if total is None or not seconds else total / seconds

    is_up = now.total(ENGINE_UP)
    host, wait = (added.total(ENGINE_TIME, part=part) for part in ("host", "wait"))
    queried, hits = (added.total(_counter(f"prefix_{name}_tokens")) for name in ("queried", "hit"))
    steps = added.histogram(STEP)
    restarts = added.total(RESTARTS)
    return Figures(
        engine=engine,
        version=now.label(("headrace:build_info",), "version"),
        models=tuple(dict.fromkeys(sample.labels["model_name"] for sample in page if "model_name" in sample.labels)),
        seconds=seconds,
        generated_per_s=rate(_counter("num_generated_tokens")),
        prompt_per_s=rate(_counter("num_prompt_tokens")),
        requests_per_s=rate(FINISHED),
        refused_per_s=rate(_counter("num_refused")),
        errors_per_s=None if not seconds or (errors := _errors(added)) is None else errors / seconds,
        running=now.total(RUNNING),
        waiting=now.total(WAITING),
        ttft=_percentiles(added.histogram(FIRST_TOKEN)),
        itl=_percentiles(added.histogram(TOKEN_GAP)),
        kv_use=now.highest(KV_USE),
        preemptions_per_s=rate(_counter("num_preemptions")),
        prefix_hit_share=hits / queried if queried and hits is not None else None,
        step_s=None if steps is None else steps.mean,
        host_share=host / (host + wait) if host is not None and wait is not None and host + wait > 0 else None,
        is_up=None if is_up is None else is_up > 0,
        engines_down=tuple(each.labels.get("engine", "?") for each in now.of(ENGINE_UP) if is_up and each.value == 0),
        restarts=now.total(RESTARTS),
        has_restarted=grown is not None and (grown.is_restart or bool(restarts)),
        gpus=_gpus(now),
        gpu_missing=now.label(GPU_TELEMETRY, "missing") or None,
        engines=_engines(now, added, seconds),
        missing=_missing(now, is_down=is_up == 0),
    )


class _Series:
    """Samples by name. A figure takes the first of its names that the page has, so aliases are not added twice."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            self._by_name.setdefault(sample.name, []).append(sample)

    def has(self, names: Sequence[str]) -> bool:
        return any(name in self._by_name or f"{name}_bucket" in self._by_name for name in names)

    def of(self, names: Sequence[str], **labels: str) -> list[Sample]:
        """With these labels; of the first of these names."""
        found = next((self._by_name[name] for name in names if name in self._by_name), [])
        return [sample for sample in found if labels.items() <= sample.labels.items()]

    def total(self, names: Sequence[str], **labels: str) -> float | None:
        found = self.of(names, **labels)
        return sum(sample.value for sample in found) if found else None

    def highest(self, names: Sequence[str]) -> float | None:
        return max((sample.value for sample in self.of(names)), default=None)

    def label(self, names: Sequence[str], label: str) -> str | None:
        return next((sample.labels[label] for sample in self.of(names) if label in sample.labels), None)

    def by_group(self, names: Sequence[str]) -> dict[Group, float]:
        sums: dict[Group, float] = {}
        for sample in self.of(names):
            sums[sample.group] = sums.get(sample.group, 0.0) + sample.value
        return sums

    def histogram(self, names: Sequence[str]) -> Histogram | None:
        name = next((name for name in names if f"{name}_bucket" in self._by_name), None)
        if name is None:
            return None
        up_to: dict[float, float] = {}
        for sample in self._by_name[f"{name}_bucket"]:
            bound = _bound(sample)
            if bound is not None:
                up_to[bound] = up_to.get(bound, 0.0) + sample.value
        bounds = tuple(sorted(up_to))
        counts, below = [], 0.0
        for bound in bounds:
            counts.append(max(0.0, up_to[bound] - below))
            below = max(below, up_to[bound])
        return Histogram(bounds, tuple(counts), self.total((f"{name}_sum",)) or 0.0)


def _bound(sample: Sample) -> float | None:
    try:
        return float(sample.labels["le"])
    except (KeyError, ValueError):
        return None


def _percentiles(histogram: Histogram | None) -> Percentiles | None:
    if histogram is None:
        return None
    p50, p95 = histogram.quantile(0.5), histogram.quantile(0.95)
    return None if p50 is None or p95 is None else Percentiles(p50, p95)


def _gpus(now: _Series) -> tuple[GpuFigures, ...]:
    found: dict[str, dict[str, float]] = {}
    for name in GpuFigures.__slots__[2:]:
        for sample in now.of((f"headrace:gpu_{name}",)):
            found.setdefault(sample.labels.get("gpu", "?"), {})[name] = sample.value
    names = {sample.labels.get("gpu"): sample.labels.get("name", "") for sample in now.of(("headrace:gpu_info",))}
    return tuple(GpuFigures(gpu=gpu, name=names.get(gpu, ""), **found[gpu]) for gpu in sorted(found, key=_in_order))


def _in_order(text: str) -> tuple[int, str]:
    return (int(text), "") if text.isdecimal() else (1 << 30, text)


def _engines(now: _Series, added: _Series, seconds: float | None) -> tuple[EngineRow, ...]:
    running, waiting, kv_use = (now.by_group(names) for names in (RUNNING, WAITING, KV_USE))
    generated = added.by_group(_counter("num_generated_tokens"))
    groups = list(dict.fromkeys([*running, *waiting, *kv_use, *generated]))
    if len(groups) < 2:
        return ()
    return tuple(
        EngineRow(
            model=group[0],
            engine=group[1],
            generated_per_s=generated[group] / seconds if seconds and group in generated else None,
            running=running.get(group),
            waiting=waiting.get(group),
            kv_use=kv_use.get(group),
        )
        for group in groups
    )


def _errors(counted: _Series) -> float | None:
    """Requests that ended with an error; else HTTP answers with 5xx, which vLLM counts once there is one."""
    for name, label in zip(FINISHED, ("reason", "finished_reason"), strict=False):
        if (found := counted.total((name,), **{label: "error"})) is not None:
            return found
    return counted.total(HTTP, status="5xx") or 0.0 if counted.has(HTTP) else None


def _missing(now: _Series, *, is_down: bool) -> tuple[str, ...]:
    expected = {name: series for name, series in WANTED.items() if not (is_down and name in _ABSENT_WHILE_DOWN)}
    lacks_errors = _errors(now) is None
    return tuple(
        name for name, series in expected.items() if (lacks_errors if name == "errors" else not now.has(series))
    )


def alerts_of(document: Any) -> list[Mapping[str, Any]]:
    """The firing alerts of a document in the shape of Prometheus' /api/v1/alerts."""
    try:
        alerts = document["data"]["alerts"]
        return [alert for alert in alerts if alert.get("state") == "firing"]
    except (AttributeError, KeyError, TypeError):
        return []
